"""Checks the arguments of calls about requests that run: which request, which of its samples, and what a fork gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ..checks import is_integer, refusal, scalar, shown
from ..request import Request, SampleSequence
from ..sampling.logit_rules_spec import LogitRulesSpec

MAX_SAMPLE_INDEX = (1 << 31) - 1
"""Sample indices travel to the device as int32."""


@dataclass(frozen=True)
class Fork:
    """New samples of a request that begin with tokens of one of its samples."""

    parent: SampleSequence
    sample_indices: list[int]
    num_tokens: int
    """Tokens that the new samples have in common with the parent: its prompt and its first output tokens."""
    first_token_ids: list[int] | None
    """The next token of each new sample, which is not drawn; None if all are drawn."""


def unfinished_request(request_id: Any, requests: Mapping[str, Request]) -> Request:
    """Return the request with this id; raise InvalidRequestError if there is none."""
    request = requests.get(request_id) if isinstance(request_id, str) else None
    if request is None:
        raise refusal("request_id", shown(request_id), "an unfinished request", "fork before it ends")
    return request


def as_request_ids(request_ids: Any) -> list[str]:
    """Return a list of ids from one id or several; raise InvalidRequestError for anything else."""
    ids = [request_ids] if isinstance(request_ids, str) or not isinstance(request_ids, Iterable) else list(request_ids)
    if not all(isinstance(request_id, str) for request_id in ids):
        raise refusal("request_ids", shown(request_ids), "a string or a list of strings")
    return ids


def sample_of(request: Request, sample: Any) -> SampleSequence:
    """Return the sample with the index `sample` of a request, which may have ended.

    Raise InvalidRequestError if there is none, or if the request is no one that samples.
    """
    _check_samples(request)
    indices = [sequence.index for sequence in request.sequences]
    if not is_integer(sample) or sample not in indices:
        way_out = "outputs have the indices of their samples, and fork returns those of new ones"
        raise refusal("sample", shown(sample), f"one of the request's samples, {indices}", way_out)
    return request.sequences[indices.index(sample)]


def checked_fork(
    request: Request,
    n: Any,
    *,
    sample: Any,
    sample_indices: Any,
    num_output_tokens: Any,
    first_token_ids: Any,
    max_num_seqs: int,
    rules: LogitRulesSpec,
) -> Fork:
    """Return a fork of the sample with index `sample`; `rules` are the engine's.

    `sample_indices` are n different indices that the request has never had; None stands for the lowest such indices.
    Example: a request that has had the samples 0, 1 and 3 gets 2 and 4 for `n=2`. An `n` of None is the number of
    `first_token_ids`, or 1. `max_num_seqs` bounds the samples that have not ended at a time, so `n` must be an integer
    from 1 to `max_num_seqs` less their number. A `num_output_tokens` of None is all that the host knows.

    Raise InvalidRequestError if an argument is wrong, if the sample is unknown or has ended, or if the request is a
    beam search or, without `first_token_ids`, greedy: all its samples would be equal. The request's grammar is not
    asked.
    """
    _check_samples(request)
    live = {sequence.index: sequence for sequence in request.live}
    parent = live.get(sample) if is_integer(sample) else None
    if parent is None:
        raise refusal("sample", shown(sample), f"a sample that has not ended, {list(live)}")
    if request.params.is_greedy and first_token_ids is None:
        got = "a greedy request, whose samples would all be equal"
        way_out = "give first_token_ids, or fork one with temperature > 0"
        raise refusal("temperature", got, "a request that draws", way_out)
    tokens = first_token_ids.tolist() if hasattr(first_token_ids, "tolist") else first_token_ids
    if n is None:
        n = len(tokens) if isinstance(tokens, list | tuple) else 1
    num_live, room = len(live), max_num_seqs - len(live)
    if not is_integer(n) or not 1 <= n <= room:
        left = f"which max_num_seqs, {max_num_seqs}, leaves beside {num_live} samples that have not ended"
        allowed = f"{f'an integer in [1, {room}]' if room else 'none'}, {left}"
        raise refusal("n", shown(n), allowed, "fork fewer, or start the engine with a larger max_num_seqs")
    num_known = parent.num_output_tokens
    if num_output_tokens is None:
        num_output_tokens = num_known
    if not is_integer(num_output_tokens) or not 0 <= num_output_tokens <= num_known:
        allowed = f"an integer in [0, {num_known}], the output tokens that sample {parent.index} has got"
        raise refusal("num_output_tokens", shown(num_output_tokens), allowed, "fork once it has more, or leave it out")
    indices = _sample_indices(request, n, sample_indices)
    num_tokens = request.prompt_len + int(num_output_tokens)
    if tokens is not None:
        tokens = _first_token_ids(parent, n, tokens, num_tokens, rules)
    return Fork(parent, indices, num_tokens, tokens)


def _check_samples(request: Request) -> None:
    """Raise InvalidRequestError for a request whose samples nobody may fork or end apart."""
    if request.scoring is not None:
        raise refusal("request_id", "a request that scores given tokens", "a request that samples")
    if request.beams is not None:
        raise refusal("request_id", "a beam search", "a request that samples", "its beams fork and end by themselves")


def _sample_indices(request: Request, n: int, sample_indices: Any) -> list[int]:
    """Return the `n` indices of new samples; see `checked_fork`."""
    used = {sequence.index for sequence in request.sequences}  # Ended samples keep their indices.
    if sample_indices is None:
        return list(islice((index for index in count() if index not in used), n))
    if isinstance(sample_indices, str) or not isinstance(sample_indices, Sequence):
        raise refusal("sample_indices", shown(sample_indices), "a list of integers")
    indices = list(sample_indices)
    is_valid = all(is_integer(index) and 0 <= index <= MAX_SAMPLE_INDEX for index in indices)
    # The union is larger by n only if the n indices differ from each other and from the used ones.
    if not is_valid or len(indices) != n or len(used.union(indices)) != len(used) + n:
        allowed = f"n, {n}, different integers ≥ 0 that the request does not have yet"
        raise refusal("sample_indices", shown(indices), allowed, f"it has {sorted(used)}")
    return indices


def _first_token_ids(parent: SampleSequence, n: int, tokens: Any, num_tokens: int, rules: LogitRulesSpec) -> list[int]:
    """Return one token for each of `n` samples that begin with the first `num_tokens` tokens of `parent`.

    Raise InvalidRequestError for tokens outside the vocabulary, and for those that the request's logit rules forbid
    there: nothing would be left to draw.
    """
    name = "first_token_ids"
    if not isinstance(tokens, list | tuple) or len(tokens) != n:
        raise refusal(name, shown(tokens), f"a list of n, {n}, token ids, one for each new sample")
    ids = list(map(scalar, tokens))
    if wrong := [one for one in ids if not is_integer(one) or not 0 <= one < rules.vocab_size]:
        raise refusal(name, f"token id {shown(wrong[0])}, out of vocabulary", f"0 to {rules.vocab_size - 1}")
    request, params = parent.request, parent.request.params
    output = parent.token_ids[request.prompt_len : num_tokens].tolist()
    ends = rules.eos_token_ids | request.stop_ids
    for token_id in map(int, ids):
        written = (*output, token_id)
        reason = ""
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            reason = "is not among allowed_token_ids"
        elif any(written[-len(word) :] == tuple(word) for word in request.bad_words):
            reason = "completes one of bad_words"
        elif len(output) < params.min_tokens and token_id in ends:
            reason = f"would end a sample before min_tokens, {params.min_tokens}"
        if reason:
            raise forbidden_token(token_id, reason)
    return list(map(int, ids))


def forbidden_token(token_id: int, reason: str) -> Exception:
    """Return the error for a first token that a fork may not begin with; `reason` is a clause without its subject."""
    allowed = "a token that the request may draw there"
    return refusal("first_token_ids", f"token id {token_id}, which {reason}", allowed, "force another one")
