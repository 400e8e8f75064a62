"""Products of rows that choose their matrix: each of T rows is multiplied by k of E matrices, its experts.

Rows are sorted by expert first, so that work and memory traffic follow the T × k choices, and never E: no row is
multiplied by a matrix that it has not chosen, and no matrix is read that no row has chosen. Source: Shazeer et al.
2017, arXiv:1701.06538.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .scaled_matrix import ScaledMatrix, scaled_product

MIN_TILE, MAX_TILE = 8, 256
"""Rows of one expert that are multiplied together, where a product goes over tiles of rows."""


@partial(jax.tree_util.register_dataclass, data_fields=["experts", "weights"], meta_fields=[])
@dataclass(frozen=True)
class Routing:
    """The experts that each of T rows has chosen: k for each row, in the order in which their results are added."""

    experts: Int[Array, "T k"]
    """int32, from 0 on. E, the number of all experts, stands for none, whose result is not added."""
    weights: Float[Array, "T k"]
    """Factors of the results, float32."""


class SortedChoices(NamedTuple):
    """The C = T × k choices of T rows, sorted by expert; those of one expert are in the order of the rows.

    Choices of no expert lie behind all others.
    """

    rows: Int[Array, " C"]
    """The row of each choice."""
    places: Int[Array, "T k"]
    """Where each choice lies among the sorted ones."""
    sizes: Int[Array, " E"]
    """Choices of each expert."""


def sorted_choices(experts: Int[Array, "T k"], num_experts: int) -> SortedChoices:
    """Return the choices of rows sorted by expert; `num_experts` stands for none."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)
    sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return SortedChoices(order // experts.shape[1], places.reshape(experts.shape), sizes)


def expert_of_rows(sizes: Int[Array, " E"], num_rows: int) -> Int[Array, " C"]:
    """Return the expert of each of `num_rows` sorted rows, `sizes` for each expert; that of rows behind is the last."""
    ends = jnp.cumsum(sizes)
    found = jnp.searchsorted(ends, jnp.arange(num_rows, dtype=ends.dtype), side="right")
    return jnp.minimum(found, sizes.shape[0] - 1).astype(jnp.int32)


def grouped_product(
    rows: Float[Array, "C K"], weight: Float[Array, "E K N"] | ScaledMatrix, sizes: Int[Array, " E"]
) -> Float[Array, "C N"]:
    """Return the product of each row with its expert's matrix, in float32, accumulated in float32.

    The first `sizes[0]` rows belong to expert 0, the next `sizes[1]` to expert 1, and so on. The results of rows behind
    the last expert's may be anything, and are not read by callers.
    """
    if isinstance(weight, ScaledMatrix):
        return _product_by_tiles(rows, weight, sizes)
    return lax.platform_dependent(rows, weight, sizes, tpu=_ragged_dot, default=_product_by_tiles)


def _ragged_dot(
    rows: Float[Array, "C K"], weight: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "C N"]:
    return lax.ragged_dot(rows, weight, sizes, preferred_element_type=jnp.float32)


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile: a power of two near the rows of an expert, if all experts have equally many."""
    rows_of_expert = -(-num_rows // num_experts)
    return min(MAX_TILE, max(MIN_TILE, 1 << (rows_of_expert - 1).bit_length()))


def _product_by_tiles(
    rows: Float[Array, "C K"], weight: Float[Array, "E K N"] | ScaledMatrix, sizes: Int[Array, " E"]
) -> Float[Array, "C N"]:
    """Return what `grouped_product` returns, by a loop over tiles of rows, each with a slice of one expert's matrix.

    A tile may reach into the rows of the next expert, whose tiles come later and write over its results. Tiles that are
    not needed multiply zeros and write behind the last row.
    """
    num_rows = rows.shape[0]
    tile = tile_rows(num_rows, sizes.shape[0])
    tiles = _tiles_of(sizes, num_rows, tile)
    padded = jnp.pad(rows, ((0, tile), (0, 0)))

    def multiply_tile(index: Int[Array, ""], out: Float[Array, "M N"]) -> Float[Array, "M N"]:
        first_row = tiles.first_rows[index]
        tile_of_rows = lax.dynamic_slice_in_dim(padded, first_row, tile)
        results = _product_of_expert(tile_of_rows, weight, tiles.experts[index])
        return lax.dynamic_update_slice_in_dim(out, results, first_row, 0)

    num_out = jax.eval_shape(_product_of_expert, rows, weight, tiles.experts[0]).shape[1]
    out = jnp.zeros((num_rows + tile, num_out), jnp.float32)
    return lax.fori_loop(0, tiles.experts.shape[0], multiply_tile, out)[:num_rows]


class _Tiles(NamedTuple):
    """The tiles that sorted rows are cut into."""

    first_rows: Int[Array, " tiles"]
    """The first row of each tile; the number of all rows for a tile that is not needed."""
    experts: Int[Array, " tiles"]
    """The expert whose matrix a tile is multiplied by; that of the last needed one for a tile that is not needed."""


def _tiles_of(sizes: Int[Array, " E"], num_rows: int, tile: int) -> _Tiles:
    """Return the tiles of `tile` rows that `num_rows` sorted rows are cut into, `sizes` for each expert.

    Their number is static, the most that so many rows can need: a GPU's host would have to read another one in each
    iteration of a loop. Example: with tiles of 8 rows and experts of 3, 0 and 9 rows, the tiles begin at the rows 0, 3
    and 11, of the experts 0, 2 and 2.
    """
    num_experts = sizes.shape[0]
    num_tiles = min(num_rows, -(-num_rows // tile) + num_experts - 1)
    tiles_of_expert = -(-sizes // tile)
    tile_ends = jnp.cumsum(tiles_of_expert)
    first_rows, first_tiles = jnp.cumsum(sizes) - sizes, tile_ends - tiles_of_expert
    tile_numbers = jnp.arange(num_tiles, dtype=tile_ends.dtype)
    last_needed = jnp.maximum(tile_ends[-1] - 1, 0)
    experts = jnp.searchsorted(tile_ends, jnp.minimum(tile_numbers, last_needed), side="right")
    experts = jnp.minimum(experts, num_experts - 1)
    is_needed = tile_numbers < tile_ends[-1]
    starts = first_rows[experts] + (tile_numbers - first_tiles[experts]) * tile
    return _Tiles(jnp.where(is_needed, starts, num_rows), experts)


def _product_of_expert(
    rows: Float[Array, "C K"], weight: Float[Array, "E K N"] | ScaledMatrix, expert: Int[Array, ""]
) -> Float[Array, "C N"]:
    """Return rows · W of one expert, in float32."""
    if isinstance(weight, ScaledMatrix):
        return scaled_product(rows, weight.of_expert(expert))
    matrix = lax.dynamic_index_in_dim(weight, expert, keepdims=False)
    return jnp.dot(rows, matrix, preferred_element_type=jnp.float32)


def weighted_sum(results: Float[Array, "C N"], choices: SortedChoices, routing: Routing) -> Float[Array, "T N"]:
    """Return the sum of each row's results times their weights, in the order of its choices.

    `results` are those of the sorted choices; those of no expert are left out.
    """
    is_there = routing.experts < choices.sizes.shape[0]
    total = jnp.zeros((routing.experts.shape[0], results.shape[1]), jnp.float32)
    for choice in range(routing.experts.shape[1]):
        weighted = results[choices.places[:, choice]] * routing.weights[:, choice, None]
        total = total + jnp.where(is_there[:, choice, None], weighted, 0)
    return total
