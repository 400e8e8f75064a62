"""The host core: schedules steps, starts them on a runner, and gives the tokens that they sample to the requests.

    schedule → build → dispatch → (in flight) → read → retire

`EngineCore.dispatch` does the first three, `EngineCore.retire` the last two; between them up to two steps are in
flight. The engine, the simulation in the tests and `scripts/bench/scheduler.py` all drive this one object. It knows no
array but the sampled rows of a step.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..checks import one_line
from ..messages import NewRequest
from ..request import CacheKey, Request, RequestState, SampleSequence
from ..sampling.sampling_params import BeamSearchParams
from ..scheduling.beam_search import BeamSearch, BeamStep
from ..scheduling.quarantine import FailureVerdict, Quarantine
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_output import SchedulerOutput
from .step_record import StepObserver, StepRecord, preempted_of, turns_of

if TYPE_CHECKING:
    from ..sampling.sampler import SampledRows
    from ..step.runner import Runner, StepOutputs
    from ..step.step_inputs import StepInputBuilder
    from ..step.step_records import StepInputs, StepRows
    from ..text.output_processor import OutputProcessor

logger = logging.getLogger("jpaged")

NOT_FINITE = "the model gave NaN or infinite logits for this request"
NO_TOKEN_LEFT = f"{NOT_FINITE}, or its rules, such as allowed_token_ids and bad_words, leave no token to draw"
OUTPUT_FAILED = "internal error while its output was made"
STEPS_FAILED = "internal error while its steps were computed"


class StepInFlight(NamedTuple):
    """A step that was dispatched and has not retired."""

    work: SchedulerOutput
    inputs: StepInputs
    rows: StepRows
    outputs: StepOutputs
    record: StepRecord | None = None
    """What the observer is told of it; None without one."""


@dataclass(eq=False, kw_only=True)
class EngineCore:
    """Scheduler, step builder, runner and output processor, driven one step at a time."""

    scheduler: Scheduler
    builder: StepInputBuilder
    runner: Runner
    outputs: OutputProcessor
    clock: Callable[[], float]
    """Gives seconds, by which the times of requests are taken."""
    seed: int = 0
    """Seeds the draws of requests that have no seed of their own."""
    observer: StepObserver | None = None
    """Is told of each step."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    """Steps in the order of their dispatch; the oldest one retires first."""
    num_steps: int = 0
    num_step_tokens: int = 0
    """Tokens that all steps so far have computed."""
    num_padded_tokens: int = 0
    """Tokens that all steps so far had room for: `num_step_tokens` and the padding up to their buckets."""
    num_generated: int = 0
    """Output tokens that requests have been given."""
    num_idle_faults: int = 0
    """How often pages or slots were lost that no request had any more; 0 unless there is a defect."""
    _last_retry: tuple[str, int] = ("", 0)
    """The failure that the last warning told of, and `num_generated` at that time."""

    def make(self, new: NewRequest) -> Request:
        """Return a request that is not queued; raise InvalidRequestError if it can never fit."""
        params, beams = new.params, None
        if isinstance(params, BeamSearchParams):
            beams = BeamSearch(params, new.stop_ids, new.max_tokens)
            params = params.as_samples(beams.num_top_tokens)
        request = Request(
            request_id=new.request_id,
            number=new.number,
            prompt_token_ids=array("i", new.prompt_token_ids),
            params=params,
            arrival_time=new.arrival_time,
            max_tokens=new.max_tokens,
            engine_seed=self.seed,
            num_groups=self.scheduler.arithmetic.num_groups,
            prompt=new.prompt,
            priority=new.priority,
            cache_key=CacheKey(cache_salt=new.cache_salt),
            stop_ids=new.stop_ids,
            bad_words=new.bad_words,
            beams=beams,
            form=new.form,
            given_token=new.given_token,
            tempers_scores=new.tempers_scores,
            policy_key=new.policy_key,
        )
        if new.policy_key is None:
            self.scheduler.check(request)
        return request

    def add(self, new: NewRequest) -> Request:
        """Queue a request, and return it.

        Raise InvalidRequestError if it can never fit, QueueFullError if too many wait.
        """
        request = self.make(new)
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request of `make`. Raise QueueFullError if too many wait."""
        # A caller may try a full queue again and again, so the room is checked before the output is set up.
        self.scheduler.waiting.check_room(request)
        for sequence in request.live:
            self.outputs.start(sequence)
        self.scheduler.add(request)

    def fork(self, parent: SampleSequence, indices: Sequence[int]) -> list[SampleSequence]:
        """Add one sample per index to the parent's request, each with the parent's tokens and output so far.

        Raise InvalidRequestError, changing nothing, if the request could never fit with so many samples.
        """
        children = self.scheduler.fork(parent, indices)
        for child in children:
            self.outputs.fork(parent, child)
        return children

    def abort(self, request: Request) -> None:
        """End a request in any state and drop what is in flight for it. A second call does nothing."""
        for sequence in list(request.live):
            self.scheduler.finish(sequence, RequestState.FINISHED_ABORTED)

    def fail(self, request: Request, message: str, *, cause: Exception | None = None) -> None:
        """End all samples of a request that have not ended by an error; other requests go on unchanged.

        The request's caller reads `message` and the type of `cause`, which is kept as `request.failure`.
        """
        if cause is not None:
            request.failure, message = cause, f"{message}: {type(cause).__name__}"
        self.scheduler.fail(request, message)

    def prepare(self) -> None:
        """Let the scheduler know which request to compute alone, if earlier steps have failed."""
        if self.quarantine.note_step(self.num_generated):
            self._start_anew()
        self.scheduler.isolated_request = self.quarantine.isolated_request

    def dispatch_ahead(self, num_steps: int) -> None:
        """Dispatch steps until `num_steps` are in flight or there is nothing to schedule."""
        while len(self.in_flight) < num_steps and not self.dispatch().is_empty:
            pass

    def dispatch(self) -> SchedulerOutput:
        """Schedule, build and start one step. An empty one is not started: only a retiring step makes new work."""
        observer, start_s = self.observer, time.perf_counter()
        work = self.scheduler.schedule()
        scheduled_s = time.perf_counter()
        for request, mode, reason in work.preempted:
            logger.debug("request %s is preempted by %s: %s", request.request_id, mode.value, reason)
        if work.is_empty:
            self._check_progress(work)
            return work
        inputs, rows = self.builder.build(work)
        built_s = time.perf_counter()
        step = StepInFlight(work, inputs, rows, self.runner.dispatch(inputs))
        self.num_steps += 1
        if observer is not None:
            record = self._record(step, scheduled_s - start_s, built_s - scheduled_s, built_s)
            step = step._replace(record=record)
            observer.dispatched(record)
        self.in_flight.append(step)
        self.num_step_tokens += work.num_tokens
        if inputs.layout is not None:
            self.num_padded_tokens += inputs.layout.num_tokens * max(inputs.decode_lens, default=1)
        return work

    def retire(self) -> list[SampleSequence]:
        """Wait for the oldest step in flight, append its tokens, and return the sequences that it sampled for."""
        work, inputs, rows, outputs, record = self.in_flight[0]
        start_s = time.perf_counter()
        sampled, scores = outputs.read(), outputs.read_scores() if rows.scored else None
        self.in_flight.popleft()
        read_s = time.perf_counter()
        if scores is not None:
            self._append_scores(rows, scores)  # Before they count as delivered: an interrupt may come.
        self.scheduler.retire(work)
        if sampled is not None and inputs.decode_lens:
            self._append_decode_steps(rows.samples, inputs.decode_lens, sampled)
        elif sampled is not None:
            count = len(rows.samples)
            self._append_sampled(rows.samples, sampled.token_ids[:count], sampled.is_finite[:count], sampled)
        if record is not None and self.observer is not None:
            record.read_s, record.process_s, record.is_retired = read_s - start_s, time.perf_counter() - read_s, True
            self.observer.retired(record)
        return rows.samples

    def _record(self, step: StepInFlight, schedule_s: float, build_s: float, built_s: float) -> StepRecord:
        """Return what an observer is told of a step that was just dispatched; it was built at `built_s`."""
        scheduler = self.scheduler
        return StepRecord(
            number=self.num_steps,
            inputs=step.inputs,
            turns=turns_of(step.work),
            preempted=preempted_of(step.work),
            num_waiting=len(scheduler.waiting) + len(scheduler.swapped),
            num_free_pages=scheduler.blocks.num_free,
            schedule_s=schedule_s,
            build_s=build_s,
            dispatch_s=time.perf_counter() - built_s,
        )

    def drop_finished(self) -> None:
        """Retire, without reading, the oldest steps whose sequences have all ended.

        The device computes them before any later step, so their pages are free for that one.
        """
        while self.in_flight:
            work = self.in_flight[0].work
            rows = (*work.decodes, *(chunk.sequence for chunk in work.chunks))
            if not all(sequence.state.is_finished for sequence in rows):
                break
            self.in_flight.popleft()
            self.scheduler.retire(work)

    def recover(self, error: BaseException) -> None:
        """Set everything up to compute again what a failed step has lost, and end the requests that make steps fail.

        Raise `error` if it ends all requests, or is an interrupt such as KeyboardInterrupt.
        """
        running, isolated = list(self.scheduler.running), self.scheduler.isolated_request
        self._start_anew()
        if not isinstance(error, Exception):
            raise error
        verdict = self.quarantine.note_failure(running, self.num_generated)
        if verdict is FailureVerdict.END_ISOLATED and isolated is not None and not isolated.state.is_finished:
            self.fail(isolated, STEPS_FAILED, cause=error)
        elif verdict is FailureVerdict.END_ALL:
            for request in list(self.scheduler.unfinished):
                self.fail(request, STEPS_FAILED, cause=error)
            raise error
        else:
            self._warn_of_retry(error)

    def _warn_of_retry(self, error: Exception) -> None:
        """Say in one line that a step is computed again; once for failures that repeat without a token between them."""
        retry = f"{type(error).__name__}: {one_line(error)}", self.num_generated
        if retry != self._last_retry:
            self._last_retry = retry
            is_traced = logger.isEnabledFor(logging.DEBUG)
            logger.warning("a step failed, and is computed again (%s)", retry[0], exc_info=error if is_traced else None)

    def _start_anew(self) -> None:
        self.restart()
        self.runner.reset()

    def restart(self) -> None:
        """Drop all steps in flight and let every live request be computed again from the tokens that the host knows."""
        self.in_flight.clear()
        for request in self.scheduler.unfinished:
            if isinstance(request.beams, BeamSearch):
                for sequence in request.live:
                    sequence.token_ids = request.prompt_token_ids + array("i", request.beams.token_ids_of(sequence))
        self.scheduler.restart()

    def check_idle(self) -> None:
        """If no request is unfinished and pages or slots are lost, log that as an error and count it."""
        if not self.scheduler.unfinished and (lost := self.scheduler.idle_fault()) is not None:
            self.num_idle_faults += 1
            logger.error("%s are lost, though no request has them: this is a defect of jpaged; please report it", lost)

    def stats(self) -> dict[str, float | int]:
        """Count steps and tokens since the start, under the names of `Engine.stats`."""
        return {
            "steps": self.num_steps,
            "generation_tokens": self.num_generated,
            "step_tokens": self.num_step_tokens,
            "padded_tokens": self.num_padded_tokens,
            "idle_faults": self.num_idle_faults,
            "padding_share": 1 - self.num_step_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0,
        }

    def _check_progress(self, work: SchedulerOutput) -> None:
        """Raise RuntimeError if an empty step means that no later one will have work either."""
        if self.scheduler.has_unfinished and not (self.in_flight or work.preempted or work.ignored):
            cause = "this is a defect of jpaged, or an admission gate that never opens"
            raise RuntimeError(f"the scheduler has unfinished requests and no work for them: {cause}")

    def _append_scores(self, step_rows: StepRows, scores: SampledRows) -> None:
        """Give each request the logprobs of its prompt tokens that the step has scored."""
        row = 0
        for request, positions in step_rows.scored:
            rows = range(row, row := row + len(positions))
            if request.state.is_finished:
                continue
            if not scores.is_finite[rows.start : rows.stop].all():
                self.fail(request, NOT_FINITE)
                continue
            try:
                self.outputs.append_scores(request, positions, scores, rows)
            except Exception as exception:  # Whatever one request does to its output, the others go on.
                self.fail(request, OUTPUT_FAILED, cause=exception)

    def _append_decode_steps(self, samples: list[SampleSequence], lens: list[int], sampled: SampledRows) -> None:
        """Append the tokens of a step that decoded several times, in their order; none behind a sequence's end.

        `lens` has the most tokens that the step has drawn for each sequence.
        """
        for index in range(max(lens)):
            rows = [row for row, one in enumerate(samples) if index < lens[row] and not one.state.is_finished]
            live, num_left = [samples[row] for row in rows], [lens[row] - index - 1 for row in rows]
            now = sampled.at(index, rows)
            self._append_sampled(live, now.token_ids, now.is_finite, now, num_left)

    def _append_sampled(
        self,
        samples: list[SampleSequence],
        token_ids: Any,
        is_finite: Any,
        sampled: SampledRows,
        num_left: list[int] | None = None,
    ) -> None:
        """Append each token to its sequence; process only those that may end it, fill a page or be shown.

        `token_ids` and `is_finite` are numpy arrays with one entry per sequence of `samples`. `num_left` says how many
        more tokens the step has for each sequence, None for none.
        """
        if not is_finite.all():
            for sequence in (samples[row] for row in np.flatnonzero(~is_finite).tolist()):
                if not sequence.state.is_finished:
                    has_rules = sequence.request.params.has_rules
                    self.fail(sequence.request, NO_TOKEN_LEFT if has_rules else NOT_FINITE)
        row = 0
        scores = sampled.scores
        logprobs = [] if scores is None else scores.logprobs.tolist()
        log_masses = [] if scores is None or scores.log_kept_masses is None else scores.log_kept_masses.tolist()
        try:
            for row, one, token_id in zip(range(len(samples)), samples, token_ids.tolist(), strict=True):
                known = one.token_ids
                if one.token_logprobs is not None and not one.state.is_finished:
                    one.token_logprobs.append(logprobs[row])
                if one.token_log_masses is not None and not one.state.is_finished:
                    one.token_log_masses.append(log_masses[row])
                if len(known) < one.check_at_len and not (token_id in one.stop_ids or one.needs_every_token):
                    known.append(token_id)
                elif one.state.is_finished:
                    self.num_generated -= 1  # It ended while this step was in flight, or its logits were not finite.
                elif one.request.beams is not None:
                    self._append_beam(one, sampled, row)
                else:
                    known.append(token_id)
                    self._process_token(one, sampled, row)
        except BaseException:  # An interrupt: the restart that follows draws the tokens from here on again.
            self.num_generated += row
            self._roll_back(samples[row], num_left[row] if num_left else 0)
            raise
        self.num_generated += len(samples)

    def _roll_back(self, sequence: SampleSequence, num_left: int) -> None:
        """Remove from a sequence the token at which an interrupt came, with its text and logprobs, if it has them.

        `num_left` is the number of tokens that the interrupted step has for the sequence behind that one.
        """
        num_to_come = num_left
        for step in self.in_flight:
            samples = step.rows.samples
            counts = step.inputs.decode_lens or [1] * len(samples)
            num_to_come += sum(count for one, count in zip(samples, counts, strict=True) if one is sequence)
        if sequence in sequence.request.live and sequence.request.beams is None:
            del sequence.token_ids[sequence.num_tokens - num_to_come - 1 :]
            for numbers in (sequence.token_logprobs, sequence.token_log_masses):
                if numbers is not None:
                    del numbers[sequence.num_output_tokens :]
            self.outputs.restart(sequence)

    def _append_beam(self, sequence: SampleSequence, sampled: SampledRows, row: int) -> None:
        """Note the likeliest next tokens of one beam; with those of the request's last beam, choose how all go on."""
        request, search = sequence.request, sequence.request.beams
        assert isinstance(search, BeamSearch)
        assert sampled.scores is not None
        if request.first_token_time is None:
            request.first_token_time = self.clock()
        if request.state is not RequestState.RUNNING:
            return  # It was preempted while this step was in flight, and computes this row again.
        try:
            if search.add_scores(sequence, *sampled.scores.top(row, search.num_top_tokens)):
                step = search.choose(request.live)
                if not step.choices:
                    search.commit(step, ())
                successors = self._extend_beams(request, step)
                if step.choices:
                    search.commit(step, successors)
        except Exception as exception:  # Whatever one search does, other requests go on.
            self.fail(request, OUTPUT_FAILED, cause=exception)

    def _extend_beams(self, request: Request, step: BeamStep) -> list[SampleSequence]:
        """Give a request's samples the tokens of the step's choices; return the sample of each choice."""
        successors = self.scheduler.branch(request, [parent for parent, _ in step.choices])
        for successor, (parent, _) in zip(successors, step.choices, strict=True):
            if successor is not parent:
                successor.token_ids = parent.token_ids[:]
        for successor, (_, beam) in zip(successors, step.choices, strict=True):
            successor.token_ids.append(beam.last_token)
            self.scheduler.count_chosen_token(successor)
        return successors

    def _process_token(self, sequence: SampleSequence, sampled: SampledRows, row: int) -> None:
        """Apply stop rules, text and page bookkeeping to the token that was appended to a sequence last."""
        request = sequence.request
        if request.first_token_time is None:
            request.first_token_time = self.clock()
        try:
            end = self.outputs.check_stop(sequence, sampled, row)
        except Exception as exception:  # Whatever one request does to its output, the others go on.
            self.fail(request, OUTPUT_FAILED, cause=exception)
            return
        if end is not None or len(sequence.token_ids) > sequence.check_at_len:
            self.scheduler.update_pages(sequence)
        if end is not None:
            self.scheduler.finish(sequence, end)


def fault_of(failure: BaseException) -> tuple[str, str, int]:
    """Return what equal failures have in common: the type of the exception, and the line that has raised it."""
    traceback = failure.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = ("", 0) if traceback is None else (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
    return type(failure).__name__, *place
