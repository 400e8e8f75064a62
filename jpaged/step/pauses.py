"""When work behind may begin: while no request runs, or else for a share of the time.

    requests   ████████  ██  ████████████████████
    work                        ▒▒▒               ▒▒▒▒▒▒▒▒▒▒▒    in a pause, or after MAX_HELD times the last one's time

Knows neither programs nor requests; the gate tells it whether any run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

PAUSE_S = 0.5
"""Seconds without a request after which work begins: a client's next request mostly comes sooner."""
MAX_HELD = 5
"""A piece of work is held at most so many times as long as the last one took: requests that never pause make all of it
take 1 + MAX_HELD times as long, and no longer."""


class Pauses:
    """Holds pieces of work, one at a time, while requests run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Start without requests; `clock` gives seconds."""
        self._clock = clock
        self._idle_since_s = clock()
        """When the last request ended; infinite while any run."""
        self._last_work_s = 0.0
        """Seconds that the last piece of work took."""
        self.is_holding = False
        """Whether a piece of work waits now."""
        self._changed = threading.Condition()

    def note(self, *, are_running: bool) -> None:
        """Note that requests run from now on, or that none does."""
        with self._changed:
            self._idle_since_s = math.inf if are_running else self._clock()
            self._changed.notify_all()

    def recheck(self) -> None:
        """Let `wait` ask `is_urgent` again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, is_urgent: Callable[[], bool]) -> None:
        """Wait until a piece of work may begin: at once if `is_urgent()`."""
        with self._changed:
            latest_s = self._clock() + MAX_HELD * self._last_work_s
            self.is_holding = True
            try:
                while not is_urgent() and (left_s := min(latest_s, self._idle_since_s + PAUSE_S) - self._clock()) > 0:
                    self._changed.wait(left_s)
            finally:
                self.is_holding = False

    def note_work(self, work_s: float) -> None:
        """Note how many seconds a piece of work took."""
        self._last_work_s = work_s
