"""Parses the bodies of requests off the event loop, and bounds the bytes that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..protocols.http_errors import unavailable
from ..protocols.parser_process import ParserProcess
from ..protocols.request_parser import RequestParser

Result = TypeVar("Result")
NUM_THREADS = 4
"""Threads that parse bodies, render chats and tokenize at the same time."""
LONG_BODY_BYTES = 1 << 20
"""A body with more bytes is parsed in another process: JSON alone holds Python's global lock for 2 ms a megabyte."""
SHORT_SHARE = 8
"""Long bodies may not take the last of this many parts of the bytes that may wait: it is left to short bodies."""


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
        self._unfinished: set[Future[Any]] = set()
        """The work of threads that has not ended."""

    def serve(self, parser: RequestParser, long_parser: ParserProcess) -> None:
        """Parse bodies from now on; both parsers make the same of a body."""
        self._parser, self._long_parser = parser, long_parser

    def hold(self, num_bytes: int, *, is_long: bool = False) -> None:
        """Count bytes of a body that have come. Raise HTTPError, a 503, if too many wait.

        `is_long` says that the body has more than LONG_BODY_BYTES.
        """
        if self._max_bytes is not None:
            max_bytes = self._max_bytes - (self._max_bytes // SHORT_SHARE if is_long else 0)
            if self._num_bytes + num_bytes > max_bytes:
                raise unavailable("the server is busy: too many bytes of requests wait to be parsed; try again later")
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count bytes of bodies that are gone."""
        self._num_bytes -= num_bytes

    def parse(self, body: bytearray, method: Callable[[RequestParser, bytearray], Result]) -> asyncio.Future[Result]:
        """Parse a body whose bytes are held, by a method of RequestParser; return the future of the result.

        The body is emptied afterwards. If the future is cancelled, a thread that has not begun never will, and the
        process is ended if it parses this body. `serve` must have been called.
        """
        assert self._parser is not None, "no parser yet"
        assert self._long_parser is not None
        work: Future[Result]
        if is_long := len(body) > LONG_BODY_BYTES:
            work = self._long_thread.submit(self._long_parser.run, method.__name__, body)
        else:
            work = self._threads.submit(method, self._parser, body)
        self._unfinished.add(work)
        future = asyncio.wrap_future(work)
        work.add_done_callback(partial(self._drop, body, asyncio.get_running_loop()))
        if is_long:
            future.add_done_callback(partial(self._abandon, body))
        return future

    def _drop(self, body: bytearray, loop: asyncio.AbstractEventLoop, work: Future[Any]) -> None:
        """Free a body that no thread needs any more. Called by the thread that has had it, or by the loop's."""
        self._unfinished.discard(work)
        with suppress(RuntimeError):  # The event loop was closed, and with it the count ends.
            loop.call_soon_threadsafe(self.release, len(body))
        body.clear()

    def _abandon(self, body: bytearray, future: asyncio.Future[Any]) -> None:
        """End the process of a long body whose future was cancelled."""
        if future.cancelled() and self._long_parser is not None:
            self._long_parser.abandon(body)

    @property
    def is_parsing(self) -> bool:
        """Return whether a thread of this process parses a body, or waits for the process that does."""
        return any(work.running() for work in list(self._unfinished))

    def close(self) -> None:
        """Begin no other body, and end the process of long ones."""
        for threads in (self._threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._long_parser is not None:
            self._long_parser.close()
