"""Parses the bodies of requests off the event loop, and bounds the bytes that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..protocols.http_errors import unavailable
from ..protocols.parser_process import ParserProcess
from ..protocols.request_parser import RequestParser

Result = TypeVar("Result")
NUM_THREADS = 4
"""Threads that parse bodies, render chats and tokenize at the same time."""
LONG_BODY_BYTES = 1 << 20
"""A longer body is parsed in another process: this one's threads would wait for its JSON, 2 ms a megabyte and more."""


class BodyParser:
    """Parses short bodies on NUM_THREADS threads, and long ones in a process of their own, one at a time."""

    def __init__(self, max_bytes: int | None):
        """At most so many bytes of bodies may wait; None: no limit."""
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._parser: RequestParser | None = None
        self._long_parser: ParserProcess | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jpaged-parser")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="jpaged-long-bodies")
        """Waits for the process."""
        self._works: set[Future[Any]] = set()
        """Bodies that threads parse, or will."""

    def serve(self, parser: RequestParser, long_parser: ParserProcess) -> None:
        """Parse bodies from now on, by one parser in two processes."""
        self._parser, self._long_parser = parser, long_parser

    def hold(self, num_bytes: int) -> None:
        """Count bytes of bodies that have come. Raise HTTPError, a 503, if there are too many that wait."""
        if self._max_bytes is not None and self._num_bytes + num_bytes > self._max_bytes:
            raise unavailable("the server is busy: too many bytes of requests wait to be parsed; try again later")
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count bytes of bodies that are parsed or dropped."""
        self._num_bytes -= num_bytes

    def parse(
        self, body: bytes | bytearray, method: Callable[[RequestParser, bytes | bytearray], Result]
    ) -> asyncio.Future[Result]:
        """Parse a body whose bytes are held, by a method of RequestParser; return the future of the result.

        If it is cancelled before a thread has begun, none will. `serve` must have been called.
        """
        assert self._parser is not None, "no parser yet"
        assert self._long_parser is not None
        work: Future[Result]
        if len(body) > LONG_BODY_BYTES:
            work = self._long_thread.submit(self._long_parser.run, method.__name__, body)
        else:
            work = self._threads.submit(method, self._parser, body)
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        future = asyncio.wrap_future(work)
        future.add_done_callback(partial(self._release, len(body)))
        return future

    def _release(self, num_bytes: int, future: asyncio.Future[Any]) -> None:
        self.release(num_bytes)

    @property
    def is_parsing(self) -> bool:
        """Return whether a thread of this process parses a body."""
        return any(work.running() for work in list(self._works))

    def close(self) -> None:
        """Begin no other body, and end the process of long ones."""
        for threads in (self._threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._long_parser is not None:
            self._long_parser.close()
