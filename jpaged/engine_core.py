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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .request import Request, RequestState, Sequence
from .schedule import SchedulerOutput
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .output_processor import OutputProcessor
    from .sampler import SampledRows
    from .step_inputs import BuiltStep, StepInputBuilder

logger = logging.getLogger("jpaged")

NOT_FINITE = "the model gave NaN or infinite logits for this request"
NO_TOKEN_LEFT = f"{NOT_FINITE}, or its rules, such as allowed_token_ids and bad_words, leave no token to draw"


class StepResults(Protocol):
    """What a dispatched step will have drawn."""

    def read(self) -> SampledRows | None:
        """Numpy rows in the order of the step's samples, then padding; waits for the device. None if there are none.

        Of a step with `draws`: rows by step, [K, R].
        """
        ...

    def read_scores(self) -> SampledRows | None:
        """The same of a step with `scored`, in their order."""
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
            if step.layout is not None:
                self.num_padded_tokens += step.layout.num_tokens * max(step.draws, default=1)
        elif self.scheduler.has_unfinished and not (self.in_flight or work.preempted or work.ignored):
            raise RuntimeError(
                "the scheduler has requests and finds nothing to do: a defect, or a gate that never opens"
            )
        return work

    def retire(self) -> list[Sequence]:
        """Wait for the oldest step in flight and take in what it drew; returns the sequences that it drew for."""
        work, step, results = self.in_flight[0]
        sampled, scores = results.read(), results.read_scores() if step.scored else None
        self.in_flight.popleft()
        if scores is not None:
            self._take_in_scores(step, scores)  # Before they count as delivered: an interrupt may come.
        self.scheduler.retire(work)
        if sampled is not None and step.draws:
            self._take_in_several(step, sampled)
        elif sampled is not None:
            num_samples = len(step.samples)
            self._take_in(step.samples, sampled.token_ids[:num_samples], sampled.is_finite[:num_samples], sampled)
        return step.samples

    def drop(self) -> None:
        """Retire, unread, steps of which nobody is left: the device does them before whatever comes next."""
        while self.in_flight:
            work = self.in_flight[0].work
            rows = (*work.decodes, *(chunk.sequence for chunk in work.chunks))
            if not all(sequence.state.is_finished for sequence in rows):
                break
            self.in_flight.popleft()
            self.scheduler.retire(work)

    def restart(self) -> None:
        """A step has failed, and with it the device's state: results in flight are lost, all is computed anew."""
        self.in_flight.clear()
        for request in self.scheduler.unfinished:
            if request.beams is not None:
                request.beams.restore(request)
        self.scheduler.restart()

    def fail(self, request: Request, message: str) -> None:
        """End what goes on of a request, every sample of it, by an error. Its neighbours do not notice."""
        request.error = message
        for sequence in list(request.live):
            self.scheduler.finish(sequence, RequestState.FINISHED_ERROR)

    def fail_by(self, request: Request, exception: Exception, *, during: str = "its output was made") -> None:
        """The same, since it has raised this; its caller is told no more of it than its type."""
        logger.error("request %s failed", request.request_id, exc_info=exception)
        self.fail(request, f"internal error while {during}: {type(exception).__name__}")

    def _take_in_scores(self, step: BuiltStep, scores: SampledRows) -> None:
        """Give requests the scores of their prompts' tokens."""
        row = 0
        for request, positions in step.scored:
            rows = range(row, row := row + len(positions))
            if request.state.is_finished:
                continue
            if not scores.is_finite[rows.start : rows.stop].all():
                self.fail(request, NOT_FINITE)
                continue
            try:
                self.outputs.note_scores(request, positions, scores, rows)
            except Exception as exception:  # Whatever one request does to its output, the others go on.
                self.fail_by(request, exception)

    def _take_in_several(self, step: BuiltStep, sampled: SampledRows) -> None:
        """Take in what a step has decoded, token by token. After the one that ends a sequence come none of its own."""
        for index in range(max(step.draws)):
            rows = [
                row
                for row, (sequence, count) in enumerate(zip(step.samples, step.draws, strict=True))
                if index < count and not sequence.state.is_finished
            ]
            samples = [step.samples[row] for row in rows]
            num_left = [step.draws[row] - index - 1 for row in rows]
            self._take_in(samples, sampled.token_ids[index, rows], sampled.is_finite[index, rows], sampled, num_left)

    def _take_in(
        self,
        samples: list[Sequence],
        token_ids: Any,
        is_finite: Any,
        sampled: SampledRows,
        num_left: list[int] | None = None,
    ) -> None:
        """Append each token to its sequence; look closer only where it may end the sequence or fill a page.

        `token_ids` and `is_finite` are numpy, one for each of `samples`; `num_left` says how many more tokens the step
        has for each.
        """
        if not is_finite.all():
            for sequence in (samples[row] for row in np.flatnonzero(~is_finite).tolist()):
                if not sequence.state.is_finished:
                    has_rules = sequence.request.params.has_rules
                    self.fail(sequence.request, NO_TOKEN_LEFT if has_rules else NOT_FINITE)
        row = 0
        try:
            for row, sequence, token_id in zip(range(len(samples)), samples, token_ids.tolist(), strict=True):
                known = sequence.token_ids
                if len(known) < sequence.next_check and not (token_id in sequence.stop_ids or sequence.is_watched):
                    known.append(token_id)
                elif sequence.state.is_finished:
                    self.num_generated -= 1  # It ended while this step was in flight, or by values that are not finite.
                elif sequence.request.beams is not None:
                    self._take_in_beam(sequence, sampled, row)
                else:
                    known.append(token_id)
                    self._look_at(sequence, sampled, row)
        except BaseException:  # An interrupt: the tokens from here on are drawn again.
            self.num_generated += row
            self._take_back(samples[row], num_left[row] if num_left else 0)
            raise
        self.num_generated += len(samples)

    def _take_back(self, sequence: Sequence, num_left: int) -> None:
        """Forget what a sequence has of the token amid which the step was broken off, if it goes on.

        Behind that one the step has `num_left` more of it.
        """
        num_to_come = num_left
        for _, step, _ in self.in_flight:
            counts = step.draws or [1] * len(step.samples)
            num_to_come += sum(count for one, count in zip(step.samples, counts, strict=True) if one is sequence)
        if sequence in sequence.request.live and sequence.request.beams is None:
            # A new array: outputs that were given may look into the old one still.
            sequence.token_ids = sequence.token_ids[: sequence.num_tokens - num_to_come - 1]
            self.outputs.restart(sequence)

    def _take_in_beam(self, sequence: Sequence, sampled: SampledRows, row: int) -> None:
        """A beam's likeliest next tokens are there. With those of all beams of its request, they go on."""
        request, search = sequence.request, sequence.request.beams
        assert search is not None
        assert sampled.scores is not None
        if request.first_token_time is None:
            request.first_token_time = self.clock()
        if request.state is not RequestState.RUNNING:
            return  # It gave its pages back while this step was in flight, and computes this row once more.
        try:
            if search.note(sequence, *sampled.scores.top(row, search.num_of_beam)):
                turn = search.choose(request.live)
                if not turn.choices:
                    search.commit(turn, ())
                heirs = self.scheduler.branch(request, [(one, beam.last_token) for one, beam in turn.choices])
                if turn.choices:
                    search.commit(turn, heirs)
        except Exception as exception:  # Whatever one search does, the others go on.
            self.fail_by(request, exception)

    def _look_at(self, sequence: Sequence, sampled: SampledRows, row: int) -> None:
        """A token that may matter has been appended."""
        request = sequence.request
        if request.first_token_time is None:
            request.first_token_time = self.clock()
        try:
            end = self.outputs.judge(sequence, sampled, row)
        except Exception as exception:  # Whatever one request does to its output, the others go on.
            self.fail_by(request, exception)
            return
        if end is not None or len(sequence.token_ids) > sequence.next_check:
            self.scheduler.note_token(sequence)
        if end is not None:
            self.scheduler.finish(sequence, end)
