"""A thread of the engine's own, which computes steps while requests are unfinished that no caller steps.

It ends when none is left, and starts again with the next one.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import EngineStoppedError
from .engine_loop import EngineLoop
from .inbox import Inbox
from .step_lock import QueuedCall

logger = logging.getLogger("jpaged")

EXIT_S = 10.0
"""Seconds that the end of the interpreter waits for the step that the thread computes."""


class StepThread:
    """Computes the steps of one engine for the requests of some inboxes, beside whatever other threads step."""

    def __init__(self, loop: EngineLoop):
        """Start without inboxes, and without a thread."""
        self.loop = loop
        self._inboxes: list[Inbox] = []
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        """Held for a moment to start the thread, or to let it end: no call of `post` comes between."""
        self._is_stopped = False
        atexit.register(_stop, weakref.ref(self))

    def serve(self, inbox: Inbox | None = None) -> None:
        """Make sure that the requests of `inbox`, or of all inboxes so far, are computed. Runs between steps.

        Inboxes without requests are forgotten here.
        """
        if inbox is not None:
            self._inboxes = [other for other in self._inboxes if other.requests and other is not inbox] + [inbox]
        if self._has_work:
            self._ensure_thread()

    def post(self, name: str, command: Callable[[], object]) -> QueuedCall[Any]:
        """Let `command` run between two steps, in the order of all such calls, on this thread or another; return soon.

        The caller neither waits for a step nor computes one, so that no interrupt of it finds the engine within one.
        Raise RuntimeError in a forked process.
        """
        self.loop.lock.check_process()
        call = self.loop.lock.post(name, command)
        self._ensure_thread()
        return call

    def _ensure_thread(self) -> None:
        """Start the thread if there is none, or if an interrupt has kept the last one from its start."""
        with self._guard:
            if (self._thread is None or not self._thread.is_alive()) and not self._is_stopped:
                # A daemon thread does not keep a program from ending while requests are unfinished.
                self._thread = threading.Thread(target=self._run, name="jpaged steps", daemon=True)
                self._thread.start()

    def leave(self, inbox: Inbox) -> None:
        """Serve an inbox no longer. Runs between steps."""
        if inbox in self._inboxes:
            self._inboxes.remove(inbox)

    @property
    def _has_work(self) -> bool:
        """Return whether a step can do anything for an inbox: an engine that sleeps or was shut down computes none."""
        is_able = self.loop.is_open and not self.loop.sleep.missing and not self._is_stopped
        return is_able and any(inbox.has_unfinished for inbox in self._inboxes)

    def _run(self) -> None:
        """Compute steps, and run at the end of each what was posted, until there is neither."""
        while True:
            with self.loop.turn("submit"):
                if not self._has_work:
                    if self._ends():
                        return
                    continue  # The end of this turn runs what was posted, which may bring work.
                try:
                    self.loop.advance()
                except Exception as error:
                    if not isinstance(error, EngineStoppedError):
                        logger.exception("steps failed, and end the requests that this thread computes")
                    for inbox in self._inboxes:
                        self.loop.fail(inbox, error)  # Their callers raise it.

    def _ends(self) -> bool:
        """Return whether this thread ends, since there is nothing to do. Runs between steps."""
        with self._guard:
            if self.loop.lock.has_calls and not self._is_stopped:
                return False
            self._thread = None
        for inbox in self._inboxes:
            inbox.changes.set()  # A caller that waits looks at what has become of the engine.
        return True

    def stop(self) -> None:
        """Let the thread end after its present step, and wait for that."""
        self._is_stopped = True
        if (thread := self._thread) is not None:
            thread.join(EXIT_S)


def _stop(thread: weakref.ref[StepThread]) -> None:
    """Stop the thread of an engine that is still there at the end of the program.

    A thread that computes while the interpreter takes its modules apart would crash it.
    """
    if (own := thread()) is not None:
        own.stop()
