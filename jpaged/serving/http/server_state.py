"""What all handlers of a server share: the engine once it is there, its phase until then, and the open answers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..metrics import ServerMetrics
from ..options import ServeOptions
from ..protocols.front import Front
from ..protocols.replies import HTTPError, unavailable
from ..tracing import Tracing

if TYPE_CHECKING:
    from ...async_engine import AsyncEngine

Result = TypeVar("Result")
NUM_THREADS = 4
"""Threads that parse, render and tokenize at the same time."""
HEARTBEAT_S = 1.0
SILENCE_S = 15.0
"""Seconds after which a stream without tokens sends a comment, so that no proxy takes it for dead."""


class OpenAnswer(Protocol):
    """An answer that is being computed or written."""

    is_waiting: bool
    """No event is being sent: the core has given nothing since the last one."""
    last_sent_s: float
    """When its last event was sent, in seconds of `time.monotonic()`."""

    def interrupt(self, reason: HTTPError | str) -> None:
        """End the answer early: nothing is sent any more but what `reason` says."""

    def nudge(self) -> None:
        """Let it look whether it is interrupted, or silent for too long."""


class ServerState:
    """The engine, its front, and everything that is open."""

    def __init__(self, options: ServeOptions, names: tuple[str, ...], limits: Mapping[str, int | None], version: str):
        """Start without an engine: everything but health, live and the page is refused until `serve`."""
        self.options, self.names, self.limits, self.version = options, names, limits, version
        self.metrics = ServerMetrics(names[0], is_vllm=options.vllm_metrics)
        endpoint = options.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint, version)
        self.generations: set[OpenAnswer] = set()
        self.created = int(time.time())
        self.fingerprint = ""
        self.is_stopping = False
        self.start_fault: str | None = None
        """Why the engine could not start."""
        self._engine: AsyncEngine | None = None
        self._front: Front | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jpaged-front")
        self._phase: tuple[str, int, int | None, float] = ("open", 0, None, time.monotonic())
        """The phase of the start, how many of how many of its parts are done, and when it has begun."""

    def report(self, name: str, done: int, total: int | None) -> None:
        """Note the progress of the start. Any thread may call."""
        since = self._phase[3] if self._phase[0] == name else time.monotonic()
        self._phase = name, done, total, since

    def serve(self, engine: AsyncEngine, front: Front, identity: str) -> None:
        """Answer requests from now on. `identity` names the model and all options that outputs depend on."""
        digest = hashlib.sha256(f"{self.version} {identity}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self._front, self._engine = front, engine
        self.metrics.watch(engine.engine)

    @property
    def engine(self) -> AsyncEngine:
        """Return the engine. Raise HTTPError, a 503, while there is none that takes requests."""
        self.check_ready()
        assert self._engine is not None
        return self._engine

    @property
    def any_engine(self) -> AsyncEngine:
        """Return the engine, whether or not it takes requests at present."""
        assert self._engine is not None, "the start is over"
        return self._engine

    @property
    def front(self) -> Front:
        """Return the front. Raise HTTPError, a 503, before the start is over."""
        if self._front is None:
            self.check_ready()
        assert self._front is not None
        return self._front

    def check_ready(self) -> None:
        """Raise HTTPError, a 503, unless new requests are taken."""
        health = self.health()
        if health["status"] == "ok":
            return
        if health["status"] == "starting":
            eta_s = health["eta_s"]
            retry_after_s = max(1, min(60, int(eta_s or 5)))
            raise unavailable(f"the server is starting ({health['phase']}); try again", retry_after_s=retry_after_s)
        raise unavailable(f"the server is {health['status']}", retry_after_s=10)

    def health(self) -> dict[str, Any]:
        """Return what /health tells; `status` is "ok" where requests are taken."""
        if self.is_stopping:
            return {"status": "stopping"}
        if self.start_fault is not None:
            return {"status": "failed"}
        if self._engine is None:
            name, done, total, since = self._phase
            elapsed_s = time.monotonic() - since
            eta_s = round(elapsed_s * (total - done) / done, 1) if total and done else None
            return {"status": "starting", "phase": name, "done": done, "total": total, "eta_s": eta_s}
        if not self._engine.is_alive:
            return {"status": "failed"}
        return {"status": "sleeping"} if self._engine.is_sleeping() else {"status": "ok"}

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns that would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def beat(self) -> None:
        """Wake the streams that have been silent for long, for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            before = time.monotonic() - SILENCE_S
            for generation in list(self.generations):
                if generation.is_waiting and generation.last_sent_s < before:
                    generation.nudge()

    def interrupt_all(self, reason: HTTPError) -> None:
        """End all answers that are open, by an error."""
        for generation in list(self.generations):
            generation.interrupt(reason)

    async def close(self) -> None:
        """End the engine and the threads."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
