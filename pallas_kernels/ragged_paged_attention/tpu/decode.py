"""Attention of decode rows, one query each, with the new key and value written on the way: the call of the kernel.

    one grid step = a block of BLOCK_ROWS rows       VMEM
      the full KV tiles of its long rows, one            full_tiles [buffers, K, S, tile, 128], a ring:
      after another:                                       buffer a ── compute
        full tile │ full tile │ …                          buffer b ◀─ DMA ── the next full tile, of whichever row
        no mask, one wait for all pages                    buffer c ◀─ DMA ── the one after it …
      then the last KV tile ("tail") of every row,       tail_tiles [2, BLOCK_ROWS, K, S, tile, 128]:
      two rows at a time (float32: one):                   the next block's ◀─ DMA ── while this block is computed
        sub-tile 0 │ sub-tile 1 │ …, masked; the two
        rows are independent, so that one's product
        runs while the other's maximum is reduced

    h KV heads side by side on the lanes share one product; their queries, G rows each, lie on a block diagonal:
      Q [h·G, h·W] · Kᵀ [h·W, T]      →  scores [h·G, T]
      P [h·G, T] · V [T, h·W]         →  [h·G, h·W], of which the diagonal blocks are kept

Full tiles are fetched in the order of their computation, across rows and blocks, `buffers` − 1 of them ahead: this many
bytes are under way while one tile is computed, and none of them twice.

The softmax is online, as in `prefill`. With a window, full tiles are masked too, and only the pages that the window
reaches are fetched. The new key and value are put into the tail tile while it lies in VMEM, in the aligned block of
slots that a DMA can address, and that block is copied to the page while the tail is computed: the page must belong to
this row alone. Slots behind a row's end may hold NaN, so scores and values there are replaced, never multiplied by
zero. Outputs take the place of the queries; rows of the last block that are not decoded keep their queries.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (pages).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..interface import LayerInputs
from .decode_kernel import DecodeKernel
from .decode_refs import DecodeInputs, DecodeOutputs, DecodeScalars, DecodeScratch, DecodeSizes
from .kernel_call import IN_HBM, CallOptions, call_kernel
from .lanes import LANES, LOG2_E, HeadLanes, Ref, compute_dtype

BLOCK_ROWS = 4
"""Rows of one grid step, where the number of tokens of the step is a multiple of it."""
MAX_HEADS_PER_PRODUCT = 8
"""KV heads whose scores one product computes at most; with more values side by side the compiler spills registers."""
SPARE_VMEM_BYTES = 16 << 20
"""VMEM beside the tiles: queries, outputs, scores and what the compiler spills."""


def decode_vmem_bytes(
    tile_bytes: int, buffers: int, *, block_rows: int = BLOCK_ROWS, spare_bytes: int = SPARE_VMEM_BYTES
) -> int:
    """Return the bytes of VMEM that decode may need: (buffers + 2 · block_rows) KV tiles, and the spare bytes.

    `tile_bytes` are the bytes of one KV tile, keys and values of all heads. `buffers` counts the full tiles. Each row
    of a block has two buffers for its tail, the last KV tile: tails are double-buffered over blocks. `spare_bytes` are
    for queries, outputs, scores and what the compiler spills.
    """
    return spare_bytes + (buffers + 2 * block_rows) * tile_bytes


def heads_per_product(num_kv_heads: int, group_size: int, max_rows: int) -> int:
    """Return h, the KV heads that one product takes side by side, each with G = `group_size` query heads.

    A product has h·G rows of scores, at most `max_rows` of them unless h is 1. The largest divisor of `num_kv_heads`
    with this property up to `MAX_HEADS_PER_PRODUCT` = 8 is taken: 8 KV heads with G = 4 and `max_rows` 16 give h = 4.
    """
    max_heads = min(num_kv_heads, MAX_HEADS_PER_PRODUCT)
    divisors = [h for h in range(1, max_heads + 1) if num_kv_heads % h == 0 and h * group_size <= max_rows]
    return max(divisors, default=1)


def decode_attention(
    pages: Float[Array, "C K S Z L"], layer: LayerInputs, call: CallOptions, *, sizes: DecodeSizes
) -> tuple[Float[Array, "T N H"], Float[Array, "C K S Z L"]]:
    """Attend the queries of the step's R decode rows, tokens 0 … R − 1, to their rows' tokens, the last one new.

    One kernel call over blocks of rows: grouped-query attention with an online softmax; KV tiles are fetched while
    earlier ones are computed. `pages` are C pages of all layers, K KV heads, S rows of L = 128 lanes for a token's key
    and value, and Z slots. `layer.k` and `layer.v` are the new keys and values (for one-byte pages: numbers already
    quantized, in two or four bytes each). If they are None, the pages hold them already and nothing is written. Return
    `layer.q` with outputs in the place of those queries, and the written pages; both arrays are donated.
    """
    q, k, v = layer.q, layer.k, layer.v
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, num_lane_rows, _, _ = pages.shape
    group_size, width = num_heads // num_kv_heads, HeadLanes(head_size).width
    heads = heads_per_product(num_kv_heads, group_size, sizes.max_rows)
    block_rows = next(size for size in (BLOCK_ROWS, 2, 1) if num_tokens % size == 0)

    def per_row(array: Array) -> pl.BlockSpec:
        # A grid step sees `block_rows` rows of the array in VMEM, and the whole of the other axes.
        return pl.BlockSpec((block_rows, *array.shape[1:]), lambda block, *_: (block, 0, 0))

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    sinks = scales = None
    if layer.sinks is not None:
        sinks = jnp.broadcast_to(layer.sinks.astype(jnp.float32)[:, None] * LOG2_E, (num_heads, LANES))
    if layer.kv_scales is not None:
        scales = jnp.repeat(jnp.stack(layer.kv_scales).astype(jnp.float32), group_size, axis=1)
        scales = jnp.broadcast_to(scales[:, :, None], (2, num_heads, LANES))
    inputs = DecodeInputs(q, k, v, sinks, scales, pages)
    in_specs = DecodeInputs._make((*jax.tree.map(per_row, inputs[:3]), *jax.tree.map(whole, inputs[3:5]), IN_HBM))
    context_lens, num_rows = layer.step.context_lens[:num_tokens], layer.step.num_decode_rows
    lens, next_long_row = _row_schedule(context_lens, num_rows, sizes.tile, layer.options.window, block_rows)
    tables = layer.tables.reshape(-1)
    tile_shape = num_kv_heads, num_lane_rows, sizes.tile, LANES
    state_shape = block_rows, num_kv_heads // heads, heads * group_size
    scratch = DecodeScratch(
        full_tiles=pltpu.VMEM((sizes.buffers, *tile_shape), pages.dtype),
        tail_tiles=pltpu.VMEM((2, block_rows, *tile_shape), pages.dtype),
        diagonal_q=pltpu.VMEM((*state_shape, heads * width), compute_dtype(q.dtype, pages.dtype)),
        running_max=pltpu.VMEM((*state_shape, LANES), jnp.float32),
        running_sum=pltpu.VMEM((*state_shape, LANES), jnp.float32),
        acc=pltpu.VMEM((*state_shape, width), jnp.float32),
        full_sems=pltpu.SemaphoreType.DMA((sizes.buffers,)),
        tail_sems=pltpu.SemaphoreType.DMA((2,)),
        write_sem=pltpu.SemaphoreType.DMA(()),
        next_buffer=pltpu.SMEM((1,), jnp.int32),
        next_fetch=pltpu.SMEM((2,), jnp.int32),
    )

    def kernel(scalars: DecodeScalars, inputs: DecodeInputs, out: Ref, pages: Ref, scratch: DecodeScratch) -> None:
        outputs = DecodeOutputs(out, pages)
        DecodeKernel(scalars, inputs, outputs, scratch, sizes, layer.tables.shape[1], layer.options).run()

    tile_bytes = math.prod(tile_shape) * pages.dtype.itemsize
    out, pages = call_kernel(
        kernel,
        DecodeScalars(tables, lens, next_long_row, jnp.stack([layer.first_page, num_rows])),
        inputs,
        in_specs,
        scratch,
        outputs=("q", "pages"),
        num_steps=(num_rows + block_rows - 1) // block_rows,
        vmem_bytes=decode_vmem_bytes(tile_bytes, sizes.buffers, block_rows=block_rows),
        name="ragged_paged_decode",
        call=call,
    )
    return out, pages


def _row_schedule(
    context_lens: Int[Array, " R"], num_rows: Int[Array, ""], tile: int, window: int | None, block_rows: int
) -> tuple[Int[Array, " R_padded"], Int[Array, " R_padded"]]:
    """Return the lengths of the rows to decode, 0 for all others, and for each row the first long row from it on.

    These are `context_lens` and `next_long_row` of `DecodeScalars`. The first `num_rows` rows are decoded. A row is
    long if it has a full tile: its query attends to keys before the KV tile that the row ends in, its tail. With tiles
    of 512 tokens and no window, rows of 1,100, 80 and 700 tokens give `next_long_row` 0, 2, 2. The number of padded
    rows, R = 3 here, says that no long row is left. Both results are padded, with 0 and with R, to whole blocks of
    `block_rows` and one block more, because the kernel also reads the entries of the block after the last one, whose
    tails it would fetch.
    """
    num_padded_rows = context_lens.shape[0]
    row = jnp.arange(num_padded_rows)
    lens = jnp.where(row < num_rows, context_lens, 0)
    first_position = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    is_long = jnp.maximum(lens - 1, 0) // tile > first_position // tile
    next_long_row = lax.cummin(jnp.where(is_long, row, num_padded_rows), reverse=True)
    padding = (-num_padded_rows) % block_rows + block_rows
    return jnp.pad(lens, (0, padding)), jnp.pad(next_long_row, (0, padding), constant_values=num_padded_rows)
