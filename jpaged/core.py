"""The host core: requests in, steps out to a runner, results back in. One object behind engine, simulation and bench.

    schedule ─▶ build ─▶ runner.dispatch ─▶ (in flight) ─▶ read ─▶ retire

`dispatch` and `retire` may be called apart: results of up to two steps may be in flight. Knows no array beyond
the rows that a step has drawn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from .request import Request, RequestState, Sequence
from .schedule import SchedulerOutput
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .output_processor import OutputProcessor
    from .sampler import SampledRows
    from .step_inputs import BuiltStep, StepInputBuilder

logger = logging.getLogger("jpaged")


class StepResults(Protocol):
    """What a dispatched step will have drawn."""

    def read(self) -> SampledRows | None:
        """Numpy rows in the order of the step's samples; waits for the device. None if there are none."""
        ...


class StepRunner(Protocol):
    """A device, as far as the host core knows it."""

    def dispatch(self, step: BuiltStep) -> StepResults: ...


class StepInFlight(NamedTuple):
    """A step that the device may still be computing."""

    work: SchedulerOutput
    step: BuiltStep
    results: StepResults


class Core:
    """Scheduler, step builder, runner and output rules, one step at a time."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        builder: StepInputBuilder,
        runner: StepRunner,
        outputs: OutputProcessor,
        clock: Callable[[], float],
    ):
        self.scheduler = scheduler
        self.builder = builder
        self.runner = runner
        self.outputs = outputs
        self.clock = clock
        self.in_flight: deque[StepInFlight] = deque()
        self.num_steps = self.num_step_tokens = self.num_padded_tokens = self.num_generated = 0

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequestError or QueueFullError if it is not taken."""
        self.scheduler.waiting.check_room(request)  # First: where it has to be tried again, starting is not for free.
        for sequence in request.live:
            self.outputs.start(sequence)
        self.scheduler.add(request)

    def fork(self, parent: Sequence, indices: SequenceOf[int]) -> list[Sequence]:
        """Further samples of the parent's request, equal to it so far; InvalidRequestError as `Scheduler.fork`."""
        children = self.scheduler.fork(parent, indices)
        for child in children:
            self.outputs.fork(parent, child)
        return children

    def abort(self, request: Request) -> None:
        """End a request wherever it stands; what is in flight for it is dropped. A second call does nothing."""
        for sequence in list(request.live):
            self.scheduler.finish(sequence, RequestState.FINISHED_ABORTED)

    def dispatch(self) -> SchedulerOutput:
        """Schedule a step and start it. An empty one is not started: there is nothing to do before one retires."""
        work = self.scheduler.schedule()
        for request, mode, reason in work.preempted:
            logger.debug("request %s is preempted by %s: %s", request.request_id, mode.value, reason)
        if not work.is_empty:
            step = self.builder.build(work)
            self.in_flight.append(StepInFlight(work, step, self.runner.dispatch(step)))
            self.num_steps += 1
            self.num_step_tokens += work.num_tokens
            self.num_padded_tokens += step.layout.num_tokens if step.layout else 0
        elif self.scheduler.has_unfinished and not (self.in_flight or work.preempted or work.ignored):
            raise RuntimeError(
                "the scheduler has requests and finds nothing to do: a defect, or a gate that never opens"
            )
        return work

    def retire(self) -> list[Sequence]:
        """Wait for the oldest step in flight and take in what it drew; returns the sequences that it drew for."""
        work, step, results = self.in_flight[0]
        sampled = results.read()
        self.in_flight.popleft()
        self.scheduler.retire(work)
        if sampled is not None:
            self._take_in(step.samples, sampled)
        return step.samples

    def restart(self) -> None:
        """A step has failed, and with it the device's state: results in flight are lost, all is computed anew."""
        self.in_flight.clear()
        self.scheduler.restart()

    def _take_in(self, samples: list[Sequence], sampled: SampledRows) -> None:
        """Append each token to its sequence; look closer only where it may end the sequence or fill a page."""
        if not sampled.is_finite.all():
            for row in np.flatnonzero(~sampled.is_finite).tolist():
                self._fail(samples[row], "the model gave NaN or infinite logits for this request")
        row = 0
        try:
            for row, (sequence, token_id) in enumerate(zip(samples, sampled.token_ids.tolist(), strict=True)):
                token_ids = sequence.token_ids
                if len(token_ids) + 1 < sequence.next_check and not (
                    token_id in sequence.stop_ids or sequence.is_watched
                ):
                    token_ids.append(token_id)
                elif sequence.state.is_finished:
                    self.num_generated -= 1  # It ended while this step was in flight, or by values that are not finite.
                else:
                    token_ids.append(token_id)
                    self._look_at(sequence, sampled, row)
        except BaseException:  # An interrupt: the tokens from here on are drawn again.
            self.num_generated += row
            self._take_back(samples[row])
            raise
        self.num_generated += len(samples)

    def _take_back(self, sequence: Sequence) -> None:
        """Forget what a sequence has of the token amid which the step was broken off, if it goes on."""
        num_to_come = sum(sequence in step.samples for _, step, _ in self.in_flight)
        if sequence in sequence.request.live:
            del sequence.token_ids[sequence.num_tokens - num_to_come - 1 :]
            self.outputs.restart(sequence)

    def _look_at(self, sequence: Sequence, sampled: SampledRows, row: int) -> None:
        """A token that may matter has been appended."""
        request = sequence.request
        if request.first_token_time is None:
            request.first_token_time = self.clock()
        try:
            end = self.outputs.judge(sequence, sampled, row)
        except Exception as error:  # Whatever one request does to its output, the others go on.
            logger.exception("request %s failed", request.request_id)
            self._fail(sequence, f"internal error while its output was made: {type(error).__name__}")
            return
        if end is not None or len(sequence.token_ids) >= sequence.next_check:
            self.scheduler.note_token(sequence)
        if end is not None:
            self.scheduler.finish(sequence, end)

    def _fail(self, sequence: Sequence, message: str) -> None:
        if not sequence.state.is_finished:
            sequence.request.error = message
            self.scheduler.finish(sequence, RequestState.FINISHED_ERROR)
