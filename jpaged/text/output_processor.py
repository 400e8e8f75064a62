"""Turns sampled tokens into outputs: stop rules, text, logprobs, and the `RequestOutput` that a caller gets.

It knows tokens, text and stop rules; it knows nothing of pages or devices.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from ..outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, WeightVersion
from ..request import Request, RequestState, SampleSequence
from ..sampling.sampling_params import RequestOutputKind
from ..scheduling.beam_search import Beam, BeamSearch
from .detokenizer import Detokenizer

if TYPE_CHECKING:
    from ..sampling.sampler import SampledRows
    from ..sampling.token_scores import TokenScores
    from .tokenizer import Tokenizer


@dataclass(slots=True)
class SequenceOutput:
    """Text and logprobs of one sequence, and how much of them its caller has been given.

    Text counts once it is certain: no part of a stop string that may be cut off, no part of a character.
    """

    detokenizer: Detokenizer | None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """One entry per output token; empty unless the request asked for logprobs."""
    cumulative_logprob: float = 0.0
    text: str = ""
    """Certain text of the next output: all of it so far, or for RequestOutputKind.DELTA what no output has had."""
    token_ids: tuple[int, ...] = ()
    """Output tokens of the last output that had all of them; the next one adds its new tokens to these."""
    shown_logprobs: tuple[dict[int, Logprob], ...] = ()
    """Logprobs of `token_ids`."""
    num_emitted_chars: int = 0
    """Characters that outputs of RequestOutputKind.DELTA have had."""
    num_emitted_tokens: int = 0
    is_end_emitted: bool = False
    """An output of RequestOutputKind.DELTA has had the finish reason."""


class OutputProcessor:
    """Applies the stop rules of every sequence, keeps its text and logprobs, and makes outputs of them."""

    def __init__(self, tokenizer: Tokenizer | None, *, eos_token_ids: Iterable[int]):
        """`tokenizer` may be None if no request wants text.

        A token among `eos_token_ids` that ends a sequence is no stop reason, unless the sequence ignores EOS.
        """
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._token_text = _TokenTexts(tokenizer).__getitem__

    def start(self, sequence: SampleSequence) -> None:
        """Set up the output of a sequence that has no output tokens yet."""
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
        has_entries = params.logprobs is not None and not sequence.request.has_numbers
        sequence.needs_every_token = detokenizer is not None or has_entries

    def fork(self, parent: SampleSequence, child: SampleSequence) -> None:
        """Set up the output of a fork, which has the tokens of its parent."""
        self._replay(child, _output_of(parent))

    def restart(self, sequence: SampleSequence) -> None:
        """Rebuild the output of a sequence that has lost its last tokens; later deltas repeat nothing."""
        sequence.stop_reason = None
        old = _output_of(sequence)
        output = self._replay(sequence, old)
        if output.detokenizer is not None:
            output.text = output.detokenizer.delta()[old.num_emitted_chars :]
        output.num_emitted_chars, output.num_emitted_tokens = old.num_emitted_chars, old.num_emitted_tokens

    def _replay(self, sequence: SampleSequence, old: SequenceOutput) -> SequenceOutput:
        """Build the output of a sequence from its tokens, and from the logprobs that `old` has of them, or of more."""
        self.start(sequence)
        output = _output_of(sequence)
        token_ids = sequence.token_ids[sequence.request.prompt_len :]
        if output.detokenizer is not None:
            output.detokenizer.append(token_ids)
        output.logprobs = old.logprobs[: len(token_ids)]
        for entries, token_id in zip(output.logprobs, token_ids, strict=False):
            output.cumulative_logprob += entries[token_id].logprob
        return output

    def check_stop(self, sequence: SampleSequence, sampled: SampledRows, row: int) -> RequestState | None:
        """Add the sequence's last token to its output; return the state that the token ends it in, None if it goes on.

        `row` is the token's row in `sampled`. A token that ends the sequence stays among its tokens and is no part of
        its text.
        """
        params, token_id, output = sequence.request.params, sequence.token_ids[-1], _output_of(sequence)
        if params.logprobs is not None and not sequence.request.has_numbers:
            assert sampled.scores is not None
            output.logprobs.append(self._entries(token_id, sampled.scores, row, params.logprobs))
            output.cumulative_logprob += float(sampled.scores.logprobs[row])
        if token_id in sequence.stop_ids:
            if token_id in (params.stop_token_ids or ()) and (params.ignore_eos or token_id not in self.eos_token_ids):
                sequence.stop_reason = token_id
            return RequestState.FINISHED_STOPPED
        if output.detokenizer is not None and (stop := output.detokenizer.append([token_id])) is not None:
            sequence.stop_reason = stop
            return RequestState.FINISHED_STOPPED
        return RequestState.FINISHED_LENGTH if len(sequence.token_ids) >= sequence.max_len else None

    def append_scores(self, request: Request, positions: range, scores: SampledRows, rows: range) -> None:
        """Add the logprobs of prompt tokens: `rows` of `scores` belong to the tokens one behind `positions`."""
        assert scores.scores is not None
        assert request.params.prompt_logprobs is not None
        if request.has_numbers:
            if request.prompt_scores is None:
                request.prompt_scores = array("f", bytes(4 * (request.prompt_len - 1)))
            values = scores.scores.logprobs[rows.start : rows.stop].tolist()
            request.prompt_scores[positions.start : positions.stop] = array("f", values)
            return
        if isinstance(request.prompt_logprobs, tuple):
            if request.prompt_logprobs:
                return  # They were computed again after a preemption, and an output has had them.
            request.prompt_logprobs = [None] * request.prompt_len
        for position, row in zip(positions, rows, strict=True):
            token_id = request.prompt_token_ids[position + 1]
            entries = self._entries(token_id, scores.scores, row, request.params.prompt_logprobs)
            request.prompt_logprobs[position + 1] = entries

    def output_of(self, request: Request) -> RequestOutput | None:
        """Return the request's output of now, of its `output_kind`; None if that gives nothing before the end."""
        queue_end, kind = request.first_scheduled_time, request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not request.state.is_finished:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        if isinstance(request.beams, BeamSearch):
            outputs = self._beams(request, request.beams)
        else:
            shown = [one for one in request.sequences if not (is_delta and _is_fully_emitted(one))]
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
        """Return the hypotheses of a search, best first; if it was aborted or failed, its beams as they stood."""
        found: list[tuple[Beam, str | None]] = [
            (one.beam, "stop" if one.is_stopped else "length") for one in search.hypotheses
        ]
        if request.state.finish_reason not in ("stop", "length"):
            running = search.running.values() or [Beam()] * search.params.beam_width
            found = [(beam, request.state.finish_reason) for beam in running]
        return [self._beam(request, index, beam, reason) for index, (beam, reason) in enumerate(found)]

    def _beam(self, request: Request, index: int, beam: Beam, finish_reason: str | None) -> CompletionOutput:
        """Return the output of one beam. `token_ids` keep the EOS token that stopped it, the text does not."""
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
            # Beams of a search all have the same length at a time.
            weight_versions=weight_versions(request.sequences[0], len(token_ids)),
        )

    def _prompt_logprobs(self, request: Request, *, is_delta: bool) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Return the prompt's logprobs once all are there; of a stream of deltas one output alone has them."""
        if is_delta and request.has_emitted_prompt_logprobs:
            return None
        if request.has_numbers or not request.needs_prompt_scores or request.num_scored < request.prompt_len - 1:
            return None
        request.has_emitted_prompt_logprobs = True
        request.prompt_logprobs = tuple(request.prompt_logprobs or [None])  # A tuple says that nothing is to come.
        return request.prompt_logprobs

    def _entries(self, token_id: int, scores: TokenScores, row: int, num_top: int) -> dict[int, Logprob]:
        """Return the logprob of `token_id`, then the `num_top` highest ones of its row; −1 stands for all."""
        top_ids, top_logprobs = scores.top(row, num_top)
        token_ids, text_of = top_ids.tolist(), self._token_text
        own = Logprob(float(scores.logprobs[row]), int(scores.ranks[row]), text_of(token_id))
        top = map(Logprob, top_logprobs.tolist(), count(1), map(text_of, token_ids))
        entries = {token_id: own} | dict(zip(token_ids, top, strict=True))
        entries[token_id] = own  # Tokens that tie share a rank, and have different places among the highest.
        return entries


