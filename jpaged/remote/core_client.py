"""What callers ask of a core that computes elsewhere, in another thread or in another process, and what they get.

    messages ─▶ submit ─▶ core ─▶ put ─▶ OutputStream ─▶ take ─▶ the reader's task

A client belongs to the tasks of event loops. All that it takes and returns is plain: messages, names, numbers and
frozen records. Knows no engine.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..core.request_counts import RequestCounts
from ..messages import NewRequest
from ..outputs import EngineSummary, StepOutputs

COMPILING_FACTOR = 10
"""How many times as long as a step a compilation may take."""


class CoreStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a core is doing, as far as its client knows without asking it."""

    is_alive: bool
    """It takes requests: it was not shut down, and has not failed."""
    is_sleeping: bool
    """It has given the device's memory away."""
    num_programs_done: int
    """Programs whose compilation has ended, also by an error."""
    num_programs: int
    """Programs that were asked for so far."""
    held_s: float
    """Seconds for which programs that nobody waits for were held while requests ran."""
    is_compiling: bool
    """A program is missing that was asked for. In a core that was shut down: a compilation has not ended."""
    num_steps: int
    """Steps that were started so far."""
    has_work: bool
    """Requests are there that steps compute."""


class CoreSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The counters and sizes of a core."""

    stats: dict[str, float | int]
    """As `EngineLoop.stats` names them."""
    block_size: int
    """Tokens of a page."""
    expert_tokens: dict[int, list[int]] = {}
    """Layer → how many tokens have chosen each expert, in the steps that the device is done with. Empty unless the
    engine counts them."""
    requests: RequestCounts | None = None
    """Counts and times of steps and requests, of a client that counts them."""


class CoreState(NamedTuple):
    """One core process as its owner sees it."""

    engine: int
    """Counts the cores of a client from 0."""
    status: str
    """"ok", "starting", "sleeping", "stalled", "stopping" or "failed"."""


class WatchOptions(NamedTuple):
    """How long a core may make no progress, and what happens then."""

    step_s: float = 60.0
    """Seconds in which a step, or the core's next heartbeat, must have come; COMPILING_FACTOR times as many while
    programs are compiled."""
    start_s: float = 600.0
    """Seconds in which the start must have come further."""
    ends_core: bool = False
    """A core process that hangs is killed; else it is only reported."""

    def limit_s(self, status: CoreStatus) -> float:
        """Return the seconds that a core may take for what it is doing."""
        return self.step_s * (COMPILING_FACTOR if status.is_compiling else 1)


class RequestNames:
    """Gives requests their ids, which no other requests have, and their numbers."""

    def __init__(self, take_numbers: Callable[[int], int] | None = None):
        """`take_numbers(n)` reserves n consecutive numbers, and returns the first; by default they begin with 0."""
        self._take_numbers, self._prefix = take_numbers or self._next_numbers, secrets.token_hex(4)
        self._num_taken = 0

    def named(self, messages: Sequence[NewRequest]) -> list[NewRequest]:
        """Return the messages with the next ids and numbers."""
        return [
            msgspec.structs.replace(message, request_id=f"{self._prefix}-{number}", number=number)
            for number, message in enumerate(messages, self._take_numbers(len(messages)))
        ]

    def _next_numbers(self, count: int) -> int:
        self._num_taken += count
        return self._num_taken - count


class GivenNames(RequestNames):
    """Leaves requests the ids and numbers that they have."""

    def named(self, messages: Sequence[NewRequest]) -> list[NewRequest]:
        return list(messages)


class StreamOwner(ABC):
    """What a stream tells of its reader: the client of the core that computes its requests."""

    @abstractmethod
    def note_taken(self, stream: OutputStream) -> None:
        """Note that a reader has taken its last outputs, so that the core makes the next ones."""

    @abstractmethod
    def drop(self, stream: OutputStream) -> None:
        """End all requests of a reader that takes no more outputs, and forget it."""


class CoreClient(ABC):
    """The calls of a core. Those that must wait for the core's answer are awaited.

    They raise EngineStoppedError if the core was shut down or has failed, and what `Engine` raises under the same name.
    """

    @abstractmethod
    async def submit(self, messages: Sequence[NewRequest], *, takes_deltas: bool) -> OutputStream:
        """Queue the requests of some messages, all of them or none, and return the stream of their outputs.

        The client gives them their ids and numbers, and the core compiles their grammars. With `takes_deltas` the
        stream gets deltas, else outputs. The caller closes it. Raise InvalidRequestError if a request can never fit,
        and QueueFullError if there is no room for all.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str], sample: int | None = None) -> None:
        """End requests, or one sample of one; their streams get last outputs. See `Engine.abort_request`."""

    @abstractmethod
    async def fork(self, request_id: str, n: int | None, options: Mapping[str, Any]) -> list[int]:
        """Add samples to a request and return their indices; `options` are the named arguments of `Engine.fork`."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""

    @abstractmethod
    async def sleep(self, level: int, mode: str) -> None:
        """Give the device's memory away; see `Engine.sleep`."""

    @abstractmethod
    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the device's memory back, all of it or what the tags name; see `Engine.wake_up`."""

    @abstractmethod
    def pause(self) -> None:
        """Compute no steps until `resume`; requests are taken and wait."""

    @abstractmethod
    def resume(self) -> None:
        """Go on computing."""

    @abstractmethod
    def status(self) -> CoreStatus:
        """Return what the core is doing. This waits for nothing, and can be called whatever the core does."""

    def states(self) -> list[CoreState]:
        """Return how each core process is; none for an engine in this process. This waits for nothing."""
        return []

    @abstractmethod
    def watch(self, options: WatchOptions) -> str:
        """Return what hangs in the core, as a sentence without its full stop; empty while it goes on.

        Called about once a second. The stacks of all threads are printed once it hangs; see `WatchOptions` for more.
        """

    @property
    def lost_process(self) -> str:
        """Return how the process of the core has ended by itself; empty while it runs, and for a core without one."""
        return ""

    @abstractmethod
    async def snapshot(self) -> CoreSnapshot:
        """Return the counters of the core, which waits for no step; of one that was shut down, the last ones."""

    async def snapshots(self) -> dict[int, CoreSnapshot]:
        """Return the counters of each core by itself, as `snapshot` does; cores count from 0."""
        return {0: await self.snapshot()}

    @abstractmethod
    async def stats(self) -> dict[str, Any]:
        """Return the counters of `Engine.stats`, taken between two steps."""

    @abstractmethod
    async def summary(self) -> EngineSummary:
        """Return what the engine is and has done, taken between two steps; see `Engine.summary`."""

    @abstractmethod
    async def start_profile(self, folder: str) -> bool:
        """Let JAX write a profile into a folder from now on; return False if it is writing one already."""

    @abstractmethod
    async def stop_profile(self) -> bool:
        """End the profile and write its files; return False if there is none."""

    @abstractmethod
    def shutdown(self) -> None:
        """Abort all requests, end the core, and free the device's memory. Streams raise EngineStoppedError."""


class OutputStream:
    """The outputs of some requests as their reader, one task of an event loop, takes them."""

    def __init__(self, owner: StreamOwner, request_ids: list[str]):
        """Start without outputs, in the event loop that runs.

        `request_ids` are the core's ids of the requests, in the order of their messages.
        """
        self.loop = asyncio.get_running_loop()
        self.request_ids = request_ids
        self._owner = owner
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
            self._owner.note_taken(self)
        elif self._error is not None:
            raise self._error
        return outputs

    def put(self, outputs: StepOutputs) -> None:
        """Take what the requests have got, for `take`. The owner calls this on the stream's event loop."""
        if not self._is_closed:
            self._outputs = outputs
            self.nudge()

    def fail(self, error: Exception) -> None:
        """Let `take` raise an error once it has returned all outputs. The owner calls this on the event loop too."""
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
            self._owner.drop(self)
