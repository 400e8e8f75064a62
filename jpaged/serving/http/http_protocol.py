"""uvicorn's HTTP/1.1 protocol with deadlines, limits and errors in the server's own form.

uvicorn waits for ever for a request that never comes, and answers malformed ones with plain text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ..protocols.replies import HTTPError, error_body, unavailable


class LimitedProtocol(H11Protocol):
    """One connection, which is closed unless its requests arrive in time and within the limits."""

    limits: ClassVar[Mapping[str, int | None]]
    """Limits by name; see `protocol_class`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited = ""
        most = self.limits["connections"]
        if most is not None and len(self.connections) > most:
            self._refuse(unavailable(f"the server has {most} open connections, its limit; try again later"))
        else:
            self._await("header_s")

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._await("body_s")
        elif state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._await("header_s")
        else:
            self._await("")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The rest of a body that nobody reads must arrive in time too, or else end the connection.
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._await("body_s")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, or one whose line and headers are too long."""
        self._await("")
        most = self.limits["header_bytes"]
        is_long = most is not None and len(self.conn.trailing_data[0]) > most
        if is_long:
            self._refuse(HTTPError(431, f"the request's line and headers are longer than {most} bytes"))
        else:
            self._refuse(HTTPError(400, "this is no valid HTTP/1.1 request"))

    def _await(self, limit: str) -> None:
        """Close the connection when the limit's seconds are over; the same limit is not begun anew. "" is none."""
        if limit == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = limit
        seconds = self.limits[limit] if limit else None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._expire, limit)

    def _expire(self, limit: str) -> None:
        """Close a connection whose request has not arrived in time; say so if a part of it has arrived."""
        self._deadline = None
        has_begun = limit == "body_s" or bool(self.conn.trailing_data[0])
        if self.transport.is_closing():
            return
        if not has_begun or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        part = "body" if limit == "body_s" else "headers"
        self._refuse(HTTPError(408, f"the request's {part} took longer than {self.limits[limit]} s to arrive"))

    def _refuse(self, error: HTTPError) -> None:
        """Answer with an error, and close the connection."""
        body = error_body(error)
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
    """Return uvicorn's configuration for an ASGI application under these limits. It neither logs requests nor reads
    the environment."""
    return Config(
        app,
        http=protocol_class(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits["header_bytes"],
        timeout_keep_alive=limits["keep_alive_s"] or 5,
        backlog=2048,
        **options,
    )
