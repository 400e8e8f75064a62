"""Fits the work of a step into its budget and its bucket: which sequences decode, and how long chunks are.

Knows tokens and chunks; no page, no queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..request import SampleSequence
from ..sampling.sampling_params import SampleMode
from .buckets import filled_tokens
from .scheduler_config import SchedulerConfig
from .scheduler_output import Chunk

MAX_WITHHELD = 8
"""Steps in a row in which prompts that are computed whole may keep other sequences from decoding."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the programs that are compiled can compute in one step."""

    max_tokens: int
    """May be fewer than sequences run: those that a step leaves out decode in a later one."""
    token_buckets: tuple[int, ...]
    """The padded numbers of tokens, ascending."""
    several_modes: frozenset[SampleMode]
    """Sampling modes of requests of which a step may decode several tokens."""


class StepShape:
    """Shares the tokens of each step between prompts and decoding sequences."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.limits = StepLimits(config.max_num_batched_tokens, config.token_buckets, config.several_modes)
        """Those of all programs; an engine that compiles while it serves replaces them by those of the ready ones."""
        self._first_decode = 0
        """Where among the decoding sequences, without the first one, the next rotation begins."""
        self._num_withheld = 0
        """Steps in a row that kept sequences from decoding."""

    @property
    def must_decode(self) -> bool:
        """Return whether prompts have kept sequences from decoding for so long that a step without prompts is due."""
        return self._num_withheld >= MAX_WITHHELD

    def prefill_budget(self, num_decodes: int) -> int:
        """Return how many tokens of the step chunks may take, beside `num_decodes` sequences that decode one each.

        Chunks get what decoding leaves, but at least half of the step, so that no prompt starves: `choose_decodes` then
        leaves some of the decoding sequences to later steps. Without chunked prefill, chunks may take the whole step.
        Example with steps of at most 64 tokens: 10 decodes leave 54, and 50 decodes leave 32.
        """
        num_tokens = self.limits.max_tokens
        if not self.config.enable_chunked_prefill:
            return num_tokens
        return max(num_tokens - num_decodes, num_tokens // 2)

    def choose_decodes(self, decodes: list[SampleSequence], chunks: Sequence[Chunk]) -> list[SampleSequence]:
        """Return which of the sequences in `decodes` decode one token in a step with these chunks.

        If the step has room for all, all of them decode. Otherwise the first one decodes, and as many others as fit,
        which rotate from step to step. Without chunked prefill, no sequence decodes in the step of a prompt; such steps
        in a row are counted, and `must_decode` limits them.
        """
        # A chunk of one token costs no more than a decode, so it does not keep others from decoding.
        has_prompts = any(chunk.num_tokens > 1 for chunk in chunks)
        if not self.config.enable_chunked_prefill and has_prompts and decodes:
            self._num_withheld += 1
            return []
        self._num_withheld = 0
        room = self.limits.max_tokens - sum(chunk.num_tokens for chunk in chunks)
        return decodes if len(decodes) <= room else self._rotate(decodes, room)

    def _rotate(self, decodes: list[SampleSequence], room: int) -> list[SampleSequence]:
        """Return `room` of the more than `room` sequences in `decodes`: the first one always, the others in rotation.

        Example with 5 sequences and a room of 3: 0 1 2, then 0 3 4, then 0 1 2 again.
        """
        others = decodes[1:]
        start = self._first_decode % len(others)
        self._first_decode = start + room - 1
        return [decodes[0], *(others[start:] + others)[: room - 1]]

    def cut_to_bucket(self, chunks: list[Chunk], num_decodes: int) -> bool:
        """Shorten the last chunks, in place, so that the step fills a smaller bucket; return whether any was shortened.

        The time of a step depends on its bucket (padded size), not on how full that is. The step holds the chunks and
        `num_decodes` single tokens; `filled_tokens` decides whether cutting it is worth it. Every chunk keeps at least
        one token: if that cannot be, nothing is cut. A shortened chunk draws no token, and the next step computes what
        was cut off. Example with buckets of 64, 128 and 256 tokens: 3 decodes and chunks of 100 and 32 tokens make 135,
        so the last chunk is cut by 7 to 25 tokens.
        """
        num_tokens = num_decodes + sum(chunk.num_tokens for chunk in chunks)
        surplus = num_tokens - filled_tokens(self.limits.token_buckets, num_tokens, self.config.min_filled)
        if not 0 < surplus <= sum(chunk.num_tokens - 1 for chunk in chunks):
            return False
        for index in reversed(range(len(chunks))):
            chunk = chunks[index]
            if cut := min(surplus, chunk.num_tokens - 1):
                chunks[index] = Chunk(chunk.sequence, chunk.start, chunk.num_tokens - cut, ())
                surplus -= cut
        return True

    def even_out(self, lens: Sequence[int]) -> list[int]:
        """Return how many tokens each sequence decodes one after another in this step; empty means one token each.

        `lens` says how many tokens each may decode. Each round of the step draws one token per sequence, and costs the
        bucket (padded size) that holds all sequences. So the step ends as soon as the sequences that could still decode
        would fit a smaller bucket; they continue in the next step. Example with buckets of 2 and 4 sequences: lens
        (8, 8, 5, 2) gives (5, 5, 5, 2).
        """
        # With fewer sequences than this, a round would fit a smaller bucket.
        num_needed = 1 + max((size for size in self.limits.token_buckets if size < len(lens)), default=0)
        num_steps = sorted(lens, reverse=True)[num_needed - 1]
        return [min(length, num_steps) for length in lens] if num_steps > 1 else []
