"""Rows of numbers cut into blocks: a row's largest numbers are found by the blocks' maxima, which are read once.

The k largest numbers of a row lie in the k blocks with the largest maxima, where among blocks with equal maxima the
first ones are taken: each block that is left out has k blocks before it with a number that is larger, or equal and of
a lower index.

Letters: R rows, V numbers of a row, B numbers of a block, b blocks of a row; r is a group of rows, t blocks taken.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128
"""Numbers of a block; a TPU's vector has as many lanes."""

Group = Int[Array, " r"] | slice
"""Some rows: their numbers, or a slice."""


class TopBlocks(NamedTuple):
    """The blocks of each row with the largest maxima, in the order of their places in the row."""

    values: Float[Array, "r tB"]
    """The numbers of the blocks; −inf behind the end of a row."""
    numbers: Int[Array, "r t"]
    """Number of each block: it holds the row's numbers from `BLOCK` times that on."""
    floor: Float[Array, " r"]
    """The largest number of all other blocks; −inf if there are no others."""

    def indices_of(self, places: Int[Array, "r k"]) -> Int[Array, "r k"]:
        """Return the index in its row of each place in `values`."""
        return (
            jnp.take_along_axis(self.numbers, places // BLOCK, axis=1, mode="promise_in_bounds") * BLOCK
            + places % BLOCK
        )


class BlockRows(NamedTuple):
    """Rows cut into blocks, with the maximum of each block."""

    blocks: Float[Array, "R b B"]
    """−inf fills up the last one."""
    maxima: Float[Array, "R b"]
    has_nan: Bool[Array, "R b"]
    """Whether a block holds a NaN, of which the maxima say nothing: on a CPU, XLA's maximum passes over it."""
    group: Group = slice(None)
    """The rows that the methods are about. They read these rows where they lie, without a copy of all their blocks."""

    @property
    def values(self) -> Float[Array, "r bB"]:
        """The numbers of the group's rows, with −inf behind their ends."""
        rows = self.blocks[self.group]
        return rows.reshape(rows.shape[0], -1)

    @property
    def row_max(self) -> Float[Array, " r"]:
        """The largest number of each row of the group."""
        return jnp.max(self.maxima[self.group], axis=1)

    def taken(self, numbers: Int[Array, "r t"]) -> Float[Array, "r t B"]:
        """Return some blocks of each row of the group."""
        rows = jnp.arange(self.blocks.shape[0], dtype=jnp.int32)[self.group]
        return self.blocks.at[rows[:, None], numbers].get(mode="promise_in_bounds")

    def top_blocks(self, num_blocks: int) -> TopBlocks:
        """Return `num_blocks` blocks of each row, or all if there are fewer."""
        maxima = self.maxima[self.group]
        num_rows, most = maxima.shape
        if most <= num_blocks:
            numbers = jnp.broadcast_to(jnp.arange(most)[None], (num_rows, most))
            return TopBlocks(self.values, numbers, jnp.full(num_rows, -jnp.inf, jnp.float32))
        largest, numbers = _top_k(maxima, num_blocks + 1)
        numbers = jnp.sort(numbers[:, :num_blocks], axis=-1)
        return TopBlocks(self.taken(numbers).reshape(num_rows, -1), numbers, largest[:, num_blocks])

    def top_k(self, k: int) -> tuple[Float[Array, "r k"], Int[Array, "r k"]]:
        """Return the k largest numbers of each row and their indices, largest first, of equals the lower index."""
        top = self.top_blocks(k)
        values, places = _top_k(top.values, k)
        return values, top.indices_of(places)


def _top_k(values: Float[Array, "r n"], k: int) -> tuple[Float[Array, "r k"], Int[Array, "r k"]]:
    """Return the k largest values of each row and their indices, in a form that XLA:CPU leaves as it is.

    Without a barrier it would merge this with slices of the result, and sort all values. One barrier for both results
    would end the process where a program is for several devices.
    """
    largest, indices = lax.top_k(values, k)
    return lax.optimization_barrier(largest), lax.optimization_barrier(indices)


def in_blocks(values_RV: Float[Array, "R V"]) -> Float[Array, "R b B"]:
    """Return the rows cut into blocks; −inf fills up the last one."""
    widths = ((0, 0), (0, -values_RV.shape[1] % BLOCK))
    return jnp.pad(values_RV, widths, constant_values=-jnp.inf).reshape(values_RV.shape[0], -1, BLOCK)


def block_rows(values_RV: Float[Array, "R V"]) -> BlockRows:
    """Cut rows into blocks, and find the blocks' maxima and NaNs in one reduction."""
    blocks = in_blocks(values_RV)
    operands, starts = (blocks, blocks != blocks), (jnp.float32(-jnp.inf), jnp.bool_(False))
    maxima, has_nan = lax.reduce(
        operands, starts, lambda total, item: (jnp.maximum(total[0], item[0]), total[1] | item[1]), (2,)
    )
    return BlockRows(blocks, maxima, has_nan)
