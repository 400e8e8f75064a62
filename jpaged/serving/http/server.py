"""Runs a server as a process: it listens before the model is loaded, and ends in order after SIGTERM.

listen ─▶ health says "starting" ─▶ engine in a thread ─▶ serving ─▶ SIGTERM ─▶ open responses end ─▶ exit 0
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from ...errors import EngineStoppedError, JpagedError, ModelLoadError
from ..options import ServeOptions
from ..protocols.http_errors import unavailable
from .app import make_app
from .http_protocol import BACKLOG, LimitedProtocol, uvicorn_config
from .server_state import ServerState, StartedEngine

logger = logging.getLogger("jpaged")

CLOSE_S = 2
"""Seconds that connections have to take the last bytes of their responses once the server ends."""
POLL_S = 0.02
"""Seconds between two looks whether all responses have ended."""
CORE_POLL_S = 0.5
"""Seconds between two looks whether the core's process has ended, and whether the core goes on."""
NUM_ACCEPTS = 100
"""Connections that are accepted before the event loop goes on."""
NUM_OTHER_FILES = 200
"""Open files of a server beside its connections, and connections that are about to be refused."""
LOG_FILES_S = 60.0
"""Seconds between two lines of the log which say that no file is left."""
SWITCH_INTERVAL_S = 0.001
"""Thread switch interval of a server; CPython's default of 5 ms would hold up a token behind a tokenizer's thread."""

StartEngine = Callable[[], StartedEngine]
"""Makes the engine. Runs on a thread."""


class LimitedServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: after a signal it would close its socket, and end by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, a few at a time, whose TLS handshakes have no more time than a request's headers."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol: type[LimitedProtocol] = config.http_protocol_class  # type: ignore[assignment]
        make_protocol = partial(protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        handshake_s = protocol.limits["header_s"] if config.ssl is not None else None
        self.servers = []
        for listener in sockets or ():
            server = await loop.create_server(
                make_protocol, sock=listener, ssl=config.ssl, backlog=NUM_ACCEPTS, ssl_handshake_timeout=handshake_s
            )
            self.servers.append(server)
            listener.listen(BACKLOG)  # asyncio has set it to the number of connections that it accepts at a time.
        self.started = True


class ServerLifecycle:
    """One server, from its start to its end."""

    def __init__(
        self, state: ServerState, listeners: Sequence[socket.socket], keys: Sequence[str], start_engine: StartEngine
    ):
        """`listeners` listen already, `keys` are those of clients; `start_engine` is called once /health answers."""
        self.state, self._listeners, self._keys, self._start_engine = state, listeners, keys, start_engine
        self._end_requested = asyncio.Event()
        """Set by the first SIGTERM or SIGINT, and when the engine could not start or its process has ended."""
        self._files_logged_s = -LOG_FILES_S

    async def run(self) -> int:
        """Serve until a signal ends it; return the exit status.

        Raise what has kept the engine from starting, and EngineStoppedError if its process has ended.
        """
        options, state = self.state.options, self.state
        config = uvicorn_config(
            make_app(state, self._keys),
            {**state.limits, "connections": allow_connections(state.limits["connections"])},
            root_path=options.root_path,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            timeout_graceful_shutdown=CLOSE_S,
        )
        server = LimitedServer(config)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        serving = asyncio.create_task(server.serve(list(self._listeners)))
        start = asyncio.create_task(self._start())
        beats = asyncio.create_task(state.beat()), asyncio.create_task(self._watch_core())
        await self._end_requested.wait()
        await self._drain()
        server.should_exit = True
        await serving
        for beat in beats:
            beat.cancel()
        is_stuck = state.stall and options.core != "process"
        if is_stuck or not start.done():  # Neither can be stopped, and nothing depends on it.
            self._remove_socket()
            logging.shutdown()
            os._exit(0 if state.fault is None else 1)
        await state.close()
        self._remove_socket()
        if state.fault is not None:
            raise state.fault
        # The interpreter would wait for bodies of clients that are gone, and for programs that nothing runs any more.
        if state.bodies.is_parsing or state.is_compiling:
            logging.shutdown()
            os._exit(0)
        return 0

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop, but seldom that no file is left for a connection, which comes in floods."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._files_logged_s >= LOG_FILES_S:
            self._files_logged_s = time.monotonic()
            logger.error("no file is left for new connections (%s); raise the limit: ulimit -n", error.strerror)

    async def _start(self) -> None:
        """Make the engine on a thread, and serve it."""
        start_s = time.monotonic()
        try:
            started = await asyncio.to_thread(self._start_engine)
        except BaseException as error:
            self.state.fault = error
            if not isinstance(error, JpagedError | ModelLoadError | EngineStoppedError | OSError):
                logger.error("the engine could not start", exc_info=error)
            self._end_requested.set()
            return
        self.state.serve(started)
        logger.info("serving after %.1f s", time.monotonic() - start_s)

    async def _watch_core(self) -> None:
        """End the server once its core has ended or hangs, if it may: its streams get an error before that."""
        state = self.state
        while not self._end_requested.is_set():
            await asyncio.sleep(CORE_POLL_S)
            state.watch()
            if lost := state.lost_core or self._fatal_stall():
                state.fault = EngineStoppedError(lost)
                self._end_requested.set()

    def _fatal_stall(self) -> str:
        """Return what hangs in this process if that is to end the server; empty else."""
        options, stall = self.state.options, self.state.stall
        if not stall or options.core == "process" or options.watchdog != "exit":
            return ""
        logger.critical("the server ends, since %s", stall)
        return stall

    def _on_signal(self) -> None:
        """Begin to end; end at once at the second signal."""
        if self._end_requested.is_set():
            self._remove_socket()
            os._exit(0)
        self._end_requested.set()

    async def _drain(self) -> None:
        """Refuse new requests while those that are open have time to end; then end them by an error."""
        self.state.is_stopping = True
        grace_s = self.state.options.shutdown_timeout if self.state.fault is None else CLOSE_S
        if num_open := len(self.state.generations):
            logger.info("stopping: open requests, %d, have %g s to end", num_open, grace_s)
        await self._wait_for_responses(grace_s)
        self.state.interrupt_all(unavailable("the server is stopping"))
        await self._wait_for_responses(CLOSE_S)

    async def _wait_for_responses(self, max_s: float) -> None:
        """Wait until no response is open, or `max_s` seconds are over."""
        deadline_s = time.monotonic() + max_s
        while self.state.generations and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)

    def _remove_socket(self) -> None:
        """Remove the file of a unix socket."""
        if self.state.options.uds is not None:
            Path(self.state.options.uds).unlink(missing_ok=True)


