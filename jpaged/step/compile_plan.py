"""The closed set of executables: each is compiled ahead of time, once, and nothing outside the set may run in a step.

Background threads compile what `start` asks for, in order; `defer` puts keys off until the first step is done, so
that compiling takes no processor time from the first token; `start_behind` has programs compiled one at a time in the
pauses between requests; `ask` has a program compiled at once, with none behind beside it, and `get` waits for that. The
plan knows keys and how to lower them (programs.py), not what they compute. It also listens to `jax.monitoring`, which
reports every compilation in the process: those on the thread of a step are counted in `num_outside` and should be 0.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from itertools import count
from typing import Any, Protocol

import jax

from ..checks import one_line
from ..errors import EngineStoppedError
from .compile_threads import lower_own_priority
from .jax_settings import trace_settings
from .pauses import Pauses

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
DEFERRED_START_S = 2.0
"""Seconds after which deferred keys are compiled even if no step has run."""
CLOSE_S = 0.5
"""Seconds that `close` waits for compilations that have begun, so that short ones are over when it returns."""

MAX_URGENT = 16
"""Programs at most that steps wait for at the same time, each of another engine."""

logger = logging.getLogger("jpaged")

Key = Hashable


class Executable(Protocol):
    """A compiled program, such as a `jax.stages.Compiled`."""

    def __call__(self, *arguments: Any) -> Any:
        """Start the program; return its results, which may not be computed yet."""

    def memory_analysis(self) -> Any:
        """Return the bytes that the executable takes, under the names of JAX's `CompiledMemoryStats`."""


class Lowered(Protocol):
    """A program that can be compiled, such as a `jax.stages.Lowered`."""

    def compile(self) -> Executable:
        """Compile the program."""


Lower = Callable[[], Lowered]


