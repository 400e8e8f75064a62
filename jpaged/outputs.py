"""What a caller gets back: frozen, and complete in itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability, by the engine's `logprobs_mode`."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """None without a tokenizer."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A part of what a sequence had at some time: of lists that only grow."""

    pieces: Sequence[str]
    """Of the text."""
    piece_range: slice
    token_ids: array[int]
    token_range: slice
    logprobs: Sequence[dict[int, Logprob]] | None
    logprob_range: slice


class _OfSnapshot:
    """Holds where what has not been looked at comes from: no field, which copies and comparisons would take along."""

    __slots__ = ("_snapshot",)
    _snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class CompletionOutput(_OfSnapshot):
    """One sample: all of it so far, or with RequestOutputKind.DELTA what is new.

    `token_ids` include the EOS or stop id that ended it; `text` does not. Those of a running engine are put together
    when they are first looked at: a stream that shows every token of a long text need not copy it each time.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    """Sum over all tokens so far; None unless logprobs were asked for."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per token: the sampled one first, then the most likely ones."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop id that matched; None for EOS."""

    @classmethod
    def of(cls, snapshot: Snapshot, **others: Any) -> CompletionOutput:
        """One whose text, tokens and logprobs are those of a snapshot."""
        output = object.__new__(cls)
        for name, value in others.items():
            object.__setattr__(output, name, value)
        object.__setattr__(output, "_snapshot", snapshot)
        return output

    def __getattr__(self, name: str) -> Any:
        """What has not been looked at yet."""
        if name not in ("text", "token_ids", "logprobs"):
            raise AttributeError(f"CompletionOutput has no attribute {name!r}")
        snapshot = self._snapshot
        value: Any
        if name == "text":
            value = "".join(snapshot.pieces[snapshot.piece_range])
        elif name == "token_ids":
            value = tuple(snapshot.token_ids[snapshot.token_range])
        else:
            value = None if snapshot.logprobs is None else tuple(snapshot.logprobs[snapshot.logprob_range])
        object.__setattr__(self, name, value)
        return value


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
    """One request so far; with RequestOutputKind.DELTA what is new of it, and of the samples that have anything new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """Per token of the prompt, of which the first has none; None unless they were asked for and are all there. With
    RequestOutputKind.DELTA in one output alone."""
    error: str | None = None
    """Why `finish_reason` is "error"."""
