"""What all handlers of a server share: the engine once it is there, its start until then, and the open responses."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...remote.watchdog import Watchdog, print_own_stacks
from ..metrics import ServerMetrics
from ..options import ServeOptions
from ..protocols.http_errors import HTTPError, unavailable
from ..protocols.parser_process import ParserProcess
from ..protocols.request_parser import RequestParser
from ..tracing import Tracing
from .body_parser import BodyParser

if TYPE_CHECKING:
    from ...async_engine import AsyncEngine
    from ...remote.core_client import CoreClient

HEARTBEAT_S = 1.0
"""Seconds between two looks for streams that have been silent for too long."""


class OpenResponse(Protocol):
    """A response that is being computed or written."""

    is_waiting: bool
    """False while an event is being sent."""
    last_sent_s: float
    """When its last event was sent, in seconds of `time.monotonic()`."""

    def interrupt(self, reason: HTTPError) -> None:
        """End the response early: nothing is sent any more but `reason`."""

    def nudge(self) -> None:
        """Wake the task that waits for outputs, so that it looks at the time of its last event."""


class StartPhase(NamedTuple):
    """What an engine that starts is doing."""

    name: str
    num_done: int
    num_parts: int | None
    start_s: float
    """When the phase has begun, in seconds of `time.monotonic()`."""
    num_done_before: int = 0
    """Parts that were done then."""

    @property
    def eta_s(self) -> float | None:
        """Return the seconds that the phase still takes if it goes on as fast; None if that is not known yet."""
        if not self.num_parts or self.num_done >= self.num_parts:
            return 0.0 if self.num_parts else None
        num_done, elapsed_s = self.num_done - self.num_done_before, time.monotonic() - self.start_s
        return round(elapsed_s * (self.num_parts - self.num_done) / num_done, 1) if num_done > 0 else None

    @property
    def fields(self) -> dict[str, Any]:
        """Return what /health tells of the phase."""
        return {"phase": self.name, "done": self.num_done, "total": self.num_parts, "eta_s": self.eta_s}


class StartedEngine(NamedTuple):
    """What a server needs of its engine."""

    engine: AsyncEngine
    parser: RequestParser
    long_parser: ParserProcess
    """Makes the same of bodies as `parser`, in another process."""
    identity: str
    """Names the model and the options of the engine, for `system_fingerprint`."""


class ServerState:
    """The engine, the parser of its requests, and everything that is open."""

    def __init__(
        self, options: ServeOptions, model_names: tuple[str, ...], limits: Mapping[str, int | None], version: str
    ):
        """Start without an engine: everything but health, live and the page is refused until `serve`."""
        self.options, self.model_names, self.limits, self.version = options, model_names, limits, version
        self.metrics = ServerMetrics(model_names[0], has_vllm_names=options.vllm_metrics)
        endpoint = options.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint, version)
        self.generations: set[OpenResponse] = set()
        self.start_unix_s = int(time.time())
        self.fingerprint = ""
        self.is_stopping = False
        self.fault: BaseException | None = None
        """Why the engine could not start, or how its process has ended."""
        self.stall = ""
        """What hangs in the engine or its start; empty while that goes on."""
        self._start_watchdog = Watchdog(print_own_stacks)
        self.bodies = BodyParser(limits["pending_bytes"])
        self._started: StartedEngine | None = None
        self._client: CoreClient | None = None
        """That of the engine, once that has started."""
        self._phase = StartPhase("open", 0, None, time.monotonic())
        self._num_compiled = 0
        """Programs that were there when the server got ready."""
        self._ready_s = 0.0
        """When that was, in seconds of `time.monotonic()`."""

    def report(self, name: str, done: int, total: int | None) -> None:
        """Note the progress of the start. Any thread may call."""
        start_s = self._phase.start_s if self._phase.name == name else time.monotonic()
        self._phase = StartPhase(name, done, total, start_s)

    def serve(self, started: StartedEngine) -> None:
        """Answer requests from now on."""
        digest = hashlib.sha256(f"{self.version} {started.identity}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self._started, self._client = started, started.engine.client
        self._num_compiled = self._client.status().num_programs_done
        self._ready_s = time.monotonic()
        self.bodies.serve(started.parser, started.long_parser)

    @property
    def engine(self) -> AsyncEngine:
        """Return the engine. Raise HTTPError, a 503, while there is none that takes requests."""
        self.check_ready()
        assert self._started is not None
        return self._started.engine

    @property
    def engine_even_asleep(self) -> AsyncEngine:
        """Return the engine, also one that sleeps. Raise HTTPError, a 503, while there is none."""
        if self.status != "sleeping":
            self.check_ready()
        assert self._started is not None
        return self._started.engine

    @property
    def client(self) -> CoreClient:
        """Return the client of the engine, whatever that does. Raise HTTPError, a 503, before the start is over."""
        self.check_started()
        assert self._client is not None
        return self._client

    @property
    def parser(self) -> RequestParser:
        """Return the parser of requests. Raise HTTPError, a 503, before the start is over."""
        self.check_started()
        assert self._started is not None
        return self._started.parser

    def check_started(self) -> None:
        """Raise HTTPError, a 503, before the start is over."""
        if self._started is None:
            self.check_ready()

    def check_ready(self) -> None:
        """Raise HTTPError, a 503, unless new requests are taken."""
        status = self.status
        if status == "ok":
            return
        if status == "starting":
            retry_after_s = max(1, min(60, int(self._phase.eta_s or 5)))
            raise unavailable(f"the server is starting ({self._phase.name}); try again", retry_after_s=retry_after_s)
        raise unavailable(f"the server is {status}", retry_after_s=10)

    @property
    def status(self) -> str:
        """Return "ok" where requests are taken, else "starting", "restarting", "sleeping", "stalled", "stopping" or
        "failed"."""
        if self.fault is not None:
            return "failed"
        if self.is_stopping:
            return "stopping"
        if self.stall:
            return "stalled"
        if self._client is None:
            return "starting"
        core = self._client.status()
        if not core.is_alive:
            return "restarting" if any(one.status == "starting" for one in self._client.states()) else "failed"
        return "sleeping" if core.is_sleeping else "ok"

    def health(self) -> dict[str, Any]:
        """Return what /health tells: the status, how far the start is or what is compiled behind it, and each core."""
        cores = [] if self._client is None else self._client.states()
        return {**self._progress(), **({"cores": [one._asdict() for one in cores]} if cores else {})}

    def _progress(self) -> dict[str, Any]:
        """Return the status, and how far the start is, or what is compiled behind it."""
        status = self.status
        if status == "starting":
            return {"status": status, **self._phase.fields}
        if status == "stalled":
            return {"status": status, "reason": self.stall}
        if status != "ok":
            return {"status": status}
        assert self._client is not None
        core = self._client.status()
        done, total = core.num_programs_done, core.num_programs
        name = "compile" if done < total else "serve"
        # As if nothing had been held for requests, so that `eta_s` counts seconds of compiling.
        start_s = self._ready_s + core.held_s
        return {"status": status, **StartPhase(name, done, total, start_s, self._num_compiled).fields}

    def watch(self) -> None:
        """Look whether the engine, or its start, goes on. Called about once a second."""
        options = self.options.watch
        if self._client is not None:
            self.stall = self._client.watch(options)
        elif self.options.core != "process":  # A client watches the start of its process.
            self.stall = self._start_watchdog.look(self._phase, options.start_s, "the start of the engine")

    @property
    def lost_core(self) -> str:
        """Return how the core's process has ended by itself; empty while it runs, and without one."""
        return "" if self._client is None else self._client.lost_process

    @property
    def is_compiling(self) -> bool:
        """Return whether a program is being compiled, also for an engine that was shut down."""
        return self._client is not None and self._client.status().is_compiling

    async def metrics_text(self) -> bytes:
        """Return what /metrics tells."""
        snapshots = {} if self._client is None else await self._client.snapshots()
        return await asyncio.to_thread(self.metrics.text, snapshots)

    async def beat(self) -> None:
        """Wake the streams that have been silent for the limit `silence_s`, again and again until it is cancelled."""
        silence_s = self.limits["silence_s"]
        while silence_s:
            await asyncio.sleep(HEARTBEAT_S)
            silent_since_s = time.monotonic() - silence_s
            for generation in list(self.generations):
                if generation.is_waiting and generation.last_sent_s < silent_since_s:
                    generation.nudge()

    def interrupt_all(self, reason: HTTPError) -> None:
        """End all responses that are open, by an error."""
        for generation in list(self.generations):
            generation.interrupt(reason)

    async def close(self) -> None:
        """End the engine and the threads."""
        if self._started is not None:
            await asyncio.to_thread(self._started.engine.shutdown)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.bodies.close()
