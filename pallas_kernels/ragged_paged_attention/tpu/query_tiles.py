"""Tiles of a step's prefill rows: at most `tile_q` consecutive tokens of one row each, in order of tokens.

The host cuts the rows (`TpuBackend.plan`). The prefill kernel computes one tile of queries per grid step; the kernel
that writes prefill's keys and values takes the same tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from ..interface import LayerInputs
from .lanes import Ref


class QueryTiles(NamedTuple):
    """The tiles of one step in M entries, of which the first `num_tiles` are used."""

    rows: Int[Array, " M"]
    """Row of the step that each tile belongs to."""
    first_tokens: Int[Array, " M"]
    """Index among the step's tokens of each tile's first token."""
    first_positions: Int[Array, " M"]
    """Position of that token in its sequence."""
    lens: Int[Array, " M"]
    """Tokens of each tile, at least 1."""
    num_tiles: Int[Array, ""]


class QueryTileScalars(NamedTuple):
    """The arrays in SMEM that a kernel with one grid step per query tile reads; all fields are int32."""

    page_tables: Ref
    """[R × P] the page tables of all rows, row after row."""
    rows: Ref
    """[M] as in `QueryTiles`."""
    first_tokens: Ref
    """[M] as in `QueryTiles`."""
    first_positions: Ref
    """[M] as in `QueryTiles`."""
    lens: Ref
    """[M] as in `QueryTiles`."""
    first_page_and_count: Ref
    """[2] index of the layer's page 0 among the pages of all layers, and the number of tiles."""

    @classmethod
    def of(cls, tiles: QueryTiles, layer: LayerInputs) -> QueryTileScalars:
        """Collect the arrays that become these references."""
        return cls(layer.tables.reshape(-1), *tiles[:4], jnp.stack([layer.first_page, tiles.num_tiles]))

    def end_position(self, tile: Ref) -> Ref:
        """Return the position after the last token of a tile."""
        return self.first_positions[tile] + self.lens[tile]
