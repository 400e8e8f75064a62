"""The closed set of executables: each is compiled ahead of time, once, and nothing outside the set may run.

Knows keys and how to lower them; not what they compute. `jax.monitoring` tells of every compilation in the
process: those that a step causes on its own thread are counted as outside of the plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count

import jax

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
NUM_COMPILERS = 2
LATER_S = 2.0

logger = logging.getLogger("jpaged")

Key = Hashable
Lower = Callable[[], jax.stages.Lowered]


class CompilePlan:
    """Executables by key, compiled in the background once `start` has asked for them, else at their first use."""

    def __init__(self, programs: Mapping[Key, Lower]):
        self.programs = dict(programs)
        self.waited_seconds = 0.0
        """Wall time that somebody waited for a compilation (or for reading the persistent cache)."""
        self.num_outside = 0
        """Compilations during steps that the plan did not ask for. Anything but 0 is a defect."""
        self._futures: dict[Key, Future[jax.stages.Compiled]] = {}
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="jpaged-compile")
        self._urgent = ThreadPoolExecutor(1, thread_name_prefix="jpaged-compile-now")
        """What a step waits for."""
        self._serving: set[int] = set()
        self._is_closed = False
        self._lock = threading.RLock()
        """The thread of steps, a timer and whoever closes come at any time."""
        self._later: list[Key] = []
        self._timer: threading.Timer | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def num_compiled(self) -> int:
        """Executables that are ready."""
        with self._lock:
            done = [future for future in self._futures.values() if future.done()]
            return sum(future.exception() is None for future in done)

    @property
    def is_compiling(self) -> bool:
        """Whether something that was asked for is not ready."""
        with self._lock:
            return bool(self._later) or not all(future.done() for future in self._futures.values())

    def start(self, keys: Iterable[Key], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile these in the background, two at a time, in this order; `progress(done, total)`.

        KeyError for a key outside the plan: shapes are fixed at start.
        """
        with self._lock:
            missing = [key for key in dict.fromkeys(keys) if key not in self._futures]
            if unknown := [key for key in missing if key not in self.programs]:
                raise KeyError(f"{unknown[0]} is outside the compile plan of {len(self.programs)} executables")
            if progress is not None and missing:
                progress(0, len(missing))
            done = count(1)
            for key in missing:
                future = self._futures[key] = self._compilers.submit(self._compile, key)
                if progress is not None:
                    future.add_done_callback(lambda _: progress(next(done), len(missing)))

    def start_later(self, keys: Iterable[Key]) -> None:
        """The same as soon as `start_rest` is called, or after a while: compiling takes time from the first step."""
        with self._lock:
            self._later = list(keys)
            if self._later:
                self._timer = threading.Timer(LATER_S, self.start_rest)
                self._timer.daemon = True
                self._timer.start()

    def start_rest(self) -> None:
        """Compile what was put off. Further calls do nothing."""
        with self._lock:
            keys, self._later = self._later, []
            if keys and not self._is_closed:
                self.start(keys)

    def get(self, key: Key) -> jax.stages.Compiled:
        """The executable of `key`; waits for it if it is not ready, but not for others before it in the queue.

        Raises what its compilation raised.
        """
        with self._lock:
            future = self._futures.get(key)
        if future is None or not future.done():
            start = time.monotonic()
            with self._lock:
                self.start([key])
                if self._futures[key].cancel():  # It had not begun.
                    self._futures[key] = self._urgent.submit(self._compile, key)
                future = self._futures[key]
            wait([future])
            self.waited_seconds += time.monotonic() - start
        return future.result()

    def wait(self) -> None:
        """Wait for everything that was asked for; raises what a compilation raised. Not beside somebody's `get`."""
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.result()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While this lasts, compilations on the caller's thread are counted: a step must cause none."""
        self._serving.add(threading.get_ident())
        try:
            yield
        finally:
            self._serving.discard(threading.get_ident())

    def close(self) -> None:
        """Stop compiling and counting, and drop the executables. What is being compiled is waited for."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._later = True, []
            if self._timer is not None:
                self._timer.cancel()
        jax.monitoring.unregister_event_duration_listener(self._on_event)
        for compilers in (self._compilers, self._urgent):
            compilers.shutdown(cancel_futures=True)
        self._futures.clear()

    def _compile(self, key: Key) -> jax.stages.Compiled:
        try:
            return self.programs[key]().compile()
        except Exception:
            logger.exception("%s was not compiled", key)  # Whoever wants it is told; nobody may.
            raise

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        # The plan compiles on threads of its own, and so may others in this process: neither is a step.
        if event == BACKEND_COMPILE_EVENT and threading.get_ident() in self._serving:
            self.num_outside += 1
