"""What every request passes before it reaches a route: its id, its key, the limits on headers and open requests."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from ..protocols.replies import HTTPError, error_body, http_error
from .server_state import ServerState

requests_log = logging.getLogger("jpaged.requests")

OPEN_PATHS = ("/health", "/live", "/")
"""Paths that need no key."""
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """What every request passes before it reaches a route: its id, its key, the number of its headers."""

    def __init__(
        self,
        app: Any,
        state: ServerState,
        keys: Sequence[str],
        *,
        generating: Collection[str],
        logged: Collection[str],
    ):
        """`keys` are the keys of which clients must send one; without any, no key is asked for.

        `generating` are the paths whose requests `requests_per_key` limits, and the log names only paths in `logged`.
        """
        self.app, self.state = app, state
        self._generating, self._logged = generating, logged
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._num_open: dict[bytes, int] = {}
        """Unfinished requests by the digest of their key."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        start_s, status = time.perf_counter(), 0
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        scope["jpaged.id"] = request_id = _request_id(headers)
        id_header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not any(name == b"x-request-id" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], id_header]
            await send(message)

        path = scope["path"].removeprefix(scope["root_path"])
        key = b""
        try:
            self._check_head(scope)
            if path not in OPEN_PATHS:
                key = self._check_key(headers)
            self._enter(key, path)
        except HTTPError as error:
            await reply(error)(scope, receive, send_with_id)
        else:
            try:
                await self.app(scope, receive, send_with_id)
            except Exception as error:  # uvicorn would answer in plain text.
                if status:
                    raise
                await reply(http_error(error))(scope, receive, send_with_id)
            finally:
                self._leave(key, path)
        if not self.state.options.disable_log_requests and path not in ("/health", "/live", "/metrics"):
            took_s = time.perf_counter() - start_s
            route = path if path in self._logged else "another path"
            requests_log.info("%s %s %s %s %.3f s", request_id, scope["method"], route, status or "left", took_s)

    def _check_head(self, scope: Any) -> None:
        """Raise HTTPError for another version of HTTP, and for headers that exceed the limits on number and length."""
        if scope["http_version"] not in ("1.0", "1.1"):
            raise HTTPError(400, "this server speaks HTTP/1.1")
        headers, most, most_bytes = scope["headers"], self.state.limits["headers"], self.state.limits["header_bytes"]
        if most is not None and len(headers) > most:
            raise HTTPError(431, f"the request has {len(headers)} headers, allowed are {most}")
        # The line, and each header with its colon, its space and its line end.
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        num_bytes += sum(len(name) + len(value) + 4 for name, value in headers)
        if most_bytes is not None and num_bytes > most_bytes:
            raise HTTPError(431, f"the request's line and headers are longer than {most_bytes} bytes")

    def _check_key(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the digest of the key that a request carries. Raise HTTPError, a 401, unless it is one of the keys.

        Every wrong key takes the same time: digests are compared with those of all keys.
        """
        if not self._digests:
            return b""
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        if not is_known or scheme.lower() != b"bearer":
            message = "no valid key; send the header Authorization: Bearer KEY"
            raise HTTPError(401, message, headers={"www-authenticate": "Bearer"})
        return digest

    def _enter(self, key: bytes, path: str) -> None:
        """Count a request of a key that generates. Raise HTTPError, a 429, if the key has too many."""
        if path not in self._generating:
            return
        most, count = self.state.limits["requests_per_key"], self._num_open.get(key, 0)
        if most is not None and count >= most:
            message = f"{count} requests of this key are unfinished, allowed are {most}; try again later"
            raise HTTPError(429, message, headers={"retry-after": "1"})
        self._num_open[key] = count + 1

    def _leave(self, key: bytes, path: str) -> None:
        if path in self._generating:
            self._num_open[key] -= 1
            if not self._num_open[key]:
                del self._num_open[key]


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the id that a client has given to its request, if it is a plain one, else an id of ours."""
    values = [value.decode("latin-1") for name, value in headers if name == b"x-request-id"]
    if len(values) == 1 and _CLIENT_ID.fullmatch(values[0]):
        return values[0]
    return secrets.token_hex(8)


def reply(error: HTTPError) -> Response:
    """Return an error as a response."""
    return Response(error_body(error), error.status, headers=error.headers, media_type="application/json")


def json_reply(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
