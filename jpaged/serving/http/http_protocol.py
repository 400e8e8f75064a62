"""uvicorn's HTTP/1.1 protocol with deadlines, limits and errors in the server's own form.

uvicorn waits for ever for a request that never comes and for a client that takes nothing of its response, answers
malformed requests with plain text, and does not see a client leave that had sent a byte too many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ..protocols.http_errors import HTTPError, unavailable
from ..protocols.openai_errors import error_body
from .responses import ID_KEY, protocol_at

BACKLOG = 2048
"""Connections that the kernel holds until the server accepts them."""
MAX_EARLY_BYTES = 64 * 1024
"""Bytes of further requests that a client may send before the response to the first one has ended."""


class LimitedProtocol(H11Protocol):
    """One connection, which is closed unless its requests arrive in time and within the limits."""

    limits: ClassVar[Mapping[str, int | None]]
    """Limits by name; see `protocol_class`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_limit: str | None = None
        """The limit whose seconds run."""
        self._send_deadline: asyncio.TimerHandle | None = None
        self._early_data = b""
        """What the client has sent of its next request before the response to this one has ended."""
        max_connections = self.limits["connections"]
        if max_connections is not None and len(self.connections) > max_connections:
            self._refuse(unavailable(f"the server has {max_connections} open connections, its limit; try again later"))
        else:
            self._set_deadline("header_s")

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._stop_send_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering:
            self._early_data += data
            if len(self._early_data) > MAX_EARLY_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        if self._is_answering:
            # Early bytes have made uvicorn stop to read, but only by reading is it seen that a client leaves.
            self.flow.resume_reading()
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._set_deadline("body_s")
        elif state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._set_deadline("header_s")
        else:
            self._set_deadline(None)

    @property
    def _is_answering(self) -> bool:
        """Return whether a request has arrived and the response to it has not ended."""
        is_there = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return is_there and self.cycle is not None and not self.cycle.response_complete

    def pause_writing(self) -> None:
        """Stop sending, since the client takes nothing: it is given up after the limit's seconds."""
        super().pause_writing()
        if self.limits["send_s"] is not None:
            self._send_deadline = self.loop.call_later(self.limits["send_s"], self.transport.abort)

    def resume_writing(self) -> None:
        """Go on sending."""
        self._stop_send_deadline()
        super().resume_writing()

    def _stop_send_deadline(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._early_data and not self.transport.is_closing():
            data, self._early_data = self._early_data, b""
            self.data_received(data)
        # The rest of a body that nobody reads must arrive in time too, or else end the connection.
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._set_deadline("body_s")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, or one whose line and headers are too long."""
        self._set_deadline(None)
        max_bytes = self.limits["header_bytes"]
        if max_bytes is not None and len(self.conn.trailing_data[0]) > max_bytes:
            self._refuse(HTTPError(431, f"the request's line and headers are longer than {max_bytes} bytes"))
        else:
            self._refuse(HTTPError(400, "this is no valid HTTP/1.1 request"))

    def _set_deadline(self, limit: str | None) -> None:
        """Close the connection after the seconds of this limit. If they run already they go on; None stops them."""
        if limit == self._deadline_limit:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._deadline_limit = limit
        delay_s = self.limits[limit] if limit is not None else None
        if delay_s is not None:
            self._deadline = self.loop.call_later(delay_s, self._expire, limit)

    def _expire(self, limit: str | None) -> None:
        """Close a connection whose request has not arrived in time; say so if a part of it has arrived."""
        self._deadline = None
        has_begun = limit == "body_s" or bool(self.conn.trailing_data[0])
        if self.transport.is_closing():
            return
        if not has_begun or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        part, limit = ("body", "body_s") if limit == "body_s" else ("headers", "header_s")
        error = HTTPError(408, f"the request's {part} took longer than {self.limits[limit]} s to arrive")
        self._refuse(error, self.scope if part == "body" else None)

    def _refuse(self, error: HTTPError, scope: Any = None) -> None:
        """Answer with an error, and close the connection.

        `scope` is the request's, as ASGI has it; None if its head has not been read, which leaves its protocol unknown.
        """
        body = error_body(error) if scope is None else protocol_at(scope).error_body(error, scope.get(ID_KEY, ""))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers += list(error.headers.items())
        head = [f"HTTP/1.1 {error.status} {STATUS_PHRASES[error.status].decode()}"]
        head += [f"{name}: {value}" for name, value in headers]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


def protocol_class(limits: Mapping[str, int | None]) -> type[LimitedProtocol]:
    """Return the protocol of a server with these limits."""
    return type("Protocol", (LimitedProtocol,), {"limits": dict(limits)})


def uvicorn_config(app: Any, limits: Mapping[str, int | None], **options: Any) -> Config:
    """Return uvicorn's configuration for an ASGI application under these limits.

    It neither logs requests nor reads the environment.
    """
    keep_alive_s = limits["keep_alive_s"]
    assert keep_alive_s is not None, "a server has this limit"
    return Config(
        app,
        http=protocol_class(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        workers=1,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits["header_bytes"],
        timeout_keep_alive=keep_alive_s,
        **options,
    )
