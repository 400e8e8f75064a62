"""Leaves out unlikely tokens by min-p, top-k and top-p, on the device, without sorting the vocabulary.

Each rule keeps the tokens whose weight reaches a threshold, which thresholds.py finds exactly, first among a few blocks
of tokens that hold the likeliest ones. Rules apply in vLLM's order: min-p, top-k, top-p, each over the tokens that the
one before left. Tokens that tie with the last one kept are kept as well.

Letters: R rows, V vocabulary, n weights, B tokens of a block, b blocks of a row, t likely ones; r selected rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .control_flow import DYNAMIC, ControlFlow
from .thresholds import KeptMinimum, block_masses, kept_count_and_mass, kept_mass
from .top_blocks import BLOCK, BlockRows

NUM_LIKELY_BLOCKS = 64
"""Blocks of a row that are searched first: those with its likeliest tokens."""

RowFunction = Callable[[Array], Array]
"""An ascending function of each number of R rows [R, n], with parameters by row. One that gives weights, or heights to
search among, is at most 1, and 0 for −inf."""


class TruncationLimits(NamedTuple):
    """The truncation parameters of R rows."""

    min_p: Float[Array, " R"]
    """Smallest weight of a token that is kept; 0 keeps all."""
    top_k: Int[Array, " R"]
    """Tokens that are kept; 0, or the vocabulary's size, keeps all."""
    top_p: Float[Array, " R"]
    """Share of the weights that the tokens kept must reach; 1 keeps all, and 0 those that tie with the likeliest."""


class KeptTokens(NamedTuple):
    """The tokens of R rows that truncation keeps: those whose weight reaches the row's threshold."""

    threshold: Float[Array, " R"]
    block_sums: Float[Array, "R b"]
    """Sum of the weights kept in each block of `BLOCK` consecutive tokens."""


def truncate(
    logits: BlockRows,
    weigh: RowFunction,
    limits: TruncationLimits,
    is_drawn: Bool[Array, " r"],
    control_flow: ControlFlow = DYNAMIC,
) -> KeptTokens:
    """Return the tokens of each selected row that min-p, top-k and top-p keep: a threshold, and sums of kept weights.

    `weigh` turns logits [r, n] into weights, of which a row's largest is 1. A token is kept if its weight reaches the
    threshold. Min-p is the first threshold. Then top-k raises it to the weight of the k-th token, unless it is higher
    already, and top-p to the highest threshold that still keeps the share `top_p` of the remaining weights. Tokens that
    tie with the last one kept are kept. If no row has a top-k or top-p, no search is needed. The block sums of rows
    without `is_drawn` may be wrong.

    Example with the weights 1, 0.5, 0.3 and 0.1: min-p 0.2 leaves three of them, and top-k 2 leaves 1 and 0.5. Top-p
    0.6 needs 0.6 × 1.5 = 0.9 of these, so that only the first token is kept; with top-p 0.7 both are.
    """
    has_top_k = _has_top_k(logits, limits.top_k)
    has_top_p = limits.top_p < 1.0

    def limited() -> KeptTokens:
        """Return what is kept of all rows after top-k and then top-p have raised the threshold of min-p."""
        search = _threshold_search(logits, weigh, control_flow)

        def raise_threshold(index: Int[Array, ""], threshold: Float[Array, " r"]) -> Float[Array, " r"]:
            """Raise the threshold by top-k if `index` is 0, then by top-p."""
            is_top_p = index > 0
            # Top-k asks for a number of tokens and top-p for a sum of weights: the other minimum is 0 each time.
            mass = search.kept_mass(threshold, has_top_p & is_top_p)
            minimum = KeptMinimum(
                is_limited=jnp.where(is_top_p, has_top_p, has_top_k),
                min_count=jnp.where(is_top_p, 0, limits.top_k),
                min_mass=jnp.where(is_top_p, limits.top_p * mass, 0.0),
            )
            return search.raise_threshold(threshold, minimum)

        threshold = control_flow.repeat(2, raise_threshold, limits.min_p)
        return KeptTokens(threshold, search.block_sums(threshold, is_drawn))

    def unlimited() -> KeptTokens:
        """Return what is kept of all rows by min-p alone."""
        return KeptTokens(limits.min_p, block_masses(weigh(logits.values), limits.min_p))

    return control_flow.compute_if(jnp.any(has_top_k | has_top_p), limited, unlimited)


def is_in_top_k(
    logits: BlockRows, heights: RowFunction, top_k: Int[Array, " r"], control_flow: ControlFlow = DYNAMIC
) -> Bool[Array, "r bB"]:
    """Return which tokens are among the `top_k` most likely ones of their row; tokens that tie with the k-th are too.

    The result has all b × B tokens of the b blocks of each of the r selected rows, padding included. For rows whose
    `top_k` is 0, or at least the padded vocabulary, it is true everywhere. `heights` turns n logits of each row,
    [r, n], into numbers that ascend with the logits: in (0, 1], and 0 for −inf. The search bisects the bits of float32
    numbers, which are in the order of the numbers only if these are not negative. Logits of equal height tie.
    """
    # The search begins at threshold 0, which keeps all tokens. Top-k counts tokens: their sum may be anything.
    zeros = jnp.zeros(len(top_k), jnp.float32)
    search, is_limited = _threshold_search(logits, heights, control_flow), _has_top_k(logits, top_k)
    threshold = search.raise_threshold(zeros, KeptMinimum(is_limited, min_count=top_k, min_mass=zeros))
    return heights(logits.values) >= threshold[:, None]


