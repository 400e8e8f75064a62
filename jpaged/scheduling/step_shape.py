"""Fits the work of a step into its budget and its bucket: which sequences decode, and how long chunks are.

Knows tokens and chunks; no page, no queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import SampleSequence
from .buckets import filled_tokens
from .scheduler_config import SchedulerConfig
from .scheduler_output import Chunk

MAX_WITHHELD = 8
"""Steps in a row in which prompts that are computed whole may keep other sequences from decoding."""


class StepShape:
    """Shares the tokens of each step between prompts and decoding sequences."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._first_decode = 0
        """Where among the decoding sequences, without the first one, the next rotation begins."""
        self._num_withheld = 0
        """Steps in a row that kept sequences from decoding."""

    @property
    def must_decode(self) -> bool:
        """Return whether decoding sequences have waited for so many steps that one without prompts is due."""
        return self._num_withheld >= MAX_WITHHELD

    def prefill_budget(self, num_decodes: int) -> int:
        """Return the tokens for chunks: what decoding leaves, but half of the step at least, so no prompt starves."""
        num_tokens = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill:
            return num_tokens
        return max(num_tokens - num_decodes, num_tokens // 2)

    def choose_decodes(self, decodes: list[SampleSequence], chunks: Sequence[Chunk]) -> list[SampleSequence]:
        """Return the sequences that decode beside these chunks.

        They are all, if there is room; else the first and, rotating from step to step, some others. Without chunked
        prefill none decodes beside a prompt.
        """
        # A chunk of one token is no prompt that others would have to wait for.
        has_prompts = any(chunk.num_tokens > 1 for chunk in chunks)
        if not self.config.enable_chunked_prefill and has_prompts and decodes:
            self._num_withheld += 1
            return []
        self._num_withheld = 0
        room = self.config.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
        return decodes if len(decodes) <= room else self._rotate(decodes, room)

    def _rotate(self, decodes: list[SampleSequence], room: int) -> list[SampleSequence]:
        """Return the first sequence, and of the others the next ones in turn, `room` in all."""
        others = decodes[1:]
        start = self._first_decode % len(others)
        self._first_decode = start + room - 1
        return [decodes[0], *(others[start:] + others)[: room - 1]]

    def cut_to_bucket(self, chunks: list[Chunk], num_decodes: int) -> bool:
        """Shorten the last chunks, in place, if a smaller bucket then holds the step; return whether any was shortened.

        A bucket costs by its size, however full it is. What is put off is computed in the next step, beside the other
        work of that step. Every chunk keeps a token.
        """
        num_tokens = num_decodes + sum(chunk.num_tokens for chunk in chunks)
        surplus = num_tokens - filled_tokens(self.config.token_buckets, num_tokens, self.config.min_filled)
        if not 0 < surplus <= sum(chunk.num_tokens - 1 for chunk in chunks):
            return False
        for index in reversed(range(len(chunks))):
            chunk = chunks[index]
            if cut := min(surplus, chunk.num_tokens - 1):
                chunks[index] = Chunk(chunk.sequence, chunk.start, chunk.num_tokens - cut, ())
                surplus -= cut
        return True

    def even_out(self, lens: Sequence[int]) -> list[int]:
        """Return how many tokens each sequence decodes in this step, given how many each may; empty: one each.

        Every token of the step computes the bucket that holds all of these sequences. So the step ends as soon as
        those that could still go on would fit a smaller bucket; they go on in the next step.
        """
        num_needed = 1 + max((size for size in self.config.token_buckets if size < len(lens)), default=0)
        num_steps = sorted(lens, reverse=True)[num_needed - 1]
        return [min(length, num_steps) for length in lens] if num_steps > 1 else []
