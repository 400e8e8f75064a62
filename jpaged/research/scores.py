"""Scores of given tokens in arrays: what `Engine.logprobs` and `Engine.score` compute.

A request is one context with its continuations as samples: the context is computed once, and the samples share its
pages. The scores of a step go straight into the rows of the result, so that no token becomes an object.

Letters: B rows, N tokens of the longest row, K most likely tokens, S tokens that were asked for, D hidden size.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..checks import boolean, check, integer, is_integer, number, refusal, scalar, told
from ..core.batch import BatchRunner
from ..errors import ContextLengthError, InvalidRequestError, JpagedError
from ..intake.offline import as_array, as_sequences
from ..messages import NewRequest, Scoring
from ..sampling.sampling_params import COUNTS, ScoreKind
from ..sampling.token_numbers import TokenNumbers
from ..step.jax_settings import refuse_traced
from .arrays import on_device

ALIGNMENT = 64
"""Bytes; a device that is a CPU copies arrays of the host that begin elsewhere."""


class TopLogprobs(NamedTuple):
    """The most likely tokens at each place of B sequences; without B for a single one."""

    token_ids: Int[Array, "*B N1 K"]
    """int32; the most likely one first."""
    logprobs: Float[Array, "*B N1 K"]
    """float32."""
    log_rest: Float[Array, "*B N1"]
    """float32; the logarithm of the probability of all other tokens, −inf if there is none."""


class PackedTops(NamedTuple):
    """The most likely tokens at the P places of several sequences, one sequence behind the other, as arrays of numpy.

    A sequence of N tokens has N − 1 places, since its first token is not predicted.
    """

    token_ids: Int[np.ndarray, "P K"]
    """int32; the most likely one first."""
    logprobs: Float[np.ndarray, "P K"]
    """float32."""
    log_rest: Float[np.ndarray, " P"]
    """float32; as in `TopLogprobs`."""
    versions: list[int]
    """The version of the weights that has computed each sequence."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """The scores of B continuations, in the order in which they were given, padded by zeros to N tokens at their ends.

    It is a pytree, so that jitted functions take it as it is.
    """

    logprobs: Float[Array, "B N"]
    """float32; of each token, given the context and the tokens of the continuation before it."""
    is_greedy: Bool[Array, "B N"]
    """Whether no token is more likely."""
    mask: Bool[Array, "B N"]
    """Whether there is a token that was to be scored."""
    sums: Float[Array, " B"]
    """float32; the logprob of each continuation from the first token that was to be scored."""
    context_indices: Int[Array, " B"]
    """int32; the context that each continuation belongs to."""
    versions: Int[Array, " B"]
    """int32; the version of the weights that has computed each continuation."""


class _Row(NamedTuple):
    """One row of a result."""

    context: tuple[int, ...]
    continuation: list[int]
    temperature: float
    first: int = 0
    """Index of the first token of the continuation that is scored."""
    asked: bytes = b""
    """int32 [N, S], the other tokens to score."""


class Scorer:
    """Scores rows of tokens by requests that draw nothing, beside whatever else the engine computes."""

    def __init__(self, batch: BatchRunner):
        """`batch` is that of the engine."""
        self.batch, self.builder = batch, batch.builder

    def logprobs(self, ids: Any, *, temperature: Any, top_k: Any, token_ids: Any, hidden: Any) -> Any:
        """Return the logprobs of all tokens but the first, or what else is asked for; see `Engine.logprobs`."""
        if isinstance(ids, jax.core.Tracer):
            raise refusal("ids", "a traced array", "an array of token ids", "call it outside of jitted functions")
        refuse_traced("logprobs")
        sequences, is_one = as_sequences(ids)
        check("hidden", hidden, boolean)
        named = {"top_k": top_k, "token_ids": token_ids, "hidden": hidden or None}
        wanted = [name for name, value in named.items() if value is not None]
        if len(wanted) > 1:
            raise refusal(" and ".join(wanted), "several", "one of top_k, token_ids and hidden", "make two calls")
        shape = len(sequences), max(map(len, sequences)) - 1
        temperatures = _each_temperature(temperature, shape[0])
        kind, asked = ScoreKind(is_hidden=hidden), [b""] * shape[0]
        if top_k is not None:
            kind = ScoreKind(num_tops=self.check_num_tops(top_k))
        if token_ids is not None:
            kind, asked = self._asked(token_ids, shape, is_one=is_one, lens=[len(one) - 1 for one in sequences])
        max_len = self.builder.sizes.max_model_len - 1
        if hidden and (longest := shape[1] + 1) > max_len:  # The state of the last token is computed too.
            got = f"your prompt has {longest} tokens, and hidden needs one more"
            raise ContextLengthError.of(max_len + 1, got, "shorten it or raise max_model_len")
        # A token after the last one has no score, but the hidden state of the last one is that which would score it.
        after = [0] if hidden else []
        rows = [
            _Row((one[0],), [*one[1:], *after], own_temperature, asked=own_asked)
            for one, own_temperature, own_asked in zip(sequences, temperatures, asked, strict=True)
        ]
        arrays = self._arrays(shape, kind)

        def numbers_of(row: int) -> TokenNumbers:
            length = len(rows[row].continuation)
            return TokenNumbers(**{name: array[row, :length] for name, array in arrays.items()})

        self._compute("logprobs", rows, kind, numbers_of)
        found = {name: on_device(array[0] if is_one else array) for name, array in arrays.items()}
        if top_k is not None:
            return TopLogprobs(found["top_token_ids"], found["top_logprobs"], found["log_rests"])
        return next(iter(found.values()))

    def score(self, contexts: Any, continuations: Any, *, temperature: Any, from_position: Any) -> Scores:
        """Return the scores of continuations, each context computed once; see `Engine.score`."""
        refuse_traced("score")
        pairs = self._pairs(contexts, continuations)
        temperatures = _each_temperature(temperature, len(pairs))
        check("from_position", from_position, integer(0))
        for row, (_, _, continuation) in enumerate(pairs):
            if len(continuation) <= from_position:
                got = f"{from_position}, and continuation {row} of {len(continuation)} tokens"
                raise refusal("from_position", got, "less than the tokens of each continuation")
        rows = [
            _Row(context, continuation, one, int(from_position))
            for (_, context, continuation), one in zip(pairs, temperatures, strict=True)
        ]
        shape = len(rows), max((len(row.continuation) for row in rows), default=0)
        logprobs, ranks = np.zeros(shape, np.float32), np.zeros(shape, np.int32)

        def numbers_of(row: int) -> TokenNumbers:
            length = len(rows[row].continuation)
            return TokenNumbers(logprobs=logprobs[row, :length], ranks=ranks[row, :length])

        versions = self._compute("score", rows, ScoreKind(), numbers_of)
        lens = np.array([len(row.continuation) for row in rows], np.int32)
        places = np.arange(shape[1])
        mask = (places < lens[:, None]) & (places >= from_position)
        return Scores(
            logprobs=on_device(logprobs),
            is_greedy=on_device((ranks == 1) & mask),
            mask=on_device(mask),
            sums=on_device(np.asarray(np.sum(logprobs, axis=1, dtype=np.float64), np.float32)),
            context_indices=on_device(np.array([index for index, _, _ in pairs], np.int32)),
            versions=on_device(np.array(versions, np.int32)),
        )

    def packed_tops(
        self, call: str, sequences: Sequence[Sequence[int]], *, temperature: float, num_tops: int
    ) -> PackedTops:
        """Return the most likely tokens at each place of sequences of checked token ids, without padding.

        `call` is the calling function, for errors. Beside the result, memory holds no more than a few steps.
        """
        rows = [_Row((one[0],), list(one[1:]), temperature) for one in sequences]
        ends = np.cumsum([0, *(len(row.continuation) for row in rows)])
        kind = ScoreKind(num_tops=num_tops)
        arrays = self._arrays((int(ends[-1]),), kind)

        def numbers_of(row: int) -> TokenNumbers:
            return TokenNumbers(**{name: array[ends[row] : ends[row + 1]] for name, array in arrays.items()})

        versions = self._compute(call, rows, kind, numbers_of)
        return PackedTops(arrays["top_token_ids"], arrays["top_logprobs"], arrays["log_rests"], versions)

    def encode(self, prompt: Any) -> list[int]:
        """Return the checked token ids of a prompt in any form; raise InvalidRequestError if it cannot be scored."""
        return self.builder.encoder.encode(prompt, has_answer=False).token_ids

    def check_num_tops(self, top_k: Any) -> int:
        """Return a number of most likely tokens as an integer; raise InvalidRequestError if there cannot be so many."""
        try:
            return int(check("top_k", top_k, integer(1, self._max_num_tops)))
        except InvalidRequestError as error:
            if self._max_num_tops != self.builder.config.max_logprobs:
                raise
            raise InvalidRequestError(
                f"{error}; or start the engine with a higher max_logprobs", param="top_k"
            ) from None

    @property
    def _max_num_tops(self) -> int:
        """Return the most tokens at one place whose logprobs may be asked for."""
        limit = self.builder.config.max_logprobs
        return min(COUNTS[-1] if limit < 0 else limit, self.builder.encoder.vocab_size)

    def _asked(
        self, token_ids: Any, shape: tuple[int, int], *, is_one: bool, lens: Sequence[int]
    ) -> tuple[ScoreKind, list[bytes]]:
        """Return the kind of scores for tokens asked for at each place, and these tokens of each row, int32 [N, S].

        `token_ids` is an array of integers [B, N − 1, S], or [N − 1, S] for one sequence; `lens` has N − 1 by row.
        """
        given = as_array("token_ids", token_ids)
        asked = given[None] if is_one and given.ndim == 2 else given
        places = f"[{'' if is_one else f'{shape[0]}, '}{shape[1]}, S]"
        if asked.ndim != 3 or asked.shape[:2] != shape or not np.issubdtype(asked.dtype, np.integer):
            raise refusal("token_ids", f"{given.dtype} {list(given.shape)}", f"integers {places}")
        if not 1 <= asked.shape[2] <= self._max_num_tops:
            way_out = "start the engine with a higher max_logprobs"
            raise refusal("token_ids", f"S of {asked.shape[2]}", f"1 to max_logprobs, {self._max_num_tops}", way_out)
        if asked.size and not 0 <= asked.min() <= asked.max() < self.builder.encoder.vocab_size:
            outside = asked.min() if asked.min() < 0 else asked.max()
            raise refusal("token_ids", f"token id {outside}", f"0 to {self.builder.encoder.vocab_size - 1}")
        rows = [row[:length].astype(np.int32).tobytes() for row, length in zip(asked, lens, strict=True)]
        return ScoreKind(num_asked=asked.shape[2]), rows

    def _arrays(self, shape: tuple[int, ...], kind: ScoreKind) -> dict[str, np.ndarray]:
        """Return arrays of zeros for the scores of places of this shape, by their fields of `TokenNumbers`.

        Hidden states are those of rows [B, N − 1] and of one token more in each.
        """
        if kind.is_hidden:
            hidden_size = self.batch.loop.runner.state.hidden.shape[1]
            return {"hidden": _zeros((shape[0], shape[1] + 1, hidden_size), np.float32)}
        if kind.num_asked:
            return {"asked_logprobs": _zeros((*shape, kind.num_asked), np.float32)}
        if kind.num_tops:
            return {
                "top_token_ids": _zeros((*shape, kind.num_tops), np.int32),
                "top_logprobs": _zeros((*shape, kind.num_tops), np.float32),
                "log_rests": _zeros(shape, np.float32),
            }
        return {"logprobs": _zeros(shape, np.float32)}

    def _pairs(self, contexts: Any, continuations: Any) -> list[tuple[int, tuple[int, ...], list[int]]]:
        """Return (index of the context, its tokens, tokens of the continuation) for each continuation, in order."""
        for name, value in (("contexts", contexts), ("continuations", continuations)):
            if isinstance(value, str | Mapping) or not isinstance(value, Sequence | np.ndarray | jax.Array):
                raise refusal(name, told(value), "a list")
        if len(contexts) != len(continuations):
            got = f"{len(continuations)} for {len(contexts)} contexts"
            raise refusal("continuations", got, "one for each context, or a list of several for each")
        pairs = []
        for index, (context, each) in enumerate(zip(contexts, continuations, strict=True)):
            context_ids = tuple(self._ids(context, f"context {index}", is_start=True))
            several = each if _are_several(each) else [each]
            pairs += [(index, context_ids, self._ids(one, f"continuation of context {index}")) for one in several]
        return pairs

    def _ids(self, tokens: Any, name: str, *, is_start: bool = False) -> list[int]:
        """Return token ids as a list, made of a text, which gets tokens such as BOS at the start of a context alone."""
        if isinstance(tokens, str):
            tokenizer = self.builder.encoder.tokenizer
            if tokenizer is None:
                raise refusal(name, "a text", "token ids, since the engine has no tokenizer")
            tokens = tokenizer.encode(tokens, add_special_tokens=is_start)
        ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        ids = list(map(scalar, ids)) if isinstance(ids, list | tuple) else ids
        if not isinstance(ids, list) or not all(map(is_integer, ids)):
            raise refusal(name, told(tokens), "a list or an array of token ids, or a text")
        if not ids:
            raise refusal(name, "no token", "at least one", "leave it out, or give a context that ends before it")
        return [int(token_id) for token_id in ids]

    def _compute(
        self, call: str, rows: Sequence[_Row], kind: ScoreKind, numbers_of: Callable[[int], TokenNumbers]
    ) -> list[int]:
        """Compute the scores of rows, which go to `numbers_of(row)`; return the version of the weights for each row.

        Rows without a token to score are only checked. Raise InvalidRequestError for a row that cannot be scored, and
        JpagedError if one was aborted or has failed.
        """
        for index, row in enumerate(rows):
            try:
                self.builder.check_scored(row.context, row.continuation)
            except InvalidRequestError as error:
                noun = "continuation" if call == "score" else "prompt"
                raise error.within(f"{noun} {index}") from error
        groups = self._shared_contexts(rows)
        built = [self._request(rows, indices, kind) for indices in groups]
        versions = [self.batch.loop.versions.version] * len(rows)
        named = self.batch.name(call, built, number=0)
        indices_of = dict(zip(named, groups, strict=True))

        def numbers_of_samples(request_id: str) -> list[TokenNumbers]:
            return [numbers_of(index) for index in indices_of[request_id]]

        for request, _ in self.batch.compute(named.values(), on_error="raise", numbers_of=numbers_of_samples):
            indices = indices_of[request.request_id]
            if request.error is not None or request.state.finish_reason == "abort":
                raise JpagedError(f"{call}: sequence {indices[0]} failed: {request.error or 'it was aborted'}")
            self.batch.loop.core.results.let_go(request)
            for one, index in zip(request.sequences, indices, strict=True):
                versions[index] = one.weight_versions[-1][1]
        return versions

    def _request(self, rows: Sequence[_Row], indices: Sequence[int], kind: ScoreKind) -> NewRequest:
        """Return the message of a request that scores these rows, which have one context."""
        chosen = [rows[index] for index in indices]
        scoring = Scoring(
            continuations=tuple(array("i", row.continuation).tobytes() for row in chosen),
            temperatures=tuple(row.temperature for row in chosen),
            first=chosen[0].first,  # That of all rows of a call.
            kind=kind,
            asked=tuple(row.asked for row in chosen),
        )
        return self.builder.build_scored(chosen[0].context, scoring)

    def _shared_contexts(self, rows: Sequence[_Row]) -> list[list[int]]:
        """Return the indices of the rows that become one request each, its samples: rows of equal contexts, as many of
        them as the pages and `max_num_seqs` have room for at once. Rows without a token to score are left out."""
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if row.continuation:
                # A context of one token has nothing to share: the sample computes its last token itself.
                groups[row.context if len(row.context) > 1 else (row.context, index)].append(index)
        demand, max_num_seqs = self.batch.loop.scheduler.demand, self.builder.sizes.max_num_seqs
        parts = []
        for indices in groups.values():
            context_len = len(rows[indices[0]].context)
            num_tokens = context_len + max(len(rows[index].continuation) for index in indices) - 1
            size = demand.max_samples(context_len - 1, num_tokens, min(max_num_seqs, len(indices)))
            parts += [indices[start : start + size] for start in range(0, len(indices), size)]
        return parts


def _are_several(value: Any) -> bool:
    """Return whether a value is a list of continuations and not a single one."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray | jax.Array):
        return False
    return len(value) > 0 and not is_integer(scalar(value[0]))


def _each_temperature(temperature: Any, num_rows: int) -> list[float]:
    """Return a temperature for each row, of one number or of one for each; raise InvalidRequestError for others."""
    each = temperature if isinstance(temperature, Sequence) else as_array("temperature", temperature).tolist()
    values = [each] * num_rows if not isinstance(each, Sequence) or isinstance(each, str) else list(each)
    if len(values) != num_rows:
        raise refusal("temperature", f"{len(values)} for {num_rows} rows", "one for all or one for each")
    return [float(check("temperature", one, number(1e-4, 2.0))) for one in values]


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return an array of zeros that begins at a multiple of ALIGNMENT bytes, which a CPU's device takes uncopied."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