def _has_top_k(rows: BlockRows, top_k: Int[Array, " r"]) -> Bool[Array, " r"]:
    """Return which rows have a top-k that may leave tokens out; 0, or the padded vocabulary's size, leaves out none."""
    return (top_k > 0) & (top_k < rows.maxima.shape[1] * BLOCK)


def _threshold_search(logits: BlockRows, weigh: RowFunction, control_flow: ControlFlow) -> _WholeRowSearch:
    """Return a search that reads NUM_LIKELY_BLOCKS blocks of each row first, or whole rows if they have no more blocks.

    It also reads whole rows if `control_flow` has no branches, since it would read both then.
    """
    if control_flow.searches_likely_blocks and logits.maxima.shape[1] > NUM_LIKELY_BLOCKS:
        return _LikelyFirstSearch(logits, weigh, control_flow)
    return _WholeRowSearch(logits, weigh, control_flow)


class _WholeRowSearch:
    """Searches thresholds of the weights of the selected rows, over all tokens."""

    def __init__(self, logits: BlockRows, weigh: RowFunction, control_flow: ControlFlow) -> None:
        self.logits, self.weigh, self.control_flow = logits, weigh, control_flow

    def raise_threshold(self, threshold: Float[Array, " r"], minimum: KeptMinimum) -> Float[Array, " r"]:
        """Return each row's threshold, raised as far as the tokens that reach it still amount to `minimum`.

        Thresholds are weights ≥ 0. The result keeps the same tokens as the highest threshold that keeps enough; it may
        be lower where no token's weight lies between the two. Rows that are not limited (`minimum.is_limited`) get
        their given threshold back, as does a row whose given threshold keeps too few tokens already.
        """
        raised_bits = self._raise_bits(lax.bitcast_convert_type(threshold, jnp.int32), minimum)
        return jnp.where(minimum.is_limited, lax.bitcast_convert_type(raised_bits, jnp.float32), threshold)

    def kept_mass(self, threshold: Float[Array, " r"], is_needed: Bool[Array, " r"]) -> Float[Array, " r"]:
        """Return the sum of each row's weights that reach its threshold; anything in rows without `is_needed`."""
        return kept_mass(self._weights(), threshold)

    def block_sums(self, threshold: Float[Array, " r"], is_needed: Bool[Array, " r"]) -> Float[Array, "r b"]:
        """Return the sums of each block's weights that reach the threshold; anything in rows without `is_needed`."""
        return block_masses(self._weights(), threshold)

    def _raise_bits(self, threshold_bits: Int[Array, " r"], minimum: KeptMinimum) -> Int[Array, " r"]:
        """Return what `raise_threshold` does, as float32 bits; it means nothing for rows that are not limited."""
        return self.control_flow.highest_thresholds(self._weights(), threshold_bits, minimum)

    def _weights(self) -> Float[Array, "r bB"]:
        """Return the weights of whole rows."""
        return self.weigh(self.logits.values)


