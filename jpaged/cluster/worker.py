"""A worker of a run on Ray: an actor of Ray Data that holds a core process.

    RequestBlock ─▶ LastOutputs ─▶ CoreGroup ─▶ core process      several blocks at once, on one event loop

A core that ends, or that hangs, is started again here: it costs neither the actor nor its blocks. This module is loaded
in the actor, and loads no JAX.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow
import ray

from .. import codec
from ..checks import one_line
from ..config.engine_config import EngineConfig
from ..errors import EngineStoppedError, JpagedError, ModelLoadError
from ..messages import NewRequest
from ..outputs import RequestOutput, error_output
from ..remote.core_client import GivenNames, WatchOptions
from ..remote.core_group import CoreGroup
from ..remote.last_outputs import LastOutputs
from ..remote.machine_share import MachineShare
from ..remote.process_client import ENGINE_MAKER
from ..remote.wire import greeting
from ..startup.sizing.host_memory import free_host_bytes
from .blocks import RequestBlock, ResultBlock

COLUMN = "block"
"""The column of Ray's tables that has the blocks, encoded."""
MAX_RESTARTS = 1000
"""Starts of core processes after the first; a line that ends three gets an error before."""
WATCH_S = 1.0
"""Seconds between two looks at what the core does."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is made of."""

    config: Mapping[str, Any]
    """Options of the engine that are not the default ones."""
    num_on_node: int
    """Workers that share a node, at most."""
    options: Mapping[str, Any]
    """Those of what makes the engine."""
    maker: str = ENGINE_MAKER
    greeting: bytes = field(default_factory=greeting)
    """Names the version of the driver."""


class Worker:
    """Computes blocks. Ray makes one in each actor, and calls it for each task, on an event loop."""

    def __init__(self, spec: WorkerSpec):
        """Start the core. A fault of the start is what each block gets instead of results, since it is the user's."""
        self._node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        self._watching: asyncio.Task[None] | None = None
        self._core: CoreGroup | None = None
        self._problem = ""
        try:
            self._core = _started_core(spec)
        except (JpagedError, ModelLoadError, EngineStoppedError, OSError) as error:
            self._problem = one_line(error, 10_000)
            return
        self._outputs = LastOutputs(self._core)
        self._builder = self._core.builder()

    async def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the results of one block of requests."""
        data = codec.encode(await self._result(table.column(COLUMN)[0].as_py()))
        return pyarrow.table({COLUMN: pyarrow.array([data], pyarrow.large_binary())})

    async def _result(self, data: bytes) -> ResultBlock:
        if self._core is None:
            return ResultBlock(node=self._node, problem=self._problem)
        if self._watching is None:
            self._watching = asyncio.create_task(_keep_watch(self._core))
        start = time.monotonic()
        messages = codec.decode(data, RequestBlock).unpacked()
        try:
            outputs = await asyncio.gather(*map(self._output, messages))
        except EngineStoppedError as error:
            return ResultBlock(node=self._node, problem=one_line(error))
        return ResultBlock.of(self._node, outputs, time.monotonic() - start)

    async def _output(self, message: NewRequest) -> RequestOutput:
        """Return the last output of a request, or an error if it does not fit in this worker's engine."""
        num_tokens = message.num_prompt_tokens
        try:
            self._builder.encoder.check_len(num_tokens)
        except JpagedError as error:
            return error_output(message.request_id, None, str(error))
        room = self._builder.sizes.max_model_len - num_tokens
        fitting = msgspec.structs.replace(message, max_tokens=min(message.max_tokens, room))
        return await self._outputs.of(fitting)

    def __del__(self) -> None:
        """Let the core end. Ray takes the worker out of its actor once there are no more tasks."""
        if self._core is not None:
            self._core.shutdown()


def _started_core(spec: WorkerSpec) -> CoreGroup:
    """Return a core that takes requests. Raise what has kept it from starting, JpagedError for another version."""
    own = greeting()
    if own != spec.greeting:
        raise JpagedError(f"got {own.decode()}, allowed: {spec.greeting.decode()}; install one version everywhere")
    share = MachineShare(host_bytes=free_host_bytes() // spec.num_on_node)
    return CoreGroup(
        EngineConfig(**spec.config),
        num_restarts=MAX_RESTARTS,
        maker=spec.maker,
        options=spec.options,
        names=GivenNames(),
        shares=[share],
    )


async def _keep_watch(core: CoreGroup) -> None:
    """Let a core process that hangs end, so that another one takes its place."""
    while True:
        await asyncio.sleep(WATCH_S)
        core.watch(WatchOptions(ends_core=True))
