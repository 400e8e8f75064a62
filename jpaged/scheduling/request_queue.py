"""Requests in the order of a policy, with limits on how many may wait.

Knows order and counts; no page, no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import isfinite
from typing import Any

from .errors import InvalidRequestError, QueueFullError
from .request import Request

PolicyKey = Callable[[Request], Any]
"""Requests with lower keys go first; equal ones in the order of their arrival."""

POLICIES: dict[str, PolicyKey] = {
    "fcfs": lambda request: 0,
    "priority": lambda request: request.priority,
}


def key_shape(key: object) -> object:
    """What a policy's key is made of: keys of one shape can be sorted. TypeError for what has no certain order."""
    if isinstance(key, int) or (isinstance(key, float) and isfinite(key)):
        return "number"
    if isinstance(key, str):
        return "text"
    if isinstance(key, tuple):
        return tuple(map(key_shape, key))
    raise TypeError(f"got {key!r:.100}")


class Policy:
    """A key function whose keys are held to be sortable among each other."""

    def __init__(self, key: PolicyKey):
        self._key = key
        self._shape: object = None

    def key_of(self, request: Request) -> Any:
        """The key of a request. One that cannot be sorted among others would break the queue amid a step."""
        try:
            key = self._key(request)
            shape = key_shape(key)
        except Exception as error:
            raise InvalidRequestError(
                f"scheduling_policy: its key function failed here ({type(error).__name__}: {error!s:.200}); "
                "it may return a finite number, a string, or a tuple of them",
                param="priority",
            ) from error
        self._shape = self._shape or shape
        if shape != self._shape:
            raise InvalidRequestError(
                f"scheduling_policy: its key {key!r:.100} does not compare with those of other requests, made of "
                f"{self._shape}; let it return values of one type",
                param="priority",
            )
        return key


MIN_STALE = 64
"""Entries of requests that have left which are always put up with."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. None: any number."""

    waiting_requests: int | None = None
    waiting_tokens: int | None = None
    """Prompt tokens of all waiting requests together."""


class RequestQueue:
    """A heap by `Request.order`. Whoever leaves out of turn leaves an entry behind, which is skipped later."""

    def __init__(self, limits: QueueLimits | None = None):
        self.limits = limits or QueueLimits()
        self.num_tokens = 0
        self._members: dict[Request, None] = {}
        self._heap: list[tuple[tuple[Any, int], Request]] = []
        """Orders differ by arrival at least, and never change: an entry is as good as another of the same request."""

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
        self._members[request] = None
        self.num_tokens += request.prompt_len
        heappush(self._heap, (request.order, request))

    def first(self) -> Request:
        """The request whose turn it is. There must be one."""
        while self._heap[0][1] not in self._members:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.first()
        heappop(self._heap)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out that is in the queue, wherever it stands."""
        del self._members[request]
        self.num_tokens -= request.prompt_len
        # Behind a request that waits long, others may come and go for ever.
        if len(self._heap) > 2 * len(self._members) + MIN_STALE:
            self._heap = [(member.order, member) for member in self._members]
            heapify(self._heap)
