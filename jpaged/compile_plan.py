"""The closed set of executables: each is compiled ahead of time, once, and nothing outside the set may run.

Knows keys and how to lower them; not what they compute. `jax.monitoring` tells of every compilation in the
process: those that happen while the plan is open and not on its behalf are counted as outside of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
NUM_COMPILERS = 2

Key = Hashable
Lower = Callable[[], jax.stages.Lowered]


class CompilePlan:
    """Executables by key, compiled at their first use or when `prepare` asks for them."""

    def __init__(self, programs: Mapping[Key, Lower]):
        self.programs = dict(programs)
        self.executables: dict[Key, jax.stages.Compiled] = {}
        self.compile_seconds = 0.0
        """Wall time that anybody waited for compilation (or for reading the persistent cache)."""
        self.num_outside = 0
        """Compilations in this process that the plan did not ask for. Anything but 0 is a defect."""
        self._lock = threading.Lock()
        self._compiling: set[int] = set()

    def get(self, key: Key) -> jax.stages.Compiled:
        """The executable of `key`. KeyError for a key outside the plan: shapes are fixed at start."""
        executable = self.executables.get(key)
        if executable is None:
            self.prepare([key])
            executable = self.executables[key]
        return executable

    def prepare(self, keys: Iterable[Key], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing of `keys`, two at a time; `progress(done, total)`."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.executables]
        if unknown := [key for key in missing if key not in self.programs]:
            raise KeyError(f"{unknown[0]} is outside the compile plan of {len(self.programs)} executables")
        if not missing:
            return
        start = time.monotonic()
        if progress is not None:
            progress(0, len(missing))
        with ThreadPoolExecutor(min(NUM_COMPILERS, len(missing))) as compilers:
            for done, (key, executable) in enumerate(
                zip(missing, compilers.map(self._compile, missing), strict=True), 1
            ):
                self.executables[key] = executable
                if progress is not None:
                    progress(done, len(missing))
        self.compile_seconds += time.monotonic() - start

    def open(self) -> None:
        """Start-up is over: from now on, compilations that the plan did not ask for are counted."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def close(self) -> None:
        """Stop counting compilations and drop the executables."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)
        self.executables.clear()

    def _compile(self, key: Key) -> jax.stages.Compiled:
        thread = threading.get_ident()
        with self._lock:
            self._compiling.add(thread)
        try:
            return self.programs[key]().compile()
        finally:
            with self._lock:
                self._compiling.discard(thread)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == BACKEND_COMPILE_EVENT and threading.get_ident() not in self._compiling:
            self.num_outside += 1
