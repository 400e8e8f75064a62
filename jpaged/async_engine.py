"""An engine for asyncio: requests of many tasks on one thread that owns the engine.

`AsyncEngine.generate` is the call for programs; the server calls `submit`, which takes checked messages. This module
loads no JAX; the engine does, when one is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from .checks import check, integer, one_of, or_none, refusal, shown
from .config.engine_config import EngineConfig
from .core.stat_loggers import StatLogger
from .errors import ConfigError, JpagedError
from .intake.request_builder import RequestBuilder
from .messages import NewRequest, Params
from .outputs import RequestOutput
from .remote.core_client import CoreClient, OutputStream
from .remote.thread_client import ThreadClient
from .sampling.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine
    from .remote.core_group import CoreGroup
    from .startup.build_engine import Progress
    from .startup.open_model import ModelHandle

Result = TypeVar("Result")
CORES = ("thread", "process")
"""Where steps can be computed."""


class AsyncEngine:
    """One model behind a paged cache, for the tasks of an event loop.

    `generate` gives the outputs of a request as they come. A thread of its own computes the steps; requests, aborts and
    other calls enter between two steps. The `Engine` itself is the attribute `engine`; those of its calls that are
    missing here, such as `score`, can be awaited by `call`.

    With `core="process"` the engine is in a process of its own, and this one loads no JAX; with `data_parallel_size`
    there are several, and each request goes to the one that has the least to do for it. What Python alone can give is
    refused then: `engine`, `call`, `update_params`, loggers, and options such as `mesh` or `params`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        core: str | None = None,
        core_restarts: int = 0,
        stat_loggers: Sequence[StatLogger] = (),
        **options: Any,
    ):
        """Load a model; the other arguments are those of `Engine`. Raise ConfigError or ModelLoadError.

        `core` is where steps are computed: in a thread, which is the default for one core, or in a process, where
        requests and streams wait for no step. A core process that ends by itself is started again at most
        `core_restarts` times; its requests end by an error. `stat_loggers` are told of each step and of each ended
        request, on the thread that computes steps.
        """
        num_cores = options.get("data_parallel_size", 1)
        if check_core(core, num_cores, core_restarts, stat_loggers) == "process":
            if not isinstance(model, str | None):
                raise _needs_thread("model", f"a {type(model).__name__}")
            config = EngineConfig(**options) if model is None else EngineConfig(model=model, **options)
            from .remote.core_group import CoreGroup  # This needs a package of the extra `serve`.

            self._start_processes(config, CoreGroup(config, num_restarts=core_restarts))
            return
        from .engine import Engine  # This loads JAX.

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
        from .engine import Engine  # This loads JAX.

        engine = Engine.from_engine_args(config, handle, progress=progress)
        return cls.from_engine(engine, stat_loggers=stat_loggers)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, stat_loggers: Sequence[StatLogger] = (), counts_requests: bool = False
    ) -> Self:
        """Wrap an engine that exists. It belongs to this object from now on, which shuts it down.

        With `counts_requests`, snapshots of the client tell counts and times of steps and requests.
        """
        self = cls.__new__(cls)
        self._start(engine, stat_loggers, counts_requests=counts_requests)
        return self

    @classmethod
    def from_processes(cls, config: EngineConfig, group: CoreGroup) -> Self:
        """Wrap core processes that were started with a config. They belong to this object from now on."""
        self = cls.__new__(cls)
        self._start_processes(config, group)
        return self

    def _start(self, engine: Engine, stat_loggers: Sequence[StatLogger], *, counts_requests: bool = False) -> None:
        self._engine: Engine | None = engine
        self.config = engine.config
        """The options of the engine."""
        self._set_client(ThreadClient(engine, stat_loggers, counts_requests=counts_requests))

    def _start_processes(self, config: EngineConfig, group: CoreGroup) -> None:
        self._engine, self.config = None, config
        self._builder = group.builder()
        self._set_client(group)

    def _set_client(self, client: CoreClient) -> None:
        self.client = client
        self._streams: dict[str, set[OutputStream]] = {}
        """The open streams of `generate` by their callers' ids."""

    @property
    def engine(self) -> Engine:
        """Return the engine itself. Raise ConfigError for one in a process of its own."""
        if self._engine is None:
            raise _needs_thread("engine", "a call of it")
        return self._engine

    @property
    def builder(self) -> RequestBuilder:
        """Return what checks requests."""
        return self._builder if self._engine is None else self._engine.builder

    @property
    def is_alive(self) -> bool:
        """Return whether the engine takes requests: it was not shut down, and its thread has not ended."""
        return self.client.status().is_alive

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
        build = partial(self.builder.build, "", prompt, sampling_params, number=0, priority=priority)
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
        return await self.client.submit(messages, takes_deltas=takes_deltas)

    async def call(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Return the result of a call that may wait for a step, such as `call(engine.update_params, tree)`.

        It runs on a thread of the event loop's pool; what it changes is changed between two steps.
        """
        if not isinstance(self.client, ThreadClient):
            raise _needs_thread("call", "a function")
        return await self.client.call(function, *args, **options)

    async def abort(self, request_id: str, *, sample: int | None = None) -> None:
        """End the requests of `generate` with this id; their iterators get a last output with the reason "abort".

        With `sample`, only this sample of one request ends; see `Engine.abort_request`.
        """
        await self.client.abort(self._core_ids(request_id), sample)

    async def fork(self, request_id: str, n: int | None = None, **options: Any) -> list[int]:
        """Add `n` samples to the unfinished request with this id; the arguments are those of `Engine.fork`."""
        ids = self._core_ids(request_id)
        if len(ids) != 1:
            got = f"{shown(request_id)}, the id of {len(ids)} unfinished requests"
            raise refusal("request_id", got, "that of exactly one")
        return await self.client.fork(ids[0], n, options)

    def _core_ids(self, request_id: str) -> list[str]:
        """Return the core's ids of the unfinished requests of `generate` with this id."""
        return [one for stream in self._streams.get(request_id, ()) for one in stream.request_ids]

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; see `Engine.reset_prefix_cache`."""
        await self.client.reset_prefix_cache()

    async def update_params(self, params: Any, **options: Any) -> Any:
        """Take new weights; see `Engine.update_params`."""
        if self._engine is None:
            raise _needs_thread("update_params", "a tree of arrays")
        return await self.call(self.engine.update_params, params, **options)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory away; see `Engine.sleep`."""
        await self.client.sleep(level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the device's memory back; see `Engine.wake_up`."""
        await self.client.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether the engine has given its memory away."""
        return self.client.status().is_sleeping

    def pause(self) -> None:
        """Compute no steps until `resume`; requests are taken and wait."""
        self.client.pause()

    def resume(self) -> None:
        """Go on computing."""
        self.client.resume()

    async def stats(self) -> dict[str, Any]:
        """Return counters and sizes; see `Engine.stats`."""
        return await self.client.stats()

    def shutdown(self) -> None:
        """Abort all requests, end the thread, and free the device's memory. Iterators raise EngineStoppedError."""
        self.client.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)


def check_core(
    core: str | None, num_cores: Any = 1, num_restarts: int = 0, stat_loggers: Sequence[StatLogger] = ()
) -> str:
    """Return where steps are computed: where `core` says, else in a thread, but in processes for several cores.

    Raise ConfigError for a word that is none, for several cores in threads and restarts of a thread, for loggers with a
    process, and if the package for processes is missing.
    """
    check("core", core, or_none(one_of(*CORES)), error=ConfigError)
    check("core_restarts", num_restarts, integer(0), error=ConfigError)
    check("data_parallel_size", num_cores, integer(1), error=ConfigError)
    if core == "thread" and num_cores > 1:
        allowed, way_out = "process with data_parallel_size above 1", "leave core out"
        raise refusal("core", shown(core), allowed, way_out, error=ConfigError)
    core = core or ("thread" if num_cores == 1 else "process")
    if core == "thread" and num_restarts:
        raise refusal("core_restarts", num_restarts, "0 for a thread", "take core=process", error=ConfigError)
    if core == "process" and stat_loggers:
        raise _needs_thread("stat_loggers", "some")
    if core == "process" and find_spec("zmq") is None:
        way_out = "run: pip install 'jpaged[serve]'"
        raise refusal("core", "process and no package zmq", "the extra serve", way_out, error=ConfigError)
    return core


def _needs_thread(name: str, got: str) -> JpagedError:
    """Return the error for what an engine in another process cannot have."""
    return refusal(name, f"{got} with a core process", "none there", 'take core="thread"', error=ConfigError)
