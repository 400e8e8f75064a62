"""Servers of jpaged behind the router of Ray Serve, on one machine or many: `serve run ray_serve.yaml`.

Each replica is a whole server with a core process of its own: all routes of `jpaged serve`, its limits and its metrics.
Ray starts replicas, replaces those that are lost, and sends each request to one that has few open requests. It does not
know which one has the beginning of a conversation cached, so a later turn may compute its prompt again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ray import serve

from jpaged import __version__
from jpaged.async_engine import AsyncEngine
from jpaged.config.engine_config import EngineConfig
from jpaged.remote.core_client import WatchOptions
from jpaged.remote.core_group import CoreGroup
from jpaged.serving.http.app import make_app
from jpaged.serving.http.server_state import ServerState, StartedEngine
from jpaged.serving.options import ServeOptions, served_limits
from jpaged.serving.protocols.parser_process import ParserProcess
from jpaged.serving.protocols.request_parser import RequestParser

OWN_OPTIONS = ServeOptions(core="process", watchdog="exit")
WATCH_S = 0.5


@serve.deployment(
    max_ongoing_requests=512,  # By default 5, too few for a batch. What a core cannot run yet waits in its queue.
    max_queued_requests=1000,  # In each proxy; by default without a limit. More get 503.
    health_check_period_s=1,  # By default 10: a replica whose core has ended would get requests all the while.
    health_check_timeout_s=5,
    graceful_shutdown_timeout_s=600,  # By default 20: open streams have this long to end when there are fewer replicas.
)
@serve.ingress()
class Server:
    """One replica."""

    async def __init__(self, model: str, model_name: str, options: dict[str, Any]):
        """Start the core. `options` are others of the engine, and requests name the model by `model_name`."""
        config = EngineConfig(model=model, limits=served_limits({}), **options)
        core_options = {"keeps_programs": True, "compiles_behind": True}
        watch = WatchOptions(ends_core=True)
        self._group = await asyncio.to_thread(CoreGroup, config, options=core_options, watch=watch)
        engine = AsyncEngine.from_processes(config, self._group)
        parser = RequestParser(engine.builder, (model_name,))
        parser_process = ParserProcess(parser, self._group.builder_setup)
        self._state = ServerState(OWN_OPTIONS, (model_name,), config.limits, __version__)
        self._state.serve(StartedEngine(engine, parser, parser_process, self._group.identity))
        self._tasks = [asyncio.create_task(self._state.beat()), asyncio.create_task(self._watch())]

    def __serve_build_asgi_app__(self) -> Any:
        """Return our application; Ray adds the header x-request-id to responses, and gives us the same id."""
        app = make_app(self._state, keys=())

        async def without_own_id(scope: Any, receive: Any, send: Any) -> None:
            async def send_on(message: Any) -> None:
                if message["type"] == "http.response.start":
                    headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                    message = {**message, "headers": headers}
                await send(message)

            await app(scope, receive, send_on)

        return without_own_id

    async def _watch(self) -> None:
        """Let a core that hangs end."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._state.watch()

    def check_health(self) -> None:
        """Raise an error if the core has ended: Ray replaces the replica then."""
        if self._state.lost_core:
            raise RuntimeError(self._state.lost_core)

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", []):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if hasattr(self, "_state"):
            await self._state.close()


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application of the file ray_serve.yaml, given what it has as `args`."""
    model = arguments["model"]
    return Server.bind(model, arguments.get("model_name", model), arguments.get("options", {}))
