"""A small HTTP/1.1 client, plain or over TLS, with a connection for each request; a response is read as it comes.

Knows nothing of what bodies hold.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from ...checks import one_line, refusal, shown
from ...errors import ConfigError

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a response's head; a longer one is refused."""

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class RequestFailedError(Exception):
    """A request has no measurement. `kind` is what errors are counted by, such as "status 500"."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Server:
    """Where a server is, and how it is asked."""

    url: str
    """The base URL as it was given, without /v1."""
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    api_key: str | None = None
    address: str | None = None
    """An IP address of the host that answers; with None, each connection looks the host up."""

    @classmethod
    def from_url(cls, url: str, api_key: str | None = None) -> Server:
        """Return the server of a base URL, which may end with /v1; ConfigError if the URL or the key is wrong."""
        allowed = "http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # A port that is no number, or an unclosed bracket.
            raise refusal("--base-url", shown(url), allowed, error=ConfigError) from None
        is_plain = parts.scheme in ("http", "https") and url.isascii() and url.isprintable() and " " not in url
        if not is_plain or not parts.hostname or parts.username is not None or parts.query or parts.fragment:
            raise refusal("--base-url", shown(url), allowed, error=ConfigError)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise refusal("--api-key", "another text", "printable ASCII", error=ConfigError)
        is_tls = parts.scheme == "https"
        tls = ssl.create_default_context() if is_tls else None
        base = url.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(base, parts.hostname, port or (443 if is_tls else 80), tls, api_key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of an HTTP request for `path`, such as "/v1/models", after which the server shall close."""
        parts = urlsplit(self.url)
        lines = [f"{method} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += ["User-Agent: jpaged-bench", "Accept: text/event-stream, application/json"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def connect(self, factory: Callable[[], _Protocol]) -> tuple[asyncio.Transport, _Protocol]:
        """Open a connection for a protocol; raises OSError."""
        host, name = self.address or self.host, None if self.tls is None else self.host
        loop = asyncio.get_running_loop()
        return await loop.create_connection(factory, host, self.port, ssl=self.tls, server_hostname=name)

    async def resolved(self) -> Server:
        """Return the server with an address that takes connections; raises OSError if there is none."""
        transport, _ = await self.connect(asyncio.Protocol)
        address: str = transport.get_extra_info("peername")[0]
        transport.close()
        return replace(self, address=address)


class Response:
    """A parser of one HTTP/1.1 response that takes bytes as they come."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head has come."""
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = bytearray()
        self._is_chunked = False
        self._left: int | None = None
        """Bytes of the body that are still to come; None if the connection's end is the body's."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return the part of the body that they complete. A chunk counts once all of it came.

        Raises RequestFailedError if they are no HTTP.
        """
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        body = bytes(self._buffer)
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(body)
            self.is_complete = self._left <= 0
        return body

    def end(self) -> None:
        """Take the end of the connection; raises RequestFailedError if the response is not complete."""
        if not self.status or self._is_chunked or self._left:
            raise RequestFailedError("broken stream", "the connection was closed before the end of the response")
        self.is_complete = True

    def _read_head(self) -> bool:
        """Read status and headers once all of them came; return whether they did."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise RequestFailedError("no HTTP", f"the response has no head within {MAX_HEAD_BYTES} bytes")
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdecimal():
            raise RequestFailedError("no HTTP", f"the response begins with {bytes(self._buffer[:40])!r}")
        del self._buffer[: end + 4]
        if words[1].startswith("1"):  # Such as 100 Continue: the head that counts comes after it.
            return self._read_head()
        self.status = int(words[1])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._is_chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() else None
        self.is_complete = self._left == 0 and not self._is_chunked
        return True

    def _read_chunks(self) -> bytes:
        """Return the bytes of the chunks that have come as a whole, and remove them from the buffer."""
        buffer, position, parts = self._buffer, 0, []
        while (end := buffer.find(b"\r\n", position)) >= 0:
            try:
                size = int(buffer[position:end].partition(b";")[0], 16)
            except ValueError:
                size = -1
            if size < 0:
                raise RequestFailedError("broken stream", f"no size of a chunk: {bytes(buffer[position:end][:40])!r}")
            if size == 0:
                self.is_complete = True
                break
            stop = end + 2 + size
            if len(buffer) < stop + 2:
                break
            parts.append(bytes(buffer[end + 2 : stop]))
            position = stop + 2
        del buffer[:position]
        return parts[0] if len(parts) == 1 else b"".join(parts)


async def exchange(server: Server, request: bytes, on_body: Callable[[Response, bytes], None]) -> Response:
    """Send a request; call `on_body` with each part of the response's body; return the response at its end.

    Raises OSError if no connection can be opened, and RequestFailedError if it breaks, or the response is no HTTP.
    """
    transport, connection = await server.connect(lambda: _Exchange(request, on_body))
    try:
        await connection.ended
    finally:
        transport.close()
    return connection.response


class _Exchange(asyncio.Protocol):
    """A connection of one request. It takes a quarter less processor time per event than asyncio's streams."""

    def __init__(self, request: bytes, on_body: Callable[[Response, bytes], None]):
        self._request, self._on_body = request, on_body
        self.response = Response()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the response is complete, or with the exception that ended it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():  # The response is complete, has failed or is too late; the connection is being closed.
            return
        try:
            self._on_body(self.response, self.response.feed(data))
        except RequestFailedError as error:
            self.ended.set_exception(error)
        else:
            if self.response.is_complete:
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        try:
            if error is not None:
                raise RequestFailedError("broken stream", one_line(error) or type(error).__name__)
            self.response.end()
        except RequestFailedError as failure:
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)


async def get_json(server: Server, path: str, *, timeout_s: float) -> tuple[int, Any]:
    """Return status and JSON of a GET request; None for a body that is no JSON. Raises OSError, RequestFailedError."""
    body = bytearray()
    async with asyncio.timeout(timeout_s):
        response = await exchange(server, server.request("GET", path), lambda _, part: body.extend(part))
    try:
        return response.status, msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return response.status, None
