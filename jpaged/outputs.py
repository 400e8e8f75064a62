"""What a caller gets back: frozen, and complete in itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability, before temperature and truncation."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. `token_ids` include the EOS or stop id that ended it; `text` does not."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    """Sum over the tokens; None unless logprobs were asked for."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per token: the sampled one first, then the most likely ones."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop id that matched; None for EOS."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times are monotonic seconds; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    time_in_queue: float | None
    num_preemptions: int
    """Times that it had to give its pages up."""
    num_swaps: int
    """Of these, the times that the host kept what was in them."""
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request so far, all of its tokens and text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    error: str | None = None
    """Why `finish_reason` is "error"."""
