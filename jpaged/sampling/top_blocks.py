"""Finds the blocks of a row of numbers that hold its largest ones: reads the row once, and sorts only block maxima.

The k largest numbers of a row lie in the k blocks with the largest maxima, where among blocks with equal maxima the
first ones are taken: each block that is left out has k blocks before it with a number that is larger, or equal and of
a lower index.

Letters: R rows, V numbers of a row, b blocks taken, B numbers of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128
"""Numbers of a block; a TPU's vector has as many lanes."""


class TopBlocks(NamedTuple):
    """The blocks of each row with the largest maxima, in the order of their places in the row."""

    values: Float[Array, "R bB"]
    """The numbers of the blocks; −inf behind the end of a row."""
    numbers: Int[Array, "R b"]
    """Number of each block: it holds the row's numbers from `BLOCK` times that on."""
    floor: Float[Array, " R"]
    """The largest number of all other blocks; −inf if there are no others."""

    def indices_of(self, places: Int[Array, "R k"]) -> Int[Array, "R k"]:
        """Return the index in its row of each place in `values`."""
        return (
            jnp.take_along_axis(self.numbers, places // BLOCK, axis=1, mode="promise_in_bounds") * BLOCK
            + places % BLOCK
        )


def in_blocks(values_RV: Float[Array, "R V"], padding: float = -jnp.inf) -> Float[Array, "R b B"]:
    """Return the rows cut into blocks; `padding` fills up the last one."""
    widths = ((0, 0), (0, -values_RV.shape[1] % BLOCK))
    return jnp.pad(values_RV, widths, constant_values=padding).reshape(values_RV.shape[0], -1, BLOCK)


def top_blocks(values_RV: Float[Array, "R V"], num_blocks: int) -> TopBlocks:
    """Return `num_blocks` blocks of each row, or all if there are fewer."""
    blocks = in_blocks(values_RV)
    num_rows, most, _ = blocks.shape
    if most <= num_blocks:
        numbers = jnp.broadcast_to(jnp.arange(most)[None], (num_rows, most))
        return TopBlocks(blocks.reshape(num_rows, -1), numbers, jnp.full(num_rows, -jnp.inf))
    # The barrier keeps XLA:CPU from merging this with the slices below, after which it would sort all maxima.
    maxima, numbers = lax.optimization_barrier(lax.top_k(jnp.max(blocks, axis=-1), num_blocks + 1))
    numbers = jnp.sort(numbers[:, :num_blocks], axis=-1)
    values = jnp.take_along_axis(blocks, numbers[:, :, None], axis=1, mode="promise_in_bounds").reshape(num_rows, -1)
    return TopBlocks(values, numbers, maxima[:, num_blocks])


def top_k(values_RV: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Return the k largest numbers of each row and their indices, largest first, the lower index first among equals."""
    blocks = top_blocks(values_RV, k)
    values, places = lax.top_k(blocks.values, k)
    return values, blocks.indices_of(places)
