"""What every request passes before it reaches a route: its id, the limits on its head, its key, its line in the log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

from ..protocols.fields import CLIENT_ID
from ..protocols.http_errors import HTTPError, http_error
from .responses import ID_KEY, error_response, path_of, protocol_at
from .server_state import ServerState

requests_log = logging.getLogger("jpaged.requests")

OPEN_PATHS = ("/health", "/live", "/")
"""Paths that never need a key."""
KEY_HEADERS = (b"authorization", b"x-api-key")
"""Headers in which clients of OpenAI and of Anthropic send a key."""
UNLOGGED_PATHS = ("/health", "/live", "/metrics")
"""Paths whose requests get no line in the log."""


class Gate:
    """An ASGI application around another one, which only sound requests reach."""

    def __init__(
        self,
        app: Any,
        state: ServerState,
        keys: Sequence[str],
        *,
        generation_paths: Collection[str],
        logged_paths: Collection[str],
    ):
        """`keys` are the keys of which clients must send one; without any, no key is asked for.

        `generation_paths` are those whose requests the limit `requests_per_key` counts; the log names only
        `logged_paths`.
        """
        self.app, self.state = app, state
        self._generation_paths, self._logged_paths = generation_paths, logged_paths
        self._open_paths = (*OPEN_PATHS, "/metrics") if state.options.metrics_without_key else OPEN_PATHS
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._num_open: dict[bytes, int] = {}
        """Unfinished requests by the digest of their key."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, give its response the header x-request-id, and log it.

        The arguments are ASGI's: the request's scope, and the functions that receive and send its events.
        """
        if scope["type"] != "http":
            return
        start_s, status = time.perf_counter(), 0
        scope[ID_KEY] = _request_id(scope["headers"])

        async def send_with_id(event: Any) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                event["headers"] = [*event["headers"], *((name, scope[ID_KEY].encode()) for name in id_headers)]
            await send(event)

        path, own_header = path_of(scope), protocol_at(scope).id_header
        id_headers = [b"x-request-id"] if own_header is None else [b"x-request-id", own_header.encode()]
        try:
            await self._pass(scope, path, receive, send_with_id)
        except Exception as error:  # uvicorn would answer in plain text.
            if status:
                raise
            await error_response(scope, http_error(error))(scope, receive, send_with_id)
        if not self.state.options.disable_log_requests and path not in UNLOGGED_PATHS:
            took_s = time.perf_counter() - start_s
            route = path if path in self._logged_paths else "another path"
            requests_log.info("%s %s %s %s %.3f s", scope[ID_KEY], scope["method"], route, status or "left", took_s)

    async def _pass(self, scope: Any, path: str, receive: Any, send: Any) -> None:
        """Check a request, and let the application answer it. Raise HTTPError for one that must not reach it."""
        self._check_head(scope)
        key = b"" if path in self._open_paths else self._check_key(scope["headers"])
        if path not in self._generation_paths:
            await self.app(scope, receive, send)
            return
        self._count_open(key)
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_open[key] -= 1
            if not self._num_open[key]:
                del self._num_open[key]

    def _check_head(self, scope: Any) -> None:
        """Raise HTTPError for another version of HTTP, and for headers that exceed the limits on number and length."""
        if scope["http_version"] not in ("1.0", "1.1"):
            raise HTTPError(400, "this server speaks HTTP/1.1")
        headers, max_headers = scope["headers"], self.state.limits["headers"]
        if max_headers is not None and len(headers) > max_headers:
            raise HTTPError(431, f"the request has {len(headers)} headers, allowed are {max_headers}")
        # The line, and each header with its colon, its space and its line end.
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        num_bytes += sum(len(name) + len(value) + 4 for name, value in headers)
        max_bytes = self.state.limits["header_bytes"]
        if max_bytes is not None and num_bytes > max_bytes:
            raise HTTPError(431, f"the request's line and headers are longer than {max_bytes} bytes")

    def _check_key(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the digest of the key that a request carries. Raise HTTPError, a 401, unless it is one of the keys.

        A key comes in `Authorization: Bearer`, as OpenAI's clients send it, or in `x-api-key`, as Anthropic's do. A
        request may have both headers if both hold the same key. Every wrong key takes the same time: digests are
        compared with those of all keys.
        """
        if not self._digests:
            return b""
        sent = [(name, value) for name, value in headers if name in KEY_HEADERS]
        digests = {hashlib.sha256(_key(name, value)).digest() for name, value in sent}
        is_one = len(digests) == 1 and len({name for name, _ in sent}) == len(sent)
        digest = next(iter(digests), b"")
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        if not (is_one and is_known):
            message = "no valid key; send the header Authorization: Bearer KEY, or x-api-key: KEY"
            raise HTTPError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return digest

    def _count_open(self, key: bytes) -> None:
        """Count an unfinished request of a key. Raise HTTPError, a 429, if the key has too many."""
        max_open, count = self.state.limits["requests_per_key"], self._num_open.get(key, 0)
        if max_open is not None and count >= max_open:
            message = f"{count} requests of this key are unfinished, allowed are {max_open}; try again later"
            raise HTTPError(429, message, code="rate_limit_exceeded", headers={"retry-after": "1"})
        self._num_open[key] = count + 1


def _key(header: bytes, value: bytes) -> bytes:
    """Return the key in a header, empty if it holds another kind of credentials."""
    if header != b"authorization":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the id that a client has given to its request, if it is a plain one, else an id of ours."""
    values = [value.decode("latin-1") for name, value in headers if name == b"x-request-id"]
    if len(values) == 1 and CLIENT_ID.fullmatch(values[0]):
        return values[0]
    return secrets.token_hex(8)
