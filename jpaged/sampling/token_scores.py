"""Scores tokens by the log-softmax of their rows of logits, with their ranks and the most likely tokens.

Letters: R rows, V vocabulary, k most likely tokens; r selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .control_flow import ControlFlow
from .thresholds import sum_pairs
from .top_blocks import BLOCK, BlockRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """The logprob and rank of one token per row, and the logprobs of the most likely tokens, or of all of them."""

    logprobs: Float[Array, " R"]
    ranks: Int[Array, " R"]
    """1 for the most likely token."""
    top_token_ids: Int[Array, "R k"] | None = None
    """The k most likely tokens, most likely first."""
    top_logprobs: Float[Array, "R k"] | None = None
    all_logprobs: Float[Array, "R V"] | None = None
    """Instead of the two above, where requests may ask for the whole vocabulary."""
    log_kept_masses: Float[Array, " R"] | None = None
    """The logarithm of the probability that truncation left, 0 for rows that do not ask for it; in mode FULL alone."""

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
) -> TokenScores:
    """Return the logprob and rank of one token of each selected row, by the log-softmax of logits ÷ temperature.

    `token_ids` are these tokens, one for each of r rows. Ranks count from 1. `max_logprobs` is how many most likely
    tokens are returned beside it, [r, k] with k = min(max_logprobs, vocab_size): 0 for none, and −1 for the logprobs of
    the whole vocabulary, [r, V], instead. If `wants_tops` is false, no row asks for the most likely tokens, and zeros
    may be returned for them. The row maximum is subtracted from logits first, before the logarithm of the total: in the
    other order, the rounding of large logits would show in the result.
    """
    # Of each row only the block that holds the token is read, [r, 1, B].
    block_ids = token_ids[:, None] // BLOCK
    token_logit = jnp.take_along_axis(logits.take_blocks(block_ids)[:, 0], token_ids[:, None] % BLOCK, axis=1)
    row_max, scale = logits.row_max[:, None], 1.0 / temperature[:, None]
    ranks, log_total = _ranks_and_log_totals(logits.blocks[logits.selection], token_logit, row_max, scale)

    def logprobs(logits_rn: Float[Array, "r n"]) -> Float[Array, "r n"]:
        return (logits_rn - row_max) * scale - log_total

    token_logprobs = logprobs(token_logit)[:, 0]
    if max_logprobs < 0:
        return TokenScores(token_logprobs, ranks, all_logprobs=logprobs(logits.values[:, :vocab_size]))
    if max_logprobs == 0:
        return TokenScores(token_logprobs, ranks)
    num_tops = min(max_logprobs, vocab_size)

    def tops() -> tuple[Int[Array, "r k"], Float[Array, "r k"]]:
        top_logits, top_ids = logits.top_k(num_tops)
        return top_ids.astype(jnp.int32), logprobs(top_logits)  # With x64, top_k gives indices of int64.

    def zeros() -> tuple[Int[Array, "r k"], Float[Array, "r k"]]:
        shape = len(token_ids), num_tops
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_ids, top_logprobs = control_flow.compute_if(wants_tops, tops, zeros)
    return TokenScores(token_logprobs, ranks, top_ids, top_logprobs)


def _ranks_and_log_totals(
    blocks: Float[Array, "r b B"],
    token_logit: Float[Array, "r 1"],
    row_max: Float[Array, "r 1"],
    scale: Float[Array, "r 1"],
) -> tuple[Int[Array, " r"], Float[Array, "r 1"]]:
    """Return the rank of each row's token and the logarithm of the row's total, the softmax's denominator.

    `blocks` are the logits of r rows, cut into b blocks of B; −inf fills up the last one, and adds 0 to both results.
    The rank is 1 + the number of larger logits, so tokens that tie have the same rank. The total is
    Σ exp((logit − row_max) × scale) over the vocabulary; `scale` is 1 ÷ temperature. One reduction along the blocks
    gives both results of each block, since a separate one for ranks would take a CPU longer than the exponentials. A
    second one adds up the blocks: a single running sum over a vocabulary would be off by 1e-6.
    """
    is_larger = (blocks > token_logit[:, :, None]).astype(jnp.int32)
    num_larger, totals = sum_pairs(is_larger, jnp.exp((blocks - row_max[:, :, None]) * scale[:, :, None]), axis=2)
    return 1 + jnp.sum(num_larger, axis=1, dtype=jnp.int32), jnp.log(jnp.sum(totals, axis=1, keepdims=True))
