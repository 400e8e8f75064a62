"""Runs over many requests on core processes, for a caller without an event loop: `jpaged generate`.

    messages ─▶ up to twice as many as the cores compute at once ─▶ CoreGroup ─▶ last outputs, as they come

Requests of a core that has ended are computed again. One that was in two such cores waits until all others are done,
and is then computed alone, so that no request is blamed for another's fault; if a core ends then too, it fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import msgspec

from ..errors import EngineStoppedError, InvalidRequestError, QueueFullError
from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest
from ..outputs import EngineSummary, LastOutput, RequestOutput, SampleDelta, error_output
from ..text.parsed_outputs import OutputParser
from .core_group import CoreGroup

Result = TypeVar("Result")
StreamSink = Callable[[list[SampleDelta]], None]

POLL_S = 0.02
"""Seconds until it is looked again for the next message, for room in a queue, or for a core that serves."""
MAX_ENDS = 3
"""Core processes that may end while they compute a request."""
ENDED_CORES = f"{MAX_ENDS} core processes have ended while they computed this request"
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
        self._turns = _Turns()

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
            output = await self._output_of(message, stream)
            self._ended.append(output)
        except Exception as error:
            self._failure = error
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        self._has_news.set()

    async def _output_of(self, message: NewRequest, stream: StreamSink | None) -> RequestOutput:
        """Return the last output of a request, which is computed again if its core ends."""
        show = None if stream is None else _NewDeltas(stream)
        for num_ends in range(MAX_ENDS):
            turn = self._turns.alone if num_ends == MAX_ENDS - 1 else self._turns.beside_others
            async with turn():
                await self._until_a_core_serves()
                try:
                    return await self._try_to_compute(message, show)
                except InvalidRequestError as error:
                    return error_output(message.request_id, message.prompt, str(error))
                except EngineStoppedError:  # The core has ended, perhaps by this request.
                    continue
        return error_output(message.request_id, message.prompt, ENDED_CORES)

    async def _until_a_core_serves(self) -> None:
        """Wait while cores are started again. Raise EngineStoppedError if none is."""
        while not self._group.status().is_alive:
            if lost := self._group.lost_process:
                raise EngineStoppedError(lost)
            await asyncio.sleep(POLL_S)

    async def _try_to_compute(self, message: NewRequest, show: _NewDeltas | None) -> RequestOutput:
        """Return the last output of a request. Raise EngineStoppedError if its core ends."""
        if show is not None:
            show.begin()
        while True:
            try:
                stream = await self._group.submit([message], takes_deltas=show is not None)
                break
            except QueueFullError:
                await asyncio.sleep(POLL_S)
        try:
            while True:
                outputs = await stream.take()
                assert outputs is not None, "nothing nudges this stream"
                if show is not None:
                    show.take(outputs.deltas)
                for output in outputs.outputs:
                    if output.finished:
                        return output
        finally:
            stream.close()


class _Turns:
    """Lets requests run beside each other, or one alone once none runs any more."""

    def __init__(self) -> None:
        self._num_running = 0
        self._is_one_alone = False
        self._changes = asyncio.Condition()

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Wait until no request runs alone, and run."""
        async with self._changes:
            await self._changes.wait_for(lambda: not self._is_one_alone)
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            await self._tell()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until no request runs, and let none run beside this one."""
        async with self._changes:
            await self._changes.wait_for(lambda: not self._num_running and not self._is_one_alone)
            self._is_one_alone = True
        try:
            yield
        finally:
            self._is_one_alone = False
            await self._tell()

    async def _tell(self) -> None:
        async with self._changes:
            self._changes.notify_all()


class _NewDeltas:
    """The deltas of a request that is computed again, without the text that was shown already."""

    def __init__(self, show: StreamSink):
        self._show = show
        self._num_shown: Counter[int] = Counter()
        """Characters of each sample that were shown."""
        self._num_come: Counter[int] = Counter()
        """Characters of each sample that have come since it was begun."""

    def begin(self) -> None:
        """Note that the request is computed from its beginning on."""
        self._num_come.clear()

    def take(self, deltas: Iterable[SampleDelta]) -> None:
        """Show what is new of the deltas."""
        new: list[SampleDelta] = []
        for delta in deltas:
            num_known = max(0, self._num_shown[delta.index] - self._num_come[delta.index])
            self._num_come[delta.index] += len(delta.text)
            self._num_shown[delta.index] = max(self._num_shown[delta.index], self._num_come[delta.index])
            if len(delta.text) > num_known or not num_known:
                new.append(msgspec.structs.replace(delta, text=delta.text[num_known:]))
        self._show(new)
