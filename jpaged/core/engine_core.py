"""The host core: schedules steps, starts them on a runner, and gives the tokens that they sample to the requests.

    schedule → build → dispatch → (in flight) → read → retire

`EngineCore.dispatch` does the first three, `EngineCore.retire` the last two; between them up to two steps are in
flight. A step with masks, those of grammars and of given tokens, is sampled once the host knows all tokens before it:
when it has become the oldest step in flight. The engine, the simulation in the tests and `scripts/bench/scheduler.py`
all drive this one object. It knows no array but the sampled rows and the masks of a step.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import one_line, sent_as
from ..errors import EngineStoppedError
from ..messages import NewRequest
from ..request import CacheKey, Request, RequestState, SampleSequence
from ..sampling.sampling_params import BeamSearchParams
from ..scheduling.beam_search import BeamSearch
from ..scheduling.quarantine import FailureVerdict, Quarantine
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_output import SchedulerOutput
from .step_record import StepObserver, StepRecord, preempted_of, turns_of
from .step_results import StepInFlight, StepResults

if TYPE_CHECKING:
    from ..step.program_gate import ProgramGate
    from ..step.runner import Runner
    from ..step.step_inputs import StepInputBuilder
    from ..text.grammar.grammar import Matcher
    from ..text.output_processor import OutputProcessor

logger = logging.getLogger("jpaged")

GATE_POLL_S = 0.005
"""Seconds that a step without work waits for a program at most."""
STEPS_FAILED = "internal error while its steps were computed"


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
    """Is told of each step, until it raises."""
    gate: ProgramGate | None = None
    """Keeps requests back whose programs are not compiled yet; None if each step may wait for its programs."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    """Steps in the order of their dispatch; the oldest one retires first."""
    num_steps: int = 0
    num_step_tokens: int = 0
    """Tokens that all steps so far have computed."""
    num_padded_tokens: int = 0
    """Tokens that all steps so far had room for: `num_step_tokens` and the padding up to their buckets."""
    num_idle_faults: int = 0
    """How often pages or slots were lost that no request had any more; 0 unless there is a defect."""
    _last_retry: tuple[str, int] = ("", 0)
    """The failure that the last warning told of, and `num_generated` at that time."""

    def __post_init__(self) -> None:
        self.results = StepResults(self.scheduler, self.outputs, self.clock, self.in_flight)

    @property
    def num_generated(self) -> int:
        """Return the number of output tokens that requests have been given."""
        return self.results.num_generated

    def make(self, new: NewRequest, grammar: Matcher | None = None) -> Request:
        """Return the mutable request of a message, not queued yet.

        The request has `params.n` samples, or for a beam search one sample per beam. Raise InvalidRequestError if the
        page pool could not hold the request even if it ran alone. A message with a `policy_key` was checked before, so
        it is not checked again: the check is what gives a request its key. `grammar` is a matcher of the message's
        grammar; None takes one, which may have to be compiled.
        """
        # A beam search runs as a request with one sample per beam; `beams` chooses the tokens of these samples.
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
            mark_ids=new.mark_ids,
            beams=beams,
            form=new.form,
            scoring=new.scoring,
            tempers_scores=new.tempers_scores,
            is_streamed=new.is_streamed,
            policy_key=new.policy_key,
        )
        if new.policy_key is None:
            with sent_as(new.sent_names):
                self.scheduler.check(request)
        if new.grammar:
            self.outputs.set_grammar(request, grammar or self.outputs.grammars.matcher(new.grammar))
        return request

    def policy_key(self, new: NewRequest) -> Any:
        """Return the key that the scheduling policy gives the request of a message.

        Raise InvalidRequestError if the page pool could not hold the request even if it ran alone.
        """
        return self.make(msgspec.structs.replace(new, grammar="")).policy_key

    def add(self, new: NewRequest) -> Request:
        """Queue the request of a message, and return it.

        Raise InvalidRequestError if the page pool can never hold it, and QueueFullError if as many requests or tokens
        wait as the engine's limits allow. In both cases nothing is queued.
        """
        request = self.make(new)
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request of `make`. Raise QueueFullError if as many requests or tokens wait as the limits allow."""
        # A caller may try a full queue again and again, so the room is checked before the output is set up.
        self.scheduler.waiting.check_room(request)
        for sequence in request.live:
            self.outputs.start(sequence)
            self.results.start(sequence)
        self.scheduler.add(request)

    def fork(
        self,
        parent: SampleSequence,
        indices: Sequence[int],
        num_tokens: int | None = None,
        first_token_ids: Sequence[int] | None = None,
    ) -> list[SampleSequence]:
        """Add one sample per sample index to the request of `parent`, and return the new samples.

        `indices` are the sample indices, from which each new sample draws differently. Each starts with the first
        `num_tokens` tokens of the parent, prompt and output, and with their text and logprobs; None: with all that the
        host knows. The next token of each is that of `first_token_ids`, if given, whatever the logits are. Raise
        InvalidRequestError, changing nothing, if there are not as many state slots, or if the page pool could never
        hold the request with so many samples.
        """
        children = self.scheduler.fork(parent, indices, num_tokens, first_token_ids)
        for child in children:
            self.outputs.fork(parent, child)
            self.results.start(child, parent)
        return children

    def abort(self, request: Request) -> None:
        """End a request in any state and drop what is in flight for it. A second call does nothing."""
        for sequence in list(request.live):
            self.scheduler.finish(sequence, RequestState.FINISHED_ABORTED)

    def abort_sample(self, sequence: SampleSequence) -> None:
        """End one sample of a request, in any state; the others go on. Do nothing if it has ended."""
        self.scheduler.finish(sequence, RequestState.FINISHED_ABORTED)

    def fail(self, request: Request, message: str, *, cause: Exception | None = None) -> None:
        """End all samples of a request that have not ended by an error; other requests go on unchanged.

        The request's caller reads `message` and the type of `cause`, which is kept as `request.failure`.
        """
        self.results.fail(request, message, cause=cause)

    def prepare(self) -> None:
        """Tell the scheduler which request to compute alone, if earlier steps have failed; None lets all requests run.

        If the isolated request has got a token since it was isolated, it is released, and all requests are queued anew.
        The same is done if an interrupt during an earlier reset has left the runner without state on the device.
        """
        if self.quarantine.note_step(self.num_generated) or not self.runner.has_state:
            self._start_anew()
        self.scheduler.isolated_request = self.quarantine.isolated_request

    def dispatch_ahead(self, num_steps: int) -> None:
        """Dispatch steps until `num_steps` are in flight or there is nothing to schedule."""
        while len(self.in_flight) < num_steps and not self.dispatch().is_empty:
            pass

    def dispatch(self) -> SchedulerOutput:
        """Schedule one step, build its inputs and start it on the runner; return the work that was scheduled.

        The step is then the last of `in_flight`, and its tokens and padding are counted. The device computes it
        meanwhile; `retire` reads its results. A step without work is not started: the steps in flight must retire
        first, which frees pages and tells the host their tokens. Raise RuntimeError if there is no work although
        requests are unfinished and no step is in flight. The observer, if there is one, is told of the step.
        """
        observer, start_s = self.observer, time.perf_counter()
        if self.gate is not None and (limits := self.gate.new_limits()) is not None:
            self.scheduler.shape.limits = limits
        work = self.scheduler.schedule()
        scheduled_s = time.perf_counter()
        for request, mode, reason in work.preempted:
            logger.debug("request %s is preempted by %s: %s", request.request_id, mode.value, reason)
        if work.is_empty:
            self._check_progress(work)
            return work
        inputs, rows = self.builder.build(work)
        built_s = time.perf_counter()
        assert not any(step.awaits_masks for step in self.in_flight), "its hidden states would be lost"
        step = StepInFlight(work, inputs, rows, self.runner.dispatch(inputs))
        self.num_steps += 1
        if observer is not None:
            times_s = scheduled_s - start_s, built_s - scheduled_s, time.perf_counter() - built_s
            record = self._record(step, *times_s)
            step = step._replace(record=record)
            self._tell(observer.dispatched, record)
        self.in_flight.append(step)
        self._sample_oldest()
        self.num_step_tokens += work.num_tokens
        # A step that decodes K tokens per sequence computes its whole bucket K times. A step without a layout only
        # copies pages or changes page tables, and computes no rows.
        if inputs.layout is not None:
            self.num_padded_tokens += inputs.layout.num_tokens * max(inputs.decode_lens, default=1)
        return work

    def retire(self) -> list[SampleSequence]:
        """Wait for the oldest step in flight, and append the tokens that it has drawn to their sequences.

        Prompt scores of the step go to their requests, and pages that only this step could write may be reused. Return
        the sequences that the step sampled for, in the order of its sampled rows. Some of them may have ended while the
        step was in flight, and got no token. A step must be in flight. The observer, if there is one, is told of it.
        """
        step = self.in_flight[0]
        start_s = time.perf_counter()
        sampled, scores = step.outputs.read(), step.outputs.read_scores()
        self.in_flight.popleft()
        read_s, record = time.perf_counter(), step.record
        # Before `scheduler.retire` counts the positions as scored: an interrupt between the two would lose the scores.
        for scored, batch in zip(step.rows.scored, scores, strict=True):
            self.results.append_scores(scored, batch)
        self.scheduler.retire(step.work)
        self.results.end_scored(step.work)
        if sampled is not None:
            self.results.append(step.rows.samples, step.inputs.decode_lens, sampled)
        self._sample_oldest()
        if record is not None and self.observer is not None:
            record.read_s, record.process_s, record.is_retired = read_s - start_s, time.perf_counter() - read_s, True
            self._tell(self.observer.retired, record)
        return step.rows.samples

    def _sample_oldest(self) -> None:
        """Start the sampler of the oldest step in flight, if that still awaits the masks of its rows.

        All earlier steps have retired, so the matchers have taken every token before this step's. Requests whose
        grammar takes too much work end by an error.
        """
        if self.in_flight and (step := self.in_flight[0]).awaits_masks:
            masks, failures = self.outputs.masks(step.rows.samples, self.builder.rules_spec.vocab_size)
            for sequence, message in failures:
                self.fail(sequence.request, message)
            outputs = self.runner.sample(step.inputs, step.outputs, masks)
            self.in_flight[0] = step._replace(outputs=outputs)

    def _tell(self, observe: Callable[[StepRecord], None], record: StepRecord) -> None:
        """Call a method of the observer. An observer that raises is dropped, and the step goes on."""
        try:
            observe(record)
        except Exception:
            self.observer = None
            logger.exception("the observer of steps raised, and is told of no more of them")

    def _record(self, step: StepInFlight, schedule_s: float, build_s: float, dispatch_s: float) -> StepRecord:
        """Return the record of a step that was just dispatched, for the observer.

        `schedule_s`, `build_s` and `dispatch_s` are the seconds that the host took for these three parts. Requests that
        are swapped out count as waiting. What is known only after the step has retired is left at 0.
        """
        scheduler = self.scheduler
        return StepRecord(
            number=self.num_steps,
            inputs=step.inputs,
            turns=turns_of(step.work),
            num_decodes=len(step.work.decodes),
            preempted=preempted_of(step.work),
            num_waiting=len(scheduler.waiting) + len(scheduler.swapped),
            num_free_pages=scheduler.blocks.num_free,
            schedule_s=schedule_s,
            build_s=build_s,
            dispatch_s=dispatch_s,
        )

    def drop_finished(self) -> None:
        """Retire the oldest steps in flight while all sequences of the oldest one have ended; read no results.

        The tokens of such a step are not needed, and its pages are free from now on. A step that is still running
        cannot harm a later owner of a page: the device computes steps in the order of their dispatch. This stops at the
        first step with a sequence that has not ended.
        """
        while self.in_flight:
            work = self.in_flight[0].work
            sequences = (*work.decodes, *(chunk.sequence for chunk in work.chunks))
            if not all(sequence.state.is_finished for sequence in sequences):
                break
            self.in_flight.popleft()
            self.scheduler.retire(work)
            self._sample_oldest()

    def recover(self, error: BaseException) -> None:
        """Queue all unfinished requests anew after a step has failed with `error`, from the tokens that the host knows.

        All steps in flight are dropped. The quarantine then decides on one of three outcomes. The failure is only
        logged, and the next steps compute what was lost. Or the request that was computed alone ends by an error. Or
        all unfinished requests end by an error, and `error` is raised. An interrupt such as KeyboardInterrupt is always
        raised, and ends no request. So is the EngineStoppedError of a step that waited for a compilation when the
        engine was shut down: no step comes after it.
        """
        # Read before the restart, which empties `running`.
        running, isolated = list(self.scheduler.running), self.scheduler.isolated_request
        if isinstance(error, EngineStoppedError):
            self.restart()
            raise error
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
        """Log a warning that a step failed with `error` and is computed again.

        The warning is one line. A failure with the same type and text as the last one is not logged again before a
        request has got a new token. The warning has a traceback only if the logger's level is DEBUG.
        """
        message = f"{type(error).__name__}: {one_line(error)}"
        if (message, self.num_generated) != self._last_retry:
            self._last_retry = message, self.num_generated
            is_traced = logger.isEnabledFor(logging.DEBUG)
            logger.warning("a step failed, and is computed again (%s)", message, exc_info=error if is_traced else None)

    def _start_anew(self) -> None:
        """Queue all unfinished requests anew, and reset the runner's state on the device."""
        self.restart()
        self.runner.reset()

    def restart(self) -> None:
        """Drop all steps in flight and let every live request be computed again from the tokens that the host knows."""
        self.in_flight.clear()
        for request in self.scheduler.unfinished:
            self.results.keep_chosen_tokens(request)
        self.scheduler.restart()

    def check_idle(self) -> None:
        """Log an error, and count it in `num_idle_faults`, if no request is unfinished and pages or slots are taken.

        Such pages or slots are leaked: nothing would ever free them. While a request is unfinished, this does nothing.
        """
        if not self.scheduler.unfinished and (lost := self.scheduler.idle_fault()) is not None:
            self.num_idle_faults += 1
            logger.error("%s are lost, though no request has them: this is a defect of jpaged; please report it", lost)

    def stats(self) -> dict[str, float | int]:
        """Return counts of steps and tokens since the start, under the names of `Engine.stats`.

        `generation_tokens` are output tokens, `step_tokens` all tokens that steps have computed, and `padded_tokens`
        these and the padding up to the buckets. `padding_share` is the share of `padded_tokens` that was padding; 0
        before the first step.
        """
        return {
            "steps": self.num_steps,
            "generation_tokens": self.num_generated,
            "step_tokens": self.num_step_tokens,
            "padded_tokens": self.num_padded_tokens,
            "idle_faults": self.num_idle_faults,
            "padding_share": 1 - self.num_step_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0,
        }

    def _check_progress(self, work: SchedulerOutput) -> None:
        """Raise RuntimeError if requests are unfinished and no step after the empty step `work` could compute them.

        An empty step is in order while a step is in flight, which may free pages when it retires. It is also in order
        if scheduling it has preempted or ended a request: the next step then finds other pages free. If all requests
        wait for programs, this waits for one of them, but soon returns, so that other requests may come meanwhile.
        """
        if self.gate is not None and not self.in_flight and self.scheduler.waiting.num_parked:
            self.gate.wait(GATE_POLL_S)
            return
        if self.scheduler.has_unfinished and not (self.in_flight or work.preempted or work.ignored):
            cause = "this is a defect of jpaged, or an admission gate that never opens"
            raise RuntimeError(f"the scheduler has unfinished requests and no work for them: {cause}")
