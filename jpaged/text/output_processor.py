"""From sampled tokens to text: the rules by which a sequence stops, and what its caller is shown.

Knows tokens, text and stop rules; nothing of pages or devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .beam_search import Beam
from .detokenizer import Detokenizer
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Snapshot
from .request import Request, RequestState, Sequence
from .sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from .beam_search import BeamSearch
    from .sampler import SampledRows, TokenScores
    from .tokenizer import Tokenizer


NO_IDS: frozenset[int] = frozenset()


@dataclass(slots=True)
class SequenceOutput:
    """What the caller of one sequence will see."""

    detokenizer: Detokenizer | None
    pieces: list[str] = field(default_factory=list)
    """Text that is certain: no part of a stop string that may be cut off, no half of a character."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_told_pieces: int = 0
    """Of what was put out by RequestOutputKind.DELTA."""
    num_told_chars: int = 0
    num_told_tokens: int = 0
    is_end_told: bool = False

    def settle(self, *, finished: bool) -> None:
        """Note the text that has become certain."""
        if self.detokenizer is not None and (piece := self.detokenizer.delta(finished=finished)):
            self.pieces.append(piece)

    def tell(self, num_tokens: int, *, finished: bool) -> tuple[slice, slice]:
        """Put out what is new of pieces and of `num_tokens` tokens."""
        pieces = slice(self.num_told_pieces, len(self.pieces))
        tokens = slice(self.num_told_tokens, num_tokens)
        self.num_told_pieces, self.num_told_tokens, self.is_end_told = pieces.stop, num_tokens, finished
        self.num_told_chars += sum(map(len, self.pieces[pieces]))
        return pieces, tokens


