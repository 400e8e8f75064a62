"""Notices a core that hangs: one that has work and makes no progress, or that sends no heartbeats.

    status, heartbeats ─▶ sign of life ─▶ Watchdog.look, once a second ─▶ the stacks of all threads, and what hangs

Only time in which somebody looks counts, so that a machine that slept, or a front that was stopped itself, blames no
core. Knows no engine, and loads no JAX.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import time
from collections.abc import Callable, Hashable

from .core_client import CoreStatus

logger = logging.getLogger("jpaged")

MAX_LOOK_S = 2.0
"""Seconds that one look counts at most."""
STACKS_S = 2.0
"""Seconds that a process has to print its stacks before it is killed."""
STDERR = 2
STACKS_SIGNAL = signal.SIGUSR1
"""At which a process prints the stacks of its threads, even while native code holds Python's lock."""


class Watchdog:
    """Looks for one thing whether it goes on."""

    def __init__(self, print_stacks: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        """`print_stacks` is called once each time when it hangs; `clock` tells seconds."""
        self.silent_s = 0.0
        """Seconds for which looks have found the same sign."""
        self._print_stacks, self._clock = print_stacks, clock
        self._sign: Hashable = None
        self._last_s = clock()
        self._stalled = ""
        """What it hangs in; empty while it goes on."""

    def look(self, sign: Hashable, limit_s: float, doing: str) -> str:
        """Return what hangs, as a sentence without its full stop; empty while it goes on.

        `sign` is another one each time when it has come further; `limit_s` is how long the same one may stay, and
        `doing` tells what it does meanwhile.
        """
        now_s = self._clock()
        waited_s, self._last_s = min(now_s - self._last_s, MAX_LOOK_S), now_s
        if sign != self._sign:
            if self._stalled:
                logger.warning("%s goes on after %d s", self._stalled, self.silent_s)
            self._sign, self.silent_s, self._stalled = sign, 0.0, ""
            return ""
        self.silent_s += waited_s
        if self.silent_s < limit_s:
            return ""
        stall = f"{doing} makes no progress since {int(self.silent_s)} s"
        if not self._stalled:
            self._stalled = doing
            logger.error("%s; the stacks of all threads follow", stall)
            self._print_stacks()
        return stall


def sign_of_life(status: CoreStatus, num_heartbeats: int) -> Hashable:
    """Return what differs once a core has come further: in its work, or without any by its next heartbeat."""
    is_busy = status.has_work or status.is_compiling
    return (status.num_steps, status.num_programs_done) if is_busy else num_heartbeats


def work_of(status: CoreStatus) -> str:
    """Return what a core does, as the subject of a sentence."""
    if status.is_compiling:
        return "a compilation"
    return "a step" if status.has_work else "the core, which has no work,"


def print_stacks_at_signal() -> None:
    """Let this process print the stacks of all its threads on stderr at each STACKS_SIGNAL."""
    faulthandler.register(STACKS_SIGNAL, STDERR, all_threads=True)


def print_own_stacks() -> None:
    """Print the stacks of all threads of this process on stderr."""
    faulthandler.dump_traceback(STDERR, all_threads=True)
