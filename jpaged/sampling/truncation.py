"""Leaves out unlikely tokens by min-p, top-k and top-p, on the device, without sorting the vocabulary.

Each rule keeps the tokens whose weight reaches a threshold, which is found exactly by cutting the range of the bits of
a float32 again and again, first among a few blocks of tokens that hold the likeliest ones. Rules apply in vLLM's order:
min-p, top-k, top-p, each over the tokens that the one before left. Tokens that tie with the last one kept are kept as
well.

Letters: R rows, V vocabulary, n thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .top_blocks import BLOCK, in_blocks, top_blocks

BITS_OF_ONE = int(np.float32(1.0).view(np.int32))
NUM_PARTS, NUM_CUTS = 8, 10
"""Parts that a range of bits is cut into, and how often, where the number of passes is fixed: 8¹⁰ = 2³⁰ numbers."""
NUM_LIKELY_BLOCKS = 64
"""Blocks of a row that are searched first: those with its likeliest tokens."""

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


def truncated_weights(
    tempered_RV: Float[Array, "R V"], limits: TruncationLimits, is_static: bool = False
) -> tuple[Float[Array, "R V"], Bool[Array, "R V"]]:
    """Return softmax numerators, 0 for tokens that min-p, top-k or top-p drop, and which tokens are kept.

    The row maximum of `tempered_RV` is 0, so that the weight of the most likely token is 1. `is_static`: the number of
    passes does not depend on the data.
    """
    weights = jnp.exp(tempered_RV)
    has_top_k = (limits.top_k > 0) & (limits.top_k < weights.shape[1])
    has_top_p = limits.top_p < 1.0

    def limited(threshold: Float[Array, " R"]) -> Float[Array, " R"]:
        search = _Search(weights, is_static)
        threshold = search.raised(threshold, has_top_k, limits.top_k, jnp.zeros_like(threshold))
        _, mass = _kept_total(weights, threshold)
        return search.raised(threshold, has_top_p, jnp.zeros_like(limits.top_k), limits.top_p * mass)

    if is_static:
        threshold = limited(limits.min_p)
    else:
        threshold = lax.cond(jnp.any(has_top_k | has_top_p), limited, lambda threshold: threshold, limits.min_p)
    is_kept = weights >= threshold[:, None]
    return jnp.where(is_kept, weights, 0.0), is_kept


def is_in_top_k(
    tempered_RV: Float[Array, "R V"], top_k: Int[Array, " R"], is_static: bool = False
) -> Bool[Array, "R V"]:
    """Return which tokens are among the top k, told apart also where their weight e^x is 0, below x = −104.

    1 / (1 − x) is ordered as x is and does not underflow.
    """
    heights = 1.0 / (1.0 - tempered_RV)
    no_mass = jnp.zeros(heights.shape[0], jnp.float32)
    has_top_k = (top_k > 0) & (top_k < heights.shape[1])
    return heights >= _Search(heights, is_static).raised(no_mass, has_top_k, top_k, no_mass)[:, None]


class _Search:
    """Searches thresholds of R rows of weights, none above 1."""

    def __init__(self, weights: Float[Array, "R V"], is_static: bool) -> None:
        self.weights, self.is_static = weights, is_static
        self.likely = None
        if not is_static and weights.shape[1] > NUM_LIKELY_BLOCKS * BLOCK:
            self.likely = top_blocks(weights, NUM_LIKELY_BLOCKS)

    def raised(
        self,
        threshold: Float[Array, " R"],
        is_limited: Bool[Array, " R"],
        min_count: Int[Array, " R"],
        min_mass: Float[Array, " R"],
    ) -> Float[Array, " R"]:
        """Return each row's highest threshold that still keeps `min_count` tokens whose weights sum up to `min_mass`.

        Rows without `is_limited` keep the threshold that they have. Where the likeliest tokens suffice in every row,
        as they nearly always do, only these are read.
        """
        low = lax.bitcast_convert_type(threshold, jnp.int32)
        arguments = is_limited, min_count, min_mass
        if self.is_static:
            low = _cut(self.weights, low, min_count, min_mass)
        elif self.likely is None:
            low = _bisect(self.weights, low, *arguments)
        else:
            likely = self.likely.values
            # Every token above the floor is among the likely ones.
            above_floor = lax.bitcast_convert_type(self.likely.floor, jnp.int32) + 1
            count, mass = _kept_total(likely, lax.bitcast_convert_type(above_floor, jnp.float32))
            is_enough = (count >= min_count) & (mass >= min_mass)
            low = lax.cond(
                jnp.all(is_enough | ~is_limited),
                lambda: _bisect(likely, jnp.maximum(low, above_floor), *arguments),
                lambda: _bisect(self.weights, low, *arguments),
            )
        return jnp.where(is_limited, lax.bitcast_convert_type(low, jnp.float32), threshold)


def _bisect(
    weights: Float[Array, "R V"],
    low: Int[Array, " R"],
    is_limited: Bool[Array, " R"],
    min_count: Int[Array, " R"],
    min_mass: Float[Array, " R"],
) -> Int[Array, " R"]:
    """Return `_Search.raised` as the bits of a float32, from `low` on, which are in the order of the numbers.

    Halves the range until at most one token lies between the bounds of every limited row: further passes for other
    rows would not change which tokens are kept. Without a limited row there is no pass at all.
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
    """Return what `_bisect` returns, or a threshold that keeps the same tokens, in a fixed number of passes.

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
    weights: Float[Array, "R V"], threshold: Float[Array, " R"]
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Return how many weights reach the threshold, and their sum.

    Both come from one reduction: two of them take a CPU ten times as long.
    """
    is_kept = weights >= threshold[:, None]
    operands = is_kept.astype(jnp.int32), jnp.where(is_kept, weights, 0.0)
    count, mass = lax.reduce(
        operands, (jnp.int32(0), jnp.float32(0)), lambda total, item: (total[0] + item[0], total[1] + item[1]), (1,)
    )
    return count, mass


def _kept_totals(
    weights: Float[Array, "R V"], thresholds: Float[Array, "R n"]
) -> tuple[Int[Array, "R n"], Float[Array, "R n"]]:
    """Return how many weights reach each threshold of their row, and their sum; thresholds are above 0.

    One reduction gives all 2 n numbers of a block of weights, and a second one adds up the blocks: a single running sum
    over a vocabulary would be off by 1e-5.
    """
    num_thresholds, blocks = thresholds.shape[1], in_blocks(weights, 0.0)
    is_kept = [blocks >= thresholds[:, index, None, None] for index in range(num_thresholds)]
    operands = [each.astype(jnp.int32) for each in is_kept] + [jnp.where(each, blocks, 0.0) for each in is_kept]
    starts = [jnp.int32(0)] * num_thresholds + [jnp.float32(0)] * num_thresholds
    totals = lax.reduce(operands, starts, lambda total, item: [a + b for a, b in zip(total, item, strict=True)], (2,))
    counts, masses = jnp.stack(totals[:num_thresholds], axis=1), jnp.stack(totals[num_thresholds:], axis=1)
    return jnp.sum(counts, axis=2), jnp.sum(masses, axis=2)
