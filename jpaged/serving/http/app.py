"""The routes of the server, as one ASGI application, behind the checks that every request passes.

request ─▶ CORS ─▶ id, key, limits (Gate) ─▶ route ─▶ reply
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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
from ..protocols.encoders import ChatEncoder, CompletionEncoder, Encoder
from ..protocols.front import Front
from ..protocols.generation_request import GenerationRequest
from ..protocols.replies import HTTPError, http_error
from .gate import Gate, json_reply, reply
from .generation import Generation
from .server_state import ServerState

PAGE_POLICY = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'"
Handler = Callable[[Request], Awaitable[Response]]


async def read_body(request: Request, limit: int | None) -> bytes:
    """Return a request's body. Raise HTTPError if it is no plain JSON, or longer than the limit's bytes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPError(415, "the body must be JSON; send the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise HTTPError(415, "compressed bodies are not taken; send the body as it is")
    too_long = HTTPError(413, f"the body is longer than {limit} bytes, the server's limit body_bytes")
    # Its rest would still have to be read before the connection could be used again.
    too_long.headers["connection"] = "close"
    length = request.headers.get("content-length", "")
    if limit is not None and length.isdigit() and int(length) > limit:
        raise too_long
    chunks, num_bytes = [], 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if limit is not None and num_bytes > limit:
                raise too_long
            chunks.append(chunk)
    except ClientDisconnect:
        raise HTTPError(400, "the client has left before its body was there") from None
    return b"".join(chunks)


class Routes:
    """The handlers of all routes."""

    def __init__(self, state: ServerState):
        self.state = state

    def table(self) -> list[Route]:
        """Return all routes of the server."""
        posts: dict[str, Handler] = {"/tokenize": self.tokenize, "/detokenize": self.detokenize}
        gets: dict[str, Handler] = {
            "/": self.page,
            "/health": self.health,
            "/live": self.live,
            "/version": self.version,
            "/metrics": self.metrics,
            "/tokenizer_info": self.tokenizer_info,
            "/v1/models": self.models,
        }
        routes = [Route(path, self._guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        routes += [Route(path, self._guarded(handler), methods=["POST"]) for path, handler in posts.items()]
        routes.append(Route("/v1/models/{name:path}", self._guarded(self.model), methods=["GET"]))
        for path, (prepare, encoder) in GENERATING.items():
            routes.append(Route(path, self._guarded(partial(self.generate, prepare, encoder)), methods=["POST"]))
        routes += [Route(path, self._guarded(_not_available), methods=["POST"]) for path in not_available.ROUTES]
        if self.state.options.enable_admin:
            from .admin import admin_routes

            routes += admin_routes(self.state, self._guarded)
        return routes

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler whose exceptions become replies."""

        async def run(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                return reply(http_error(error))

        return run

    async def generate(
        self, prepare: Callable[[Front, bytes], GenerationRequest], encoder: type[Encoder], request: Request
    ) -> Response:
        """Read the body of a request that generates; the response that is returned computes and writes the answer."""
        self.state.check_ready()
        body = await read_body(request, self.state.limits["body_bytes"])
        front = self.state.front
        return _GenerationResponse(self.state, partial(prepare, front, body), encoder)

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, self.state.limits["body_bytes"])
        return json_reply(await self.state.in_thread(partial(self.state.front.tokenize, body)))

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, self.state.limits["body_bytes"])
        return json_reply(await self.state.in_thread(partial(self.state.front.detokenize, body)))

    async def tokenizer_info(self, request: Request) -> Response:
        return json_reply(self.state.front.tokenizer_info)

    async def models(self, request: Request) -> Response:
        return json_reply({"object": "list", "data": [self._model(name) for name in self.state.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.state.names:
            raise HTTPError(404, "this model does not exist; GET /v1/models lists those that do", param="model")
        return json_reply(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        front = self.state.front
        return {
            "id": name,
            "object": "model",
            "created": self.state.created,
            "owned_by": "jpaged",
            "root": front.config.model,
            "parent": None,
            "max_model_len": front.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        health = self.state.health()
        response = json_reply(health, 200 if health["status"] in ("ok", "sleeping") else 503)
        if response.status_code == 503:
            response.headers["retry-after"] = "1"
        return response

    async def live(self, request: Request) -> Response:
        return json_reply({"status": "alive"})

    async def version(self, request: Request) -> Response:
        return json_reply({"version": self.state.version})

    async def metrics(self, request: Request) -> Response:
        return Response(await self.state.in_thread(self.state.metrics.text), media_type=CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        text = files("jpaged.serving").joinpath("page.html").read_bytes()
        return Response(text, media_type="text/html", headers={"content-security-policy": PAGE_POLICY})


class _GenerationResponse(Response):
    """Computes and writes the answer to a request whose body is there."""

    def __init__(self, state: ServerState, prepare: Callable[[], GenerationRequest], encoder: type[Encoder]):
        super().__init__()
        self._state, self._prepare, self._encoder = state, prepare, encoder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Generation(self._state, scope).run(self._prepare, self._encoder, receive, send)


async def _not_available(request: Request) -> Response:
    raise HTTPError(404, "this route is not available in this version")


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer for paths and methods that no route has."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return reply(HTTPError(405, f"this method is not allowed here; allowed: {allowed}", headers={"allow": allowed}))
    return reply(HTTPError(error.status_code, "there is no such route"))


GENERATING: dict[str, tuple[Callable[[Front, bytes], GenerationRequest], type[Encoder]]] = {
    "/v1/completions": (Front.completion, CompletionEncoder),
    "/v1/chat/completions": (Front.chat, ChatEncoder),
}
"""Path → what makes a request of a body, and what writes its answer."""
KNOWN_PATHS = frozenset(
    (*GENERATING, *not_available.ROUTES, "/", "/version", "/tokenize", "/detokenize", "/tokenizer_info", "/v1/models")
)
"""Paths that the log names."""


def make_app(state: ServerState, keys: Sequence[str]) -> Any:
    """Return the ASGI application of a server, for clients that have one of the keys."""
    app = Starlette(routes=Routes(state).table(), exception_handlers={404: _no_route, 405: _no_route})
    app.router.redirect_slashes = False
    gate = Gate(app, state, keys, generating=frozenset(GENERATING), logged=KNOWN_PATHS)
    if origins := state.options.allowed_origins:
        # A browser asks for permission without a key, so this comes before the check of keys.
        return CORSMiddleware(gate, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    return gate
