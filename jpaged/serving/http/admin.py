"""Routes for the owner of a server: sleep, pause, forget prefixes, profile. They exist only with --enable-admin."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...checks import check, one_of, shown_name
from ..protocols.http_errors import HTTPError
from .responses import Handler, json_response
from .server_state import ServerState

PATHS = (
    "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/reset_prefix_cache", "/start_profile", "/stop_profile",
)  # fmt: skip


def admin_routes(state: ServerState, guarded: Callable[[Handler], Handler]) -> list[Route]:
    """Return the routes; `guarded` makes responses of the exceptions of a handler."""

    async def sleep(request: Request) -> Response:
        query = _query(request, "level", "mode")
        level = check("level", query.get("level", "1"), one_of("1", "2"))
        mode = check("mode", query.get("mode", "abort"), one_of("abort", "wait", "keep"))
        await state.engine.sleep(int(level), mode)
        return json_response({})

    async def wake_up(request: Request) -> Response:
        _query(request, "tags")
        await state.engine_even_asleep.wake_up(request.query_params.getlist("tags") or None)
        return json_response({})

    async def is_sleeping(request: Request) -> Response:
        _query(request)
        return json_response({"is_sleeping": state.engine_even_asleep.is_sleeping()})

    async def pause(request: Request) -> Response:
        _query(request)
        state.engine_even_asleep.pause()
        return json_response({})

    async def resume(request: Request) -> Response:
        _query(request)
        state.engine_even_asleep.resume()
        return json_response({})

    async def reset_prefix_cache(request: Request) -> Response:
        _query(request)
        await state.engine.reset_prefix_cache()
        return json_response({})

    async def start_profile(request: Request) -> Response:
        _query(request)
        client = state.client
        folder = tempfile.mkdtemp(prefix="jpaged-profile-")
        if not await client.start_profile(folder):
            Path(folder).rmdir()
            raise HTTPError(400, "a profile is being taken already; POST /stop_profile first")
        return json_response({"folder": folder})

    async def stop_profile(request: Request) -> Response:
        _query(request)
        if not await state.client.stop_profile():
            raise HTTPError(400, "no profile is being taken; POST /start_profile first")
        return json_response({})

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


def _query(request: Request, *names: str) -> dict[str, str]:
    """Return the query of a request. Raise HTTPError for a name that is not among `names`."""
    query = dict(request.query_params)
    if unknown := [name for name in query if name not in names]:
        allowed = ", ".join(names) or "none"
        name = shown_name(unknown[0])
        raise HTTPError(400, f"{name}: unknown query parameter; allowed: {allowed}", param=unknown[0])
    return query
