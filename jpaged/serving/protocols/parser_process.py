"""Parses long bodies in a process of its own: JSON of megabytes would hold Python's global lock, and so every stream.

    ParserProcess ── _Setup, then for each body: method, body ─▶ python -m jpaged.serving.protocols.parser_process
                  ◀── _Reply, after each body ──

Every message is its length, 8 bytes, and that many bytes: the name of a method and a body as they are, all others as
msgpack. The process starts with the first long body. It ends when its stdin does, and when its parent has died.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import IO, Any, Self

import msgspec

from ... import codec
from ...checks import one_line
from ...codec import PackedRequests
from ...intake.builder_setup import BuilderSetup, builder_of, setup_of
from ...startup.import_path import import_path
from .generation_request import GenerationRequest
from .http_errors import HTTPError, http_error
from .request_parser import ParserResponse, RequestParser
from .table import METHODS

logger = logging.getLogger("jpaged")

LENGTH_BYTES = 8
MAX_REPLY_BYTES = 1 << 30
NICENESS = 5
"""Added to the process's niceness, so that the server's threads come first."""
PARENT_POLL_S = 1.0
"""Seconds between two looks of the process whether its parent has died."""


class _Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: everything that a parser is made of, as plain values."""

    names: tuple[str, ...]
    is_strict: bool
    chat_template: str | None
    """The template that replaces the model's own."""
    builder: bytes
    """The `BuilderSetup` of its builder, encoded."""


class _Request(msgspec.Struct, frozen=True):
    """A GenerationRequest in which nothing long stands once for each prompt."""

    request: GenerationRequest
    """Without its new requests."""
    new_requests: PackedRequests

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """Return the request in this form."""
        return cls(replace(request, new_requests=()), PackedRequests.of(request.new_requests))

    def unpacked(self) -> GenerationRequest:
        """Return the request as it was."""
        return replace(self.request, new_requests=self.new_requests.unpacked())


class _Failure(msgspec.Struct, frozen=True):
    """The attributes of an HTTPError."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str]


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a method has returned, a request or a response, or the error that it has raised."""

    request: _Request | None = None
    response: ParserResponse | None = None
    failure: _Failure | None = None


