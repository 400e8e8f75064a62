"""What handlers share: responses that are made in one piece, and the wait for clients that leave."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...json_lines import encode_json
from ..protocols.http_errors import HTTPError
from ..protocols.protocol import Protocol
from ..protocols.table import protocol_of

logger = logging.getLogger("jpaged")

Handler = Callable[[Request], Awaitable[Response]]
ID_KEY = "jpaged.request_id"
"""Where the scope of a request has the id that its response and its line in the log show."""


async def client_left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Wait until the client of a request whose body has been read has left. `receive` is ASGI's."""
    while (await receive())["type"] != "http.disconnect":
        continue


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(encode_json(value), status, media_type="application/json")


def protocol_at(scope: Any) -> Protocol:
    """Return the protocol that the client of a request speaks; `scope` is the request's, as ASGI has it."""
    return protocol_of(path_of(scope), scope["headers"])


def path_of(scope: Any) -> str:
    """Return the path of a request as routes call it: without the one under which a proxy shows this server."""
    path: str = scope["path"]
    return path.removeprefix(scope["root_path"])


def error_response(scope: Any, error: HTTPError) -> Response:
    """Return an error as a response to the request of a scope, in the form of its protocol."""
    body = protocol_at(scope).error_body(error, scope.get(ID_KEY, ""))
    return Response(body, error.status, headers=error.headers, media_type="application/json")


def warning_headers(warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the header `Warning` of a response to what a client sent without effect, and tell the log of it.

    The list is empty without warnings, which are sentences.
    """
    if not warnings:
        return []
    for warning in warnings:
        logger.warning("a request: %s", warning)
    quoted = (warning.replace("\\", "/").replace('"', "'") for warning in warnings)
    text = ", ".join(f'199 jpaged "{warning}"' for warning in quoted)
    return [(b"warning", text.encode("ascii", "replace"))]
