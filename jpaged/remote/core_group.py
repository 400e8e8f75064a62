"""One client of several core processes that serve the same model, and of their successors.

    calls ─▶ CoreGroup ─▶ the best core for a request, or all cores ─▶ ProcessClient ─▶ core process
                          a core that has ended by itself is started again, as often as it may be

Streams belong to the client of their core: outputs pass through no further hands. Loads no JAX.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ..checks import one_line
from ..config.engine_config import EngineConfig
from ..errors import EngineStoppedError, QueueFullError
from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest
from ..outputs import EngineSummary
from .core_client import (
    CoreClient,
    CoreSnapshot,
    CoreState,
    CoreStatus,
    GivenNames,
    OutputStream,
    RequestNames,
    WatchOptions,
)
from .machine_share import MachineShare, machine_shares
from .merged import merged_snapshot, merged_stats, merged_status, merged_summary
from .placement import Placement, RequestTokens
from .process_client import ENGINE_MAKER, ProcessClient, ReportProgress

logger = logging.getLogger("jpaged")

Result = TypeVar("Result")

SHARED_LIMITS = ("waiting_requests", "waiting_tokens")
"""Limits of what waits in all cores together."""


@dataclass(eq=False)
class _Core:
    """One place of the group: the core process that has it now."""

    index: int
    client: ProcessClient
    """That of the process, or of one that has ended while the next one is started."""
    num_restarts_left: int
    end: str = ""
    """Why no process has its place any more; empty while one has, or is started."""
    stall: str = ""
    """What hangs in it."""

    @property
    def is_serving(self) -> bool:
        """Return whether it takes requests, or would if it did not sleep."""
        return self.client.status().is_alive

    @property
    def state(self) -> CoreState:
        """Return what its owner is told of it."""
        status = self.client.status()
        if not status.is_alive:
            return CoreState(self.index, "failed" if self.end else "starting")
        if self.stall:
            return CoreState(self.index, "stalled")
        return CoreState(self.index, "sleeping" if status.is_sleeping else "ok")


class CoreGroup(CoreClient):
    """Starts `data_parallel_size` core processes for a config, and takes each call to those that it concerns."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_restarts: int = 0,
        maker: str = ENGINE_MAKER,
        options: Mapping[str, Any] | None = None,
        progress: ReportProgress | None = None,
        watch: WatchOptions = WatchOptions(),  # noqa: B008 (it is frozen)
        names: RequestNames | None = None,
        shares: Sequence[MachineShare] | None = None,
    ):
        """Start the processes, and wait until all take requests. The arguments are those of `ProcessClient`.

        `shares` are the parts of the machine that they have; None: equal ones of the whole. A core that ends by itself
        later is started again at most `num_restarts` times. Raise as `ProcessClient` does, and ConfigError if the
        machine has too few devices.
        """
        self._names = names or RequestNames()
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        """Held while a new process takes a place, and while the group begins to stop."""
        self._is_paused = False
        self._sleep: tuple[int, str] | None = None
        """Level and mode in which the cores sleep."""
        self._core_of: dict[str, _Core] = {}
        """The core of each unfinished request, by the request's id."""
        self._shares = shares or machine_shares(config)
        self._start_client = partial(
            ProcessClient,
            core_config(config),
            maker=maker,
            options=options,
            watch=watch,
            names=GivenNames(),
            is_unwanted=self._is_stopping,
        )
        clients = self._start_all(progress)
        self._cores = [_Core(index, client, num_restarts) for index, client in enumerate(clients)]
        first = clients[0]
        self.builder_setup, self.identity = first.builder_setup, first.identity
        self.memory = first.memory if len(clients) == 1 else f"{len(clients)} engines, each with {first.memory}"
        self._builder = first.builder()
        num_pages = first.num_cached_pages if len(clients) > 1 else 0  # A single core needs no choice.
        page_size = self._builder.sizes.block_size
        self._placement = Placement(len(clients), page_size=page_size, num_pages=num_pages)
        self._keepers = [
            threading.Thread(target=self._keep, args=(core,), name=f"jpaged core {core.index}", daemon=True)
            for core in self._cores
        ]
        for keeper in self._keepers:
            keeper.start()

    @property
    def num_cores(self) -> int:
        """Return how many core processes there are, those included that are being started again or are lost."""
        return len(self._cores)

    def builder(self) -> RequestBuilder:
        """Return a builder as the engines have it."""
        return self._builder

    # Starts

    def _start_all(self, progress: ReportProgress | None) -> list[ProcessClient]:
        """Start the first core alone, which fills caches of programs and weights, and then all others at once."""
        first, *others = self._shares
        clients = [self._start_client(share=first, progress=progress)]
        with ThreadPoolExecutor(len(self._shares)) as pool:
            starts = [pool.submit(self._start_client, share=share) for share in others]
            try:
                for num_started, start in enumerate(as_completed(starts), 2):
                    start.result()
                    if progress is not None:
                        progress("cores", num_started, len(self._shares))
                return clients + [start.result() for start in starts]
            except BaseException:
                self._is_stopping.set()  # Ends the other starts.
                wait(starts)
                for client in clients + [start.result() for start in starts if start.exception() is None]:
                    client.shutdown()
                raise

    def _keep(self, core: _Core) -> None:
        """Start another process each time that a core's has ended by itself. Runs on a thread of the core's own."""
        is_kept = True
        while is_kept:
            is_kept = self._restart(core, core.client.wait_for_end())

    def _restart(self, core: _Core, end: str) -> bool:
        """Start a core's next process, if there may be one; return whether there is one now.

        `end` is how the last one has ended. A start that fails is one of those that may be.
        """
        while not self._is_stopping.is_set():
            logger.error("engine %d: %s; restarts left: %d", core.index, end, core.num_restarts_left)
            if not core.num_restarts_left:
                core.end = end
                return False
            core.num_restarts_left -= 1
            try:
                client = self._start_client(share=self._shares[core.index])
            except Exception as error:
                end = one_line(error)
                continue
            self._replace(core, client)
            return True
        return False

    def _replace(self, core: _Core, client: ProcessClient) -> None:
        """Let a new process take the place of one that has ended; close what is left of that."""
        with self._lock:
            former, is_wanted = core.client, not self._is_stopping.is_set()
            if is_wanted:
                self._placement.forget(core.index)
                if self._is_paused:
                    client.pause()
                if self._sleep is not None:
                    client.send_call("sleep", *self._sleep)
                core.client = client
        if is_wanted:
            former.close()
            logger.warning("engine %d serves again", core.index)
        else:
            client.shutdown()

    # Calls of one core

    async def submit(self, messages: Sequence[NewRequest], *, takes_deltas: bool) -> OutputStream:
        named = self._names.named(messages)
        tokens = self._placement.tokens_of(named)
        full: QueueFullError | None = None
        for index in self._placement.ranked(tokens, [core.index for core in self._takers()]):
            core = self._cores[index]
            note_over = self._placed(named, tokens, core)
            try:
                return await core.client.submit(named, takes_deltas=takes_deltas, on_over=note_over)
            except QueueFullError as error:  # There may be room in another core.
                note_over()
                full = error
            except BaseException:
                note_over()
                raise
        raise full or self._stopped()

    def _placed(self, named: Sequence[NewRequest], tokens: RequestTokens, core: _Core) -> Callable[[], None]:
        """Note which core gets some requests; return what is called once they are over."""
        forget_tokens = self._placement.place(tokens, core.index)
        self._core_of.update((message.request_id, core) for message in named)

        def note_over() -> None:
            forget_tokens()
            for message in named:
                self._core_of.pop(message.request_id, None)

        return note_over

    async def abort(self, request_ids: Sequence[str], sample: int | None = None) -> None:
        by_core: dict[int, list[str]] = {}
        for request_id in request_ids:
            by_core.setdefault(self._core_with(request_id).index, []).append(request_id)
        await asyncio.gather(*(self._cores[index].client.abort(ids, sample) for index, ids in by_core.items()))

    async def fork(self, request_id: str, n: int | None, options: Mapping[str, Any]) -> list[int]:
        return await self._core_with(request_id).client.fork(request_id, n, options)

    def _core_with(self, request_id: str) -> _Core:
        """Return the core of a request; for an id of none a core that says so."""
        return self._core_of.get(request_id) or self._takers()[0]

    def _takers(self) -> list[_Core]:
        """Return the cores that may get requests. Raise EngineStoppedError if there is none."""
        serving = [core for core in self._cores if core.is_serving]
        if not serving:
            raise self._stopped()
        return [core for core in serving if not core.stall] or serving

    def _stopped(self) -> EngineStoppedError:
        if self._is_stopping.is_set():
            return EngineStoppedError("the engine was shut down")
        return EngineStoppedError(self.lost_process or "the core process has ended, and is started again")

    # Calls of all cores

    async def reset_prefix_cache(self) -> None:
        self._placement.forget_prefixes()
        await self._on_all(lambda core: core.client.reset_prefix_cache())

    async def sleep(self, level: int, mode: str) -> None:
        self._sleep = level, mode
        self._placement.forget_prefixes()
        await self._on_all(lambda core: core.client.sleep(level, mode))

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        self._sleep = None
        await self._on_all(lambda core: core.client.wake_up(tags))

    def pause(self) -> None:
        self._set_paused(True)

    def resume(self) -> None:
        self._set_paused(False)

    def _set_paused(self, is_paused: bool) -> None:
        with self._lock:  # A process that takes a place now pauses too.
            self._is_paused = is_paused
            for core in self._cores:
                core.client.pause() if is_paused else core.client.resume()

    async def start_profile(self, folder: str) -> bool:
        def folder_of(core: _Core) -> str:  # Each writes files of the same names.
            return folder if len(self._cores) == 1 else f"{folder}/engine-{core.index}"

        return all((await self._on_all(lambda core: core.client.start_profile(folder_of(core)))).values())

    async def stop_profile(self) -> bool:
        return all((await self._on_all(lambda core: core.client.stop_profile())).values())

    async def stats(self) -> dict[str, Any]:
        return merged_stats(list((await self._on_all(lambda core: core.client.stats())).values()))

    async def summary(self) -> EngineSummary:
        return merged_summary(list((await self._on_all(lambda core: core.client.summary())).values()))

    async def snapshot(self) -> CoreSnapshot:
        return merged_snapshot(list((await self.snapshots()).values()))

    async def snapshots(self) -> dict[int, CoreSnapshot]:
        return await self._on_all(lambda core: core.client.snapshot())

    async def _on_all(self, call: Callable[[_Core], Awaitable[Result]]) -> dict[int, Result]:
        """Return what a call of each core that serves returns, by the core's index; all are asked if none serves.

        A core that ends meanwhile is left out. Raise EngineStoppedError if none answers.
        """
        cores = [core for core in self._cores if core.is_serving] or self._cores
        found = await asyncio.gather(*map(call, cores), return_exceptions=True)
        results: dict[int, Result] = {}
        for core, one in zip(cores, found, strict=True):
            if not isinstance(one, BaseException):
                results[core.index] = one
            elif not isinstance(one, EngineStoppedError):
                raise one
        if not results:
            raise self._stopped()
        return results

    # What waits for nothing

    def status(self) -> CoreStatus:
        serving = [core for core in self._cores if core.is_serving]
        return merged_status([core.client.status() for core in serving or self._cores])

    def states(self) -> list[CoreState]:
        if self._is_stopping.is_set():
            return [CoreState(core.index, "stopping") for core in self._cores]
        return [core.state for core in self._cores]

    def watch(self, options: WatchOptions) -> str:
        for core in self._cores:
            core.stall = core.client.watch(options)
        serving = [core for core in self._cores if core.is_serving]
        return serving[0].stall if all(core.stall for core in serving) and serving else ""

    @property
    def lost_process(self) -> str:
        ends = [core.end for core in self._cores]
        if self._is_stopping.is_set() or not all(ends):
            return ""
        return ends[0] if len(ends) == 1 else "; ".join(f"engine {index}: {end}" for index, end in enumerate(ends))

    def shutdown(self) -> None:
        with self._lock:
            self._is_stopping.set()
        for core in self._cores:
            core.client.stop()
        for core in self._cores:
            core.client.shutdown()
        for keeper in self._keepers:
            keeper.join()


def core_config(config: EngineConfig) -> EngineConfig:
    """Return the options of each single core of a group: limits of what waits are divided."""
    num_cores, limits = config.data_parallel_size, dict(config.limits)
    for name in SHARED_LIMITS:
        limit = limits[name]
        limits[name] = None if limit is None else -(-limit // num_cores)
    return replace(config, data_parallel_size=1, limits=limits)
