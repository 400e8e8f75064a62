"""Runs a server as a process: it listens before the model is loaded, and ends in order after SIGTERM.

listen ─▶ health says "starting" ─▶ engine in a thread ─▶ serving ─▶ SIGTERM ─▶ open answers end ─▶ exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from ...checks import one_line
from ...errors import JpagedError, ModelLoadError
from ..options import ServeOptions
from ..protocols.front import Front
from ..protocols.replies import unavailable
from .app import make_app
from .http_protocol import uvicorn_config
from .server_state import ServerState

if TYPE_CHECKING:
    from ...async_engine import AsyncEngine

logger = logging.getLogger("jpaged")

CLOSE_S = 2
"""Seconds that connections have to take the last bytes of their answers once the server ends."""
POLL_S = 0.02
SWITCH_INTERVAL_S = 0.001
"""Thread switch interval of a server; CPython's default of 5 ms would hold up a token behind a tokenizer's thread."""

StartEngine = Callable[[ServerState], "tuple[AsyncEngine, Front, str]"]
"""Makes the engine, the front for it, and a text that identifies what outputs depend on. Runs on a thread."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: after a signal it would close its socket, and end by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerProcess:
    """One server, from its socket to its end."""

    def __init__(self, state: ServerState, listener: socket.socket, start_engine: StartEngine):
        """`listener` is bound already; `start_engine` makes the engine once the server answers to health."""
        self.state, self._listener, self._start_engine = state, listener, start_engine
        self._end = asyncio.Event()
        """Set by the first SIGTERM or SIGINT, and when the engine could not start."""
        self._error: BaseException | None = None

    async def run(self) -> int:
        """Serve until a signal ends it; return the exit status. Raise what has kept the engine from starting."""
        options, state = self.state.options, self.state
        config = uvicorn_config(
            make_app(state, options.keys()),
            state.limits,
            root_path=options.root_path,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            timeout_graceful_shutdown=CLOSE_S,
        )
        server = _Server(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        serving = asyncio.create_task(server.serve([self._listener]))
        start = asyncio.create_task(self._start())
        beat = asyncio.create_task(state.beat())
        await self._end.wait()
        await self._drain()
        server.should_exit = True
        await serving
        beat.cancel()
        if not start.done():  # An engine that is still loading cannot be stopped, and nothing depends on it.
            self._remove_socket()
            os._exit(0)
        await state.close()
        self._remove_socket()
        if self._error is not None:
            raise self._error
        return 0

    async def _start(self) -> None:
        """Make the engine on a thread, and serve it."""
        start_s = time.monotonic()
        try:
            engine, front, identity = await asyncio.to_thread(self._start_engine, self.state)
        except BaseException as error:
            self.state.start_fault, self._error = one_line(error), error
            if not isinstance(error, JpagedError | ModelLoadError | OSError):
                logger.error("the engine could not start", exc_info=error)
            self._end.set()
            return
        self.state.serve(engine, front, identity)
        logger.info("serving after %.1f s", time.monotonic() - start_s)

    def _signal(self) -> None:
        """Begin to end; end at once at the second signal."""
        if self._end.is_set():
            self._remove_socket()
            os._exit(0)
        self._end.set()

    async def _drain(self) -> None:
        """Refuse new requests while those that are open have time to end; then end them by an error."""
        self.state.is_stopping = True
        end_s = time.monotonic() + self.state.options.shutdown_timeout
        if num_open := len(self.state.generations):
            logger.info("stopping: %d requests have %.0f s to end", num_open, self.state.options.shutdown_timeout)
        while self.state.generations and time.monotonic() < end_s and self._error is None:
            await asyncio.sleep(POLL_S)
        self.state.interrupt_all(unavailable("the server is stopping"))
        deadline_s = time.monotonic() + CLOSE_S
        while self.state.generations and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)

    def _remove_socket(self) -> None:
        """Remove the file of a unix socket."""
        if self.state.options.uds is not None:
            Path(self.state.options.uds).unlink(missing_ok=True)


def address_of(options: ServeOptions, listener: socket.socket) -> str:
    """Return the URL at which a server listens, or the path of its unix socket."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_server(state: ServerState, listener: socket.socket, start_engine: StartEngine) -> int:
    """Run a server in this process until a signal ends it; return the exit status."""

    async def main() -> Any:
        return await ServerProcess(state, listener, start_engine).run()

    return int(asyncio.run(main()))
