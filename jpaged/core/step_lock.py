"""One thread at a time computes a step; what other threads want of the engine runs between two steps.

    thread A   │ step │ calls of others │ step │ …        holds the lock for a step and the calls behind it
    thread B          └─ its call, which has waited in a queue

A thread that finds the lock free runs its call at once. Threads that all want to compute steps take turns. Interrupts
such as KeyboardInterrupt come to the main thread between any two instructions. Wherever one comes, the lock is free
afterwards, no call runs twice, and none waits for ever.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ..sharding import outside_mesh

POLL_S = 0.005
"""Seconds after which a thread that waits for a step of another thread looks again whether it may run its own call."""
TURN_S = 0.0001
"""Seconds for which a thread that has released the lock leaves it to threads that wait for it. Without a pause, a
thread that takes the lock again at once would keep them from it for ever."""
Result = TypeVar("Result")


class QueuedCall(Generic[Result]):
    """A call that a thread waits for, and that another thread may run."""

    def __init__(self, name: str, command: Callable[[], Result]):
        """Make a call that runs `command`. `name` is the method that errors name."""
        self.name, self.command = name, command
        self.has_begun = self.is_cancelled = False
        self.result: Result
        """Only after a call without `error`."""
        self.error: Exception | None = RuntimeError(
            f"{name}: was interrupted in the thread that computes the steps, and may be done in part; call it again"
        )
        """What the call raised; until it has ended, what its caller gets if the thread that runs it is interrupted."""
        self.is_done = threading.Event()

    def run(self) -> None:
        """Run the command, and keep its result or its exception for the caller. Interrupts are raised.

        Do nothing if an earlier `run` has begun the command, or if its caller has gone (`is_cancelled`).
        """
        if self.has_begun:
            return
        self.has_begun = True
        # `call` cancels first and then looks at `has_begun`; in this order at least one of the two sees the other.
        if self.is_cancelled:
            return
        try:
            self.result, self.error = self.command(), None
        except Exception as error:
            self.error = error


class StepLock:
    """The lock that a step needs, and the calls of other threads that wait for the end of a step.

    What runs under it runs outside of any mesh that a trainer has set for its thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The identifier of the thread that holds the lock."""
        self._calls: deque[QueuedCall[Any]] = deque()
        self._waiting: set[int] = set()
        """The identifiers of threads that wait in `hold`."""
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """Return whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock for one step, the `with` block; then run the calls that other threads have queued meanwhile.

        They run before the lock is free, also if the step raises an exception. Wait while another thread has the lock.
        Threads that wait here get it before this thread can take it again. Raise RuntimeError in a forked process.
        """
        self.check_process()
        thread = threading.get_ident()
        try:
            self._waiting.add(thread)
            with self._lock, outside_mesh():
                self._waiting.discard(thread)
                try:
                    self._owner = thread
                    try:
                        yield
                    finally:
                        self._run_calls()
                finally:
                    self._owner = None
        finally:
            self._waiting.discard(thread)  # An interrupt may have come while this thread waited.
        if self._waiting:
            time.sleep(TURN_S)

    def call(self, name: str, command: Callable[[], Result]) -> Result:
        """Run `command` while no step runs, and return its result or raise its exception. `name` is for errors.

        If no step runs, this thread runs it. During a step of another thread the command waits, and that thread runs it
        after the step; this thread must not hold the lock. An interrupt of this thread is raised, before the command
        begins or after it has ended. Raise RuntimeError in a forked process.
        """
        self.check_process()
        call = QueuedCall(name, command)
        self._calls.append(call)
        try:
            while not call.is_done.is_set():
                if self._lock.locked():
                    call.is_done.wait(POLL_S)
                else:
                    # The end of `hold` runs the queued calls. If another thread was faster, that one runs them.
                    with self.hold():
                        pass
        except BaseException:
            call.is_cancelled = True
            # A call that this thread was running has ended by the interrupt. Wait for one that another thread runs.
            if call.has_begun and not call.is_done.is_set() and self._lock.locked():
                call.is_done.wait()
            raise
        if call.error is not None:
            raise call.error
        return call.result

    def read(self, name: str, command: Callable[[], Result]) -> Result:
        """Return what `command` reads while no other thread changes the engine, also from inside of a step."""
        return command() if self.is_own else self.call(name, command)

    def post(self, name: str, command: Callable[[], object]) -> QueuedCall[Any]:
        """Let `command` run at the end of a step, or with the next call; return at once, and drop its result.

        This runs nothing and waits for nothing, so that a finalizer may post: garbage is collected in any thread, also
        within a step or while JAX traces a function. `StepThread.post` makes sure that a step comes.
        """
        call = QueuedCall[Any](name, command)
        self._calls.append(call)
        return call

    @property
    def has_calls(self) -> bool:
        """Return whether calls wait for the end of a step."""
        return bool(self._calls)

    def check_process(self) -> None:
        """Raise RuntimeError in a child of `os.fork`: it lacks the threads that compute, so that a step would hang."""
        if os.getpid() != self._process:
            got = f"this engine is that of process {self._process}, and its threads are not in this fork of it"
            raise RuntimeError(f"{got}; let multiprocessing start processes by spawn, and make an engine there")

    def _run_calls(self) -> None:
        """Run the queued calls, in order; this thread must hold the lock. Their exceptions go to their callers.

        An interrupt is raised here, and ends the call that it came into; later calls stay queued for the next thread
        that holds the lock.
        """
        while self._calls:
            call = self._calls[0]
            try:
                call.run()
            finally:
                # If an interrupt comes here too, the next thread that runs calls finds this one begun, and ends it.
                call.is_done.set()
                self._calls.popleft()
