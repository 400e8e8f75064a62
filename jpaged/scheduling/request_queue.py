"""A queue of requests in the order of a policy, with limits on how many may wait.

Knows order and counts; no page, no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import isfinite
from typing import Any

from ..errors import InvalidRequestError, QueueFullError
from ..request import Request

PolicyKey = Callable[[Request], Any]
"""Returns a request's key: requests with lower keys go first, equal ones in the order of their arrival."""

POLICIES: dict[str, PolicyKey] = {"fcfs": lambda request: 0, "priority": lambda request: request.priority}


def key_shape(key: object) -> object:
    """Return the types that a policy's key consists of; two keys with equal results can be sorted.

    A key is a number, a string, or a tuple of keys. Examples: 1.5 and True give "number", and (1, "a") gives ("number",
    "text"). Raise TypeError for any other type, and for a float that is infinite or NaN: NaN has no place in an order.
    """
    if isinstance(key, int) or (isinstance(key, float) and isfinite(key)):
        return "number"
    if isinstance(key, str):
        return "text"
    if isinstance(key, tuple):
        return tuple(map(key_shape, key))
    raise TypeError(f"got {key!r:.100}")


class Policy:
    """A key function, and the check that all its keys can be sorted among each other."""

    def __init__(self, key: PolicyKey):
        self._key = key
        self._shape: object = None

    def key_of(self, request: Request) -> Any:
        """Return the policy's key of a request: requests with lower keys go first.

        Raise InvalidRequestError if the key function raises an exception, or if its key cannot be compared with the
        earlier ones: the first key sets the types that all later keys must have. A key of other types would otherwise
        raise an exception in the middle of a step, when requests are sorted.
        """
        try:
            key = self._key(request)
            shape = key_shape(key)
        except Exception as error:
            raise InvalidRequestError(
                f"scheduling_policy: its key function failed for this request ({type(error).__name__}: "
                f"{error!s:.200}); it must return a finite number, a string, or a tuple of them",
                param="priority",
            ) from error
        if self._shape is None:
            self._shape = shape  # The first key decides. The shape of an empty tuple is (), so `or` would pass it over.
        if shape != self._shape:
            raise InvalidRequestError(
                f"scheduling_policy: its key function returned {key!r:.100}, which does not compare with the keys of "
                f"other requests, made of {self._shape}; let it return values of one type",
                param="priority",
            )
        return key


MIN_STALE = 64
"""Heap entries of requests that have left which are always tolerated, whatever the queue's length."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. None: any number."""

    waiting_requests: int | None = None
    waiting_tokens: int | None = None
    """Prompt tokens of all waiting requests together."""


class RequestQueue:
    """A heap by `Request.order`. A request that is removed leaves its entry behind, which is skipped later.

    A parked request is in the queue, and counts for its limits, but `first` and `pop` pass it over.
    """

    def __init__(self, limits: QueueLimits | None = None):
        self.limits = limits or QueueLimits()
        self.clear()

    def clear(self) -> None:
        """Remove all requests. The constructor calls this too, to create the fields."""
        self.num_tokens = 0
        """Prompt tokens of all requests in the queue."""
        self._members: dict[Request, None] = {}
        self._parked: dict[Request, None] = {}
        self._heap: list[tuple[tuple[Any, int], Request]] = []
        """(order, request). A request's order is unique and never changes, so a stale entry of it is valid again once
        the request comes back."""

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def has_next(self) -> bool:
        """Return whether a request that is not parked is in the queue."""
        return len(self._members) > len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members, key=lambda request: request.order))

    def check_room(self, *requests: Request) -> None:
        """Raise QueueFullError if the queue has no room for all of these requests together."""
        limits, num_waiting = self.limits, len(self) + len(requests)
        num_tokens = self.num_tokens + sum(request.prompt_len for request in requests)
        if limits.waiting_requests is not None and num_waiting > limits.waiting_requests:
            raise QueueFullError("waiting_requests", got=num_waiting, allowed=limits.waiting_requests)
        if limits.waiting_tokens is not None and num_tokens > limits.waiting_tokens:
            raise QueueFullError("waiting_tokens", got=num_tokens, allowed=limits.waiting_tokens)

    def push(self, request: Request) -> None:
        self._members[request] = None
        self.num_tokens += request.prompt_len
        heappush(self._heap, (request.order, request))

    def first(self) -> Request:
        """Return the request of the lowest order that is not parked, of which there must be one."""
        while (request := self._heap[0][1]) not in self._members or request in self._parked:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Remove the request of the lowest order that is not parked, of which there must be one, and return it."""
        request = self.first()
        heappop(self._heap)
        self.remove(request)
        return request

    def park(self, request: Request) -> None:
        """Let `first` and `pop` pass over a request, which must be in the queue, until `unpark`."""
        self._parked[request] = None
        if self._heap[0][1] is request:
            heappop(self._heap)

    def unpark(self) -> None:
        """Give all parked requests their places in the order back."""
        for request in self._parked:
            heappush(self._heap, (request.order, request))
        self._parked.clear()

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the queue.

        Its heap entry stays and is skipped later. The heap is rebuilt once it has more than twice as many entries as
        the queue has requests, and MIN_STALE more.
        """
        del self._members[request]
        self._parked.pop(request, None)
        self.num_tokens -= request.prompt_len
        # Stale entries leave the heap at its top only. While the first request waits, they would add up without limit.
        if len(self._heap) > 2 * len(self._members) + MIN_STALE:
            self._heap = [(member.order, member) for member in self._members if member not in self._parked]
            heapify(self._heap)