class _LikelyFirstSearch(_WholeRowSearch):
    """Searches thresholds in the NUM_LIKELY_BLOCKS blocks with a row's likeliest tokens, and in whole rows if needed.

    Likely blocks suffice for a row if they hold all tokens that the answer depends on, as in nearly every row. Whole
    rows are read only if a row needs them. Which of the two gives a row's result depends on that row only.
    """

    def __init__(self, logits: BlockRows, weigh: RowFunction, control_flow: ControlFlow) -> None:
        """Weigh the tokens of each row's likely blocks, and find the lowest weight that no token elsewhere reaches.

        The likely blocks of a row are the t = NUM_LIKELY_BLOCKS blocks of B tokens with the largest maxima; `logits`
        must have more blocks per row. `weigh` turns logits [r, n] into weights in [0, 1] that ascend with the logits.
        """
        super().__init__(logits, weigh, control_flow)
        top = logits.top_blocks(NUM_LIKELY_BLOCKS)
        largest_unlikely = weigh(top.largest_outside[:, None])[:, 0]
        # As integers, the bits of float32 numbers ≥ 0 are in the order of the numbers: + 1 is the next larger number.
        self.complete_from = lax.bitcast_convert_type(largest_unlikely, jnp.int32) + 1
        """Bits of a weight, [r]: every token whose weight reaches it lies in a likely block."""
        self.likely_weights = weigh(top.values)
        """Weights of the tokens in likely blocks, [r, t × B]."""
        self.likely_block_ids = top.block_ids

    def _raise_bits(self, threshold_bits: Int[Array, " r"], minimum: KeptMinimum) -> Int[Array, " r"]:
        """Return each row's threshold, raised as far as the tokens whose weight reaches it still amount to `minimum`.

        Thresholds are weights ≥ 0, given and returned as their float32 bits, int32 [r]: as integers, these are in the
        order of the numbers. A row whose given threshold keeps too few tokens already gets it back. The result means
        nothing for rows that are not limited (`minimum.is_limited`).

        A row's likely blocks are the NUM_LIKELY_BLOCKS blocks of tokens with its largest weights. They hold every token
        whose weight reaches `complete_from` (bits [r]). If these tokens amount to `minimum`, the answer is at least
        `complete_from`, and only the likely blocks are searched. Otherwise the whole row is searched.

        Example: two likely blocks hold the weights (1, 0.05) and (0.5, 0.2), and the largest weight elsewhere is 0.1.
        So `complete_from` is the next number above 0.1, which three tokens reach. That suffices for top-k 2, whose
        search ends at a threshold that keeps 1 and 0.5. For top-k 4 the whole row is searched, and 0.1 is kept too.
        """
        search, is_limited = self.control_flow.highest_thresholds, minimum.is_limited
        complete_from = lax.bitcast_convert_type(self.complete_from, jnp.float32)
        # Whether the tokens that reach `complete_from` are enough, by row.
        suffices = minimum.is_met(*kept_count_and_mass(self.likely_weights, complete_from))
        low = jnp.maximum(threshold_bits, self.complete_from)
        # Only rows that are limited are searched: here those whose likely blocks suffice, and below the others.
        likely_minimum = minimum._replace(is_limited=is_limited & suffices)
        raised_bits = search(self.likely_weights, low, likely_minimum)

        def search_whole_rows(weights: Float[Array, "r bB"]) -> Int[Array, " r"]:
            return search(weights, threshold_bits, minimum._replace(is_limited=is_limited & ~suffices))

        return self._where_likely_suffice(suffices, is_limited, raised_bits, search_whole_rows)

    def kept_mass(self, threshold: Float[Array, " r"], is_needed: Bool[Array, " r"]) -> Float[Array, " r"]:
        """Return the sum of each row's weights that reach its threshold, from likely blocks alone if they hold them."""
        suffices = self._are_all_likely(threshold)
        likely_mass = kept_mass(self.likely_weights, threshold)
        from_whole_rows = partial(kept_mass, threshold=threshold)
        return self._where_likely_suffice(suffices, is_needed, likely_mass, from_whole_rows)

    def block_sums(self, threshold: Float[Array, " r"], is_needed: Bool[Array, " r"]) -> Float[Array, "r b"]:
        """Return, for each of a row's b blocks, the sum of its weights that reach the row's threshold.

        If all of these weights lie in the row's t likely blocks, the sums of these [r, t] are scattered to the blocks'
        indices in the row, and the other blocks have the sum 0. Else the whole row is summed. The result means nothing
        for rows without `is_needed`. For example, the sums 0.7 and 1.5 of the likely blocks 1 and 3 of a row with b = 5
        blocks become [0, 0.7, 0, 1.5, 0].
        """
        block_ids, num_blocks = self.likely_block_ids, self.logits.maxima.shape[1]
        zeros_rb = jnp.zeros((len(block_ids), num_blocks), jnp.float32)
        likely_blocks = zeros_rb.at[jnp.arange(len(block_ids))[:, None], block_ids]
        likely_sums = block_masses(self.likely_weights, threshold)
        from_likely_blocks = likely_blocks.set(likely_sums, mode="promise_in_bounds", unique_indices=True)
        suffices = self._are_all_likely(threshold)[:, None]
        from_whole_rows = partial(block_masses, threshold=threshold)
        return self._where_likely_suffice(suffices, is_needed[:, None], from_likely_blocks, from_whole_rows)

    def _are_all_likely(self, threshold: Float[Array, " r"]) -> Bool[Array, " r"]:
        """Return whether all tokens of a row that reach its threshold lie in likely blocks."""
        return lax.bitcast_convert_type(threshold, jnp.int32) >= self.complete_from

    def _where_likely_suffice(
        self,
        suffices: Bool[Array, "r ..."],
        is_needed: Bool[Array, "r ..."],
        from_likely_blocks: Array,
        from_whole_rows: Callable[[Float[Array, "r bB"]], Array],
    ) -> Array:
        """Return `from_likely_blocks` for rows with `suffices`, and for others `from_whole_rows` of all their weights.

        `suffices` says for which rows the likely blocks hold all that the result depends on. When the program runs,
        whole rows are read only if a row with `is_needed` lacks `suffices`. Otherwise all rows get
        `from_likely_blocks`, which means nothing in rows without `suffices`.
        """

        def mixed() -> Array:
            return jnp.where(suffices, from_likely_blocks, from_whole_rows(self._weights()))

        return lax.cond(jnp.all(suffices | ~is_needed), lambda: from_likely_blocks, mixed)
