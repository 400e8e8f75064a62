"""Requests that an iterator gives one after the other, read a limited number ahead and ordered by the policy.

Knows requests and their order; no page, no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from ..errors import QueueFullError
from ..request import Request

MIN_READ_AHEAD = 1000
"""Requests that are read before the engine has begun them; twice `max_num_seqs` if that is more. The scheduling policy
orders these."""
_END = object()


class RequestSource:
    """Reads requests of an iterator ahead, and queues them as the queue's limits leave room."""

    def __init__(self, requests: Iterable[Request | None], *, max_num_seqs: int):
        """Prepare to read from the iterable `requests`, which gives None if the next request is not there yet.

        Nothing is read here. After a None the iterable is asked again at the next call of `read`. `max_num_seqs` is the
        engine's limit of running sequences: with twice as many requests read ahead, no step lacks work.
        """
        self._iterator, self._max_waiting = iter(requests), max(MIN_READ_AHEAD, 2 * max_num_seqs)
        self._heap: list[tuple[Any, int, Request]] = []
        """(policy key, place in the order of reading, request) of those that were read and are not queued."""
        self._num_read, self._is_at_end = 0, False

    @property
    def is_empty(self) -> bool:
        """Return whether every request has been queued and no other will come."""
        return self._is_at_end and not self._heap

    def read(self, num_waiting: int) -> None:
        """Read requests until `max(MIN_READ_AHEAD, 2 × max_num_seqs)` wait, or the iterator has none now.

        `num_waiting` counts the requests that are queued in the engine already. The requests that are read are kept in
        the policy's order until `queue` hands them on. After the iterator's end this does nothing.
        """
        while not self._is_at_end and len(self._heap) + num_waiting < self._max_waiting:
            request: Any = next(self._iterator, _END)  # _END marks the end, since None is not the end.
            if request is _END:
                self._is_at_end = True
            elif request is None:
                return
            else:
                self._num_read += 1
                # `_num_read` is unique, so that requests themselves are never compared.
                heappush(self._heap, (request.policy_key, self._num_read, request))

    def queue(self, add: Callable[[Request], Any], *, is_idle: bool) -> None:
        """Hand the requests that were read to `add`, in the policy's order, until it raises QueueFullError.

        The requests that are left stay for the next call. `is_idle` says that the engine has no request: if the queue
        is too small even for the first one, waiting would not help, so QueueFullError is raised to the caller.
        """
        while self._heap:
            try:
                add(self._heap[0][-1])
            except QueueFullError:
                if is_idle:
                    raise
                return
            is_idle = False  # The engine has a request now, so a full queue will have room later.
            heappop(self._heap)
