"""An engine for asyncio: requests of many tasks on one thread that owns the engine.

`AsyncEngine.generate` is the call for programs; the server calls `submit`, which takes checked messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from .checks import refusal, shown
from .config.engine_config import EngineConfig
from .core.core_thread import CoreThread, Delivery, ResultCallback, StepOutputs, Subscription
from .core.stat_loggers import StatLogger, StatLoggers
from .engine import Engine
from .errors import EngineStoppedError
from .messages import NewRequest, Params
from .outputs import RequestOutput
from .sampling.sampling_params import RequestOutputKind, SamplingParams
from .startup.build_engine import Progress
from .startup.open_model import ModelHandle
from .text.grammar.grammar import Matcher

Result = TypeVar("Result")


class OutputStream(Subscription):
    """The outputs of some requests as their reader, one task of an event loop, takes them."""

    def __init__(self, core: CoreThread, *, takes_deltas: bool):
        super().__init__(takes_deltas=takes_deltas)
        self.loop = asyncio.get_running_loop()
        self.request_ids: list[str] = []
        self._core = core
        self._outputs: StepOutputs | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    async def take(self) -> StepOutputs | None:
        """Wait for outputs and return them; None if `nudge` came first. Raise EngineStoppedError if none will come."""
        if self._outputs is None and self._error is None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            self._core.note_taken(self)
        elif self._error is not None:
            raise self._error
        return outputs

    def put(self, outputs: StepOutputs) -> None:
        if not self._is_closed:
            self._outputs = outputs
            self.nudge()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.nudge()

    def nudge(self) -> None:
        """Let `take` return, with None if there are no outputs."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """End the requests that are unfinished; no more outputs come."""
        if not self._is_closed:
            self._is_closed = True
            self._core.drop(self)


class AsyncEngine:
    """One model behind a paged cache, for the tasks of an event loop.

    `generate` gives the outputs of a request as they come. A thread of its own computes the steps; requests, aborts and
    other calls enter between two steps. The `Engine` itself is the attribute `engine`; those of its calls that are
    missing here, such as `score`, can be awaited by `call`.
    """

    def __init__(self, model: str | None = None, *, stat_loggers: Sequence[StatLogger] = (), **options: Any):
        """Load a model; the other arguments are those of `Engine`. Raise ConfigError or ModelLoadError.

        `stat_loggers` are told of each step and of each ended request, on the thread that computes steps.
        """
        self._start(Engine(model, **options), stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        config: EngineConfig,
        handle: ModelHandle | None = None,
        *,
        progress: Progress | None = None,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> Self:
        """Return an engine for a validated config; see `Engine.from_engine_args`."""
        engine = Engine.from_engine_args(config, handle, progress=progress)
        return cls.from_engine(engine, stat_loggers=stat_loggers)

    @classmethod
    def from_engine(cls, engine: Engine, *, stat_loggers: Sequence[StatLogger] = ()) -> Self:
        """Wrap an engine that exists. It belongs to this object from now on, which shuts it down."""
        self = cls.__new__(cls)
        self._start(engine, stat_loggers)
        return self

    def _start(self, engine: Engine, stat_loggers: Sequence[StatLogger]) -> None:
        loggers = StatLoggers(stat_loggers)
        if stat_loggers:
            engine.core.observer = loggers
        self.engine = engine
        self.core = CoreThread(engine.loop, _deliver, take_numbers=engine.builder.take_numbers, on_ended=loggers.ended)
        self._streams: dict[str, set[OutputStream]] = {}
        """The open streams of `generate` by their callers' ids."""

    @property
    def config(self) -> EngineConfig:
        """Return the options of the engine."""
        return self.engine.config

    @property
    def is_alive(self) -> bool:
        """Return whether the engine takes requests: it was not shut down, and its thread has not ended."""
        return self.core.is_alive

    async def generate(
        self,
        prompt: Any,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request as they come, by the `output_kind` of its parameters; the last is finished.

        `prompt`, `sampling_params` and `priority` are those of `Engine.add_request`. Outputs carry `request_id`, which
        need not be unique; without one they carry the engine's own id. A reader that falls behind gets what has come
        meanwhile in one output. Leaving the iterator, by `break`, `aclose` or the end of its task, aborts the request.

        Raise InvalidRequestError if an argument is wrong or the request can never fit, QueueFullError if too much
        waits, and EngineStoppedError if the engine was shut down or has failed.
        """
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise refusal("request_id", shown(request_id), "a non-empty string")
        build = partial(self.engine.builder.build, "", prompt, sampling_params, number=0, priority=priority)
        message = await asyncio.to_thread(build)
        kind = message.params.output_kind if isinstance(message.params, SamplingParams) else None
        message = msgspec.structs.replace(message, is_streamed=kind not in (None, RequestOutputKind.FINAL_ONLY))
        stream = await self.submit([message], takes_deltas=False)
        output_id = request_id or stream.request_ids[0]
        self._streams.setdefault(output_id, set()).add(stream)
        try:
            while True:
                outputs = await stream.take()
                assert outputs is not None, "nobody nudges this stream"
                for output in outputs.outputs:
                    yield replace(output, request_id=output_id)
                    if output.finished:
                        return
        finally:
            stream.close()
            self._streams[output_id].discard(stream)
            if not self._streams[output_id]:
                del self._streams[output_id]

    async def submit(self, messages: Sequence[NewRequest], *, takes_deltas: bool) -> OutputStream:
        """Queue the requests of some messages, all or none, and return the stream of their outputs.

        The caller closes the stream. Raise InvalidRequestError if a request can never fit, QueueFullError if there is
        no room for all, and EngineStoppedError if the engine was shut down or has failed.
        """
        grammars: list[Matcher | None] = [None] * len(messages)
        if any(message.grammar for message in messages):
            grammars = await asyncio.to_thread(self._matchers, messages)
        stream = OutputStream(self.core, takes_deltas=takes_deltas)
        try:
            stream.request_ids = await self._result(partial(self.core.add, messages, grammars, stream))
        except BaseException:  # Cancelled while the requests may be queued already.
            stream.close()
            raise
        return stream

    def _matchers(self, messages: Sequence[NewRequest]) -> list[Matcher | None]:
        """Return a matcher for each message that has a grammar; one that is not known yet is compiled."""
        grammars = self.engine.core.outputs.grammars
        return [grammars.matcher(message.grammar) if message.grammar else None for message in messages]

    async def call(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Return the result of a call that may wait for a step, such as `call(engine.update_params, tree)`.

        It runs on a thread of the event loop's pool; what it changes is changed between two steps.
        """
        result = await asyncio.to_thread(function, *args, **options)
        self.core.wake()
        return result

    async def abort(self, request_id: str, *, sample: int | None = None) -> None:
        """End the requests of `generate` with this id; their iterators get a last output with the reason "abort".

        With `sample`, only this sample of one request ends; see `Engine.abort_request`.
        """
        abort = partial(self.engine.abort_request, self._core_ids(request_id), sample=sample)
        await self._result(partial(self.core.call, abort))

    async def fork(self, request_id: str, n: int | None = None, **options: Any) -> list[int]:
        """Add `n` samples to the unfinished request with this id; the arguments are those of `Engine.fork`."""
        ids = self._core_ids(request_id)
        if len(ids) != 1:
            got = f"{shown(request_id)}, the id of {len(ids)} unfinished requests"
            raise refusal("request_id", got, "that of exactly one")
        return await self._result(partial(self.core.call, partial(self.engine.fork, ids[0], n, **options)))

    def _core_ids(self, request_id: str) -> list[str]:
        """Return the core's ids of the unfinished requests of `generate` with this id."""
        return [one for stream in self._streams.get(request_id, ()) for one in stream.request_ids]

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; see `Engine.reset_prefix_cache`."""
        await self._result(partial(self.core.call, self.engine.reset_prefix_cache))

    async def update_params(self, params: Any, **options: Any) -> Any:
        """Take new weights; see `Engine.update_params`."""
        return await self.call(self.engine.update_params, params, **options)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory away; see `Engine.sleep`."""
        await self.call(self.engine.sleep, level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the device's memory back; see `Engine.wake_up`."""
        await self.call(self.engine.wake_up, *(() if tags is None else (tags,)))

    def is_sleeping(self) -> bool:
        """Return whether the engine has given its memory away."""
        return bool(self.engine.loop.sleep.missing)

    def pause(self) -> None:
        """Compute no steps until `resume`; requests are taken and wait."""
        self.core.is_paused = True

    def resume(self) -> None:
        """Go on computing."""
        self.core.is_paused = False
        self.core.wake()

    async def stats(self) -> dict[str, Any]:
        """Return counters and sizes; see `Engine.stats`."""
        return await self._result(partial(self.core.call, self.engine.stats))

    def shutdown(self) -> None:
        """Abort all requests, end the thread, and free the device's memory. Iterators raise EngineStoppedError."""
        self.core.stop()
        self.engine.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _result(self, call: Callable[[ResultCallback], None]) -> Any:
        """Make a call of the core's thread, and wait for its result."""
        if not self.core.is_alive:
            raise EngineStoppedError("the engine was shut down, or has failed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        call(_FutureCallback(loop, future))
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