class OutputProcessor:
    """Applies stop rules and keeps text and logprobs of every sequence."""

    def __init__(self, tokenizer: Tokenizer | None, *, eos_token_ids: Iterable[int]):
        """Without a tokenizer for requests that want neither text nor logprobs."""
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._texts: dict[int, str] = {}
        """Of tokens that logprobs have named."""

    def start(self, sequence: Sequence) -> None:
        """Begin the output of a new sequence."""
        params = sequence.request.params
        detokenizer = None
        if params.detokenize:
            assert self.tokenizer is not None, "text without a tokenizer"
            detokenizer = Detokenizer(
                self.tokenizer,
                sequence.request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop or (),
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        sequence.output = SequenceOutput(detokenizer)
        sequence.is_watched = detokenizer is not None or params.logprobs is not None
        sequence.stop_ids = NO_IDS if params.ignore_eos else self.eos_token_ids
        if params.stop_token_ids:
            sequence.stop_ids = sequence.stop_ids.union(params.stop_token_ids)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begin the output of a sequence that has the parent's tokens."""
        assert parent.output is not None, "start comes before fork"
        self._replay(child, parent.output)

    def restart(self, sequence: Sequence) -> None:
        """Make the output of a sequence that has lost its last tokens what it was before them."""
        assert sequence.output is not None, "start comes before restart"
        sequence.stop_reason = None
        old = sequence.output
        self._replay(sequence, old)
        sequence.output.settle(finished=False)
        text = "".join(sequence.output.pieces)
        sequence.output.pieces = [text[: old.num_told_chars], text[old.num_told_chars :]]
        sequence.output.num_told_pieces = 1
        sequence.output.num_told_chars, sequence.output.num_told_tokens = old.num_told_chars, old.num_told_tokens

    def _replay(self, sequence: Sequence, old: SequenceOutput) -> None:
        """Begin anew with the tokens that the sequence has, and the logprobs that these or more had in `old`."""
        self.start(sequence)
        output = sequence.output
        assert output is not None
        token_ids = sequence.token_ids[sequence.request.prompt_len :]
        if output.detokenizer is not None:
            output.detokenizer.append(token_ids)
        output.logprobs = old.logprobs[: len(token_ids)]
        for entries, token_id in zip(output.logprobs, token_ids, strict=False):
            output.cumulative_logprob += entries[token_id].logprob

    def judge(self, sequence: Sequence, sampled: SampledRows, row: int) -> RequestState | None:
        """Take in the token that was appended last, which `row` of a step drew; returns the state it ends in, if so.

        The id that ends a sequence is kept among its tokens and left out of its text.
        """
        params, token_id = sequence.request.params, sequence.token_ids[-1]
        if params.logprobs is not None:
            self._append_logprobs(sequence, sampled, row, params.logprobs)
        if token_id in sequence.stop_ids:
            if token_id in (params.stop_token_ids or ()) and (params.ignore_eos or token_id not in self.eos_token_ids):
                sequence.stop_reason = token_id
            return RequestState.FINISHED_STOPPED
        output = sequence.output
        assert output is not None, "start comes before judge"
        if output.detokenizer is not None and (stop := output.detokenizer.append([token_id])) is not None:
            sequence.stop_reason = stop
            return RequestState.FINISHED_STOPPED
        return RequestState.FINISHED_LENGTH if len(sequence.token_ids) >= sequence.max_len else None

    def note_scores(self, request: Request, positions: range, scores: SampledRows, rows: range) -> None:
        """Take in the scores of the prompt's tokens behind these positions, which these rows hold."""
        assert scores.scores is not None
        assert request.params.prompt_logprobs is not None
        if isinstance(request.prompt_logprobs, tuple):
            if request.prompt_logprobs:
                return  # Computed once more, after a preemption: the caller has them.
            request.prompt_logprobs = [None] * request.prompt_len
        for position, row in zip(positions, rows, strict=True):
            token_id = request.prompt_token_ids[position + 1]
            entries = self._entries(token_id, scores.scores, row, request.params.prompt_logprobs)
            request.prompt_logprobs[position + 1] = entries

    def output_of(self, request: Request) -> RequestOutput | None:
        """The request as its caller sees it now; None if that is nothing before the end."""
        queue_end, kind = request.first_scheduled_time, request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not request.state.is_finished:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        if request.beams is not None:
            outputs = self._beams(request, request.beams)
        else:
            shown = [one for one in request.sequences if not (is_delta and _is_told(one))]
            outputs = [_completion(sequence, is_delta=is_delta) for sequence in shown]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_tuple,
            outputs=tuple(outputs),
            finished=request.state.is_finished,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=queue_end,
                first_token_time=request.first_token_time,
                last_token_time=request.last_token_time,
                finished_time=request.finished_time,
                time_in_queue=None if queue_end is None else queue_end - request.arrival_time,
                num_preemptions=request.num_preemptions,
                num_swaps=request.num_swaps,
                num_cached_tokens=request.num_cached_tokens,
            ),
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(request, is_delta=is_delta),
            error=request.error,
        )

    def _beams(self, request: Request, search: BeamSearch) -> list[CompletionOutput]:
        """What the search has found, the best first; of one that has failed, where its beams stood."""
        found: list[tuple[Beam, str | None]] = [
            (one.beam, "stop" if one.is_stopped else "length") for one in search.hypotheses
        ]
        if request.state.finish_reason not in ("stop", "length"):
            running = search.running.values() or [Beam()] * search.params.beam_width
            found = [(beam, request.state.finish_reason) for beam in running]
        return [self._beam(request, index, beam, reason) for index, (beam, reason) in enumerate(found)]

    def _beam(self, request: Request, index: int, beam: Beam, finish_reason: str | None) -> CompletionOutput:
        token_ids = beam.token_ids
        text = ""
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids)
            detokenizer.append(token_ids[:-1] if finish_reason == "stop" else token_ids)
            text = detokenizer.delta(finished=True)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tuple(token_ids),
            cumulative_logprob=beam.score,
            finish_reason=finish_reason,
        )

    def _prompt_logprobs(self, request: Request, *, is_delta: bool) -> tuple[dict[int, Logprob] | None, ...] | None:
        """All of them; of a stream of deltas they belong to the first that has them."""
        if is_delta and request.are_prompt_logprobs_told:
            return None
        if not request.needs_prompt_scores or request.num_scored < request.prompt_len - 1:
            return None
        request.are_prompt_logprobs_told = True
        request.prompt_logprobs = tuple(request.prompt_logprobs or [None])  # Once: there is nothing to come.
        return request.prompt_logprobs

    def _append_logprobs(self, sequence: Sequence, sampled: SampledRows, row: int, num_top: int) -> None:
        assert sampled.scores is not None
        assert sequence.output is not None
        entries = self._entries(sequence.token_ids[-1], sampled.scores, row, num_top)
        sequence.output.logprobs.append(entries)
        sequence.output.cumulative_logprob += float(sampled.scores.logprobs[row])

    def _entries(self, token_id: int, scores: TokenScores, row: int, num_top: int) -> dict[int, Logprob]:
        """A token's logprob first, then the `num_top` highest, −1 for all."""
        top_ids, top_logprobs = scores.top(row, num_top)
        token_ids = [token_id, *top_ids.tolist()]
        logprobs = [float(scores.logprobs[row]), *top_logprobs.tolist()]
        ranks = [int(scores.ranks[row]), *range(1, len(token_ids))]
        entries: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
            if token_id not in entries:
                entries[token_id] = Logprob(logprob, rank, self._decoded(token_id))
        return entries

    def _decoded(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _is_told(sequence: Sequence) -> bool:
    """Whether deltas have said all that there is of it."""
    output = sequence.output
    assert output is not None
    is_end_told = output.is_end_told or not sequence.state.is_finished
    return is_end_told and output.num_told_tokens == sequence.num_output_tokens


def _completion(sequence: Sequence, *, is_delta: bool) -> CompletionOutput:
    output, request, first = sequence.output, sequence.request, sequence.request.prompt_len
    assert output is not None
    num_tokens, finished = sequence.num_output_tokens, sequence.state.is_finished
    output.settle(finished=finished)
    pieces, tokens = slice(0, len(output.pieces)), slice(0, num_tokens)
    if is_delta:
        pieces, tokens = output.tell(num_tokens, finished=finished)
    has_logprobs = request.params.logprobs is not None
    return CompletionOutput.of(
        Snapshot(
            output.pieces,
            pieces,
            sequence.token_ids,
            slice(first + tokens.start, first + tokens.stop),
            output.logprobs if has_logprobs else None,
            tokens,
        ),
        index=sequence.index,
        cumulative_logprob=output.cumulative_logprob if has_logprobs else None,
        finish_reason=sequence.state.finish_reason,
        stop_reason=sequence.stop_reason,
    )
