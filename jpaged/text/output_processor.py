"""Turns sampled tokens into outputs: stop rules, text, logprobs, and the `RequestOutput` that a caller gets.

It knows tokens, text and stop rules; it knows nothing of pages or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from ..outputs import (
    CompletionOutput,
    Logprob,
    Mark,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleDelta,
    WeightVersion,
)
from ..request import Request, RequestState, SampleSequence
from ..sampling.sample_columns import ALL_ALLOWED, num_mask_words
from ..sampling.sampling_params import RequestOutputKind
from ..sampling.token_numbers import TokenNumbers
from ..scheduling.beam_search import Beam, BeamSearch
from .grammar.grammar import GrammarFailure, Matcher
from .tokenizing.detokenizer import Detokenizer

if TYPE_CHECKING:
    from ..sampling.sampler import SampledRows
    from ..sampling.token_scores import TokenScores
    from .grammar.grammar import Grammars
    from .tokenizing.tokenizer import Tokenizer


@dataclass(slots=True)
class SequenceOutput:
    """Text and logprobs of one sequence, and how much of them its caller has been given.

    Text counts once it is certain: no part of a stop string that may be cut off, no part of a character.
    """

    detokenizer: Detokenizer | None
    matcher: Matcher | None = None
    """Where in its request's grammar the sample is; None without a grammar."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """One entry per output token; empty unless the request asked for logprobs."""
    cumulative_logprob: float = 0.0
    text: str = ""
    """Text of the last output that had all of it; the next one adds new pieces of text to this."""
    num_text_pieces: int = 0
    """Pieces of the detokenizer's text that `text` is made of."""
    token_ids: tuple[int, ...] = ()
    """Output tokens of the last output that had all of them; the next one adds its new tokens to these."""
    shown_logprobs: tuple[dict[int, Logprob], ...] = ()
    """Logprobs of `token_ids`."""
    num_delta_pieces: int = 0
    """Pieces of the detokenizer's text that deltas have had."""
    num_delta_chars: int = 0
    """Their characters."""
    num_delta_marks: int = 0
    """Marks that deltas have had."""
    num_delta_tokens: int = 0
    """Output tokens that deltas have had."""
    is_end_in_delta: bool = False
    """A delta has had the finish reason."""


