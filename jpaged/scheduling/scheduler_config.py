"""The options of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..sampling.sampling_params import SampleMode
from .buckets import MIN_FILLED
from .preemption import PreemptionPolicy
from .request_queue import POLICIES, PolicyKey, QueueLimits

Clock = Callable[[], float]
"""Returns the present time in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much a step computes, which requests go first, and how they are preempted."""

    max_num_seqs: int
    """Sequences that run together: state slots on the device."""
    max_num_batched_tokens: int
    """Tokens that one step computes at most; no fewer than `max_num_seqs`."""
    policy: PolicyKey = POLICIES["fcfs"]
    """Orders the requests; the default is the order of their arrival."""
    limits: QueueLimits = field(default_factory=QueueLimits)
    """How many requests and prompt tokens may wait; the default is any number."""
    watermark: float = 0.0
    """Share of the pool's pages that a newcomer must leave free beside running requests."""
    delay_factor: float = 0.0
    """Newcomers wait this many times as long as the last step with newcomers took, so that others join them."""
    enable_chunked_prefill: bool = True
    """Compute prompts in chunks beside sequences that decode; False: whole, in steps in which none decodes."""
    long_prefill_token_threshold: int = 0
    """Prompt tokens of one sequence that a step computes at most, while chunked prefill is on; 0: as many as fit."""
    preemption: PreemptionPolicy = field(default_factory=PreemptionPolicy)
    """Whether a preempted request is swapped out or recomputed."""
    tokens_ahead: int = 1
    """Tokens that a decoding sequence has pages for, at least, before the scheduler checks it again."""
    several_modes: frozenset[SampleMode] = frozenset(SampleMode)
    """Sampling modes of requests of which a step may decode several tokens."""
    max_decode_steps: int = 1
    """Tokens that sequences decode one after another in one step where nothing else is to be done."""
    token_buckets: tuple[int, ...] = ()
    """The padded numbers of tokens, ascending, that steps are compiled for."""
    min_filled: int = MIN_FILLED
    """Tokens of the smallest bucket that a step is cut down to."""
    max_scored: int | None = None
    """Prompt tokens whose logprobs one step returns at most; None: as many as it computes."""

    def __post_init__(self) -> None:
        assert self.max_num_seqs <= self.max_num_batched_tokens, "a step cannot decode all sequences"

    @property
    def max_chunk(self) -> int:
        """Return the most tokens of one chunk while chunked prefill is on."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens

    @property
    def max_scored_tokens(self) -> int:
        """Return the most prompt tokens whose logprobs one step returns."""
        return self.max_scored or self.max_num_batched_tokens
