"""Tiles of a step's prefill rows: at most `tile_q` consecutive tokens of one row each, in order of tokens.

The host cuts the rows. What it writes (`TpuBackend.plan`) is the number of tiles, then four rows of M numbers: the row,
the first token, its position and the length of each tile. The prefill kernel computes one tile of queries per grid
step; the kernel that writes prefill's keys and values takes the same tiles. A plan without tiles has a grid step, too,
which does nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ..interface import LayerInputs
from .lanes import Ref, Scalar

PLAN_HEADER = 1
"""Numbers of a plan before the tiles: how many tiles are used."""


class QueryTiles(NamedTuple):
    """The arrays in SMEM that a kernel with one grid step per query tile reads: M tiles, the first ones used."""

    page_tables: Ref
    """[R × P] the page tables of all rows, row after row."""
    rows: Ref
    """[M] row of the step that each tile belongs to."""
    first_tokens: Ref
    """[M] index among the step's tokens of each tile's first token."""
    first_positions: Ref
    """[M] position of that token in its sequence."""
    lens: Ref
    """[M] tokens of each tile, at least 1."""
    first_page_and_count: Ref
    """[2] index of the layer's page 0 among the pages of all layers, and the number of tiles."""

    @classmethod
    def of(cls, layer: LayerInputs) -> QueryTiles:
        """Collect the arrays that become these references in a kernel.

        `layer.step.plan` is int32 [1 + 4·M]: the number of tiles in use, then four fields of M numbers each: row, first
        token, first position and length of each tile. The page tables `layer.tables` [R, P] are flattened, row after
        row.
        """
        plan = layer.step.plan
        first_page_and_count = jnp.stack([layer.first_page, plan[0]])
        return cls._make((layer.tables.reshape(-1), *plan[PLAN_HEADER:].reshape(4, -1), first_page_and_count))

    @property
    def num_tiles(self) -> Ref:
        """Return the number of tiles in use."""
        return self.first_page_and_count[1]

    def end_position(self, tile: Scalar) -> Scalar:
        """Return the position after the last token of a tile."""
        return self.first_positions[tile] + self.lens[tile]
