"""Gives the results of a step to the requests: tokens to sequences, scores to prompts, choices to beam searches.

Knows sampled rows, stop rules and the scheduler's bookkeeping; not how steps are built or started. Whatever one request
does to its output, the others go on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from ..request import Request, RequestState, SampleSequence
from ..sampling.token_numbers import TokenNumbers
from ..scheduling.beam_search import BeamSearch, BeamStep
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_output import SchedulerOutput
from ..text.grammar.grammar import GrammarFailure
from .step_record import StepRecord

if TYPE_CHECKING:
    from ..sampling.sampler import SampledRows
    from ..step.step_outputs import StepOutputs
    from ..step.step_records import ScoredPositions, StepInputs, StepRows
    from ..text.output_processor import OutputProcessor

NOT_FINITE = "the model gave NaN or infinite logits for this request"
NO_TOKEN_LEFT = (
    f"{NOT_FINITE}, or its rules, such as structured_outputs, allowed_token_ids, bad_words and min_tokens, together "
    "leave no token to draw"
)
OUTPUT_FAILED = "internal error while its output was made"


class StepInFlight(NamedTuple):
    """A step that was dispatched and has not retired."""

    work: SchedulerOutput
    inputs: StepInputs
    rows: StepRows
    outputs: StepOutputs
    record: StepRecord | None = None
    """What the observer is told of it; None without one."""

    @property
    def awaits_masks(self) -> bool:
        """Return whether its sampler has still to be started, by `Runner.sample`."""
        return self.outputs.columns is not None


@dataclass(eq=False, slots=True)
class StepResults:
    """The tokens and scores of steps on their way to requests."""

    scheduler: Scheduler
    outputs: OutputProcessor
    clock: Callable[[], float]
    """Gives seconds, by which the times of requests are taken."""
    in_flight: Collection[StepInFlight]
    """The core's own deque of steps that were dispatched after the one whose results are given."""
    num_generated: int = 0
    """Output tokens that requests have been given."""

    def fail(self, request: Request, message: str, *, cause: Exception | None = None) -> None:
        """End all samples of a request that have not ended by an error; see `EngineCore.fail`."""
        if cause is not None:
            request.failure, message = cause, f"{message}: {type(cause).__name__}"
        self.scheduler.fail(request, message)

    def keep_chosen_tokens(self, request: Request) -> None:
        """Give each sample of a beam search the tokens that the search has committed for it.

        Tokens of a choice that an interrupt has stopped before its commit are dropped. A sample's tokens become the
        prompt and the output tokens of its beam. Requests without a beam search are unchanged.
        """
        if isinstance(request.beams, BeamSearch):
            for sequence in request.live:
                sequence.token_ids = request.prompt_token_ids + array("i", request.beams.token_ids_of(sequence))

    def start(self, sequence: SampleSequence, parent: SampleSequence | None = None) -> None:
        """Give a sequence the arrays of numbers that its request asks for, unless `start_with` has given it some.

        They have a row for each output token that it may have; a fork begins with those of its parent.
        """
        request, numbers = sequence.request, parent.numbers if parent is not None else None
        if isinstance(numbers, TokenNumbers):
            sequence.numbers = numbers.copy()
        if sequence.numbers is not None or not (request.has_numbers or request.params.log_kept_mass):
            return
        params, num_tokens = request.params, sequence.max_len - request.prompt_len
        has_logprobs = request.has_numbers and params.logprobs is not None
        num_tops = (params.logprobs or 0) if has_logprobs else 0
        sequence.numbers = TokenNumbers(
            logprobs=np.zeros(num_tokens, np.float32) if has_logprobs else None,
            log_masses=np.zeros(num_tokens, np.float32) if params.log_kept_mass else None,
            top_token_ids=np.zeros((num_tokens, num_tops), np.int32) if num_tops else None,
            top_logprobs=np.zeros((num_tokens, num_tops), np.float32) if num_tops else None,
        )

    def start_with(self, request: Request, numbers: Sequence[TokenNumbers]) -> None:
        """Give the samples of a new request these arrays, in their order."""
        for sequence, own in zip(request.sequences, numbers, strict=True):
            sequence.numbers = own

    def let_go(self, request: Request) -> None:
        """Drop the arrays of a request that has ended, which its caller has.

        Requests and their samples are in cycles, which would keep the arrays until Python looks for garbage.
        """
        for sequence in request.sequences:
            sequence.numbers = None

    def append_scores(self, scored: ScoredPositions, scores: SampledRows) -> None:
        """Give each sequence the scores of its tokens in one batch of a step.

        `scored` lists (sequence, positions): each position has one row of `scores`, in that order, which is of the
        token at the next position. Example: with [(a, range(5, 7)), (b, range(0, 3))], rows 0 and 1 are for a's tokens
        6 and 7, and rows 2 to 4 are for b. What has ended gets nothing: a prompt's scores belong to its request. A
        request whose logits were not finite, or whose output cannot be made, ends with an error, and the others go on.
        """
        row = 0
        for sequence, positions in scored:
            rows = range(row, row := row + len(positions))
            request, numbers = sequence.request, sequence.numbers
            if request.state.is_finished or (request.scoring is not None and sequence.state.is_finished):
                continue
            if not scores.is_finite[rows.start : rows.stop].all():
                self.fail(request, NOT_FINITE)
                continue
            try:
                if request.scoring is None:
                    self.outputs.append_scores(request, positions, scores, rows)
                elif isinstance(numbers, TokenNumbers) and scores.scores is not None:
                    index = positions.start + 1 - request.prompt_len
                    numbers.put(index, scores.scores, slice(rows.start, rows.stop))
            except Exception as exception:  # A fault in one request's output must not stop other requests.
                self.fail(request, OUTPUT_FAILED, cause=exception)

    def end_scored(self, work: SchedulerOutput) -> None:
        """End the sequences whose last token this step, which has retired, has scored; each counts as one generated.

        They are found by what is scored and not by the step's rows of scores: a sequence whose end an interrupt has
        kept off is computed again, and then has nothing left to score.
        """
        for chunk in work.chunks:
            sequence = chunk.sequence
            if sequence.request.scoring is None or sequence.state.is_finished:
                continue
            if chunk.start + chunk.num_tokens == sequence.num_tokens <= sequence.num_scored:
                self.num_generated += 1
                self.scheduler.finish_scored(sequence)

    def append(self, samples: list[SampleSequence], decode_lens: list[int], sampled: SampledRows) -> None:
        """Append the tokens that a step has drawn to their sequences, which are in the order of the sampled rows.

        `decode_lens` is empty for a step that has drawn one token per sequence. The arrays of `sampled` are then [R]:
        one row per sequence, perhaps with padding rows at the end. Otherwise `decode_lens` has the number of tokens for
        each sequence, and the arrays are [K, R]: K iterations of a decode program, each with R rows. All first tokens
        are appended before the second ones, and a sequence that ends at a token gets none of its later ones. Example:
        with `decode_lens` (3, 1), iteration 0 has a token for both sequences, iterations 1 and 2 for the first only.
        """
        if not decode_lens:
            count = len(samples)
            self._append_one_each(samples, sampled.token_ids[:count], sampled.is_finite[:count], sampled)
            return
        for index in range(max(decode_lens)):
            has_token = [index < num_tokens for num_tokens in decode_lens]
            rows = [row for row, sample in enumerate(samples) if has_token[row] and not sample.state.is_finished]
            live, num_left = [samples[row] for row in rows], [decode_lens[row] - index - 1 for row in rows]
            iteration = sampled.at(index, rows)
            self._append_one_each(live, iteration.token_ids, iteration.is_finite, iteration, num_left)

    def _append_one_each(
        self,
        samples: list[SampleSequence],
        token_ids: Int[Array, " R"],
        is_finite: Bool[Array, " R"],
        sampled: SampledRows,
        num_left: list[int] | None = None,
    ) -> None:
        """Append one token to each sequence that has not ended.

        `token_ids` and `is_finite` are numpy arrays [R], one entry per sequence of `samples`; entry i belongs to row i
        of `sampled`. `num_left` has how many more tokens this step has for each sequence, 0 each if left out; only the
        rollback after an interrupt needs it. `num_generated` grows by one for each sequence that had not ended.

        A request with a sequence whose logits were not finite ends with an error. The fast path appends a token and
        does nothing else: it is for tokens that can neither end the sequence nor fill a page, and of which nothing is
        shown. Tokens of a sequence that has ended are dropped.
        """
        if not is_finite.all():
            for sequence in (samples[row] for row in np.flatnonzero(~is_finite).tolist()):
                if not sequence.state.is_finished:
                    has_rules = sequence.request.params.has_rules or sequence.request.grammar is not None
                    self.fail(sequence.request, NO_TOKEN_LEFT if has_rules else NOT_FINITE)
        row = 0
        scores = sampled.scores
        try:
            for row, sample, token_id in zip(range(len(samples)), samples, token_ids.tolist(), strict=True):
                tokens, numbers = sample.token_ids, sample.numbers
                if isinstance(numbers, TokenNumbers) and scores is not None and not sample.state.is_finished:
                    numbers.put_drawn(len(tokens) - sample.request.prompt_len, scores, row)
                # `check_at_len` is 0 for a sequence that has ended or was preempted, so these take another branch.
                if len(tokens) < sample.check_at_len and not (token_id in sample.stop_ids or sample.needs_every_token):
                    tokens.append(token_id)
                elif sample.state.is_finished:
                    # It ended while this step was in flight, or its logits were not finite. The sum at the end counts
                    # all rows, so this one is taken off.
                    self.num_generated -= 1
                elif sample.request.beams is not None:
                    self._append_beam(sample, sampled, row)
                else:
                    tokens.append(token_id)
                    self._process_token(sample, sampled, row)
        except BaseException:  # An interrupt: the restart that follows draws the tokens from here on again.
            self.num_generated += row
            self._roll_back(samples[row], num_left[row] if num_left else 0)
            raise
        self.num_generated += len(samples)

    def _roll_back(self, sequence: SampleSequence, num_left: int) -> None:
        """Undo the append of one token to a sequence, at whatever point an interrupt has stopped it.

        The token may or may not be in `token_ids`, so the right length comes from `num_tokens`. That counts this token,
        the `num_left` later tokens that the interrupted step has for the sequence, and the tokens of steps in flight.
        Example: `num_tokens` 20, `num_left` 3 and 4 tokens in flight give 20 − 3 − 4 − 1 = 12 tokens. The text is cut
        to the same length. Samples that have ended stay as they are. So do those of a beam search, to
        which a restart gives the tokens of their search.
        """
        num_to_come = num_left
        for step in self.in_flight:
            samples = step.rows.samples
            counts = step.inputs.decode_lens or [1] * len(samples)
            num_to_come += sum(count for other, count in zip(samples, counts, strict=True) if other is sequence)
        if sequence in sequence.request.live and sequence.request.beams is None:
            del sequence.token_ids[sequence.num_tokens - num_to_come - 1 :]
            self.outputs.restart(sequence)

    def _append_beam(self, sequence: SampleSequence, sampled: SampledRows, row: int) -> None:
        """Give a beam search the likeliest next tokens of the beam `sequence`, from row `row` of `sampled`.

        Once all beams of the request have got theirs, the search chooses which beams continue, with which tokens, and
        which end; the samples are changed to match. Until then the search only stores the tokens and their log
        probabilities. Nothing is added if the request was preempted meanwhile. If the search raises an exception, the
        request ends with an error, and others go on.
        """
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
                # A search that is over is committed first: extending it to no beam ends the request, whose output
                # needs the hypotheses. Otherwise an interrupt before the commit leaves the old choice in force.
                if not step.choices:
                    search.commit(step, ())
                successors = self._extend_beams(request, step)
                if step.choices:
                    search.commit(step, successors)
        except Exception as exception:  # A fault in one search must not stop other requests.
            self.fail(request, OUTPUT_FAILED, cause=exception)

    def _extend_beams(self, request: Request, step: BeamStep) -> list[SampleSequence]:
        """Make one sample of a request hold each chosen beam; return the samples in the order of `step.choices`.

        A choice is (parent, beam): the sample that the beam continues, and the beam with its new last token. The
        sample gets the parent's tokens and the new one. The first choice of a parent keeps the parent's own sample.
        Further choices of that parent take over samples that were not chosen, and share the parent's pages. Samples
        that are left over end.
        """
        successors = self.scheduler.branch(request, [parent for parent, _ in step.choices])
        # All copies come before the first append: a parent's tokens must be copied without its own next one.
        for successor, (parent, _) in zip(successors, step.choices, strict=True):
            if successor is not parent:
                successor.token_ids = parent.token_ids[:]
        for successor, (_, beam) in zip(successors, step.choices, strict=True):
            successor.token_ids.append(beam.last_token)
            self.scheduler.count_chosen_token(successor)
        return successors

    def _process_token(self, sequence: SampleSequence, sampled: SampledRows, row: int) -> None:
        """Apply stop rules, text and page bookkeeping to the token that was appended to a sequence last.

        `row` is the token's row in `sampled`. The request's first token sets `first_token_time`. The sequence ends if a
        stop rule says so (EOS, a stop token or string, the end of its grammar, or its full length). If the rules or the
        text raise an exception, the whole request ends with an error, and other requests go on.
        """
        request = sequence.request
        if request.first_token_time is None:
            request.first_token_time = self.clock()
        try:
            end = self.outputs.check_stop(sequence, sampled, row)  # The state to end in; None if it goes on.
        except GrammarFailure as failure:
            self.fail(request, str(failure))
            return
        except Exception as exception:  # A fault in one request's output must not stop other requests.
            self.fail(request, OUTPUT_FAILED, cause=exception)
            return
        # A sequence that ends publishes its full pages too; any other one only after it has filled a page.
        if end is not None or len(sequence.token_ids) > sequence.check_at_len:
            self.scheduler.update_pages(sequence)
        if end is not None:
            self.scheduler.finish(sequence, end)
