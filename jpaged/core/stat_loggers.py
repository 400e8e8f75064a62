"""Loggers that an engine's owner adds: they receive a record of each step and of each request that has ended.

A logger that raises is dropped, and nothing else is harmed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from ..request import Request
from .step_record import StepObserver, StepRecord

logger = logging.getLogger("jpaged")


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that has ended. Times are seconds of `time.monotonic()`; None for what has not happened."""

    request_id: str
    finish_reason: str
    """"stop", "length", "abort" or "error", of the request as a whole."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_output_tokens: int
    """Output tokens of all samples together."""
    longest_output: int
    """Output tokens of the longest sample."""
    num_samples: int
    n: int
    """The samples that were asked for, also of a search whose samples are beams."""
    max_tokens: int
    """Most output tokens of a sample: as many as were asked for, or as the context has room for."""
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None

    @classmethod
    def from_request(cls, request: Request) -> EndedRequest:
        """Return the record of a request of the core."""
        output_lens = [sequence.num_output_tokens for sequence in request.sequences]
        return cls(
            request_id=request.request_id,
            finish_reason=request.state.finish_reason or "abort",
            num_prompt_tokens=request.prompt_len,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=sum(output_lens),
            longest_output=max(output_lens, default=0),
            num_samples=len(request.sequences),
            n=request.params.n,
            max_tokens=request.max_tokens,
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=request.finished_time,
        )


class StatLogger(StepObserver, Protocol):
    """Is told of every step and of every ended request of an engine, on the thread that computes steps."""

    def ended(self, request: EndedRequest) -> None:
        """Note a request that has ended."""


class StatLoggers:
    """Tells several loggers of steps and ended requests, and makes their records."""

    def __init__(self, loggers: Iterable[StatLogger]):
        self._loggers = list(loggers)

    def __bool__(self) -> bool:
        """Return whether there is a logger that is told."""
        return bool(self._loggers)

    def dispatched(self, record: StepRecord) -> None:
        """Note a step that was started."""
        self._tell(lambda one: one.dispatched(record))

    def retired(self, record: StepRecord) -> None:
        """Note that the results of a step were processed."""
        self._tell(lambda one: one.retired(record))

    def ended(self, request: Request) -> None:
        """Note a request that has ended."""
        if self._loggers:
            record = EndedRequest.from_request(request)
            self._tell(lambda one: one.ended(record))

    def _tell(self, call: Callable[[StatLogger], Any]) -> None:
        for one in list(self._loggers):
            try:
                call(one)
            except Exception:
                self._loggers.remove(one)
                logger.exception("a stat logger raised, and is told of nothing more")
