"""The client of an engine in this process, whose steps a thread of its own computes (`CoreThread`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.core_thread import Delivery, ResultCallback
from ..core.stat_loggers import StatLogger
from ..errors import EngineStoppedError
from ..messages import NewRequest
from ..outputs import EngineSummary
from ..text.grammar.grammar import Matcher
from .core_calls import CoreCalls
from .core_client import CoreClient, CoreSnapshot, CoreStatus, OutputStream, RequestNames, StreamOwner, WatchOptions
from .watchdog import Watchdog, print_own_stacks, sign_of_life, work_of

if TYPE_CHECKING:
    from ..engine import Engine

Result = TypeVar("Result")


class ThreadClient(CoreClient, StreamOwner):
    """Takes the calls of tasks to the thread that owns the engine, and its answers and outputs to their event loops."""

    def __init__(self, engine: Engine, stat_loggers: Sequence[StatLogger] = (), *, counts_requests: bool = False):
        """Start the thread. The engine belongs to this client from now on, which shuts it down. See `CoreCalls`."""
        self._calls = CoreCalls(engine, _deliver, stat_loggers, counts_requests=counts_requests)
        self._names = RequestNames(engine.builder.take_numbers)
        self._core = self._calls.thread
        self._watchdog, self._looks = Watchdog(print_own_stacks), itertools.count()

    async def submit(self, messages: Sequence[NewRequest], *, takes_deltas: bool) -> OutputStream:
        grammars: list[Matcher | None] = [None] * len(messages)
        if any(message.grammar for message in messages):  # One that has to be compiled would delay the next step.
            grammars = await asyncio.to_thread(self._calls.matchers, messages)
        named = self._names.named(messages)
        stream = OutputStream(self, [message.request_id for message in named])
        add = partial(self._core.add, named, grammars, stream, takes_deltas=takes_deltas)
        try:
            await self._answer(add)
        except BaseException:  # Cancelled while the requests may be queued already.
            stream.close()
            raise
        return stream

    def note_taken(self, stream: OutputStream) -> None:
        self._core.note_taken(stream)

    def drop(self, stream: OutputStream) -> None:
        self._core.drop(stream)

    async def call(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Return the result of a call of the engine that may wait for a step; it runs on a thread of the loop's pool.

        No other client can have this call, since a function is nothing that a message could hold.
        """
        result = await asyncio.to_thread(function, *args, **options)
        self._core.wake()
        return result

    async def abort(self, request_ids: Sequence[str], sample: int | None = None) -> None:
        await self._between_steps(partial(self._calls.abort, request_ids, sample))

    async def fork(self, request_id: str, n: int | None, options: Mapping[str, Any]) -> list[int]:
        return await self._between_steps(partial(self._calls.fork, request_id, n, options))

    async def reset_prefix_cache(self) -> None:
        await self._between_steps(self._calls.reset_prefix_cache)

    async def stats(self) -> dict[str, Any]:
        return await self._between_steps(self._calls.stats)

    async def summary(self) -> EngineSummary:
        return await self._between_steps(self._calls.summary)

    async def sleep(self, level: int, mode: str) -> None:
        await asyncio.to_thread(self._calls.sleep, level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        await asyncio.to_thread(self._calls.wake_up, tags)

    def pause(self) -> None:
        self._calls.pause(True)

    def resume(self) -> None:
        self._calls.pause(False)

    def status(self) -> CoreStatus:
        return self._calls.status()

    def watch(self, options: WatchOptions) -> str:
        status = self.status()
        if not status.is_alive:
            return ""
        sign = sign_of_life(status, next(self._looks))  # A thread without work needs no heartbeat.
        return self._watchdog.look(sign, options.limit_s(status), work_of(status))

    async def snapshot(self) -> CoreSnapshot:
        return await asyncio.to_thread(self._calls.snapshot)

    async def start_profile(self, folder: str) -> bool:
        return await asyncio.to_thread(self._calls.start_profile, folder)

    async def stop_profile(self) -> bool:
        return await asyncio.to_thread(self._calls.stop_profile)

    def shutdown(self) -> None:
        self._calls.shutdown()

    async def _between_steps(self, run: Callable[[], Result]) -> Result:
        """Return the result of a call that the thread makes between two steps."""
        return await self._answer(partial(self._core.call, run))

    async def _answer(self, post: Callable[[ResultCallback], None]) -> Any:
        """Post a command to the thread, and wait for its result."""
        if not self._core.is_alive:
            raise EngineStoppedError("the engine was shut down, or has failed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        post(_FutureCallback(loop, future))
        return await future


class _FutureCallback:
    """Resolves a future of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]):
        self.loop, self._future = loop, future

    def __call__(self, result: Any, error: Exception | None) -> None:
        if self._future.done():  # Its task was cancelled.
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


def _deliver(deliveries: list[Delivery]) -> None:
    """Make all calls on the event loops of their receivers, by one wake-up of each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for delivery in deliveries:
        by_loop.setdefault(delivery.receiver.loop, []).append(delivery)
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call_all, of_loop)
        except RuntimeError:  # The loop was closed: nobody waits any more.
            continue


def _call_all(deliveries: list[Delivery]) -> None:
    for delivery in deliveries:
        delivery.call()
