"""Scores tokens by the log-softmax of their rows of logits, with their ranks and the most likely tokens.

Letters: R rows, V vocabulary, k most likely tokens; r selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.row_sums import sum_by_halves
from .control_flow import ControlFlow
from .sampling_params import ScoreKind
from .thresholds import sum_together
from .top_blocks import BLOCK, BlockRows, take_along_rows, take_rows

if TYPE_CHECKING:
    from ..pallas_kernels.native.row_scores import ScoredRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """The logprob and rank of one token per row, and the logprobs of the most likely tokens, or of all of them."""

    logprobs: Float[Array, " R"]
    ranks: Int[Array, " R"]
    """1 for the most likely token."""
    top_token_ids: Int[Array, "R k"] | None = None
    """The k most likely tokens, most likely first. Those of rows without `Score.TOPS`, and their logprobs, mean
    nothing: they may never have been written."""
    top_logprobs: Float[Array, "R k"] | None = None
    all_logprobs: Float[Array, "R V"] | None = None
    """Instead of the two above, where requests may ask for the whole vocabulary."""
    log_kept_masses: Float[Array, " R"] | None = None
    """The logarithm of the probability that truncation left, 0 for rows that do not ask for it; in mode FULL alone."""
    log_rests: Float[Array, " R"] | None = None
    """The logarithm of the probability of all but the most likely tokens; for tokens that are scored and not drawn."""
    asked_logprobs: Float[Array, "R S"] | None = None
    """The logprobs of the other tokens that were asked for, likewise."""
    hidden: Float[Array, "R D"] | None = None
    """The hidden states that score the tokens, instead of all logprobs; likewise."""

    def top(self, row: int, num_tops: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and logprobs of the `num_tops` most likely tokens of a row, most likely first.

        −1 asks for the whole vocabulary, which needs `all_logprobs`. Of tokens with equal logprobs the lower id comes
        first. With `all_logprobs`, a number beyond the vocabulary gives all of it. Without, the row's k stored tokens
        are cut, so that a number beyond k gives k. If only the row's own token was scored, `num_tops` must be 0, and
        both arrays are empty. Call this on the host, after the scores have been copied there as numpy arrays.
        """
        if self.all_logprobs is None and self.top_token_ids is None:
            # A request that asks for other tokens is sampled in mode FULL, which scores them.
            assert num_tops == 0, "no other tokens were scored"
            return np.empty(0, np.int32), np.empty(0, np.float32)
        if self.all_logprobs is None:
            assert self.top_token_ids is not None
            assert self.top_logprobs is not None
            return np.asarray(self.top_token_ids[row, :num_tops]), np.asarray(self.top_logprobs[row, :num_tops])
        logprobs = np.asarray(self.all_logprobs[row])
        if 0 <= num_tops < len(logprobs):
            # A vocabulary is long: only the tokens that reach the logprob of the last one wanted are sorted. All that
            # tie with that one are among them, so that the lower ids win. For 0 tokens, no logprob reaches infinity.
            lowest_logprob = np.partition(logprobs, -num_tops)[-num_tops] if num_tops else np.inf
            ids = np.flatnonzero(logprobs >= lowest_logprob)
        else:
            ids = np.arange(len(logprobs))
        # A stable sort keeps the lower of two ids with equal logprobs first.
        ids = ids[np.argsort(-logprobs[ids], kind="stable")][: num_tops if num_tops >= 0 else None]
        return ids, logprobs[ids]


def token_scores(
    logits: BlockRows,
    token_ids: Int[Array, " r"],
    temperature: Float[Array, " r"],
    wants_tops: Bool[Array, ""],
    *,
    max_logprobs: int,
    vocab_size: int,
    control_flow: ControlFlow,
    native_scores: ScoredRows | None = None,
) -> TokenScores:
    """Return the logprob and rank of one token of each selected row, by the log-softmax of logits ÷ temperature.

    `token_ids` are these tokens, one for each of r rows. Ranks count from 1. `max_logprobs` is how many most likely
    tokens are returned beside it, [r, k] with k = min(max_logprobs, vocab_size): 0 for none, and −1 for the logprobs of
    the whole vocabulary, [r, V], instead. Those of rows that do not ask for them mean nothing: native code writes none
    for such a row, and if `wants_tops` is false, no row asks. The row maximum is subtracted from logits first, before
    the logarithm of the total: in the other order, the rounding of large logits would show in the result. With
    `native_scores`, those that native code has of the selected rows, no row is read for what they hold.
    """
    token_logit = logits_of(logits, token_ids[:, None])
    row_max, scale = logits.row_max[:, None], 1.0 / temperature[:, None]
    if native_scores is not None:
        ranks, log_total = 1 + native_scores.num_larger, jnp.log(native_scores.totals)[:, None]
    else:
        blocks = take_rows(logits.blocks, logits.selection)
        ranks, log_total, _ = _ranks_and_log_totals(blocks, token_logit, row_max, scale)

    def logprobs(logits_rn: Float[Array, "r n"]) -> Float[Array, "r n"]:
        return (logits_rn - row_max) * scale - log_total

    token_logprobs = logprobs(token_logit)[:, 0]
    if max_logprobs < 0:
        return TokenScores(token_logprobs, ranks, all_logprobs=logprobs(logits.values[:, :vocab_size]))
    if max_logprobs == 0:
        return TokenScores(token_logprobs, ranks)
    if native_scores is not None and native_scores.top_logits is not None:
        return TokenScores(token_logprobs, ranks, native_scores.top_ids, logprobs(native_scores.top_logits))
    num_tops = min(max_logprobs, vocab_size)

    def tops() -> tuple[Int[Array, "r k"], Float[Array, "r k"]]:
        top_logits, top_ids = logits.top_k(num_tops)
        return top_ids.astype(jnp.int32), logprobs(top_logits)  # With x64, top_k gives indices of int64.

    def zeros() -> tuple[Int[Array, "r k"], Float[Array, "r k"]]:
        shape = len(token_ids), num_tops
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_ids, top_logprobs = control_flow.compute_if(wants_tops, tops, zeros)
    return TokenScores(token_logprobs, ranks, top_ids, top_logprobs)


