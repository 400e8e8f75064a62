"""Leaves out unlikely tokens by min-p, top-k and top-p, on the device, without sorting the vocabulary.

Each rule keeps the tokens whose weight reaches a threshold, which is found exactly by cutting the range of the bits of
a float32 again and again, first among a few blocks of tokens that hold the likeliest ones. Rules apply in vLLM's order:
min-p, top-k, top-p, each over the tokens that the one before left. Tokens that tie with the last one kept are kept as
well.

Letters: R rows, V vocabulary, n thresholds or weights, B tokens of a block, b blocks of a row, t likely ones; r is a
group of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .top_blocks import BLOCK, BlockRows

BITS_OF_ONE = int(np.float32(1.0).view(np.int32))
NUM_PARTS, NUM_CUTS = 8, 10
"""Parts that a range of bits is cut into, and how often, where the number of passes is fixed: 8¹⁰ = 2³⁰ numbers."""
NUM_LIKELY_BLOCKS = 64
"""Blocks of a row that are searched first: those with its likeliest tokens."""

RowFunction = Callable[[Array], Array]
"""An ascending function of each number of R rows [R, n], with parameters by row. One that gives weights, or heights to
search among, is at most 1, and 0 for −inf."""
Bounds = tuple[Array, Array, Array, Array]
"""State of a bisection, [R] each: lower and upper bound as the bits of a float32, and how many tokens reach each."""


class TruncationLimits(NamedTuple):
    """Parameters of R rows."""

    min_p: Float[Array, " R"]
    """Smallest weight of a token that is kept; 0 keeps all."""
    top_k: Int[Array, " R"]
    """Tokens that are kept; 0, or the vocabulary's size, keeps all."""
    top_p: Float[Array, " R"]
    """Share of the weights that the tokens kept must reach; 1 keeps all."""


class KeptTokens(NamedTuple):
    """The tokens of R rows that truncation keeps: those whose weight reaches the row's threshold."""

    threshold: Float[Array, " R"]
    block_sums: Float[Array, "R b"]
    """Sum of the weights kept in each block of `BLOCK` consecutive tokens."""


def truncate(
    rows: BlockRows, weigh: RowFunction, limits: TruncationLimits, is_drawn: Bool[Array, " r"], is_static: bool = False
) -> KeptTokens:
    """Apply min-p, top-k and top-p to the weights of a group of rows, of which the largest is 1.

    The sums of rows without `is_drawn` may be wrong. `is_static`: the number of passes does not depend on the data.
    """
    has_top_k = _has_top_k(rows, limits.top_k)
    has_top_p = limits.top_p < 1.0
    no_mass = jnp.zeros_like(limits.min_p)

    def limited() -> KeptTokens:
        search = _Search(rows, weigh, is_static)
        threshold = search.raised(limits.min_p, has_top_k, limits.top_k, no_mass)
        mass = search.mass(threshold, has_top_p)
        threshold = search.raised(threshold, has_top_p, jnp.zeros_like(limits.top_k), limits.top_p * mass)
        return KeptTokens(threshold, search.block_sums(threshold, is_drawn))

    if is_static:
        return limited()
    return lax.cond(
        jnp.any(has_top_k | has_top_p),
        limited,
        lambda: KeptTokens(limits.min_p, _block_sums(weigh(rows.values), limits.min_p)),
    )


def is_in_top_k(
    rows: BlockRows, heights: RowFunction, top_k: Int[Array, " r"], is_static: bool = False
) -> Bool[Array, "r bB"]:
    """Return which tokens have a height among the top k of a group of rows; no height is above 1."""
    no_mass = jnp.zeros(len(top_k), jnp.float32)
    threshold = _Search(rows, heights, is_static).raised(no_mass, _has_top_k(rows, top_k), top_k, no_mass)
    return heights(rows.values) >= threshold[:, None]


def _has_top_k(rows: BlockRows, top_k: Int[Array, " r"]) -> Bool[Array, " r"]:
    """Return which rows have a top k that may leave tokens out."""
    return (top_k > 0) & (top_k < rows.maxima.shape[1] * BLOCK)


