"""Runs over many requests on core processes, for a caller without an event loop: `jpaged generate`.

    messages ─▶ up to twice as many as the cores compute at once ─▶ CoreGroup ─▶ last outputs, as they come

Requests of a core that has ended are computed again (`last_outputs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Self, TypeVar

from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest
from ..outputs import EngineSummary, LastOutput, RequestOutput
from ..text.parsed_outputs import OutputParser
from .core_group import CoreGroup
from .last_outputs import LastOutputs
from .new_deltas import StreamSink

Result = TypeVar("Result")

POLL_S = 0.02
"""Seconds until it is looked again for the next message."""
NO_MORE = object()


class MessageRun:
    """The calls of an `Engine` for a run over a file, on the cores of a group. It shuts the group down."""

    def __init__(self, group: CoreGroup):
        """`group` leaves requests their ids and numbers."""
        self._group, self._loop = group, asyncio.new_event_loop()
        self._max_open = 2 * group.num_cores * group.builder().sizes.max_num_seqs
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each request that has no last output yet."""
        self._ended: list[RequestOutput] = []
        self._failure: BaseException | None = None
        """Why no more outputs come."""
        self._has_news = asyncio.Event()
        """Set once one of the two has something."""
        self._outputs = LastOutputs(group)

    @property
    def builder(self) -> RequestBuilder:
        """Return what makes the messages of requests."""
        return self._group.builder()

    def output_parser(self) -> OutputParser:
        """Return what reads the outputs of the model; raise InvalidRequestError without a tokenizer."""
        return self.builder.output_parser()

    def checked_message(self, new: NewRequest) -> NewRequest:
        """Return the message: a core checks it when it gets it, and its last output tells what is wrong."""
        return new

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, of all cores together."""
        return self._run(self._group.stats())

    def summary(self) -> EngineSummary:
        """Return what the engines are and have done together."""
        return self._run(self._group.summary())

    def run_messages(
        self, messages: Iterable[NewRequest | None], *, stream: StreamSink | None = None
    ) -> Iterator[LastOutput]:
        """Compute the requests of messages, and yield the last output of each.

        A None among the messages lets cores compute a while before the next is asked for. `stream` is called with the
        deltas of all samples. Raise EngineStoppedError once no core is left.
        """
        source, is_read = iter(messages), False
        try:
            while self._tasks or self._ended or not is_read:
                is_waiting = False
                while not is_read and not is_waiting and len(self._tasks) < self._max_open:
                    new: Any = next(source, NO_MORE)
                    is_read, is_waiting = new is NO_MORE, new is None
                    if not is_read and not is_waiting:
                        self._begin(new, stream)
                if self._tasks or self._ended or is_waiting:
                    self._run(self._wait_for_news(POLL_S if is_waiting else None))
                if self._failure is not None:
                    raise self._failure
                ended, self._ended = self._ended, []
                yield from map(LastOutput, ended)
        finally:
            self._run(self._cancel_all())

    def shutdown(self) -> None:
        """End the cores."""
        self._group.shutdown()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # On the event loop

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(call)

    def _begin(self, message: NewRequest, stream: StreamSink | None) -> None:
        self._tasks.add(self._loop.create_task(self._compute(message, stream)))

    async def _wait_for_news(self, max_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._has_news.wait(), max_s)
        except TimeoutError:
            return
        self._has_news.clear()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _compute(self, message: NewRequest, stream: StreamSink | None) -> None:
        """Compute a request, and keep its last output."""
        try:
            output = await self._outputs.of(message, stream)
            self._ended.append(output)  # The list may be another one by now.
        except Exception as error:
            self._failure = error
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        self._has_news.set()
