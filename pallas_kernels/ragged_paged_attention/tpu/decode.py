"""Attention of decode rows, one query each, with the new key and value written on the way: the call of the kernel.

    one grid step = a block of BLOCK_ROWS rows       VMEM
      the full KV tiles of its long rows, one            full_tiles [2, K, S, tile, 128], two buffers:
      after another:                                       buffer a ◀─ DMA ── the next full tile, of whichever row
        full tile │ full tile │ …                          buffer b ── compute
        no mask, one wait for all pages
      then the last KV tile ("tail") of every row,       tail_tiles [2, BLOCK_ROWS, K, S, tile, 128]:
      two rows at a time (float32: one):                   the next block's ◀─ DMA ── while this block is computed
        sub-tile 0 │ sub-tile 1 │ …, masked; the two
        rows are independent, so that one's product
        runs while the other's maximum is reduced

    h KV heads side by side on the lanes share one product; their queries, G rows each, lie on a block diagonal:
      Q [h·G, h·W] · Kᵀ [h·W, T]      →  scores [h·G, T]
      P [h·G, T] · V [T, h·W]         →  [h·G, h·W], of which the diagonal blocks are kept

The softmax is online, as in `prefill`. With a window, full tiles are masked too, and only the pages that the window
reaches are fetched. The new key and value are put into the tail tile while it lies in VMEM, in the aligned block of
slots that a DMA can address, and that block is copied to the page while the tail is computed: the page must belong to
this row alone. Slots behind a row's end may hold NaN, so scores and values there are replaced, never multiplied by
zero. Outputs take the place of the queries; rows of the last block that are not decoded keep their queries.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (pages).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..interface import AttendOptions
from ..kv_scales import LayerScales
from .decode_kernel import DecodeKernel
from .decode_refs import DecodeInputs, DecodeOutputs, DecodeScalars, DecodeScratch, DecodeSizes, DecodeStatics
from .lanes import LANES, LOG2_E, HeadLanes, compute_dtype

BLOCK_ROWS = 4
"""Rows of one grid step, where the number of tokens of the step is a multiple of it."""
MAX_HEADS_PER_PRODUCT = 8
"""KV heads whose scores one product computes at most; with more values side by side the compiler spills registers."""
SPARE_VMEM_BYTES = 16 << 20
"""VMEM beside the tiles: queries, outputs, scores and what the compiler spills."""


def decode_vmem_bytes(tile_bytes: int, block_rows: int = BLOCK_ROWS) -> int:
    """Return the VMEM that decode may need: two full tiles, two tails of each row of a block, and the spare bytes."""
    return SPARE_VMEM_BYTES + (2 + 2 * block_rows) * tile_bytes


def heads_per_product(num_kv_heads: int, group: int, max_rows: int) -> int:
    """Return h, a divisor of `num_kv_heads`: KV heads of G = `group` query heads whose scores one product computes.

    A product has h·G rows of scores, at most `max_rows` of them unless h is 1.
    """
    limit = min(num_kv_heads, MAX_HEADS_PER_PRODUCT)
    fitting = [h for h in range(1, limit + 1) if num_kv_heads % h == 0 and h * group <= max_rows]
    return max(fitting, default=1)


def decode_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    pages: Float[Array, "C K S Z L"],
    page_tables: Int[Array, "R P"],
    context_lens: Int[Array, " R"],
    num_rows: Int[Array, ""],
    first_page: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    kv_scales: LayerScales | None,
    *,
    options: AttendOptions,
    sizes: DecodeSizes,
    interpret: Any = False,
    check_bounds: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "C K S Z L"]]:
    """Attend queries 0 … `num_rows` − 1 to the first `context_lens` tokens of their rows, the last of which is new.

    `k` and `v` are the new keys and values (for pages of one byte a number: such numbers, in more bytes); without them
    nothing is written, because the pages hold them already. `first_page` is added to page numbers; L is 128. Return
    `q` with outputs in the place of those queries, and the written pages; both arguments are donated.
    """
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, num_lane_rows, page_size, _ = pages.shape
    group = num_heads // num_kv_heads
    lanes, heads = HeadLanes(head_size), heads_per_product(num_kv_heads, group, sizes.max_rows)
    block_rows = next(size for size in (BLOCK_ROWS, 2, 1) if num_tokens % size == 0)

    def per_row(num_heads: int) -> pl.BlockSpec:
        return pl.BlockSpec((block_rows, num_heads, head_size), lambda block, *_: (block, 0, 0))

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    sinks_by_head = scales_by_head = None
    if sinks is not None:
        sinks_by_head = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None] * LOG2_E, (num_heads, LANES))
    if kv_scales is not None:
        scales_by_head = jnp.repeat(jnp.stack(kv_scales).astype(jnp.float32), group, axis=1)
        scales_by_head = jnp.broadcast_to(scales_by_head[:, :, None], (2, num_heads, LANES))
    inputs = DecodeInputs(q, k, v, sinks_by_head, scales_by_head, pages)
    in_specs = DecodeInputs(
        q=per_row(num_heads),
        k=None if k is None else per_row(num_kv_heads),
        v=None if v is None else per_row(num_kv_heads),
        sinks=None if sinks_by_head is None else whole(sinks_by_head),
        scales=None if scales_by_head is None else whole(scales_by_head),
        pages=in_hbm,
    )
    lens, next_long = _schedule(context_lens, num_rows, sizes.tile, options.window, block_rows)
    scalars = DecodeScalars(page_tables.reshape(-1), lens, next_long, jnp.stack([first_page, num_rows]))
    tile_shape = num_kv_heads, num_lane_rows, sizes.tile, LANES
    state_shape = block_rows, num_kv_heads // heads, heads * group
    scratch = DecodeScratch(
        full_tiles=pltpu.VMEM((2, *tile_shape), pages.dtype),
        tail_tiles=pltpu.VMEM((2, block_rows, *tile_shape), pages.dtype),
        diagonal_q=pltpu.VMEM((*state_shape, heads * lanes.width), compute_dtype(q.dtype, pages.dtype)),
        running_max=pltpu.VMEM((*state_shape, LANES), jnp.float32),
        running_sum=pltpu.VMEM((*state_shape, LANES), jnp.float32),
        acc=pltpu.VMEM((*state_shape, lanes.width), jnp.float32),
        full_sems=pltpu.SemaphoreType.DMA((2,)),
        tail_sems=pltpu.SemaphoreType.DMA((2,)),
        write_sem=pltpu.SemaphoreType.DMA(()),
        next_buffer=pltpu.SMEM((1,), jnp.int32),
    )
    statics = DecodeStatics(lanes, heads, sizes, page_size, page_tables.shape[1], options)

    def kernel(scalars: DecodeScalars, inputs: DecodeInputs, outputs: DecodeOutputs, scratch: DecodeScratch) -> None:
        DecodeKernel(scalars, inputs, outputs, scratch, statics).run()

    tile_bytes = num_kv_heads * num_lane_rows * sizes.tile * LANES * pages.dtype.itemsize
    num_inputs = len(jax.tree.leaves(inputs))
    (outputs,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=((num_rows + block_rows - 1) // block_rows,),
            in_specs=[in_specs],
            out_specs=[DecodeOutputs(per_row(num_heads), in_hbm)],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            DecodeOutputs(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(pages.shape, pages.dtype))
        ],
        input_output_aliases={len(scalars): 0, len(scalars) + num_inputs - 1: 1},  # q and pages
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not check_bounds,
            vmem_limit_bytes=decode_vmem_bytes(tile_bytes, block_rows),
        ),
        interpret=interpret,
        name="ragged_paged_decode",
    )(scalars, inputs)
    return outputs.out, outputs.pages


def _schedule(
    lens: Int[Array, " R"], num_rows: Int[Array, ""], tile: int, window: int | None, block_rows: int
) -> tuple[Int[Array, " R_padded"], Int[Array, " R_padded"]]:
    """Return the `context_lens` and `next_long` of `DecodeScalars`, padded by up to two blocks.

    The kernel looks one block ahead of the last one.
    """
    row = jnp.arange(lens.shape[0])
    lens = jnp.where(row < num_rows, lens, 0)
    first_seen = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    is_long = jnp.maximum(lens - 1, 0) // tile > first_seen // tile
    next_long = lax.cummin(jnp.where(is_long, row, lens.shape[0]), reverse=True)
    room = (-lens.shape[0]) % block_rows + block_rows
    return jnp.pad(lens, (0, room)), jnp.pad(next_long, (0, room), constant_values=lens.shape[0])
