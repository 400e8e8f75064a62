"""Merge on a GPU: the unfinished results of the pieces of a unit → its output.

    slots [S, K, M, H]   │ piece │ piece │ piece │   weighted values, with a maximum and a total per row
                             └───────┼───────┘
    queries [K, A, H]             unit              one thread block for each, and KV head

Each piece's numbers are taken down to the largest maximum of all. A piece that saw no key has a total of 0, or a
maximum so low that its weight is 0. Most steps have few merges and many have none.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import gpu_mma, gpu_tiles
from .gpu_attention import Partial
from .gpu_plan import ALIGN, MERGE_FIELDS, Order
from .gpu_tiles import LEAST_MAX, Chip, plgpu


def merge(queries: Any, unfinished: Partial, plan: Int[Array, " plan"], order: Order, chip: Chip) -> None:
    """Write the results of the units that were cut to the place of their `queries`, a mutable [K, A, H]."""
    tiles = order.tiles
    num_kv_heads, _, head_size = queries.shape

    def body(queries: Any, sums: Any, maxima: Any, totals: Any, plan: Any, staging: Any) -> None:
        index, head = lax.axis_index("merge"), lax.axis_index("head")

        @pl.when(index < plan[order.num_merges])
        def _() -> None:
            fields = [plan[order.merges + field * tiles.max_merges + index] for field in range(MERGE_FIELDS)]
            place, num_rows, first, count = fields
            results = _merged((sums, maxima, totals), head, first, count)
            gpu_tiles.write_rows(queries, head, pl.multiple_of(place, ALIGN), num_rows, results, staging, chip)

    plgpu.kernel(
        body,
        scratch_types=[gpu_tiles.tile_memory((tiles.tile_rows, head_size), queries.dtype, chip)],
        grid=(tiles.max_merges, num_kv_heads),
        grid_names=("merge", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=chip.interpret,
        kernel_name="merge_pieces",
    )(queries, *unfinished, plan)


def _merged(unfinished: tuple[Any, Any, Any], head: Any, first: Any, count: Any) -> Float[Array, "M H"]:
    sums, maxima, totals = unfinished
    tile_rows, head_size = sums.shape[2:]
    layout = gpu_mma.sums(tile_rows)
    row_layout = layout.reduce(1)

    def add(index: Any, carry: Any) -> Any:
        acc, top, total = carry
        slot = first + index
        its_top = gpu_tiles.read_in(maxima.at[slot, head], row_layout)
        new_top = jnp.maximum(top, its_top)
        decay, weight = jnp.exp2(top - new_top), jnp.exp2(its_top - new_top)
        total = total * decay + gpu_tiles.read_in(totals.at[slot, head], row_layout) * weight
        values = gpu_tiles.read_in(sums.at[slot, head], layout)
        decay, weight = (lax.broadcast_in_dim(x, acc.shape, [0]) for x in (decay, weight))
        return acc * decay + values * weight, new_top, total

    acc = plgpu.layout_cast(jnp.zeros((tile_rows, head_size), jnp.float32), layout)
    top = plgpu.layout_cast(jnp.full((tile_rows,), LEAST_MAX, jnp.float32), row_layout)
    total = plgpu.layout_cast(jnp.zeros((tile_rows,), jnp.float32), row_layout)
    acc, _, total = lax.fori_loop(0, count, add, (acc, top, total))
    return acc / lax.broadcast_in_dim(total, acc.shape, [0])
