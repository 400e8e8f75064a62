"""Finds the highest threshold of each row of weights that still keeps enough of them, without sorting.

Thresholds are searched as the bits of float32 numbers, which as integers are in the order of the numbers ≥ 0. So a
search of at most 30 halvings is exact. `bisect_thresholds` stops as early as the data allow; `section_thresholds` makes
a fixed number of passes.

Letters: R rows, V weights of a row, n thresholds.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.row_sums import sum_by_halves
from .top_blocks import BLOCK

BITS_OF_ONE = int(np.float32(1.0).view(np.int32))
NUM_PARTS, NUM_CUTS = 8, 10
"""Parts that a range of bits is cut into, and how often, where the number of passes is fixed: 8¹⁰ = 2³⁰ numbers."""


class KeptMinimum(NamedTuple):
    """What the weights that reach a row's threshold must amount to, at least."""

    is_limited: Bool[Array, " R"]
    """Whether the row's threshold is searched at all; what a search returns for other rows means nothing."""
    min_count: Int[Array, " R"]
    """Number of weights."""
    min_mass: Float[Array, " R"]
    """Sum of the weights."""

    def is_met(self, count: Int[Array, " R"], mass: Float[Array, " R"]) -> Bool[Array, " R"]:
        """Return, by row, whether `count` weights with the sum `mass` are enough: both minima are reached."""
        return (count >= self.min_count) & (mass >= self.min_mass)


class _Bounds(NamedTuple):
    """The state of a bisection: the highest threshold that keeps enough lies in [low, high)."""

    low: Int[Array, " R"]
    """Bits of a threshold that keeps enough weights."""
    high: Int[Array, " R"]
    """Bits of a threshold that keeps too few."""
    num_low: Int[Array, " R"]
    """Weights that reach the lower threshold."""
    num_high: Int[Array, " R"]
    """Weights that reach the higher threshold."""


def bisect_thresholds(weights: Float[Array, "R V"], low: Int[Array, " R"], minimum: KeptMinimum) -> Int[Array, " R"]:
    """Return by bisection, for each limited row, a threshold ≥ `low` that keeps as few weights as `minimum` allows.

    A threshold keeps the weights that reach it. Thresholds are the bits of float32 numbers, as int32 [R]: as integers,
    these are in the order of the numbers ≥ 0. Weights are in [0, 1]. `low` must keep enough of them; if it does not, it
    is returned. The range of each limited row is halved until at most one weight lies in it: further passes would not
    change which weights are kept. Then the result may be below that weight. With the weights 1, 0.5 and 0.2 and a
    minimum count of 2 it lies above 0.2 and is at most 0.5. The results for rows that are not limited mean nothing.
    Without a limited row there is no pass at all.
    """

    def is_open(bounds: _Bounds) -> Bool[Array, ""]:
        """Return whether any limited row has more than one weight between its bounds, and a number to try there."""
        has_numbers_between = bounds.high - bounds.low > 1
        return jnp.any(minimum.is_limited & has_numbers_between & (bounds.num_low - bounds.num_high > 1))

    def halve(bounds: _Bounds) -> _Bounds:
        """Return the upper half of each row's range [low, high) if its middle keeps enough weights, else the lower."""
        middle = bounds.low + (bounds.high - bounds.low >> 1)
        count, mass = kept_count_and_mass(weights, lax.bitcast_convert_type(middle, jnp.float32))
        is_enough = minimum.is_met(count, mass)
        raised = bounds._replace(low=middle, num_low=count)
        lowered = bounds._replace(high=middle, num_high=count)
        return jax.tree.map(partial(jnp.where, is_enough), raised, lowered)

    # No weight is above 1, so the next number keeps none. How many reach `low` is not known yet: at most all of them.
    high, num_low = jnp.full_like(low, BITS_OF_ONE + 1), jnp.full_like(low, weights.shape[1])
    return lax.while_loop(is_open, halve, _Bounds(low, high, num_low, jnp.zeros_like(low))).low