def given_scores(
    logits: BlockRows,
    token_ids: Int[Array, " R"],
    temperature: Float[Array, " R"],
    kind: ScoreKind,
    asked: Int[Array, "R S"] | None,
    *,
    vocab_size: int,
) -> TokenScores:
    """Return the scores of one given token of each row, by the log-softmax of logits ÷ temperature.

    `kind` says what is given beside the logprob and the rank: the k most likely tokens, k = min(num_tops, vocab_size),
    with the logarithm of the probability of all others, which is −inf if there is none; or the whole vocabulary; or the
    logprobs of the tokens `asked`.
    """
    row_max, scale = logits.row_max[:, None], 1.0 / temperature[:, None]
    token_logit, num_tops = logits_of(logits, token_ids[:, None]), min(kind.num_tops, vocab_size)
    top_logits, top_ids = logits.top_k(num_tops) if num_tops > 0 else (None, None)
    # The least likely of the tops; without tops, no logit is below −inf.
    lowest = jnp.full_like(row_max, -jnp.inf) if top_logits is None else top_logits[:, -1:]
    ranks, log_total, log_rest = _ranks_and_log_totals(logits.blocks, token_logit, row_max, scale, lowest, num_tops)

    def logprobs(logits_Rn: Float[Array, "R n"]) -> Float[Array, "R n"]:
        return (logits_Rn - row_max) * scale - log_total

    scores = TokenScores(logprobs(token_logit)[:, 0], ranks)
    if top_logits is not None and top_ids is not None:
        return replace(
            scores,
            top_token_ids=top_ids.astype(jnp.int32),
            top_logprobs=logprobs(top_logits),
            log_rests=(log_rest - log_total)[:, 0],
        )
    if num_tops < 0:
        return replace(scores, all_logprobs=logprobs(logits.values[:, :vocab_size]))
    if asked is not None:
        return replace(scores, asked_logprobs=logprobs(logits_of(logits, asked)))
    return scores


def logits_of(logits: BlockRows, token_ids: Int[Array, "r n"]) -> Float[Array, "r n"]:
    """Return the logits of n tokens of each selected row. Of each row only the blocks that hold them are read."""
    blocks = logits.take_blocks(token_ids // BLOCK)
    return take_along_rows(blocks.reshape(-1, BLOCK), (token_ids % BLOCK).reshape(-1, 1)).reshape(token_ids.shape)


def _ranks_and_log_totals(
    blocks: Float[Array, "r b B"],
    token_logit: Float[Array, "r 1"],
    row_max: Float[Array, "r 1"],
    scale: Float[Array, "r 1"],
    lowest_top: Float[Array, "r 1"] | None = None,
    num_tops: int = 0,
) -> tuple[Int[Array, " r"], Float[Array, "r 1"], Float[Array, "r 1"]]:
    """Return the rank of each row's token, the logarithm of the row's total, and that of what its tops leave.

    `blocks` are the logits of r rows, cut into b blocks of B; −inf fills up the last one, and adds 0 to all results.
    The rank is 1 + the number of larger logits, so tokens that tie have the same rank. The total, the softmax's
    denominator, is Σ exp((logit − row_max) × scale) over the vocabulary; `scale` is 1 ÷ temperature. The tops are the
    `num_tops` largest logits, of which `lowest_top` is the smallest; they leave the sum over the others, of which some
    may be equal to it. Without tops that result means nothing.

    One reduction along the blocks gives all results of each block, since a separate one for ranks would take a CPU
    longer than the exponentials. A second one adds up the blocks: a single running sum over a vocabulary would be off
    by 1e-6.
    """
    is_larger = (blocks > token_logit[:, :, None]).astype(jnp.int32)
    weights = jnp.exp((blocks - row_max[:, :, None]) * scale[:, :, None])
    if not num_tops or lowest_top is None:
        num_larger, totals = sum_together(is_larger, weights, axis=2)
        log_total = jnp.log(sum_by_halves(totals)[:, None])
        return 1 + jnp.sum(num_larger, axis=1, dtype=jnp.int32), log_total, log_total
    edge = lowest_top[:, :, None]
    is_in_tops, below = (blocks >= edge).astype(jnp.int32), jnp.where(blocks < edge, weights, 0.0)
    sums = sum_together(is_larger, is_in_tops, weights, below, axis=2)
    num_larger, num_reaching = (jnp.sum(one, axis=1, keepdims=True, dtype=one.dtype) for one in sums[:2])
    total, rest = (sum_by_halves(one)[:, None] for one in sums[2:])
    num_ties = (num_reaching - num_tops).astype(jnp.float32)  # Logits equal to the lowest top that are no tops.
    rest += num_ties * jnp.exp((lowest_top - row_max) * scale)
    return 1 + num_larger[:, 0], jnp.log(total), jnp.log(rest)