class _Search:
    """Searches thresholds of the weights of a group of rows.

    A row whose likeliest tokens suffice is answered from these alone, as nearly every row is; whole rows are read only
    if there is one for which they do not. Which of the two answers a row depends on that row only.
    """

    def __init__(self, rows: BlockRows, weigh: RowFunction, is_static: bool) -> None:
        self.rows, self.weigh, self.is_static = rows, weigh, is_static
        self.num_blocks = rows.maxima.shape[1]
        self.has_likely = not is_static and self.num_blocks > NUM_LIKELY_BLOCKS
        if self.has_likely:
            top = rows.top_blocks(NUM_LIKELY_BLOCKS)
            above_floor = lax.bitcast_convert_type(weigh(top.floor[:, None])[:, 0], jnp.int32) + 1
            self.likely = _Likely(weigh(top.values), top.numbers, above_floor)

    def raised(
        self,
        threshold: Float[Array, " r"],
        is_limited: Bool[Array, " r"],
        min_count: Int[Array, " r"],
        min_mass: Float[Array, " r"],
    ) -> Float[Array, " r"]:
        """Return each row's highest threshold that still keeps `min_count` tokens whose weights sum up to `min_mass`.

        Rows without `is_limited` keep the threshold that they have.
        """
        low = lax.bitcast_convert_type(threshold, jnp.int32)
        if self.is_static:
            low = _cut(self.weigh(self.rows.values), low, min_count, min_mass)
        elif not self.has_likely:
            low = _bisect(self.weigh(self.rows.values), low, is_limited, min_count, min_mass)
        else:
            weights, _, above_floor = self.likely
            count, mass = _kept_total(weights, lax.bitcast_convert_type(above_floor, jnp.float32))
            suffices = (count >= min_count) & (mass >= min_mass)
            low = self._answer(
                suffices,
                is_limited,
                _bisect(weights, jnp.maximum(low, above_floor), is_limited & suffices, min_count, min_mass),
                lambda weights: _bisect(weights, low, is_limited & ~suffices, min_count, min_mass),
            )
        return jnp.where(is_limited, lax.bitcast_convert_type(low, jnp.float32), threshold)

    def mass(self, threshold: Float[Array, " r"], is_needed: Bool[Array, " r"]) -> Float[Array, " r"]:
        """Return the sum of each row's weights that reach its threshold; anything in rows without `is_needed`."""

        def of(weights: Float[Array, "r n"]) -> Float[Array, " r"]:
            return _kept_mass(weights, threshold)

        if not self.has_likely:
            return of(self.weigh(self.rows.values))
        return self._answer(self._are_likely(threshold), is_needed, of(self.likely.weights), of)

    def block_sums(self, threshold: Float[Array, " r"], is_needed: Bool[Array, " r"]) -> Float[Array, "r b"]:
        """Return the sums of each block's weights that reach the threshold; anything in rows without `is_needed`."""

        def of(weights: Float[Array, "r nB"]) -> Float[Array, "r n"]:
            return _block_sums(weights, threshold)

        if not self.has_likely:
            return of(self.weigh(self.rows.values))
        numbers = self.likely.numbers
        placed = jnp.zeros((len(numbers), self.num_blocks), jnp.float32).at[jnp.arange(len(numbers))[:, None], numbers]
        from_likely = placed.set(of(self.likely.weights), mode="promise_in_bounds", unique_indices=True)
        return self._answer(self._are_likely(threshold)[:, None], is_needed[:, None], from_likely, of)

    def _are_likely(self, threshold: Float[Array, " r"]) -> Bool[Array, " r"]:
        """Return whether all tokens that reach the threshold are among the likely ones."""
        return lax.bitcast_convert_type(threshold, jnp.int32) >= self.likely.above_floor

    def _answer(
        self,
        suffices: Bool[Array, " r"],
        is_needed: Bool[Array, " r"],
        from_likely: Array,
        from_whole: Callable[[Float[Array, "r bB"]], Array],
    ) -> Array:
        """Return `from_likely` in rows where it suffices, and elsewhere what all weights of the row give."""
        return lax.cond(
            jnp.all(suffices | ~is_needed),
            lambda: from_likely,
            lambda: jnp.where(suffices, from_likely, from_whole(self.weigh(self.rows.values))),
        )


class _Likely(NamedTuple):
    """The likeliest tokens of a group of rows."""

    weights: Float[Array, "r tB"]
    numbers: Int[Array, "r t"]
    """Number of each of their blocks."""
    above_floor: Int[Array, " r"]
    """Bits of a weight: every token whose weight reaches it is among the likely ones."""


def _block_sums(weights: Float[Array, "r nB"], threshold: Float[Array, " r"]) -> Float[Array, "r n"]:
    """Return the sum of each block's weights that reach the row's threshold."""
    return _kept_mass(weights.reshape(len(threshold), -1, BLOCK), threshold[:, None])


