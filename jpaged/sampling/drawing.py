"""Draws a token of each row by its weight, with a random number for each level of a tree over the vocabulary.

A block of consecutive tokens is drawn by the sums of blocks, then a token of that block. Both go down a tree: at each
node by the inverse CDF of its branches' weights. With one running sum over the whole vocabulary, rounding moves each of
its edges, and one draw in 300 falls where that matters, in the tail. Here each draw meets few edges.

Letters: R rows, n weights of a row, L levels; r is the number of selected rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .top_blocks import BLOCK, BlockRows, take_along_rows
from .truncation import KeptTokens, RowFunction

NUM_BRANCHES = 16
"""Children of a node of a tree."""


def num_draw_levels(vocab_size: int) -> int:
    """Return how many random numbers `draw_tokens` takes for each row: those for a block, then those for its token."""
    return num_levels(-(-vocab_size // BLOCK)) + num_levels(BLOCK)


def draw_tokens(
    logits: BlockRows, weigh: RowFunction, kept: KeptTokens, uniforms_rL: Float[Array, "r L"]
) -> Int[Array, " r"]:
    """Return one kept token of each selected row, drawn with a probability proportional to its weight.

    A block of BLOCK = 128 consecutive tokens is drawn first, by the sums of the kept weights of blocks, then a token of
    that block: token 2 of block 7 is token 7 × 128 + 2 = 898. `weigh` turns logits [r, n] into weights. A token is kept
    if its weight reaches the row's threshold. `uniforms_rL` holds L = `num_draw_levels` random numbers in [0, 1) for
    each row, first those for the block. The result is 0 for a row whose weights are all 0.
    """
    num_block_levels = num_levels(kept.block_sums.shape[1])
    block_ids = draw_branches(kept.block_sums, uniforms_rL[:, :num_block_levels])
    weights_rB = weigh(logits.take_blocks(block_ids[:, None])[:, 0])
    # A drawn block holds a kept token. Its weight may be rounded to just below the threshold here, as it was computed
    # in another fusion when blocks were summed up: so the block's largest weight is always kept.
    threshold = jnp.minimum(kept.threshold, jnp.max(weights_rB, axis=1))
    weights_rB = jnp.where(weights_rB >= threshold[:, None], weights_rB, 0.0)
    return block_ids * BLOCK + draw_branches(weights_rB, uniforms_rL[:, num_block_levels:])


def num_levels(num_weights: int) -> int:
    """Return the levels below the root of a tree with this many leaves and 16 children per node: 2 for 17 leaves."""
    levels = 1
    while (num_weights := -(-num_weights // NUM_BRANCHES)) > 1:
        levels += 1
    return levels


def draw_branches(weights_Rn: Float[Array, "R n"], uniforms_RL: Float[Array, "R L"]) -> Int[Array, " R"]:
    """Return the index of one of n weights in each row, drawn with a probability proportional to the weight.

    The draw goes down a tree with NUM_BRANCHES = 16 children per node, at each node by the inverse CDF of its
    children's sums. One running sum over all n weights would be less exact: rounding moves each of its edges, while a
    draw from a tree meets few edges. `uniforms_RL` holds one random number in [0, 1) for each of the L =
    `num_levels(n)` levels, the root's first. Child b of node g, in a level of m nodes, is node g + b × m of the level
    below, so that sums over children are sums of slices. Levels are padded with weights of 0. A weight of 0 is never
    drawn, so padding is not either; only a row without any weight gives 0.

    Example with 40 weights: the root has 3 children, padded to 16, and these are parents of the weights, padded to
    16 × 3. If child 1 of the root is drawn, and then child 5 of that node, the result is 1 + 5 × 3 = 16.
    """
    levels: list[Float[Array, "R n"]] = []
    sums = weights_Rn
    while not levels or sums.shape[1] > 1:
        levels.append(jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % NUM_BRANCHES))))
        sums = jnp.sum(levels[-1].reshape(len(sums), NUM_BRANCHES, -1), axis=1)
    nodes, branches = jnp.zeros(weights_Rn.shape[0], jnp.int32), jnp.arange(NUM_BRANCHES, dtype=jnp.int32)[None]
    for level, uniform in zip(reversed(levels), uniforms_RL.T, strict=True):
        stride = level.shape[1] // NUM_BRANCHES
        branch_weights = take_along_rows(level, nodes[:, None] + stride * branches)
        running_sums = jnp.cumsum(branch_weights, axis=-1)
        nodes += stride * _inverse_cdf(branch_weights, running_sums, uniform * running_sums[:, -1])
    return nodes


def _inverse_cdf(
    weights: Float[Array, "R n"], running_sums: Float[Array, "R n"], target: Float[Array, " R"]
) -> Int[Array, " R"]:
    """Return the first index of each row with a weight above 0 and a running sum above `target`.

    If no running sum exceeds the target, return the last index with a weight above 0; a row without any weight gives 0.
    Running sums are rounded and do not always ascend, so an index without weight is skipped whatever its sum is. With
    the weights [2, 0, 1] and the running sums [2, 2, 3], the target 1.5 gives index 0; 2 gives 2, and so does 3.
    """
    indices = jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
    has_weight = weights > 0
    last_index = jnp.max(jnp.where(has_weight, indices, 0), axis=-1)
    exceeds_target = running_sums > target[:, None]
    first_index = jnp.min(jnp.where(has_weight & exceeds_target, indices, weights.shape[1]), axis=-1)
    return jnp.minimum(first_index, last_index)
