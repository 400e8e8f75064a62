"""Merges the partial results of tiles whose keys were split (the second step of split-KV attention).

    partial results [P2, K, M, H]   │ piece │ piece │ piece │   weighted sums, with a maximum and a sum per query row
                                        └───────┼───────┘
    queries [K, A, H]                     query tile            one thread block for each split tile and KV head

Every piece's sums are rescaled to the largest maximum of all pieces, added up, and divided by the sum of weights. A
piece that saw no key has a sum of 0, or a maximum so low that its weight is 0. Most steps merge few tiles, many none.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import mma
from .attention import Partials
from .memory_ops import MASK_VALUE, Chip, Ref, load_global, plgpu, smem_tile, store_query_rows
from .plan import MERGE_FIELDS, ROW_ALIGN, Merge, PlanSection


def merge(queries: Ref, partials: Partials, plan: Int[Array, " plan"], section: PlanSection, chip: Chip) -> None:
    """Merge the partial results of each query tile whose keys were split, and write the outputs over its queries.

    `queries` is a mutable [K, A, H]: A counts query rows, aligned per sequence by `QueryRows`. `section` says where the
    merges of this tile size stand in `plan`. One thread block computes one merge and KV head.
    """
    tiles = section.tiles
    num_kv_heads, _, head_size = queries.shape

    def body(queries: Ref, partials: Partials, plan: Ref, staging: Ref) -> None:
        index, head = lax.axis_index("merge"), lax.axis_index("head")

        @pl.when(index < plan[section.num_merges_at])
        def _() -> None:
            offsets = [section.merges_at + field * tiles.max_merges for field in range(MERGE_FIELDS)]
            tile = Merge(*[plan[offset + index] for offset in offsets])
            outputs = _merged(partials, head, tile)
            aligned_row = pl.multiple_of(tile.aligned_row, ROW_ALIGN)
            store_query_rows(queries, head, aligned_row, tile.num_query_rows, outputs, staging, chip)

    plgpu.kernel(
        body,
        scratch_types=[smem_tile((tiles.tile_rows, head_size), queries.dtype, chip)],
        grid=(tiles.max_merges, num_kv_heads),
        grid_names=("merge", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=chip.interpret,
        kernel_name="merge_pieces",
    )(queries, partials, plan)


def _merged(partials: Partials, head: Any, tile: Merge) -> Float[Array, "M H"]:
    """Return the outputs of one split tile and KV head."""
    tile_rows, head_size = partials.acc.shape[2:]
    layout = mma.acc_layout(tile_rows)
    per_row = layout.reduce(1)

    def add(index: Any, carry: Any) -> Any:
        acc, running_max, running_sum = carry
        partial = tile.first_partial + index
        piece_max = load_global(partials.running_max.at[partial, head], per_row)
        new_max = jnp.maximum(running_max, piece_max)
        decay, weight = jnp.exp2(running_max - new_max), jnp.exp2(piece_max - new_max)
        running_sum = running_sum * decay + load_global(partials.running_sum.at[partial, head], per_row) * weight
        values = load_global(partials.acc.at[partial, head], layout)
        decay, weight = (lax.broadcast_in_dim(x, acc.shape, [0]) for x in (decay, weight))
        return acc * decay + values * weight, new_max, running_sum

    acc = plgpu.layout_cast(jnp.zeros((tile_rows, head_size), jnp.float32), layout)
    running_max = plgpu.layout_cast(jnp.full((tile_rows,), MASK_VALUE, jnp.float32), per_row)
    running_sum = plgpu.layout_cast(jnp.zeros((tile_rows,), jnp.float32), per_row)
    acc, _, running_sum = lax.fori_loop(0, tile.num_partials, add, (acc, running_max, running_sum))
    return acc / lax.broadcast_in_dim(running_sum, acc.shape, [0])