class CompilePlan:
    """Executables by key, compiled in the background once `start` has asked for them, else at their first use."""

    def __init__(
        self,
        programs: Mapping[Key, Lower],
        occasional: Mapping[Key, Lower] | None = None,
        *,
        of_updates: Callable[[], Mapping[Key, Lower]] | None = None,
        num_compilers: int = 2,
        on_compiled: Callable[[Key, Executable], None] | None = None,
    ):
        """Take the programs, and listen to JAX's compilations; nothing is compiled before `start`, `defer` or `get`.

        `programs` are all programs that steps run: key → the function that lowers the program. `num_compilers` of them
        are compiled at the same time. `occasional` are further programs that are not planned, such as those that only
        some requests need: each is compiled when `get` first asks for it. `of_updates` returns those that replace
        weights, of which more is known only then; it is called for the first key that is none of the others.
        `on_compiled` is called with each key and its executable, on the thread that compiled it; if it raises, `get`
        raises its error.
        """
        self.programs = dict(programs)
        """Key → the function that lowers the program."""
        self._occasional, self._of_updates = dict(occasional or {}), of_updates
        self._on_compiled = on_compiled
        self.waited_s = 0.0
        """Seconds that calls of `get` have waited for compilations, or for the persistent compilation cache."""
        self.num_outside = 0
        """Compilations during steps that the plan did not ask for; anything but 0 is a defect."""
        self.num_ended = 0
        """Programs whose compilation has ended, also by an error: they are ready, or among the failures."""
        self._futures: dict[Key, Future[Executable]] = {}
        self._unended: list[Future[Executable]] = []
        """Futures of `_futures` that were not done when `_forget_ended` looked last: each step asks for them."""
        self._ready: dict[Key, Executable] = {}
        """Executables that are there. A future of `start_behind` is done a moment later."""
        self.failures: dict[Key, Exception] = {}
        """The errors of compilations that have failed."""
        self._begun: list[Future[Executable]] = []
        """Compilations that had begun when the plan was closed."""
        self._compilers = _compilers(num_compilers, "jpaged-compile")
        self._urgent = _compilers(MAX_URGENT, "jpaged-compile-now")
        """Compiles what a step waits for, past the queue of `_compilers`."""
        self.pauses = Pauses()
        """When the keys of `start_behind` may be compiled."""
        self._asked: set[Key] = set()
        """Keys that steps or requests need now, so that `start_behind` does not hold them."""
        self._num_under_way = 0
        """Programs that are being lowered or compiled."""
        self._serving: set[int] = set()
        """Threads that are executing a step now."""
        self._closed: Future[None] = Future()
        """Done once the plan is closed: what waits for an executable waits for this too."""
        self._lock = threading.RLock()
        """Guards the futures and the deferred keys: the thread of steps, the timer and `close` use them."""
        self._deferred: list[Key] = []
        self._timer: threading.Timer | None = None
        on_event = weakref.WeakMethod(self._on_event)

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            """Pass the name of a JAX event to the plan as long as the plan exists; its duration is not used."""
            if (count_event := on_event()) is not None:
                count_event(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        # JAX keeps listeners forever. This one holds a weak reference only, so that a plan that is dropped without
        # `close` is freed too; the finalizer then removes the listener.
        self._stop_listening = weakref.finalize(self, _unregister, listen)

    @cached_property
    def _update_programs(self) -> Mapping[Key, Lower]:
        return {} if self._of_updates is None else self._of_updates()

    def _is_known(self, key: Key) -> bool:
        return key in self.programs or key in self._occasional or key in self._update_programs

    @property
    def num_compiled(self) -> int:
        """Return the number of executables for steps that are ready.

        Programs whose compilation failed do not count, nor do occasional programs, which no step runs.
        """
        with self._lock:
            done = [future for key, future in self._futures.items() if future.done() and key in self.programs]
            return sum(future.exception() is None for future in done)

    def is_ready(self, key: Key) -> bool:
        """Return whether the executable of `key` is there, so that `get` does not wait."""
        return key in self._ready

    @property
    def progress(self) -> tuple[int, int]:
        """Return how many of the programs that were asked for have ended, also by an error, and how many there are."""
        with self._lock:
            self._forget_ended()
            num_deferred = sum(key not in self._futures for key in self._deferred)
            return len(self._futures) - len(self._unended), len(self._futures) + num_deferred

    @property
    def is_held(self) -> bool:
        """Return whether nothing is compiled now, since what is left waits for a pause between requests."""
        return self.pauses.is_holding and self._num_under_way == 0

    @property
    def is_closed(self) -> bool:
        """Return whether the plan was closed, and gives no more executables."""
        return self._closed.done()

    @property
    def is_compiling(self) -> bool:
        """Return whether a requested or deferred executable is not ready.

        After `close`, whether a compilation that had begun has not ended.
        """
        with self._lock:
            self._forget_ended()
            return bool(self._deferred or self._unended) or not all(future.done() for future in self._begun)

    def _forget_ended(self) -> None:
        """Leave only futures in `_unended` that are not done. The caller holds the lock."""
        self._unended = [future for future in self._unended if not future.done()]

    def _keep(self, key: Key, future: Future[Executable]) -> Future[Executable]:
        """Note the future of a key that is compiled from now on, and return it. The caller holds the lock."""
        self._futures[key] = future
        self._unended.append(future)
        return future

    def start(self, keys: Iterable[Key], progress: Callable[[int, int], None] | None = None) -> None:
        """Start compiling these keys in the background, in this order, and return at once.

        Keys that were started before are not started again. `progress(num_done, total)` is called once with `num_done`
        0, and then after each of these keys has ended, also if it failed or if `get` took it out of the queue. The
        later calls come from any thread; without a new key there is no call. Raises KeyError for a key outside the
        plan, because the set of shapes is fixed, and EngineStoppedError if the plan is closed; no key is started then.
        """
        with self._lock:
            self._check_open()
            keys = list(dict.fromkeys(keys))  # Equal keys count once; their order stays.
            new_keys = self._new_keys(keys)
            for key in new_keys:
                self._keep(key, self._compilers.submit(self._compile, key))
            if progress is None or not new_keys:
                return
            progress(0, len(keys))
            num_done = count(1)
            for key in keys:
                self._futures[key].add_done_callback(lambda _: progress(next(num_done), len(keys)))

    def start_behind(self, keys: Iterable[Key]) -> None:
        """Start compiling these keys as `start` does, but one at a time, in the pauses between requests.

        The thread gives way to steps, also if a key is asked for that it compiles already. One that is asked for before
        is not held; see `pauses` for how long others are.
        """
        with self._lock:
            self._check_open()
            for key in self._new_keys(dict.fromkeys(keys)):
                self._keep(key, _compiler_behind().submit(self._compile_behind, key))

    def _new_keys(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of some keys that were not started; KeyError if one is outside the plan."""
        new_keys = [key for key in keys if key not in self._futures]
        if unknown := [key for key in new_keys if not self._is_known(key)]:
            raise KeyError(f"{unknown[0]} is outside the compile plan of {len(self.programs)} executables")
        return new_keys

    def defer(self, keys: Iterable[Key]) -> None:
        """Compile these keys in the background once `start_deferred` is called, or after DEFERRED_START_S seconds.

        They replace keys that were deferred before and are not started yet. Without keys no timer is started.
        """
        with self._lock:
            self._deferred = list(keys)
            if self._deferred:
                self._timer = threading.Timer(DEFERRED_START_S, self.start_deferred)
                self._timer.daemon = True
                self._timer.start()

    def start_deferred(self) -> None:
        """Start compiling the deferred keys, unless the plan is closed. Further calls do nothing."""
        with self._lock:
            keys, self._deferred = self._deferred, []
            if keys and not self.is_closed:
                self.start(keys)

    def get(self, key: Key) -> Executable:
        """Return the executable of `key`; if it is not ready, compile it at once and wait for it.

        A key that no thread has begun to compile is taken out of the queue and goes to the thread for urgent keys, past
        all others. One that is being compiled is waited for. The seconds waited are added to `waited_s`. Raises what
        the compilation raised, KeyError for a key outside the plan, and EngineStoppedError once the plan is closed,
        also if it is closed meanwhile.
        """
        if (ready := self._ready.get(key)) is not None:
            return ready
        with self._lock:
            future = self._futures.get(key)
        if future is None or not future.done():
            wait_start_s = time.monotonic()
            future = self.ask(key)
            ends: list[Future[Any]] = [future, self._closed]
            wait(ends, return_when=FIRST_COMPLETED)
            self.waited_s += time.monotonic() - wait_start_s
        self._check_open()
        return future.result()

    def ask(self, key: Key) -> Future[Executable]:
        """Compile `key` at once, and return its future without waiting.

        A key that no thread has begun to compile goes past all others, as in `get`. Until it is done, no key of
        `start_behind` is begun. Raises KeyError for a key outside the plan, and EngineStoppedError if the plan is
        closed.
        """
        with self._lock:
            self.start([key])  # Nothing if the key was started before; else it is queued, and cancelled below.
            # `cancel` succeeds only while the key still waits in the queue.
            future = self._futures[key]
            if future.cancel():
                future = self._keep(key, self._urgent.submit(self._compile, key))
            self._asked.add(key)
        self.pauses.put_first(future)
        self.pauses.recheck()  # This key may be held now.
        return future

    def wait(self) -> None:
        """Wait until every key that was started is compiled; raise the error of the first one that failed, in order.

        Keys that were deferred and are not started yet are not waited for. This must not be called while another thread
        may be in `get`, which cancels futures and replaces them: waiting for a cancelled one would raise.
        """
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.result()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Return a context in which compilations on the calling thread are counted in `num_outside`.

        Each step runs in one: a step must cause no compilation. The plan's own compilations run on other threads.
        """
        self._serving.add(threading.get_ident())
        try:
            yield
        finally:
            self._serving.discard(threading.get_ident())

    def stats(self) -> dict[str, float | int]:
        """Return counts of executables, and the seconds that `get` has waited, under the names of `Engine.stats`."""
        return {
            "executables": self.num_compiled,
            "planned_executables": len(self.programs),
            "compile_seconds": self.waited_s,
            "recompiles": self.num_outside,
        }

    def close(self) -> None:
        """Stop compiling and counting, and drop the executables. Further calls do nothing.

        Compilations that wait in a queue are cancelled, and what waits in `get` raises EngineStoppedError. One that has
        begun cannot be ended: after CLOSE_S it goes on behind this call, and its executable is dropped. The end of the
        program waits for it, since the interpreter must not go while XLA compiles.
        """
        with self._lock:
            if self.is_closed:
                return
            self._closed.set_result(None)
            self._deferred = []
            if self._timer is not None:
                self._timer.cancel()
            self._begun = [future for future in self._futures.values() if not future.cancel()]
            self._futures.clear()
            self._unended.clear()
            self._ready.clear()
        self.pauses.recheck()
        self._stop_listening()
        wait(self._begun, timeout=CLOSE_S)

    def _compile(self, key: Key) -> Executable:
        """Lower and compile the program of `key`, and return its executable. Runs on a thread of the plan.

        An error of tracing, compiling or `on_compiled` is logged and raised; the key's future keeps it. Once the plan
        is closed, the next of these is left out by EngineStoppedError, and nothing is logged.
        """
        with self._lock:
            self._num_under_way += 1
        start_s = time.monotonic()
        try:
            with trace_settings():
                lower = self.programs.get(key) or self._occasional.get(key) or self._update_programs[key]
                lowered = lower()
                self._check_open()
                compiled = lowered.compile()
            self._check_open()
            if self._on_compiled is not None:
                self._on_compiled(key, compiled)
            self._ready[key] = compiled
            return compiled
        except Exception as error:
            if self.is_closed:
                raise
            self.failures[key] = error
            # `get` raises the error with its traceback, but it may never be called for this key.
            logger.error("%s was not compiled: %s: %s", key, type(error).__name__, one_line(error))
            raise
        finally:
            self.pauses.note_work(time.monotonic() - start_s)
            with self._lock:
                self.num_ended += 1
                self._num_under_way -= 1

    def _compile_behind(self, key: Key) -> Executable:
        """Compile a program as `_compile` does, once a pause has come.

        One that is asked for meanwhile is traced at once, by a thread of normal priority. The threads of XLA's compiler
        may have a lower one for all programs, see `compile_threads`.
        """
        self.pauses.wait(lambda: self.is_closed or key in self._asked)
        self._check_open()
        return self._urgent.submit(self._compile, key).result() if key in self._asked else self._compile(key)

    def _check_open(self) -> None:
        """Raise EngineStoppedError once the plan is closed."""
        if self.is_closed:
            raise EngineStoppedError("this engine was shut down; make a new one")

    def _on_event(self, event: str) -> None:
        """Raise `num_outside` by one if JAX has just compiled a program on a thread that is executing a step."""
        # The plan compiles on its own threads, and other code in this process on others: neither is a step.
        if event == BACKEND_COMPILE_EVENT and threading.get_ident() in self._serving:
            self.num_outside += 1


@cache
def _compilers(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return up to `num_threads` threads that compile for all engines of this process, as many as are needed at once.

    They stay when an engine is closed. With new threads for each engine, the C library would compile each time in other
    arenas of memory: after ten engines 40 MB more stayed in the process.
    """
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name)


@cache
def _compiler_behind() -> ThreadPoolExecutor:
    """Return a thread that compiles for all engines of this process, and gives way to steps, also while it traces.

    A program that is held for one engine's requests holds those of others, too; a server has one engine.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="jpaged-compile-behind", initializer=lower_own_priority)


def _unregister(listen: Callable[..., None]) -> None:
    """Remove a listener from `jax.monitoring`, if it is there."""
    # Another library may have removed all of JAX's listeners, as Tunix does.
    with suppress(AssertionError):
        jax.monitoring.unregister_event_duration_listener(listen)
