"""What travels between the driver of a run on Ray and its workers.

    driver ── RequestBlock ─▶ worker ── ResultBlock ─▶ driver

Their clocks differ: a time is sent as an age, how many seconds ago it was, and becomes a time again where it arrives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import msgspec

from ..codec import PackedRequests
from ..messages import NewRequest
from ..outputs import RequestMetrics, RequestOutput
from ..remote.sent_outputs import without_prompts

BLOCK_REQUESTS = 32
"""Requests of a block."""


class RequestBlock(msgspec.Struct, frozen=True, array_like=True):
    """Requests that one task computes."""

    requests: PackedRequests
    """With ages instead of times of arrival, and without the texts of prompts."""

    @classmethod
    def of(cls, messages: Sequence[NewRequest]) -> Self:
        """Return the requests in this form."""
        now = time.monotonic()
        aged = [msgspec.structs.replace(one, arrival_time=now - one.arrival_time) for one in without_prompts(messages)]
        return cls(PackedRequests.of(aged))

    def unpacked(self) -> list[NewRequest]:
        """Return the requests, with times of this process's clock."""
        now = time.monotonic()
        packed = self.requests.unpacked()
        return [msgspec.structs.replace(one, arrival_time=now - one.arrival_time) for one in packed]


class ResultBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a block."""

    node: str
    """Where it was computed."""
    problem: str = ""
    """Why the worker computes nothing; empty if it does."""
    outputs: tuple[RequestOutput, ...] = ()
    """The last outputs, with ages instead of times, and without prompts, which the driver has."""
    computed_s: float = 0.0
    """Seconds that this took."""

    @classmethod
    def of(cls, node: str, outputs: Sequence[RequestOutput], computed_s: float) -> Self:
        """Return the outputs in this form."""
        now = time.monotonic()
        sent = [replace(one, prompt=None, prompt_token_ids=(), metrics=_turned(one.metrics, now)) for one in outputs]
        return cls(node=node, outputs=tuple(sent), computed_s=computed_s)

    def outputs_here(self) -> list[RequestOutput]:
        """Return the outputs with times of this process's clock, still without prompts."""
        now = time.monotonic()
        return [replace(one, metrics=_turned(one.metrics, now)) for one in self.outputs]


def _turned(metrics: RequestMetrics, now: float) -> RequestMetrics:
    """Return metrics with ages instead of times, or with times instead of ages."""

    def turned(value: float | None) -> float | None:
        return None if value is None else now - value

    return replace(
        metrics,
        arrival_time=now - metrics.arrival_time,
        first_scheduled_time=turned(metrics.first_scheduled_time),
        first_token_time=turned(metrics.first_token_time),
        last_token_time=turned(metrics.last_token_time),
        finished_time=turned(metrics.finished_time),
    )
