"""Requests in the order of a policy, with limits on how many may wait.

Knows order and counts; no page, no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from .errors import QueueFullError
from .request import Request

PolicyKey = Callable[[Request], Any]
"""Requests with lower keys go first; equal ones in the order of their arrival."""

POLICIES: dict[str, PolicyKey] = {
    "fcfs": lambda request: 0,
    "priority": lambda request: request.priority,
}


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. None: any number."""

    waiting_requests: int | None = None
    waiting_tokens: int | None = None
    """Prompt tokens of all waiting requests together."""


class RequestQueue:
    """A heap by `Request.order`. Whoever leaves out of turn is forgotten at once and skipped later."""

    def __init__(self, limits: QueueLimits | None = None):
        self.limits = limits or QueueLimits()
        self.num_tokens = 0
        self._heap: list[tuple[tuple[Any, int], Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members, key=lambda request: request.order))

    def check_room(self, request: Request) -> None:
        """QueueFullError if this request would be one too many."""
        for name, waiting, more in (
            ("waiting_requests", len(self), 1),
            ("waiting_tokens", self.num_tokens, request.prompt_len),
        ):
            limit = getattr(self.limits, name)
            if limit is not None and waiting + more > limit:
                raise QueueFullError(name, got=waiting + more, allowed=limit)

    def push(self, request: Request) -> None:
        self._members.add(request)
        self.num_tokens += request.prompt_len
        heappush(self._heap, (request.order, request))

    def first(self) -> Request:
        """The request whose turn it is. There must be one."""
        while self._heap[0][1] not in self._members:
            heappop(self._heap)
        return self._heap[0][1]

    def peek(self) -> list[Request]:
        """The request whose turn it is, if there is one."""
        return [self.first()] if self._members else []

    def pop(self) -> Request:
        request = self.first()
        heappop(self._heap)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out that is in the queue, wherever it stands."""
        self._members.remove(request)
        self.num_tokens -= request.prompt_len
