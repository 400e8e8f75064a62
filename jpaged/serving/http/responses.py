"""Responses that are made in one piece, and the type of the functions that make them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..protocols.http_errors import HTTPError, error_body

Handler = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: HTTPError) -> Response:
    """Return an error as a response."""
    return Response(error_body(error), error.status, headers=error.headers, media_type="application/json")
