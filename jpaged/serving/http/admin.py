"""Routes for the owner of a server: sleep, pause, forget prefixes, profile. They exist only with --enable-admin."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...checks import check as checked
from ...checks import integer, one_of
from ..protocols.replies import HTTPError
from .gate import json_reply
from .server_state import ServerState

Handler = Callable[[Request], Awaitable[Response]]


def admin_routes(state: ServerState, guarded: Callable[[Handler], Handler]) -> list[Route]:
    """Return the routes; `guarded` makes replies of the exceptions of a handler."""

    async def sleep(request: Request) -> Response:
        query = _query(request, "level", "mode")
        level = checked("level", int(query.get("level", "1")), integer(1, 2))
        mode = checked("mode", query.get("mode", "abort"), one_of("abort", "wait", "keep"))
        await state.engine.sleep(level, mode)
        return json_reply({})

    async def wake_up(request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        await _engine(state).wake_up(tags)
        return json_reply({})

    async def is_sleeping(request: Request) -> Response:
        return json_reply({"is_sleeping": _engine(state).is_sleeping()})

    async def pause(request: Request) -> Response:
        _engine(state).pause()
        return json_reply({})

    async def resume(request: Request) -> Response:
        _engine(state).resume()
        return json_reply({})

    async def reset_prefix_cache(request: Request) -> Response:
        await state.engine.reset_prefix_cache()
        return json_reply({})

    async def start_profile(request: Request) -> Response:
        import jax

        folder = tempfile.mkdtemp(prefix="jpaged-profile-")
        try:
            await asyncio.to_thread(jax.profiler.start_trace, folder)
        except RuntimeError:
            raise HTTPError(400, "a profile is being taken already; POST /stop_profile first") from None
        return json_reply({"folder": folder})

    async def stop_profile(request: Request) -> Response:
        import jax

        try:
            await asyncio.to_thread(jax.profiler.stop_trace)
        except RuntimeError:
            raise HTTPError(400, "no profile is being taken; POST /start_profile first") from None
        return json_reply({})

    posts: Mapping[str, Handler] = {
        "/sleep": sleep,
        "/wake_up": wake_up,
        "/pause": pause,
        "/resume": resume,
        "/reset_prefix_cache": reset_prefix_cache,
        "/start_profile": start_profile,
        "/stop_profile": stop_profile,
    }
    routes = [Route(path, guarded(handler), methods=["POST"]) for path, handler in posts.items()]
    return [*routes, Route("/is_sleeping", guarded(is_sleeping), methods=["GET"])]


def _query(request: Request, *names: str) -> dict[str, Any]:
    """Return the query of a request. Raise HTTPError for a name that is not among `names`, and for a level in words."""
    query = dict(request.query_params)
    if unknown := [name for name in query if name not in names]:
        raise HTTPError(400, f"unknown query parameter; allowed: {', '.join(names)}", param=unknown[0])
    if not query.get("level", "1").isdigit():
        raise HTTPError(400, "level: allowed: 1 or 2", param="level")
    return query


def _engine(state: ServerState) -> Any:
    """Return the engine, also one that sleeps. Raise HTTPError before the start is over."""
    if state.health()["status"] != "sleeping":
        state.check_ready()
    return state.any_engine
