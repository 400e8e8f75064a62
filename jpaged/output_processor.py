"""From sampled tokens to text: the rules by which a sequence stops, and what its caller is shown.

Knows tokens, text and stop rules; nothing of pages or devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .detokenizer import Detokenizer
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .request import Request, RequestState, Sequence

if TYPE_CHECKING:
    from .sampler import SampledRows
    from .tokenizer import Tokenizer


NO_IDS: frozenset[int] = frozenset()


@dataclass(slots=True)
class SequenceOutput:
    """What the caller of one sequence will see."""

    detokenizer: Detokenizer | None
    shown: str = ""
    """Text that is certain: no part of a stop string that may be cut off, no half of a character."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    def text(self, *, finished: bool) -> str:
        if self.detokenizer is not None:
            self.shown += self.detokenizer.delta(finished=finished)
        return self.shown


class OutputProcessor:
    """Applies stop rules and keeps text and logprobs of every sequence."""

    def __init__(self, tokenizer: Tokenizer | None, *, eos_token_ids: Iterable[int]):
        """Without a tokenizer for requests that want neither text nor logprobs."""
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)

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
                stop=params.stop or (),
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
        sequence.output = SequenceOutput(detokenizer)
        sequence.is_watched = detokenizer is not None or params.logprobs is not None
        sequence.stop_ids = NO_IDS if params.ignore_eos else self.eos_token_ids
        if params.stop_token_ids:
            sequence.stop_ids = sequence.stop_ids.union(params.stop_token_ids)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begin the output of a sequence that has the parent's tokens."""
        assert parent.output is not None, "start comes before fork"
        self._replay(child, parent.output.logprobs)

    def restart(self, sequence: Sequence) -> None:
        """Make the output of a sequence that has lost its last tokens what it was before them."""
        assert sequence.output is not None, "start comes before restart"
        sequence.stop_reason = None
        self._replay(sequence, sequence.output.logprobs)

    def _replay(self, sequence: Sequence, logprobs: list[dict[int, Logprob]]) -> None:
        """Begin anew with the tokens that the sequence has, and the logprobs that these or more had."""
        self.start(sequence)
        output = sequence.output
        assert output is not None
        token_ids = sequence.token_ids[sequence.request.prompt_len :]
        if output.detokenizer is not None:
            output.detokenizer.append(token_ids)
        output.logprobs = logprobs[: len(token_ids)]
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

    def output_of(self, request: Request) -> RequestOutput:
        """The request as its caller sees it now."""
        queue_end = request.first_scheduled_time
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_tuple,
            outputs=tuple(_completion(sequence) for sequence in request.sequences),
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
            error=request.error,
        )

    def _append_logprobs(self, sequence: Sequence, sampled: SampledRows, row: int, num_top: int) -> None:
        assert self.tokenizer is not None, "logprobs without a tokenizer"
        assert sampled.logprobs is not None
        assert sampled.ranks is not None
        assert sampled.top_token_ids is not None
        assert sampled.top_logprobs is not None
        assert sequence.output is not None
        own = float(sampled.logprobs[row])
        token_ids = [sequence.token_ids[-1], *sampled.top_token_ids[row, :num_top].tolist()]
        logprobs = [own, *sampled.top_logprobs[row, :num_top].tolist()]
        ranks = [int(sampled.ranks[row]), *range(1, num_top + 1)]
        entries: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
            if token_id not in entries:
                entries[token_id] = Logprob(logprob, rank, self.tokenizer.decode([token_id], skip_special_tokens=False))
        sequence.output.logprobs.append(entries)
        sequence.output.cumulative_logprob += own


def _completion(sequence: Sequence) -> CompletionOutput:
    output, request = sequence.output, sequence.request
    assert output is not None
    has_logprobs = request.params.logprobs is not None
    return CompletionOutput(
        index=sequence.index,
        text=output.text(finished=sequence.state.is_finished),
        token_ids=tuple(sequence.token_ids[len(request.prompt_token_ids) :]),
        cumulative_logprob=output.cumulative_logprob if has_logprobs else None,
        logprobs=tuple(output.logprobs) if has_logprobs else None,
        finish_reason=sequence.state.finish_reason,
        stop_reason=sequence.stop_reason,
    )