def section_thresholds(weights: Float[Array, "R V"], low: Int[Array, " R"], minimum: KeptMinimum) -> Int[Array, " R"]:
    """Return the highest threshold ≥ `low` of each limited row that keeps at least `minimum`, in NUM_CUTS passes.

    A threshold keeps the weights that reach it. Thresholds are the bits of float32 numbers, as int32 [R]; weights are
    in [0, 1], and `low` must keep enough of them; if it does not, it is returned. This is a section search: each pass
    cuts a row's range of bits [low, high) into NUM_PARTS = 8 parts, tries a threshold at each of the 7 inner edges, and
    continues in the part that holds the answer. There are fewer than 8¹⁰ thresholds, so that 10 passes leave one number
    in the range. The results for rows that are not limited mean nothing.
    """
    num_edges = NUM_PARTS - 1

    def cut(_: Array, bounds: tuple[Int[Array, " R"], Int[Array, " R"]]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """Return the part of each row's range (low, high) that begins at the last edge that keeps enough weights."""
        low, high = bounds
        part_size = (high - low + NUM_PARTS - 1) // NUM_PARTS  # Rounded up, so edges of a short range may reach `high`.
        edges = low[:, None] + part_size[:, None] * jnp.arange(1, num_edges + 1)[None]
        counts, masses = kept_counts_and_masses(weights, lax.bitcast_convert_type(edges, jnp.float32))
        is_enough = (
            (edges < high[:, None]) & (counts >= minimum.min_count[:, None]) & (masses >= minimum.min_mass[:, None])
        )
        # Sums should fall from edge to edge, but rounding may raise one. So only the edges before the first one that
        # keeps too little count: the running product is 1 up to there.
        low += part_size * jnp.sum(jnp.cumprod(is_enough.astype(jnp.int32), axis=1), axis=1)
        return low, jnp.minimum(low + part_size, high)

    return lax.fori_loop(0, NUM_CUTS, cut, (low, jnp.full_like(low, BITS_OF_ONE + 1)))[0]


def block_masses(weights: Float[Array, "R bB"], threshold: Float[Array, " R"]) -> Float[Array, "R b"]:
    """Return the sum of each block's weights that reach the row's threshold; blocks are BLOCK weights long."""
    return kept_mass(weights.reshape(len(threshold), -1, BLOCK), threshold[:, None])


def kept_mass(weights: Float[Array, "*rows n"], threshold: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the sum of the weights that reach the threshold."""
    count, mass = kept_count_and_mass(weights, threshold)
    # With the count in use, XLA:CPU adds the weights up where it computes them; else it writes them out first.
    return jnp.where(count > 0, mass, 0.0)


def kept_count_and_mass(
    weights: Float[Array, "*rows n"], threshold: Float[Array, "*rows"]
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """Return how many weights along the last axis reach the threshold of their row, and the sum of these weights.

    Both come from one reduction, because two separate reductions take a CPU ten times as long. Padding weights of 0
    reach a threshold of 0, so they count there.
    """
    is_kept = weights >= threshold[..., None]
    operands = is_kept.astype(jnp.int32), jnp.where(is_kept, weights, 0.0)
    count, mass = sum_together(*operands, axis=weights.ndim - 1)
    return count, mass


def sum_together(*operands: Array, axis: int) -> tuple[Array, ...]:
    """Return the sum of each operand along one axis, all in a single reduction. Their shapes are the same."""
    zeros = tuple(jnp.zeros((), operand.dtype) for operand in operands)
    return tuple(lax.reduce(operands, zeros, _sums, (axis,)))


def _sums(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the sum of each pair.

    JAX keeps what it has traced by this function: a local one would be kept anew with each sampler that is traced.
    """
    return tuple(a + b for a, b in zip(left, right, strict=True))


def kept_counts_and_masses(
    weights: Float[Array, "R V"], thresholds: Float[Array, "R n"]
) -> tuple[Int[Array, "R n"], Float[Array, "R n"]]:
    """Return, for each of a row's n thresholds, how many weights reach it and the sum of these weights.

    Rows are padded with weights of 0 to a multiple of BLOCK; thresholds must be above 0, so that padding does not
    count. One reduction along each block gives the n counts and the n sums of that block, and a second one adds up the
    blocks: a single running sum over a vocabulary would be off by 1e-5. With the weights 1, 0.5 and 0.2, the thresholds
    0.2 and 0.4 have the counts 3 and 2 and the sums 1.7 and 1.5.
    """
    num_rows, num_thresholds = thresholds.shape
    blocks_RbB = weights.reshape(num_rows, -1, BLOCK)
    is_kept = [blocks_RbB >= thresholds[:, index, None, None] for index in range(num_thresholds)]
    operands = [mask.astype(jnp.int32) for mask in is_kept] + [jnp.where(mask, blocks_RbB, 0.0) for mask in is_kept]
    sums = sum_together(*operands, axis=2)
    counts, masses = jnp.stack(sums[:num_thresholds], axis=1), jnp.stack(sums[num_thresholds:], axis=1)
    return jnp.sum(counts, axis=2), sum_by_halves(masses)
