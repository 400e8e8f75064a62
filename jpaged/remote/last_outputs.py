"""The last outputs of requests, whatever becomes of the core processes that compute them.

A request that was in flight when a core process ended is computed again by the next one, with the same draws. It may
be what has ended the process, and so it gets an error once that has happened MAX_ENDS times. For the others in flight
not to share its fate, those that have seen one end are computed a few at a time, and those that have seen two alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ..errors import EngineStoppedError, JpagedError, QueueFullError
from ..messages import NewRequest
from ..outputs import RequestOutput, error_output
from .core_client import CoreClient
from .new_deltas import NewDeltas, StreamSink

AT_ONCE = (math.inf, 12, 1)
"""How many requests that have seen so many ends are computed at once."""
MAX_ENDS = len(AT_ONCE)
"""Core processes that may end while they compute a request."""
ENDED_CORES = f"{MAX_ENDS} core processes have ended while they computed this request"
POLL_S = 0.02
"""Seconds between two looks whether there is a core, or room in its queue."""


class LastOutputs:
    """Computes requests on a client that gives them the ids and numbers of their messages, and starts cores again."""

    def __init__(self, client: CoreClient):
        self._client = client
        self._turns = _Turns()

    async def of(self, message: NewRequest, stream: StreamSink | None = None) -> RequestOutput:
        """Return the last output of a request; one with an error if the request is refused, or may end cores.

        Its parameters ask for no output but the last one. `stream` is called with its deltas: what was shown of a
        request that is computed again is not shown again. Raise EngineStoppedError if no core is left, and none comes.
        """
        show = None if stream is None else NewDeltas(stream)
        for num_ends in range(MAX_ENDS):
            async with self._turns.turn(num_ends):
                try:
                    return await self._computed(message, show)
                except JpagedError as error:
                    return error_output(message.request_id, message.prompt, str(error))
                except EngineStoppedError:  # The core has ended, perhaps by this request.
                    if self._client.lost_process:
                        raise
        return error_output(message.request_id, message.prompt, ENDED_CORES)

    async def _computed(self, message: NewRequest, show: NewDeltas | None) -> RequestOutput:
        """Return the output of a request from the core that is there once there is one."""
        if show is not None:
            show.begin()
        while True:
            while not self._client.status().is_alive:
                if self._client.lost_process:
                    raise EngineStoppedError(self._client.lost_process)
                await asyncio.sleep(POLL_S)
            try:
                stream = await self._client.submit([message], takes_deltas=show is not None)
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
    """Lets requests be computed together that have seen the same number of ends; those with more go first."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._waiting: Counter[int] = Counter()
        self._running: Counter[int] = Counter()
        """Number of ends → requests that have seen so many."""

    @asynccontextmanager
    async def turn(self, num_ends: int) -> AsyncIterator[None]:
        """Wait for the turn of a request that has seen so many ends; it lasts during the `async with`."""
        self._waiting[num_ends] += 1
        async with self._changed:
            try:
                await self._changed.wait_for(partial(self._may_run, num_ends))
            finally:
                self._waiting[num_ends] -= 1
            self._running[num_ends] += 1
        try:
            yield
        finally:
            self._running[num_ends] -= 1
            async with self._changed:
                self._changed.notify_all()

    def _may_run(self, num_ends: int) -> bool:
        have_others = any(count and seen != num_ends for seen, count in self._running.items())
        have_prior = any(count and seen > num_ends for seen, count in self._waiting.items())
        return not have_others and not have_prior and self._running[num_ends] < AT_ONCE[num_ends]