def allow_connections(max_connections: int | None) -> int:
    """Raise the process's limit on open files to what connections need; return how many there can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    wanted = hard if max_connections is None else min(hard, max_connections + NUM_OTHER_FILES)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    num_possible = max(max(soft, wanted) - NUM_OTHER_FILES, 1)
    if max_connections is not None and num_possible < max_connections:
        logger.warning(
            "%d connections instead of %d, since a process may open %d files here; raise the limit: ulimit -n",
            num_possible, max_connections, hard,
        )  # fmt: skip
    return num_possible if max_connections is None else min(max_connections, num_possible)


def addresses_of(options: ServeOptions, listeners: Sequence[socket.socket]) -> str:
    """Return the URLs at which a server listens, joined by "and", or the path of its unix socket."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    scheme = "http" if options.ssl_certfile is None else "https"
    addresses = [listener.getsockname()[:2] for listener in listeners]
    hosts = [(f"[{host}]" if ":" in host else host, port) for host, port in addresses]
    return " and ".join(f"{scheme}://{host}:{port}" for host, port in hosts)


def run_server(
    state: ServerState, listeners: Sequence[socket.socket], start_engine: StartEngine, *, keys: Sequence[str] = ()
) -> int:
    """Run a server in this process until a signal ends it; return the exit status.

    `listeners` are bound, and `keys` are those of which clients must send one. `start_engine` runs on a thread while
    the server says by /health that it starts; what it raises is raised here.
    """
    return asyncio.run(ServerLifecycle(state, listeners, keys, start_engine).run())