class ParserProcess:
    """A process that parses bodies, one at a time. It starts with the first, and again after it has died."""

    def __init__(self, parser: RequestParser, builder_setup: bytes | None = None):
        """Prepare a process that parses as `parser` does.

        `builder_setup` is the encoded `BuilderSetup` of its builder, if there is one already; to make it takes up to
        half a second for a large vocabulary.
        """
        self._setup = codec.encode(_setup_of(parser, builder_setup))
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Held while `_body` changes, and while the process is killed because of that."""
        self._body: bytearray | None = None
        """The body that the process parses; None if it is idle, and if the body was given up."""

    def run(self, method: str, body: bytearray) -> Any:
        """Return what the method of METHODS makes of a body. Only one thread may call.

        Raise the method's errors as HTTPError, and a 500 if the process dies or cannot be started. The next body starts
        another process then.
        """
        with self._lock:
            self._body = body
        try:
            process = self._running() or self._start()
            if self._body is None:  # It was given up before there was a process that `abandon` could kill.
                raise EOFError("the body was given up")
            _send(process.stdin, method.encode())
            _send(process.stdin, body)
            reply = codec.decode(_receive(process.stdout, MAX_REPLY_BYTES), _Reply)
        except Exception as error:  # The pipes may still hold parts of this body and of its reply.
            is_wanted, status = self._body is not None, self._end()
            if is_wanted:
                logger.error("the process of long bodies has ended with status %s: %s", status, one_line(error))
            raise HTTPError(500, "the process that parsed the body has ended; the server's log tells more") from None
        finally:
            with self._lock:
                self._body = None
        if (failure := reply.failure) is not None:
            raise HTTPError(
                failure.status, failure.message, param=failure.param, code=failure.code, headers=failure.headers
            )
        return reply.response if reply.request is None else reply.request.unpacked()

    def abandon(self, body: bytearray) -> None:
        """Give a body up: kill the process if it parses this one. Any thread may call."""
        with self._lock:
            if self._body is body:
                self._body = None
                self._end()

    def close(self) -> None:
        """Kill the process, whatever it does. Any thread may call."""
        with self._lock:
            self._body = None
            self._end()

    def _end(self) -> int | None:
        """Kill the process, and return its exit status; None if there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        return process.wait()

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the process if it has not died meanwhile."""
        is_running = self._process is not None and self._process.poll() is None
        return self._process if is_running else None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Without a stderr of the server, its number may be that of any file.
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            env={**os.environ, "PYTHONPATH": import_path()},
            start_new_session=True,  # Ctrl-C in a terminal reaches the server alone, which lets open requests end.
        )
        _send(self._process.stdin, self._setup)
        return self._process


def _setup_of(parser: RequestParser, builder_setup: bytes | None = None) -> _Setup:
    """Return what makes the same parser in another process; see `ParserProcess`."""
    return _Setup(
        names=parser.names,
        is_strict=parser.is_strict,
        chat_template=parser.builder.encoder.chat_template,
        builder=codec.encode(setup_of(parser.builder)) if builder_setup is None else builder_setup,
    )


def _parser_of(setup: _Setup) -> RequestParser:
    """Return the parser that `_setup_of` was given."""
    builder = builder_of(codec.decode(setup.builder, BuilderSetup), chat_template=setup.chat_template)
    return RequestParser(builder, setup.names, is_strict=setup.is_strict)


def _send(pipe: IO[bytes] | None, message: bytes | bytearray) -> None:
    """Write a message to an unbuffered pipe. Afterwards nothing refers to the message, also if this has failed."""
    assert pipe is not None
    for part in (len(message).to_bytes(LENGTH_BYTES), message):
        num_sent = 0
        with memoryview(part) as view:
            while num_sent < len(view):
                with view[num_sent:] as rest:
                    num_sent += pipe.write(rest)


def _receive(pipe: IO[bytes] | None, max_bytes: int | None = None) -> bytearray:
    """Return the next message of an unbuffered pipe. Raise EOFError at its end, and for one that is too long."""
    num_bytes = int.from_bytes(_read(pipe, LENGTH_BYTES))
    if max_bytes is not None and num_bytes > max_bytes:
        raise EOFError(f"a message of {num_bytes} bytes")
    return _read(pipe, num_bytes)


def _read(pipe: Any, num_bytes: int) -> bytearray:
    """Return so many bytes of an unbuffered pipe, an `io.RawIOBase`. Raise EOFError if it ends before."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        num_read = pipe.readinto(view)
        if not num_read:
            raise EOFError("the pipe is closed")
        view = view[num_read:]
    return data


def main() -> None:
    """Parse the bodies on stdin until it ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Service managers send it to all processes; the server decides.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.nice(NICENESS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    with open(0, "rb", buffering=0) as requests, open(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)  # What libraries print goes to the log.
        try:
            parser = _parser_of(codec.decode(_receive(requests), _Setup))
            while True:
                method = _receive(requests).decode()
                _send(replies, _reply(parser, method, _receive(requests)))
        except (EOFError, BrokenPipeError):  # The server has ended.
            return


def _end_with(parent: int) -> None:
    """End this process once its parent has died. Otherwise it would first tokenize the text that it has."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(0)


def _reply(parser: RequestParser, method: str, body: bytearray) -> bytes:
    """Return the reply to a body."""
    try:
        found = METHODS[method](parser, body)
        is_request = isinstance(found, GenerationRequest)
        return codec.encode(_Reply(request=_Request.of(found)) if is_request else _Reply(response=found))
    except Exception as error:
        failure = http_error(error)
        told = _Failure(failure.status, failure.message, failure.param, failure.code, failure.headers)
        return codec.encode(_Reply(failure=told))


if __name__ == "__main__":
    main()