class _TokenTexts(dict[int, str | None]):
    """Text of each token that was asked for so far; None for all without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = (
            None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)
        )
        return text


def _output_of(sequence: SampleSequence) -> SequenceOutput:
    """Return what `OutputProcessor.start` has set up for a sequence."""
    assert isinstance(sequence.output, SequenceOutput), "start comes first"
    return sequence.output


def _is_fully_emitted(sequence: SampleSequence) -> bool:
    """Return whether outputs of RequestOutputKind.DELTA have had all tokens of a sequence, and its end if it ended."""
    output = _output_of(sequence)
    has_no_new_end = output.is_end_emitted or not sequence.state.is_finished
    return has_no_new_end and output.num_emitted_tokens == sequence.num_output_tokens


def _completion(sequence: SampleSequence, *, is_delta: bool) -> CompletionOutput:
    """Return the output of one sequence: all of it so far, or what is new and now counts as emitted."""
    output, request = _output_of(sequence), sequence.request
    finished = sequence.state.is_finished
    has_logprobs = request.params.logprobs is not None and not request.has_numbers
    if output.detokenizer is not None and (piece := output.detokenizer.delta(finished=finished)):
        output.text += piece
    start = output.num_emitted_tokens if is_delta else len(output.token_ids)
    text, token_ids = output.text, tuple(sequence.token_ids[request.prompt_len + start :])
    logprobs = tuple(output.logprobs[start:]) if has_logprobs else None
    if is_delta:
        output.text = ""
        output.num_emitted_chars += len(text)
        output.num_emitted_tokens += len(token_ids)
        output.is_end_emitted = finished
    else:
        # The new tokens are added to the last output's tuple: rebuilding it from the array takes several times as long.
        token_ids = output.token_ids = output.token_ids + token_ids
        if logprobs is not None:
            logprobs = output.shown_logprobs = output.shown_logprobs + logprobs
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=output.cumulative_logprob if has_logprobs else None,
        logprobs=logprobs,
        log_kept_masses=_log_masses(sequence, len(token_ids)),
        finish_reason=sequence.state.finish_reason,
        stop_reason=sequence.stop_reason,
        weight_versions=weight_versions(sequence, sequence.num_output_tokens),
    )


def _log_masses(sequence: SampleSequence, num_last: int) -> tuple[float, ...] | None:
    """Return the log masses of the last tokens of a sample; None if its request did not ask for them."""
    masses = sequence.token_log_masses
    return None if masses is None else tuple(masses[len(masses) - num_last :])


def weight_versions(sequence: SampleSequence, num_tokens: int) -> tuple[WeightVersion, ...]:
    """Return which version of the weights drew which of the first `num_tokens` output tokens of a sample."""
    starts = [start for start, _ in sequence.weight_versions[1:]]
    spans = zip(sequence.weight_versions, [*starts, num_tokens], strict=True)
    return tuple(
        WeightVersion(version, start, min(end, num_tokens)) for (start, version), end in spans if start < num_tokens
    )
