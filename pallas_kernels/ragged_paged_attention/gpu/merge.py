"""Merges the partial results of tiles whose keys were split (the second step of split-KV attention).

    partial results [P2, K, M, H]   │ piece │ piece │ piece │   weighted sums, with a maximum and a sum per query row
                                        └───────┼───────┘
    queries [K, A, H]                     query tile            one thread block for each split tile and KV head

Every piece's sums are rescaled to the largest maximum of all pieces, added up, and divided by the sum of weights. A
piece that saw no key has a sum of 0, or a maximum so low that its weight is 0. Most steps merge few tiles, many none.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import mma
from .attention_refs import Partials
from .memory_ops import MASK_VALUE, Chip, Ref, Scalar, load_global, plgpu, smem_tile, store_query_rows
from .plan import MERGE_FIELDS, ROW_ALIGN, Merge, PlanSection


def merge(queries: Ref, partials: Partials, plan: Int[Array, " plan"], section: PlanSection, chip: Chip) -> None:
    """Merge the partial results of each query tile whose keys were split (split-KV); outputs overwrite its queries.

    The partial results of one tile belong to different ranges of its keys. Each split tile has one entry of type
    `Merge` in `plan`, which names them; `section` holds the offset of these entries and of their number. `queries` is a
    mutable array [K, A, H] of K KV heads and A query rows, where each sequence begins at a multiple of `ROW_ALIGN` = 8.
    The grid is as large as the plan may need, because the number of entries is only known on the device: one thread
    block for each of `max_merges` tiles and each KV head. Thread blocks beyond the number of entries do nothing.
    """
    tiles = section.tiles
    num_kv_heads, _, head_size = queries.shape

    def body(queries: Ref, partials: Partials, plan: Ref, staging: Ref) -> None:
        """Merge one split tile for one KV head: entry `merge_index` of the plan, whose fields lie `max_merges` apart.

        Do nothing if the plan has no entry of this index. The outputs overwrite the tile's query rows in `queries`
        [K, A, H]; they go there through `staging`, a tile in shared memory.
        """
        merge_index, head = lax.axis_index("merge"), lax.axis_index("head")

        @pl.when(merge_index < plan[section.num_merges_offset])
        def _() -> None:
            offsets = [section.merges_offset + field * tiles.max_merges for field in range(MERGE_FIELDS)]
            split_tile = Merge(*[plan[offset + merge_index] for offset in offsets])
            outputs = _merged(partials, head, split_tile)
            aligned_row = pl.multiple_of(split_tile.aligned_row, ROW_ALIGN)
            store_query_rows(queries, head, aligned_row, split_tile.num_query_rows, outputs, staging, chip)

    plgpu.kernel(
        body,
        scratch_types=[smem_tile((tiles.tile_rows, head_size), queries.dtype, chip)],
        grid=(tiles.max_merges, num_kv_heads),
        grid_names=("merge", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=chip.interpret,
        kernel_name="merge_pieces",
    )(queries, partials, plan)


def _merged(partials: Partials, head: Scalar, split_tile: Merge) -> Float[Array, "M H"]:
    """Return the outputs [M, H] of one split tile and KV head: its partial results combined by log-sum-exp.

    `split_tile` names `num_partials` consecutive entries of `partials`, one for each part of the tile's keys. An entry
    has, for each of the M query rows, the largest score of that part (times log₂ e), and the sum of weights and the
    weighted sum of values relative to it. Both sums are rescaled to the largest score of all parts and added up; then
    the weighted sum is divided by the sum of weights. A part without a key for a query row has a largest score of
    `MASK_VALUE` = −1e30, so its weight is 0.
    """
    tile_rows, head_size = partials.acc.shape[2:]
    layout = mma.acc_layout(tile_rows)
    state_layout = layout.reduce(1)

    def add_partial(index: Scalar, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Return the state after partial result `index` of the tile: acc [M, H], running maximum and sum of weights.

        The sums of the state and of the partial result are rescaled to the larger maximum, by powers of 2, since
        maxima are scores times log₂ e.
        """
        acc, running_max, running_sum = state
        partial = split_tile.first_partial + index
        piece_max = load_global(partials.running_max.at[partial, head], state_layout)
        new_max = jnp.maximum(running_max, piece_max)
        decay, weight = jnp.exp2(running_max - new_max), jnp.exp2(piece_max - new_max)
        running_sum = running_sum * decay + load_global(partials.running_sum.at[partial, head], state_layout) * weight
        values = load_global(partials.acc.at[partial, head], layout)
        decay, weight = (lax.broadcast_in_dim(x, acc.shape, [0]) for x in (decay, weight))
        return acc * decay + values * weight, new_max, running_sum

    acc = plgpu.layout_cast(jnp.zeros((tile_rows, head_size), jnp.float32), layout)
    running_max = plgpu.layout_cast(jnp.full((tile_rows,), MASK_VALUE, jnp.float32), state_layout)
    running_sum = plgpu.layout_cast(jnp.zeros((tile_rows,), jnp.float32), state_layout)
    acc, _, running_sum = lax.fori_loop(0, split_tile.num_partials, add_partial, (acc, running_max, running_sum))
    return acc / lax.broadcast_in_dim(running_sum, acc.shape, [0])
