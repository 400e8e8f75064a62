"""When work behind may begin: while no request runs or waits for more urgent work, or else for a share of the time.

    requests   ████████  ██  ████████████████████
    work                        ▒▒▒               ▒▒▒▒▒▒▒▒▒▒▒    in a pause, or after MAX_HELD times the time of work

Knows neither programs nor requests; it is told whether any run, and which work is urgent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

PAUSE_S = 0.5
"""Seconds without a request after which work begins: a client's next request mostly comes sooner."""
MAX_HELD = 5
"""Seconds that work is held at most for each second that it takes. Requests that never pause make all of it take
1 + MAX_HELD times as long, and MAX_HELD times the longest piece more, for which the first one is held."""
LEAST_WORK_S = 2 * PAUSE_S / MAX_HELD
"""Seconds that a piece of work is expected to take at least. With this the first piece is held for two pauses, so for
one after a request that comes just before the first pause is over."""


class Pauses:
    """Holds pieces of work, one at a time, while requests run or wait for more urgent work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Start without requests; `clock` gives seconds."""
        self._clock = clock
        self._are_requests_running = False
        self._urgent: set[Future[Any]] = set()
        """Work that requests wait for."""
        self._idle_since_s = clock()
        """When the last request, or the last urgent work, has ended."""
        self._longest_s = LEAST_WORK_S
        """Seconds that the next piece of work is expected to take: as many as the longest one so far."""
        self._past_held_s = 0.0
        """Seconds for which earlier pieces were held."""
        self._hold_start_s: float | None = None
        """Since when a piece is held; None if none is."""
        self._spent_s = 0.0
        """How many of the held seconds are used up by work that was done: MAX_HELD for each second of work."""
        self._changed = threading.Condition()

    @property
    def is_holding(self) -> bool:
        """Return whether a piece of work waits now."""
        with self._changed:
            return self._hold_start_s is not None

    @property
    def held_s(self) -> float:
        """Return the seconds for which pieces of work were held until now."""
        with self._changed:
            now_s = self._clock()
            return self._past_held_s + now_s - (now_s if self._hold_start_s is None else self._hold_start_s)

    def begin_requests(self) -> None:
        """Note that requests run from now on."""
        self._set_running(are_running=True)

    def end_requests(self) -> None:
        """Note that no request runs any more; a pause begins."""
        self._set_running(are_running=False)

    def _set_running(self, *, are_running: bool) -> None:
        with self._changed:
            self._are_requests_running = are_running
            self._idle_since_s = self._clock()
            self._changed.notify_all()

    def put_first(self, work: Future[Any]) -> None:
        """Hold all other work until this is done, for however long, since a request waits for it.

        When it is done a pause begins, in which the request comes.
        """
        with self._changed:
            if work in self._urgent or work.done():
                return
            self._urgent.add(work)
        work.add_done_callback(self._end_urgent)

    def _end_urgent(self, work: Future[Any]) -> None:
        with self._changed:
            self._urgent.discard(work)
            self._idle_since_s = self._clock()
            self._changed.notify_all()

    def note_work(self, work_s: float) -> None:
        """Note how many seconds some work took, also work that was not held."""
        with self._changed:
            self._longest_s = max(self._longest_s, work_s)
            self._spent_s = min(self._spent_s + MAX_HELD * work_s, self.held_s)

    def wait(self, is_released: Callable[[], bool]) -> None:
        """Wait until a piece of work may begin: at once if `is_released()`, which `recheck` lets be asked again."""
        with self._changed:
            self._hold_start_s = self._clock()
            try:
                while not is_released() and (left_s := self._left_s()) > 0:
                    self._changed.wait(left_s)
            finally:
                self._past_held_s = self.held_s
                self._hold_start_s = None

    def recheck(self) -> None:
        """Let `wait` ask `is_released` again."""
        with self._changed:
            self._changed.notify_all()

    def _left_s(self) -> float:
        """Return for how many seconds work is still held if nothing changes.

        A piece that takes less time than was expected leaves the rest of the held seconds to the next ones.
        """
        if self._urgent:
            return threading.TIMEOUT_MAX
        share_left_s = MAX_HELD * self._longest_s - (self.held_s - self._spent_s)
        if self._are_requests_running:
            return share_left_s
        return min(share_left_s, self._idle_since_s + PAUSE_S - self._clock())
