"""Rows of numbers cut into blocks: a row's largest numbers are found by the blocks' maxima, which are read once.

The k largest numbers of a row lie in the k blocks with the largest maxima, where among blocks with equal maxima the
first ones are taken: each block that is left out has k blocks before it with a number that is larger, or equal and of
a lower index.

Letters: R rows, V numbers of a row, B numbers of a block, b blocks of a row; r selected rows, t blocks taken from each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

BLOCK = 128
"""Numbers of a block; a TPU's vector has as many lanes."""

RowSelection = Int[Array, " r"] | slice
"""Some of R rows: their indices, or a slice."""


class TopBlocks(NamedTuple):
    """The blocks of each row with the largest maxima, in ascending order of their index in the row."""

    values: Float[Array, "r tB"]
    """The numbers of the blocks; −inf behind the end of a row."""
    block_ids: Int[Array, "r t"]
    """Index of each block in its row: block i holds the row's numbers i × BLOCK to i × BLOCK + BLOCK − 1."""
    largest_outside: Float[Array, " r"]
    """The largest number of all other blocks; −inf if there are no others."""

    def indices_in_row(self, value_indices: Int[Array, "r k"]) -> Int[Array, "r k"]:
        """Return the indices in the whole row [R, V] of numbers that are given by their indices in `self.values`.

        A row of `values` holds the numbers of the taken blocks alone, block after block. With BLOCK = 128 and the
        `block_ids` [[2, 7]], index 130 of `values` is number 2 of block 7, so the result is 7 × 128 + 2 = 898.
        """
        block_ids = take_along_rows(self.block_ids, value_indices // BLOCK)
        return block_ids * BLOCK + value_indices % BLOCK


class BlockRows(NamedTuple):
    """Rows cut into blocks, with the maximum of each block."""

    blocks: Float[Array, "R b B"]
    """−inf fills up the last one."""
    maxima: Float[Array, "R b"]
    has_nan: Bool[Array, "R b"]
    """Whether a block holds a NaN. The maxima may not show it, because XLA's maximum ignores NaNs on a CPU."""
    selection: RowSelection = slice(None)
    """The rows that the methods read. They read them from `blocks` directly, without a copy of all their blocks."""

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """The three arrays of all rows."""
        return self.blocks, self.maxima, self.has_nan

    @property
    def selected_arrays(self) -> tuple[Array, Array, Array]:
        """Those of the selected rows alone, which a selection by indices copies."""
        blocks, maxima, has_nan = (take_rows(array, self.selection) for array in self.arrays)
        return blocks, maxima, has_nan

    @property
    def values(self) -> Float[Array, "r bB"]:
        """The numbers of the selected rows, with −inf behind their ends."""
        blocks = take_rows(self.blocks, self.selection)
        return blocks.reshape(blocks.shape[0], -1)

    @property
    def row_max(self) -> Float[Array, " r"]:
        """The largest number of each selected row."""
        return jnp.max(take_rows(self.maxima, self.selection), axis=1)

    def take_blocks(self, block_ids: Int[Array, "r t"]) -> Float[Array, "r t B"]:
        """Return the blocks with these indices of each selected row; no other blocks are read."""
        row_ids = take_rows(jnp.arange(self.blocks.shape[0], dtype=jnp.int32), self.selection)
        return self.blocks.at[row_ids[:, None], block_ids].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def top_blocks(self, num_blocks: int) -> TopBlocks:
        """Return the t = min(num_blocks, b) blocks with the largest maxima of each selected row.

        They are in the order in which they stand in the row. If the row has no more blocks than `num_blocks`, they are
        all of its blocks, and the largest number outside of them is −inf. Of equal maxima the first ones are taken. For
        the maxima 3, 9, 5 and 7 and two blocks, these are the blocks 1 and 3, and the largest number outside is 5.
        """
        maxima_rb = take_rows(self.maxima, self.selection)
        num_rows, blocks_per_row = maxima_rb.shape
        if blocks_per_row <= num_blocks:
            block_ids = jnp.broadcast_to(jnp.arange(blocks_per_row)[None], (num_rows, blocks_per_row))
            return TopBlocks(self.values, block_ids, jnp.full(num_rows, -jnp.inf, jnp.float32))
        # One more maximum than blocks are taken: the last one is the largest number of the blocks that are left out.
        top_maxima, top_ids = _top_k(maxima_rb, num_blocks + 1)
        block_ids = jnp.sort(top_ids[:, :num_blocks], axis=-1)
        return TopBlocks(self.take_blocks(block_ids).reshape(num_rows, -1), block_ids, top_maxima[:, num_blocks])

    def top_k(self, k: int) -> tuple[Float[Array, "r k"], Int[Array, "r k"]]:
        """Return the k largest numbers of each selected row, the largest first, and their indices in the row.

        Of equal numbers the one with the lower index comes first. Only the k blocks with the largest maxima are
        searched: each of the k largest numbers lies in one of them. k is at most the numbers of a row.
        """
        top = self.top_blocks(k)
        values, value_indices = _top_k(top.values, k)
        return values, top.indices_in_row(value_indices)


def take_rows(values: Shaped[Array, "R ..."], selection: RowSelection) -> Shaped[Array, "r ..."]:
    """Return the selected rows, whose indices must be in [0, R): no code checks them."""
    if isinstance(selection, slice):
        return values[selection]
    return values.at[selection].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_along_rows(values: Shaped[Array, "r n"], indices: Int[Array, "r k"]) -> Shaped[Array, "r k"]:
    """Return the values at k indices of each row, which must be in [0, n): no code checks them."""
    return jnp.take_along_axis(values, indices, axis=1, mode="promise_in_bounds", wrap_negative_indices=False)


def _top_k(values: Float[Array, "r n"], k: int) -> tuple[Float[Array, "r k"], Int[Array, "r k"]]:
    """Return the k largest values of each row, the largest first, and their indices; k is at most n.

    The barriers keep XLA:CPU from merging `top_k` with slices of its results, which would make it sort all values. Each
    result has its own barrier: a single one for both crashes the process if the program is for several devices.
    """
    largest, indices = lax.top_k(values, k)
    return lax.optimization_barrier(largest), lax.optimization_barrier(indices)


def in_blocks(values_RV: Float[Array, "R V"]) -> Float[Array, "R b B"]:
    """Return the rows cut into blocks; −inf fills up the last one."""
    widths = ((0, 0), (0, -values_RV.shape[1] % BLOCK))
    return jnp.pad(values_RV, widths, constant_values=-jnp.inf).reshape(values_RV.shape[0], -1, BLOCK)


def block_rows(values_RV: Float[Array, "R V"]) -> BlockRows:
    """Return the rows cut into blocks, with each block's maximum and whether it holds a NaN.

    Both come from one reduction along the blocks. −inf fills up the last block of a row.
    """
    blocks = in_blocks(values_RV)  # Only a NaN differs from itself.
    operands, initial_values = (blocks, blocks != blocks), (jnp.float32(-jnp.inf), jnp.bool_(False))
    maxima, has_nan = lax.reduce(operands, initial_values, _maximum_and_any, (2,))
    return BlockRows(blocks, maxima, has_nan)


def _maximum_and_any(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the larger number, and whether one of two flags is set.

    JAX keeps what it has traced by this function: a local one would be kept anew with each sampler that is traced.
    """
    return jnp.maximum(left[0], right[0]), left[1] | right[1]