class OutputProcessor:
    """Applies the stop rules of every sequence, keeps its text and logprobs, and makes outputs of them."""

    def __init__(self, tokenizer: Tokenizer | None, *, eos_token_ids: Iterable[int], grammars: Grammars | None = None):
        """Start without sequences. `tokenizer` may be None if no request wants text, `grammars` if none has a grammar.

        If a sequence ends by a token among `eos_token_ids`, its stop reason stays None, unless its request ignores EOS.
        """
        self.tokenizer = tokenizer
        self._grammars = grammars
        self.eos_token_ids = frozenset(eos_token_ids)
        self._token_text = _TokenTexts(tokenizer).__getitem__

    def start(self, sequence: SampleSequence) -> None:
        """Give a sequence an empty output, and set `sequence.needs_every_token`.

        If its request wants text, the output has a detokenizer, for which the engine must have a tokenizer. If it has a
        grammar, the output has a matcher at its start. Every token must be passed to `check_stop` if the request has a
        grammar, or wants text or `Logprob` entries; otherwise only a token that may end the sequence has to be.
        """
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
                mark_ids=sequence.request.mark_ids,
            )
        grammar = sequence.request.grammar
        matcher = grammar.copy() if isinstance(grammar, Matcher) else None
        sequence.output = SequenceOutput(detokenizer, matcher)
        has_entries = params.logprobs is not None and not sequence.request.has_numbers
        sequence.needs_every_token = detokenizer is not None or matcher is not None or has_entries

    def fork(self, parent: SampleSequence, child: SampleSequence) -> None:
        """Set up the output of a fork, which begins with tokens of its parent and so with their text and logprobs."""
        self._replay(child, _output_of(parent))

    def masks(
        self, samples: Sequence[SampleSequence], vocab_size: int
    ) -> tuple[np.ndarray, list[tuple[SampleSequence, str]]]:
        """Return which tokens each sample may draw next, and the samples whose grammar cannot go on, with the reasons.

        The masks are int32 [samples, W], with a bit for each of the `vocab_size` tokens (`sampler.mask_bias`). A sample
        whose next token is given may draw that one alone. Samples without a grammar may draw every token, as may those
        that have ended or failed, whose token is not used.
        """
        matchers = [None if sample.state.is_finished else _output_of(sample).matcher for sample in samples]
        masks = self._grammar_masks(matchers, vocab_size)
        for row, sample in enumerate(samples):
            if (token_id := sample.token_given_after(len(sample.token_ids))) is not None:
                self._allow_only(masks, row, token_id)
        pairs = zip(samples, matchers, strict=True)
        return masks, [(sample, failure) for sample, one in pairs if one is not None and (failure := one.failure)]

    def _grammar_masks(self, matchers: Sequence[Matcher | None], vocab_size: int) -> np.ndarray:
        if self._grammars is None:  # There is no tokenizer, and no request has a grammar.
            return np.full((len(matchers), num_mask_words(vocab_size)), ALL_ALLOWED, np.int32)
        return self._grammars.masks(matchers)

    def _allow_only(self, masks: np.ndarray, row: int, token_id: int) -> None:
        """Let a row of masks allow one token alone."""
        masks[row] = 0
        masks.view(np.uint32)[row, token_id // 32] = 1 << token_id % 32

    def may_follow(self, sequence: SampleSequence, num_tokens: int, token_id: int) -> bool:
        """Return whether the grammar of a sample allows a token behind the sample's first `num_tokens` tokens."""
        request = sequence.request
        if not isinstance(request.grammar, Matcher):
            return True
        matcher = request.grammar.copy()
        matcher.advance_all(sequence.token_ids[request.prompt_len : num_tokens])
        mask = self.grammars.masks([matcher])[0]
        return bool(mask[token_id // 32] >> token_id % 32 & 1)

    def set_grammar(self, request: Request, grammar: Matcher | None) -> None:
        """Give a request its grammar, or free that of one that has ended: it may be large, and cycles keep requests."""
        if request.grammar is not grammar:
            request.grammar = grammar
            for sequence in request.sequences if grammar is None else ():
                _output_of(sequence).matcher = None

    @property
    def grammars(self) -> Grammars:
        assert self._grammars is not None, "a grammar without a tokenizer"
        return self._grammars

    def restart(self, sequence: SampleSequence) -> None:
        """Rebuild the output of a sequence whose last tokens were dropped and will be drawn again.

        The same tokens will be drawn. Text and logprobs become those of the tokens that are left, and a stop reason is
        dropped. Later deltas begin after what deltas have delivered. Example: 3 of 5 tokens were delivered, and the
        fifth is dropped; the next delta begins with the fourth.
        """
        sequence.stop_reason = None
        old = _output_of(sequence)
        output = self._replay(sequence, old)
        output.num_delta_tokens = old.num_delta_tokens
        output.num_delta_chars, output.num_delta_marks = old.num_delta_chars, old.num_delta_marks
        if output.detokenizer is not None and old.detokenizer is not None:
            # Of the two pieces below, the first is what deltas have had.
            text = output.detokenizer.delta()
            output.detokenizer.pieces[:] = [text[: old.num_delta_chars], text[old.num_delta_chars :]]
            output.num_delta_pieces = 1

    def _replay(self, sequence: SampleSequence, old: SequenceOutput) -> SequenceOutput:
        """Set up a new output for a sequence, with the text and logprobs of its present output tokens, and return it.

        The logprobs are copied from `old`, the output of a sequence that begins with the same tokens. They are summed
        again; without logprobs `old` has no entries, and the sum stays 0.
        """
        self.start(sequence)
        output = _output_of(sequence)
        token_ids = sequence.token_ids[sequence.request.prompt_len :]
        if output.detokenizer is not None:
            output.detokenizer.append(token_ids)
        if output.matcher is not None:
            output.matcher.advance_all(token_ids)
        output.logprobs = old.logprobs[: len(token_ids)]
        for entries, token_id in zip(output.logprobs, token_ids, strict=False):
            output.cumulative_logprob += entries[token_id].logprob
        return output

    def check_stop(self, sequence: SampleSequence, sampled: SampledRows, row: int) -> RequestState | None:
        """Add the sequence's last token to its text and logprobs, and check whether the token ends the sequence.

        Return the state that the sequence ends in, or None if it goes on. `row` is the token's row in `sampled`. Its
        logprobs are kept here only if the request asked for them and does not keep plain numbers. A stop token is not
        part of the text. Stop tokens go before stop strings, these before the end of the grammar, and that before the
        length. The stop reason is set for a stop string and for a token of `stop_token_ids`, but not for an EOS token
        unless EOS is ignored. Raise GrammarFailure if the grammar cannot go on, or ends before `min_tokens`.
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
        is_grammar_over = output.matcher is not None and output.matcher.advance(token_id)
        if is_grammar_over and (num_tokens := sequence.num_output_tokens) < params.min_tokens:
            raise GrammarFailure(f"its grammar ended after {num_tokens} tokens, before min_tokens, {params.min_tokens}")
        if is_grammar_over and token_id in self.eos_token_ids:  # Ignored by the request, and yet no part of the text.
            return RequestState.FINISHED_STOPPED
        if output.detokenizer is not None and (stop := output.detokenizer.append([token_id])) is not None:
            sequence.stop_reason = stop
            return RequestState.FINISHED_STOPPED
        at_length = RequestState.FINISHED_LENGTH if len(sequence.token_ids) >= sequence.max_len else None
        return RequestState.FINISHED_STOPPED if is_grammar_over else at_length

    def append_scores(self, request: Request, positions: range, scores: SampledRows, rows: range) -> None:
        """Add the logprobs of prompt tokens to a request that asked for them.

        Row `rows[i]` of `scores` has the logprob of the token at `positions[i]` + 1, since the logits at a position
        score the next token. Both ranges have the same length. Each token has a `Logprob` entry at its own position,
        the first one None. Example: the positions 5 and 6 score tokens 6 and 7.

        The first call makes room for all of them. Scores that are computed again after a preemption replace the old
        ones. Entries that an output has shown already (they are then a tuple that is not empty) stay as they are.
        """
        assert scores.scores is not None
        assert request.params.prompt_logprobs is not None
        prompt = request.prompt_scores
        if isinstance(prompt.entries, tuple):
            if prompt.entries:
                return  # A tuple that is not empty was shown by an output.
            prompt.entries = [None] * request.prompt_len
        for position, row in zip(positions, rows, strict=True):
            token_id = request.prompt_token_ids[position + 1]
            entries = self._entries(token_id, scores.scores, row, request.params.prompt_logprobs)
            prompt.entries[position + 1] = entries

    def output_of(self, request: Request) -> RequestOutput | None:
        """Return the present output of a request, as its `output_kind` asks.

        For FINAL_ONLY, return None before the request's end, and all its tokens then. For CUMULATIVE, return all tokens
        so far. For DELTA, return only what no earlier call has returned, and only the samples that have anything new.
        The output of a beam search always holds its beams whole.
        """
        queue_end, kind = request.first_scheduled_time, request.params.output_kind  # None while the request waits.
        if kind is RequestOutputKind.FINAL_ONLY and not request.state.is_finished:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        if isinstance(request.beams, BeamSearch):
            outputs = self._beams(request, request.beams)
        elif is_delta:
            samples = {sequence.index: sequence for sequence in request.sequences}  # A delta names its sample by index.
            outputs = [_delta_completion(samples[delta.index], delta) for delta in self.take_deltas(request)]
        else:
            outputs = [_completion(sequence) for sequence in request.sequences]
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
            prompt_logprobs=self.prompt_logprobs(request, is_delta=is_delta),
            error=request.error,
        )

    def take_deltas(self, request: Request) -> list[SampleDelta]:
        """Return one delta for each sample with new tokens or a new end since the last call, and count it as delivered.

        A delta has the tokens, their logprobs and the text that no earlier delta had. Text that later tokens may still
        change is held back, so a delta may have tokens and no text. The end of a sample is delivered once, in a delta
        without tokens if all were delivered before. A beam search has no deltas: the list is empty.
        """
        deltas: list[SampleDelta] = []
        if request.beams is not None:
            return deltas
        has_logprobs = request.params.logprobs is not None and not request.has_numbers
        for sequence in request.sequences:
            output, state = _output_of(sequence), sequence.state
            start = output.num_delta_tokens
            end = sequence.num_output_tokens
            if start == end and (output.is_end_in_delta or not state.is_finished):
                continue
            output.num_delta_tokens, output.is_end_in_delta = end, state.is_finished
            text = ""
            marks: tuple[Mark, ...] = ()
            if (detokenizer := output.detokenizer) is not None:
                detokenizer.delta(finished=state.is_finished)
                text = "".join(detokenizer.pieces[output.num_delta_pieces :])
                output.num_delta_pieces = len(detokenizer.pieces)
                if detokenizer.num_marks > output.num_delta_marks:
                    marks = _new_marks(output, detokenizer, len(text))
                output.num_delta_chars += len(text)
            delta = SampleDelta(
                request.request_id,
                sequence.index,
                tuple(sequence.token_ids[start - end :]) if start < end else (),  # The last `end - start` tokens.
                text,
                tuple(output.logprobs[start:]) if has_logprobs else None,
                state.finish_reason,
                sequence.stop_reason,
                marks,
                start,
            )
            deltas.append(delta)
        return deltas

    def _beams(self, request: Request, search: BeamSearch) -> list[CompletionOutput]:
        """Return one output per beam of a beam search.

        If the request has ended by itself, the beams are the hypotheses of the search (its ended beams), best first.
        While it is unfinished, or if it was aborted or has failed, they are its running beams instead; before the first
        token these are `beam_width` empty beams.
        """
        beams: list[tuple[Beam, str | None]] = [
            (one.beam, "stop" if one.is_stopped else "length") for one in search.hypotheses
        ]
        if request.state.finish_reason not in ("stop", "length"):
            running = search.running.values() or [Beam()] * search.params.beam_width
            beams = [(beam, request.state.finish_reason) for beam in running]
        return [self._beam(request, index, beam, reason) for index, (beam, reason) in enumerate(beams)]

    def _beam(self, request: Request, index: int, beam: Beam, finish_reason: str | None) -> CompletionOutput:
        """Return the output of one beam, under the sample index `index`, with its whole text, all tokens and its score.

        `token_ids` include the EOS token that stopped the beam, and the text does not. Without a tokenizer the text is
        empty.
        """
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
            # All samples of a beam search have the same history of weights.
            weight_versions=weight_versions(request.sequences[0], len(token_ids)),
        )

    def prompt_logprobs(self, request: Request, *, is_delta: bool) -> PromptLogprobs | None:
        """Return one entry of logprobs per prompt token, None for the first token, which no logits score.

        Return None instead of the tuple while some are not computed, if the request did not ask for them, or if its
        logprobs are kept as numbers. With `is_delta`, they are returned once only. From the first call that returns
        them, they count as shown, and `append_scores` no longer replaces them.
        """
        scores = request.prompt_scores
        if is_delta and scores.are_shown:
            return None
        if request.has_numbers or not request.needs_prompt_scores or request.num_scored < request.prompt_len - 1:
            return None
        scores.are_shown = True
        # A tuple tells `append_scores` that they were shown. A prompt of one token has nothing to score.
        scores.entries = tuple(scores.entries or [None])
        return scores.entries

    def _entries(self, token_id: int, scores: TokenScores, row: int, num_top: int) -> dict[int, Logprob]:
        """Return token id → `Logprob`: first the entry of `token_id`, then those of the `num_top` likeliest tokens.

        Row `row` of `scores` has the values; a `num_top` of −1 stands for all tokens. The likeliest tokens come in
        descending order with the ranks 1, 2, …. If `token_id` is among them, it has only its own entry, the first one.
        Example: token 7 and a `num_top` of 2, where the likeliest are 3 and 7, give {7: rank 2, 3: rank 1}.
        """
        top_ids, top_logprobs = scores.top(row, num_top)
        token_ids, text_of = top_ids.tolist(), self._token_text
        own = Logprob(float(scores.logprobs[row]), int(scores.ranks[row]), text_of(token_id))
        top = map(Logprob, top_logprobs.tolist(), count(1), map(text_of, token_ids))
        entries = {token_id: own} | dict(zip(token_ids, top, strict=True))
        entries[token_id] = own  # Its place among the likeliest may differ from its rank, which tokens that tie share.
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


def _completion(sequence: SampleSequence) -> CompletionOutput:
    """Return the output of one sequence with all its tokens, their logprobs, and the text that cannot change any more.

    `sequence.output` keeps the tuples and the text of the last call. Only what is new is appended to them here, since
    making them anew from the array takes several times as long. If the sequence has ended, no text is held back. The
    logprobs are None unless the request asked for them as entries.
    """
    output, request = _output_of(sequence), sequence.request
    if (detokenizer := output.detokenizer) is not None:
        detokenizer.delta(finished=sequence.state.is_finished)
        if new_pieces := detokenizer.pieces[output.num_text_pieces :]:
            output.text += "".join(new_pieces)
            output.num_text_pieces = len(detokenizer.pieces)
    num_old = len(output.token_ids)
    output.token_ids += tuple(sequence.token_ids[request.prompt_len + num_old :])
    has_logprobs = request.params.logprobs is not None and not request.has_numbers
    if has_logprobs:
        output.shown_logprobs += tuple(output.logprobs[num_old:])
    return CompletionOutput(
        index=sequence.index,
        text=output.text,
        token_ids=output.token_ids,
        cumulative_logprob=output.cumulative_logprob if has_logprobs else None,
        logprobs=output.shown_logprobs if has_logprobs else None,
        log_kept_masses=_log_masses(sequence, len(output.token_ids)),
        finish_reason=sequence.state.finish_reason,
        stop_reason=sequence.stop_reason,
        weight_versions=weight_versions(sequence, sequence.num_output_tokens),
        marks=() if detokenizer is None else detokenizer.marks(0, len(output.text)),
    )


def _delta_completion(sequence: SampleSequence, delta: SampleDelta) -> CompletionOutput:
    """Return the output of one sequence for RequestOutputKind.DELTA: the tokens and the text of `delta`.

    `cumulative_logprob` and `weight_versions` are those of all tokens so far. Call it before more tokens are appended.
    """
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        cumulative_logprob=_output_of(sequence).cumulative_logprob if delta.logprobs is not None else None,
        logprobs=delta.logprobs,
        log_kept_masses=_log_masses(sequence, len(delta.token_ids)),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        weight_versions=weight_versions(sequence, sequence.num_output_tokens),
        marks=delta.marks,
    )


def _new_marks(output: SequenceOutput, detokenizer: Detokenizer, num_chars: int) -> tuple[Mark, ...]:
    """Return the marks in the next `num_chars` characters for deltas, with their places there, and count them."""
    start = output.num_delta_chars
    found = detokenizer.marks(output.num_delta_marks, start + num_chars)
    output.num_delta_marks += len(found)
    return tuple(Mark(mark.place - start, mark.token_id) for mark in found)


def _log_masses(sequence: SampleSequence, num_last: int) -> tuple[float, ...] | None:
    """Return the logarithms of the probability that truncation left, for the `num_last` last tokens of a sample.

    Return None if its request did not ask for them.
    """
    numbers, end = sequence.numbers, sequence.num_output_tokens
    if not isinstance(numbers, TokenNumbers) or numbers.log_masses is None:
        return None
    return tuple(numbers.log_masses[end - num_last : end].tolist())


def weight_versions(sequence: SampleSequence, num_tokens: int) -> tuple[WeightVersion, ...]:
    """Return which version of the weights drew which of the first `num_tokens` output tokens of a sample.

    The spans are in order and cover these tokens: [(version 0, 0 to 5), (version 1, 5 to 8)] for 8 tokens if the
    weights changed after the fifth; the end of a span is not part of it. Versions that drew none of these tokens have
    no span. Empty for no tokens. `sequence.weight_versions` has (first output token, version) of each version.
    """
    # The common case, which needs no lists: the weights have not changed.
    if len(sequence.weight_versions) == 1:
        return (WeightVersion(sequence.weight_versions[0][1], 0, num_tokens),) if num_tokens else ()
    starts = [start for start, _ in sequence.weight_versions[1:]]
    spans = zip(sequence.weight_versions, [*starts, num_tokens], strict=True)
    return tuple(
        WeightVersion(version, start, min(end, num_tokens)) for (start, version), end in spans if start < num_tokens
    )