def _kept_mass(weights: Float[Array, "*rows n"], threshold: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the sum of the weights that reach the threshold."""
    count, mass = _kept_total(weights, threshold)
    # With the count in use, XLA:CPU adds the weights up where it computes them; else it writes them out first.
    return jnp.where(count > 0, mass, 0.0)


def _bisect(
    weights: Float[Array, "R V"],
    low: Int[Array, " R"],
    is_limited: Bool[Array, " R"],
    min_count: Int[Array, " R"],
    min_mass: Float[Array, " R"],
) -> Int[Array, " R"]:
    """Return the highest threshold from `low` on that keeps `min_count` weights whose sum reaches `min_mass`, by row.

    Thresholds are the bits of float32 numbers, which are in the order of the numbers. Halves the range until at most
    one token lies between the bounds of every limited row: further passes would not change which tokens are kept.
    Without a limited row there is no pass at all.
    """

    def is_open(bounds: Bounds) -> Array:
        low, high, num_low, num_high = bounds
        return jnp.any(is_limited & (high - low > 1) & (num_low - num_high > 1))

    def halve(bounds: Bounds) -> Bounds:
        low, high, num_low, num_high = bounds
        middle = low + (high - low) // 2
        count, mass = _kept_total(weights, lax.bitcast_convert_type(middle, jnp.float32))
        is_enough = (count >= min_count) & (mass >= min_mass)
        return (
            jnp.where(is_enough, middle, low),
            jnp.where(is_enough, high, middle),
            jnp.where(is_enough, count, num_low),
            jnp.where(is_enough, num_high, count),
        )

    high, num_low = jnp.full_like(low, BITS_OF_ONE + 1), jnp.full_like(low, weights.shape[1])
    return lax.while_loop(is_open, halve, (low, high, num_low, jnp.zeros_like(low)))[0]


def _cut(
    weights: Float[Array, "R V"],
    low: Int[Array, " R"],
    min_count: Int[Array, " R"],
    min_mass: Float[Array, " R"],
) -> Int[Array, " R"]:
    """Return the highest threshold as `_bisect` does, or one that keeps the same tokens, in a fixed number of passes.

    Each pass cuts the range into several parts; in the end it holds one number.
    """
    num_middles = NUM_PARTS - 1

    def cut(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        part = (high - low + NUM_PARTS - 1) // NUM_PARTS
        middles = low[:, None] + part[:, None] * jnp.arange(1, num_middles + 1)[None]
        counts, masses = _kept_totals(weights, lax.bitcast_convert_type(middles, jnp.float32))
        is_enough = (middles < high[:, None]) & (counts >= min_count[:, None]) & (masses >= min_mass[:, None])
        # Rounding may let a sum rise where it should not: the first middle that keeps too little ends the range.
        low += part * jnp.sum(jnp.cumprod(is_enough.astype(jnp.int32), axis=1), axis=1)
        return low, jnp.minimum(low + part, high)

    return lax.fori_loop(0, NUM_CUTS, cut, (low, jnp.full_like(low, BITS_OF_ONE + 1)))[0]


def _kept_total(
    weights: Float[Array, "*rows n"], threshold: Float[Array, "*rows"]
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """Return how many weights reach the threshold, and their sum.

    Both come from one reduction: two of them take a CPU ten times as long.
    """
    is_kept = weights >= threshold[..., None]
    operands = is_kept.astype(jnp.int32), jnp.where(is_kept, weights, 0.0)
    count, mass = lax.reduce(
        operands,
        (jnp.int32(0), jnp.float32(0)),
        lambda total, item: (total[0] + item[0], total[1] + item[1]),
        (weights.ndim - 1,),
    )
    return count, mass


def _kept_totals(
    weights: Float[Array, "R V"], thresholds: Float[Array, "R n"]
) -> tuple[Int[Array, "R n"], Float[Array, "R n"]]:
    """Return how many weights reach each threshold of their row, and their sum; thresholds are above 0.

    One reduction gives all 2 n numbers of a block of weights, and a second one adds up the blocks: a single running sum
    over a vocabulary would be off by 1e-5.
    """
    num_rows, num_thresholds = thresholds.shape
    blocks = weights.reshape(num_rows, -1, BLOCK)
    is_kept = [blocks >= thresholds[:, index, None, None] for index in range(num_thresholds)]
    operands = [each.astype(jnp.int32) for each in is_kept] + [jnp.where(each, blocks, 0.0) for each in is_kept]
    starts = [jnp.int32(0)] * num_thresholds + [jnp.float32(0)] * num_thresholds
    totals = lax.reduce(operands, starts, lambda total, item: [a + b for a, b in zip(total, item, strict=True)], (2,))
    counts, masses = jnp.stack(totals[:num_thresholds], axis=1), jnp.stack(totals[num_thresholds:], axis=1)
    return jnp.sum(counts, axis=2), jnp.sum(masses, axis=2)
