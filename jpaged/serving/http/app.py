"""The routes of the server, as one ASGI application, behind the checks that every request passes.

request ─▶ CORS ─▶ id, limits, key (Gate) ─▶ route ─▶ response
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ... import not_available
from ..metrics import CONTENT_TYPE
from ..protocols.http_errors import HTTPError, http_error, unknown_model
from ..protocols.protocol import GenerationRoute
from ..protocols.request_parser import ParserResponse, RequestParser
from ..protocols.served_model import ServedModel
from ..protocols.table import GENERATION_ROUTES, PARSER_ROUTES
from ..protocols.tokens.parser import tokenizer_info
from . import admin
from .body_parser import LONG_BODY_BYTES
from .gate import Gate
from .generation import Generation
from .responses import Handler, client_left, error_response, json_response, protocol_at, warning_headers
from .server_state import ServerState

INDEX_POLICY = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'"


async def read_body(request: Request, state: ServerState) -> bytearray:
    """Return the body of a request, whose bytes `state.bodies` holds until it parses or releases them.

    Raise HTTPError: 415 unless it says that it is plain JSON, 413 if it is longer than the limit, 503 if too many
    bodies wait, 400 if the client has left.
    """
    limit = state.limits["body_bytes"]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPError(415, "the body must be JSON; send the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise HTTPError(415, "compressed bodies are not taken; send the body as it is")
    too_long = HTTPError(413, f"the body is longer than {limit} bytes, the server's limit body_bytes")
    # The rest of the body would have to be read before the connection could be used again.
    too_long.headers["connection"] = "close"
    length = request.headers.get("content-length", "")
    if limit is not None and length.isdigit() and int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            state.bodies.hold(len(chunk), is_long=len(body) + len(chunk) > LONG_BODY_BYTES)
            body += chunk
            if limit is not None and len(body) > limit:
                raise too_long
    except BaseException as error:
        state.bodies.release(len(body))
        if isinstance(error, ClientDisconnect):
            raise HTTPError(400, "the client has left") from None
        raise
    return body


class Routes:
    """The handlers of all routes."""

    def __init__(self, state: ServerState):
        self.state = state

    def table(self) -> list[Route]:
        """Return all routes of the server."""
        gets: dict[str, Handler] = {
            "/": self.index,
            "/health": self.health,
            "/live": self.live,
            "/version": self.version,
            "/metrics": self.metrics,
            "/tokenizer_info": self.tokenizer_info,
            "/v1/models": self.models,
        }
        routes = [Route(path, self._guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        routes.append(Route("/v1/models/{name:path}", self._guarded(self.model), methods=["GET"]))
        for path, route in GENERATION_ROUTES.items():
            routes.append(Route(path, self._guarded(partial(self.generate, route)), methods=["POST"]))
        for path, parse in PARSER_ROUTES.items():
            routes.append(Route(path, self._guarded(partial(self.parse, parse)), methods=["POST"]))
        routes += [Route(path, self._guarded(_not_available), methods=["POST"]) for path in not_available.ROUTES]
        if self.state.options.enable_admin:
            routes += admin.admin_routes(self.state, self._guarded)
        return routes

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler whose exceptions become responses."""

        async def run(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                return error_response(request.scope, http_error(error))

        return run

    async def generate(self, route: GenerationRoute, request: Request) -> Response:
        """Read the body of a request that generates; what is returned computes and writes the response."""
        self.state.check_ready()
        body = await read_body(request, self.state)
        return _GenerationResponse(self.state, route, body)

    async def parse(self, method: Callable[[RequestParser, bytearray], ParserResponse], request: Request) -> Response:
        """Return the response that the parser makes of the body of a request.

        Raise HTTPError, a 400 for the log, if the client leaves before the response is there.
        """
        self.state.check_started()  # Before the body is read: nothing must fail while its bytes are held.
        parsing = self.state.bodies.parse(await read_body(request, self.state), method)
        leaving = asyncio.create_task(client_left(request.receive))
        try:
            await asyncio.wait((parsing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not parsing.done():
                raise HTTPError(400, "the client has left")
            found = parsing.result()
            response = Response(found.body, media_type="application/json")
            response.raw_headers += warning_headers(found.warnings)
            return response
        finally:
            parsing.cancel()
            leaving.cancel()

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(tokenizer_info, self.state.parser))

    async def models(self, request: Request) -> Response:
        models = [self._model(name) for name in self.state.model_names]
        return json_response(protocol_at(request.scope).models(models, request.query_params))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.state.model_names:
            raise unknown_model("this model does not exist; GET /v1/models lists those that do")
        return json_response(protocol_at(request.scope).model(self._model(name)))

    def _model(self, name: str) -> ServedModel:
        parser = self.state.parser
        return ServedModel(
            name=name,
            created=self.state.start_unix_s,
            root=parser.config.model,
            max_model_len=parser.max_model_len,
        )

    async def health(self, request: Request) -> Response:
        health = self.state.health()
        response = json_response(health, 200 if health["status"] in ("ok", "sleeping") else 503)
        if response.status_code == 503:
            response.headers["retry-after"] = "1"
        return response

    async def live(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": self.state.version})

    async def metrics(self, request: Request) -> Response:
        return Response(await self.state.metrics_text(), media_type=CONTENT_TYPE)

    async def index(self, request: Request) -> Response:
        text = files("jpaged.serving").joinpath("page.html").read_bytes()
        return Response(text, media_type="text/html", headers={"content-security-policy": INDEX_POLICY})


class _GenerationResponse(Response):
    """Computes a request whose body is there, and writes the response."""

    def __init__(self, state: ServerState, route: GenerationRoute, body: bytearray):
        super().__init__()
        self._state, self._route, self._request_body = state, route, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parse = partial(self._state.bodies.parse, self._request_body, self._route.parse)
        await Generation(self._state, scope).run(parse, self._route.encoder_type, receive, send)


async def _not_available(request: Request) -> Response:
    raise HTTPError(404, "this route is not available in this version")


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer for paths and methods that no route has."""
    assert isinstance(error, HTTPException)
    told = HTTPError(error.status_code, "there is no such route")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        told = HTTPError(405, f"this method is not allowed here; allowed: {allowed}", headers={"allow": allowed})
    return error_response(request.scope, told)


_OTHER_PATHS = ("/", "/version", "/tokenizer_info", "/v1/models")
EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "warning")
"""Headers of responses that pages of allowed origins may read, beside those that browsers show anyway."""
LOGGED_PATHS = frozenset((*GENERATION_ROUTES, *PARSER_ROUTES, *not_available.ROUTES, *admin.PATHS, *_OTHER_PATHS))
"""Paths that the log names."""


def make_app(state: ServerState, keys: Sequence[str]) -> Any:
    """Return the ASGI application of a server, for clients that have one of the keys."""
    app = Starlette(routes=Routes(state).table(), exception_handlers={404: _no_route, 405: _no_route})
    app.router.redirect_slashes = False
    gate = Gate(app, state, keys, generation_paths=GENERATION_ROUTES.keys(), logged_paths=LOGGED_PATHS)
    if origins := state.options.allowed_origins:
        # A browser asks for permission without a key, so this comes before the check of keys.
        return CORSMiddleware(
            gate,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return gate
