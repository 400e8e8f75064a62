"""An engine with the thread that steps it, and the named calls of a client: those of one in the same process, and
those that reach a core process as messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.core_thread import CoreThread, Deliver
from ..core.request_counts import RequestCounter
from ..core.stat_loggers import StatLogger, StatLoggers
from ..messages import NewRequest
from ..outputs import EngineSummary
from ..text.grammar.grammar import Matcher
from .core_client import CoreSnapshot, CoreStatus

if TYPE_CHECKING:
    from ..engine import Engine

BETWEEN_STEPS = ("abort", "fork", "reset_prefix_cache", "stats", "summary")
"""Calls for `CoreThread.call`. The others are for any other thread: they wait for a step themselves, or for none."""
CALLS = (*BETWEEN_STEPS, "sleep", "wake_up", "snapshot", "start_profile", "stop_profile")
"""The names of all."""


class CoreCalls:
    """The calls on one engine. It belongs to this object, which shuts it down."""

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        stat_loggers: Sequence[StatLogger] = (),
        *,
        counts_requests: bool = False,
    ):
        """Start the thread, whose deliveries `deliver` takes.

        `stat_loggers` are told of each step and of each ended request, on the thread. With `counts_requests`, so is
        what counts them for `snapshot`.
        """
        self._counter = RequestCounter() if counts_requests else None
        loggers = StatLoggers(stat_loggers if self._counter is None else [*stat_loggers, self._counter])
        if loggers:
            engine.core.observer = loggers
        self.engine = engine
        self.thread = CoreThread(engine.loop, deliver, on_ended=loggers.ended)

    def matchers(self, messages: Sequence[NewRequest]) -> list[Matcher | None]:
        """Return a matcher for each message that has a grammar; one that is not known yet is compiled."""
        grammars = self.engine.core.outputs.grammars
        return [grammars.matcher(message.grammar) if message.grammar else None for message in messages]

    def pause(self, is_paused: bool) -> None:
        """Compute no steps, or compute them again."""
        self.thread.is_paused = is_paused
        self.thread.wake()

    def status(self) -> CoreStatus:
        """Return what the core is doing. Any thread may call, and waits for nothing."""
        plan = self.engine.plan
        num_done, num_programs = plan.progress
        return CoreStatus(
            is_alive=self.thread.is_alive,
            is_sleeping=bool(self.engine.loop.sleep.missing),
            num_programs_done=num_done,
            num_programs=num_programs,
            held_s=plan.pauses.held_s,
            is_compiling=plan.is_compiling,
            num_steps=self.engine.core.num_steps,
            has_work=self.thread.has_work,
        )

    def shutdown(self) -> None:
        """Abort all requests, end the thread, and free the device's memory."""
        self.thread.stop()
        self.engine.shutdown()

    # Between two steps

    def abort(self, request_ids: Sequence[str], sample: int | None = None) -> None:
        self.engine.abort_request(request_ids, sample=sample)

    def fork(self, request_id: str, n: int | None, options: Mapping[str, Any]) -> list[int]:
        return self.engine.fork(request_id, n, **options)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def summary(self) -> EngineSummary:
        return self.engine.summary()

    # On other threads

    def sleep(self, level: int, mode: str) -> None:
        self.engine.sleep(level, mode)
        self.thread.wake()

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self.engine.wake_up(*(() if tags is None else (tags,)))
        self.thread.wake()

    def snapshot(self) -> CoreSnapshot:
        engine = self.engine
        return CoreSnapshot(
            stats=engine.loop.stats(),
            block_size=engine.step_sizes.block_size,
            expert_tokens=engine.expert_tokens_by_layer(),  # Copied from the device.
            requests=None if self._counter is None else self._counter.counts(),
        )

    def start_profile(self, folder: str) -> bool:
        import jax

        return _did(jax.profiler.start_trace, folder)

    def stop_profile(self) -> bool:
        import jax

        return _did(jax.profiler.stop_trace)


def _did(call: Callable[..., object], *args: Any) -> bool:
    """Make a call of JAX's profiler; return False if the profiler refuses it in its present state."""
    try:
        call(*args)
    except RuntimeError:
        return False
    return True
