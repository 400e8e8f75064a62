"""One streamed request to an OpenAI-compatible server, and when its tokens came.

Reads server-sent events as jpaged, vLLM, SGLang and llama.cpp write them. All times are seconds of
`time.perf_counter()`. Knows neither workloads nor statistics.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...checks import one_line
from .http_client import RequestFailedError, Response, Server, exchange

SHOWN_BYTES = 300
"""Bytes of an unexpected body that an error message shows."""


class _Usage(msgspec.Struct, gc=False):
    """Tokens of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct, gc=False):
    """New text of a chat's answer, in the fields that servers put it in."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    """New text of a completion (`text`) or a chat (`delta`)."""

    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, gc=False):
    """The JSON of one server-sent event; fields that are of no use here are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    object: str | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class StreamRecord:
    """One streamed request: what was asked for, and what came when."""

    due_s: float
    """When it was to be sent."""
    prompt_len: int
    output_len: int
    """Tokens asked for."""
    sent_s: float = 0.0
    """When its connection began to be opened."""
    event_times_s: list[float] = field(default_factory=list)
    """When each event with text or a token came."""
    event_tokens: list[int] = field(default_factory=list)
    """Tokens of each of these events; all 0 if the server does not tell them."""
    end_s: float = 0.0
    """When [DONE] came, or when the request failed."""
    usage: _Usage | None = None
    error_kind: str | None = None
    """Kind of the error; None for a request that succeeded, the only ones that have times."""
    message: str = ""

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens that came, as `tokens_counted_by` says."""
        if self.tokens_counted_by == "usage":
            assert self.usage is not None
            return self.usage.completion_tokens
        return sum(self.event_tokens) or len(self.event_times_s)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt's tokens by the server's usage, else as far as the client knows them."""
        return (self.usage.prompt_tokens if self.usage else 0) or self.prompt_len

    @property
    def tokens_counted_by(self) -> str:
        """Return what tells the tokens: each event, the usage of the whole request, or only the number of events."""
        if self.event_tokens and all(self.event_tokens):
            return "each event"
        return "usage" if self.usage and self.usage.completion_tokens else "number of events"


class _EventReader:
    """Reads the events of a stream into a record."""

    def __init__(self, record: StreamRecord, *, has_event_usage: bool):
        """`has_event_usage`: each event was asked to carry the tokens so far."""
        self._record, self._has_event_usage = record, has_event_usage
        self._rest = b""
        """The beginning of a line whose end has not come."""
        self._data: list[bytes] = []
        """Lines of data of the event whose end has not come."""
        self._name = b""
        self._num_counted = 0
        self.is_done = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body; raises RequestFailedError for an event that is an error or no JSON."""
        now_s = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.removesuffix(b"\r"), now_s)

    def end(self) -> None:
        """Take the end of the body; raises RequestFailedError unless it came after [DONE] and a token."""
        self.feed(b"\n\n")  # Some servers write no empty line after [DONE].
        if not self.is_done:
            raise RequestFailedError("no [DONE]", "the stream ended without [DONE]")
        record = self._record
        if any(record.event_tokens):  # Text that came without a token, such as the rest of a character, is no event.
            pairs = zip(record.event_times_s, record.event_tokens, strict=True)
            record.event_times_s = [when_s for when_s, count in pairs if count]
            record.event_tokens = [count for count in record.event_tokens if count]
        if not record.event_times_s:
            raise RequestFailedError("no tokens", "the stream had neither text nor tokens")

    def _line(self, line: bytes, now_s: float) -> None:
        """Take one line. An empty one ends an event."""
        if line.startswith(b"data:"):
            self._data.append(line[5:].strip())
        elif not line:
            if any(self._data):
                self._event(b"\n".join(self._data), now_s)
            self._data, self._name = [], b""
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()
        elif line.startswith(b"error:"):  # llama.cpp until September 2025.
            raise RequestFailedError("error event", _shown(line[6:]))

    def _event(self, data: bytes, now_s: float) -> None:
        """Take the data of one event."""
        record = self._record
        if data == b"[DONE]":
            self.is_done, record.end_s = True, now_s
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RequestFailedError("malformed event", _shown(data)) from None
        is_error = event.error is not None or event.object == "error" or self._name == b"error"
        if is_error or any(choice.finish_reason == "error" for choice in event.choices):
            raise RequestFailedError("error event", _shown(data))
        num_tokens, has_text = 0, False
        for choice in event.choices:
            delta = choice.delta
            has_text |= bool(choice.text)
            if delta is not None:
                has_text |= bool(delta.content or delta.reasoning_content or delta.reasoning)
            num_tokens += len(choice.token_ids or ())
        if event.usage is not None:
            record.usage = event.usage
            if self._has_event_usage and event.choices:
                num_tokens = event.usage.completion_tokens - self._num_counted
                self._num_counted = event.usage.completion_tokens
        if has_text or num_tokens > 0:
            record.event_times_s.append(now_s)
            record.event_tokens.append(max(num_tokens, 0))


async def read_stream(
    server: Server, request: bytes, record: StreamRecord, *, has_event_usage: bool, timeout_s: float
) -> None:
    """Send a request and read its stream into `record`. What fails is in `record.error_kind`, never raised."""
    reader = _EventReader(record, has_event_usage=has_event_usage)
    other = bytearray()

    def on_body(response: Response, part: bytes) -> None:
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        if response.status == 200 and is_stream:
            reader.feed(part)
        elif len(other) < SHOWN_BYTES:
            other.extend(part)

    record.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            response = await exchange(server, request, on_body)
        if response.status != 200:
            raise RequestFailedError(f"status {response.status}", _shown(bytes(other)))
        if other:
            raise RequestFailedError("no stream", _shown(bytes(other)))
        reader.end()
    except TimeoutError as error:
        # The system's own timeout of a connection is an OSError with a number.
        kind, message = ("connection", str(error)) if error.errno else ("timeout", f"no end after {timeout_s:g} s")
        record.error_kind, record.message = kind, message
    except RequestFailedError as error:
        record.error_kind, record.message = error.kind, str(error)
    except OSError as error:
        record.error_kind, record.message = "connection", one_line(error)
    if record.error_kind is not None:
        record.end_s = time.perf_counter()


def _shown(data: bytes) -> str:
    """Return the beginning of a body or an event for an error message, on one line."""
    return one_line(data[:SHOWN_BYTES].decode(errors="replace"), SHOWN_BYTES)
