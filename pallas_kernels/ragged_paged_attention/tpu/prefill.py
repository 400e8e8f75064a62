"""Attention of prefill rows: flash attention over pages, one tile of queries of one row per grid step.

    queries [T, N, H], in the model's layout
      ├─ row 0 ──────────────┤├─ row 1 ──┤             a query tile has at most tile_q queries of one row
      [tile  ][tile  ][tile  ][tile  ][ti]

    one grid step = one query tile                     VMEM: two buffers for one KV tile [K, S, tile_kv, 128]
      keys:  KV tile │ KV tile │ … │ KV tile at the      buffer a ◀─ DMA ── the next KV tile, or the first one of
                                     diagonal                               the next grid step
      in sub-tiles of sub_kv keys:                       buffer b ── compute
        unmasked  │  masked  │  masked, half as long
      for each chunk of b query heads of one KV head:
        Q [b·tile_q, W] · Kᵀ → scores [b·tile_q, sub_kv];  P · V → added to acc [N/b, b·tile_q, W] in VMEM

The softmax is computed online: each query keeps the maximum of its scores so far, the sum of its weights relative to
that maximum, and the weighted sum of values; all three are rescaled when the maximum grows. All keys and values already
lie in the pages. A tile's queries come by DMA while the tile before is computed and are transposed to [head, query]
order; its outputs return by DMA while the next tile is computed, to where its queries were.

Letters: M tiles of queries · S rows of 128 lanes per token and KV head · W lanes of a query, H rounded up to 128 ·
b = heads_per_chunk.

Source: Dao 2023, arXiv:2307.08691 (the outer loop runs over tiles of queries, the inner one over keys).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..interface import AttendOptions, LayerInputs
from .heads import heads_from_rows, heads_to_tokens, rows_shape, tokens_to_rows
from .kernel_call import IN_HBM, IN_SMEM, CallOptions, call_kernel
from .lanes import (
    LANES,
    LOG2_E,
    MASK_VALUE,
    HeadLanes,
    Ref,
    Scalar,
    base2_scores,
    broadcast_lanes,
    compute_dtype,
    divide,
    dot_nn,
    dot_nt,
    iota,
    row_mask_bits,
    zero_rows,
)
from .pages import PageCopies, PageSpan
from .query_tiles import QueryTiles

MAX_SCORE_ROWS = 1024
"""Rows of one product's scores at most: query heads of a chunk × queries of a tile."""
SPARE_VMEM_BYTES = 12 << 20
"""VMEM beside the scratch buffers and the scores, for what the compiler spills."""


class PrefillInputs(NamedTuple):
    """Arrays that the kernel reads; a field is None where the layer has no such thing."""

    sinks: Ref | None
    """float32 [N] in SMEM: sink logits times log₂ e."""
    scales: Ref | None
    """float32 [2, K] in SMEM: scales of the keys and of the values of one-byte pages."""
    q: Ref
    """[T, N, H] in HBM: queries, whose memory the output takes."""
    pages: Ref
    """[C, K, S, Z, 128] in HBM: the pages of all layers."""


class PrefillScratch(NamedTuple):
    """Scratch memory. A leading 2 counts the two buffers of what is fetched ahead."""

    q_tiles: Ref
    """[2, tile_q, N, H] in VMEM, of q's dtype: the queries of this tile and of the next."""
    out_tile: Ref
    """[tile_q, N, H] in VMEM, of q's dtype: outputs on their way to HBM."""
    queries: Ref
    """[N/b, b·tile_q, W] in VMEM, of the compute dtype: this tile's queries by chunk of heads."""
    kv_tiles: Ref
    """[2, K, S, tile_kv, 128] in VMEM, of the pages' dtype: keys and values of this KV tile and of the next."""
    running_max: Ref
    """float32 [N/b, b·tile_q, 128] in VMEM, equal in all lanes: the largest score of each query so far."""
    running_sum: Ref
    """float32 [N/b, b·tile_q, 128] in VMEM, equal in all lanes: the sum of each query's weights so far."""
    acc: Ref
    """float32 [N/b, b·tile_q, W] in VMEM: the weighted sum of values of each query so far."""
    head_rows: Ref
    """int32 [rows_shape] in VMEM: queries and outputs between [token, head] and [head, token] order."""
    q_sems: Ref
    """DMA semaphores [2]: the copies into the two q_tiles."""
    out_sem: Ref
    """DMA semaphore: the copy of out_tile to HBM."""
    kv_sems: Ref
    """DMA semaphores [2]: the copies into the two kv_tiles."""
    next_buffer: Ref
    """int32 [1] in SMEM: which of the kv_tiles the next KV tile to be computed lies in."""


def heads_per_chunk(group_size: int, tile_q: int) -> int:
    """Return b, the query heads whose scores one product computes: a divisor of G, the query heads of a KV head.

    `group_size` is G. A product has b · `tile_q` rows of scores, at most `MAX_SCORE_ROWS` = 1,024 of them unless b is
    1. The largest such b is taken: with G = 8 and tiles of 256 queries, b = 4.
    """
    divisors = [b for b in range(1, group_size + 1) if group_size % b == 0 and b * tile_q <= MAX_SCORE_ROWS]
    return max(divisors, default=1)


Buffers = dict[str, jax.ShapeDtypeStruct]
"""Field of `PrefillScratch` → shape and dtype of its array, for those in VMEM."""


def prefill_buffers(
    tile_q: int, num_heads: int, num_kv_heads: int, head_size: int, tile_kv: int, dtype: DTypeLike, kv_dtype: DTypeLike
) -> Buffers:
    """Return shape and dtype of each VMEM buffer, for tiles of `tile_q` queries and `tile_kv` keys and values.

    `dtype` is that of queries and outputs, `kv_dtype` that of the pages. Copies of queries and of keys and values are
    double-buffered: the first axis, 2, selects the buffer. A chunk is the b query heads of one product, which share a
    KV head. `queries` and the softmax state are [N/b chunks, b·tile_q rows (query i of the chunk's head h is row h ·
    tile_q + i), lanes]; the running maximum and sum repeat their number on all 128 lanes. `head_rows` is int32 scratch
    memory for the transposition between [token, head] and [head, token] order.
    """
    lanes, chunk = HeadLanes(head_size), heads_per_chunk(num_heads // num_kv_heads, tile_q)
    num_chunks, rows = num_heads // chunk, chunk * tile_q
    return {
        "q_tiles": jax.ShapeDtypeStruct((2, tile_q, num_heads, head_size), dtype),
        "out_tile": jax.ShapeDtypeStruct((tile_q, num_heads, head_size), dtype),
        "queries": jax.ShapeDtypeStruct((num_chunks, rows, lanes.width), compute_dtype(dtype, kv_dtype)),
        "kv_tiles": jax.ShapeDtypeStruct((2, num_kv_heads, lanes.num_rows, tile_kv, LANES), kv_dtype),
        "running_max": jax.ShapeDtypeStruct((num_chunks, rows, LANES), jnp.float32),
        "running_sum": jax.ShapeDtypeStruct((num_chunks, rows, LANES), jnp.float32),
        "acc": jax.ShapeDtypeStruct((num_chunks, rows, lanes.width), jnp.float32),
        "head_rows": jax.ShapeDtypeStruct(rows_shape(tile_q, num_heads, dtype), jnp.int32),
    }


def prefill_vmem_bytes(buffers: Buffers, sub_kv: int, *, spare_bytes: int = SPARE_VMEM_BYTES) -> int:
    """Return the bytes of VMEM that prefill may need: buffers with their padding, scores, and the spare bytes.

    A product over `sub_kv` keys counts as three float32 arrays [b·tile_q, sub_kv]: its scores and what is computed from
    them. `spare_bytes` are for what the compiler spills.
    """
    score_rows = buffers["queries"].shape[1]
    buffer_bytes = sum(padded_bytes(buffer) for buffer in buffers.values())
    return spare_bytes + buffer_bytes + 3 * 4 * score_rows * sub_kv


def prefill_attention(
    pages: Float[Array, "C K S Z L"], layer: LayerInputs, call: CallOptions, *, tile_kv: int, sub_kv: int, tile_q: int
) -> Float[Array, "T N H"]:
    """Attend the queries of prefill rows causally to their rows' pages; return `layer.q` with outputs in their place.

    One kernel call, flash attention with one grid step per tile of queries of one row; `layer.step.plan` holds the
    tiles. The pages already hold the keys and values of this step: C pages of all layers, K KV heads, S rows of L = 128
    lanes for a token's key and value, and Z slots. `layer.q` is donated; tokens of decode rows, where it holds outputs
    already, stay as they are. `tile_kv` is the number of keys of a KV tile, a multiple of the page size and of
    `sub_kv`, the keys of one product. `tile_q` is the largest number of queries of a tile.
    """
    q, (_, num_heads, head_size) = layer.q, layer.q.shape
    sinks = None if layer.sinks is None else layer.sinks.astype(jnp.float32) * LOG2_E
    scales = None if layer.kv_scales is None else jnp.stack(layer.kv_scales).astype(jnp.float32)
    inputs = PrefillInputs(sinks, scales, q, pages)
    # The sinks and the scales, if given, are read number by number; all else stays in HBM.
    in_specs = PrefillInputs._make((*jax.tree.map(lambda _: IN_SMEM, inputs[:2]), IN_HBM, IN_HBM))
    buffers = prefill_buffers(tile_q, num_heads, pages.shape[1], head_size, tile_kv, q.dtype, pages.dtype)
    scratch = PrefillScratch(
        **{name: pltpu.VMEM(buffer.shape, buffer.dtype) for name, buffer in buffers.items()},
        q_sems=pltpu.SemaphoreType.DMA((2,)),
        out_sem=pltpu.SemaphoreType.DMA(()),
        kv_sems=pltpu.SemaphoreType.DMA((2,)),
        next_buffer=pltpu.SMEM((1,), jnp.int32),
    )

    def kernel(scalars: QueryTiles, inputs: PrefillInputs, out: Ref, scratch: PrefillScratch) -> None:
        sizes = {"sub_kv": sub_kv, "table_len": layer.tables.shape[1]}
        attend = partial(_attend_query_tile, scalars, inputs, out, scratch, **sizes, options=layer.options)
        pl.when(scalars.num_tiles > 0)(attend)  # A plan without tiles has a grid step, too.

    (attended,) = call_kernel(
        kernel,
        QueryTiles.of(layer),
        inputs,
        in_specs,
        scratch,
        outputs=("q",),
        num_steps=layer.step.plan[0],
        vmem_bytes=prefill_vmem_bytes(buffers, sub_kv),
        name="ragged_paged_prefill",
        call=call,
    )
    return attended


def _attend_query_tile(
    scalars: QueryTiles,
    inputs: PrefillInputs,
    out: Ref,
    scratch: PrefillScratch,
    *,
    sub_kv: int,
    table_len: int,
    options: AttendOptions,
) -> None:
    """Compute one tile of queries by flash attention, and write its outputs over the queries in HBM.

    Fetch the queries, prepare the online-softmax state, add KV tile after KV tile, divide by the sums. The copies of
    queries, KV tiles and outputs overlap with the computation of the tiles before and after them, across grid steps.
    `sub_kv` counts the keys of one product, `table_len` the entries of one row's page table. `first_position` and
    `end_position` are the position of the tile's first query and the one after its last query.
    """
    lanes, window = HeadLanes(inputs.q.shape[2]), options.window
    next_buffer = scratch.next_buffer
    tile_q, num_heads = scratch.out_tile.shape[:2]
    num_kv_heads, tile_kv = scratch.kv_tiles.shape[1], scratch.kv_tiles.shape[3]
    num_chunks, chunk = scratch.queries.shape[0], num_heads // scratch.queries.shape[0]
    # The last, masked sub-tile is computed half as long if its first half has all keys and is whole hardware tiles.
    can_halve = sub_kv // 2 % (LANES if sub_kv > LANES else 32 // scratch.kv_tiles.dtype.itemsize) == 0
    half_sub_kv = sub_kv // 2 if can_halve else sub_kv
    q_tile = pl.program_id(0)
    first_page, num_q_tiles = scalars.first_page_and_count[0], scalars.num_tiles
    first_position, end_position = scalars.first_positions[q_tile], scalars.end_position(q_tile)
    q_buffer = lax.rem(q_tile, 2)
    copies = PageCopies(inputs.pages, scalars.page_tables, table_len, first_page, tile_kv)

    def first_visible_position(q_tile: Scalar) -> Scalar:
        """Return the first position that any query of a tile attends to."""
        return jnp.int32(0) if window is None else jnp.maximum(scalars.first_positions[q_tile] - window + 1, 0)

    def chunk_rows(head: int) -> Ref:
        """Return the rows of a query head among the (head, query) rows of its chunk of heads."""
        return pl.ds(head % chunk * tile_q, tile_q)

    # Copies

    def q_copy(q_tile: Scalar, buffer: Scalar) -> Ref:
        target = pl.ds(0, scalars.lens[q_tile])
        source = pl.ds(scalars.first_tokens[q_tile], scalars.lens[q_tile])
        return pltpu.make_async_copy(inputs.q.at[source], scratch.q_tiles.at[buffer, target], scratch.q_sems.at[buffer])

    def out_copy(q_tile: Scalar) -> Ref:
        source = pl.ds(0, scalars.lens[q_tile])
        target = pl.ds(scalars.first_tokens[q_tile], scalars.lens[q_tile])
        return pltpu.make_async_copy(scratch.out_tile.at[source], out.at[target], scratch.out_sem)

    def span(q_tile: Scalar, kv_tile: Scalar) -> PageSpan:
        """Return the page-table entries of a KV tile that some query of a query tile attends to."""
        return copies.span(kv_tile, first_visible_position(q_tile), scalars.end_position(q_tile))

    def fetch(q_tile: Scalar, kv_tile: Scalar, buffer: Scalar) -> None:
        target, semaphore = scratch.kv_tiles.at[buffer], scratch.kv_sems.at[buffer]
        copies.fetch(scalars.rows[q_tile], kv_tile, span(q_tile, kv_tile), target, semaphore)

    def wait(kv_tile: Scalar, buffer: Scalar) -> None:
        pages = span(q_tile, kv_tile)
        copies.wait(pages.end - pages.begin, scratch.kv_sems.at[buffer])

    # Compute

    def attend(kv_position: Scalar, kv: Ref, *, is_masked: bool) -> None:
        """Add the keys and values of one sub-tile to the online-softmax states of all query heads, chunk after chunk.

        `kv` [K, S, keys, 128] in VMEM holds the keys and values of the positions from `kv_position` on. Without
        `is_masked`, every query of the tile must attend to every one of these keys.
        """

        def attend_chunk(chunk_index: Scalar, _: int) -> int:
            """Do one step of the online softmax for the b query heads of a chunk, which share KV head `head`.

            Scores are [b·tile_q, keys], keys and values [keys, W]. The state of the chunk is updated in place: running
            maximum, sum of weights, and weighted values `acc`. The loop carries nothing: 0 is returned in place of a
            carry.
            """
            dtype, head = scratch.queries.dtype, divide(chunk_index, num_chunks // num_kv_heads)
            keys, values = lanes.keys(kv, head), lanes.values(kv, head)
            factor = options.scale if inputs.scales is None else options.scale * inputs.scales[0, head]
            scores = base2_scores(dot_nt(scratch.queries[chunk_index], keys.astype(dtype)), factor, options.soft_cap)
            if is_masked:
                key_position = kv_position + iota(scores.shape, 1)
                # Row h · tile_q + i of the scores is query i of the chunk's head h. A row after the tile's last query
                # holds no query; its mask hides the keys after that query, too, which may be unwritten.
                q_position = first_position + iota((chunk, tile_q, scores.shape[1]), 1).reshape(scores.shape)
                is_visible = key_position <= jnp.minimum(q_position, end_position - 1)
                if window is not None:
                    is_visible &= key_position > q_position - window
                scores = jnp.where(is_visible, scores, MASK_VALUE)
                values = zero_rows(values, row_mask_bits(is_visible_to_any, values))
            old_max = scratch.running_max[chunk_index]
            new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - broadcast_lanes(new_max, scores.shape[1]))
            decay = jnp.exp2(old_max - new_max)
            scratch.running_max[chunk_index] = new_max
            old_sum = scratch.running_sum[chunk_index]
            scratch.running_sum[chunk_index] = old_sum * decay + jnp.sum(weights, axis=1, keepdims=True)
            weighted_values = dot_nn(weights.astype(dtype), values.astype(dtype))
            scratch.acc[chunk_index] = scratch.acc[chunk_index] * broadcast_lanes(decay, lanes.width) + weighted_values
            return 0

        def is_visible_to_any(key: Array) -> Array:
            """Return whether any query attends to `kv_position` + `key`. Other values may be NaN; 0 × NaN is NaN."""
            is_visible = key < end_position - kv_position
            return is_visible if window is None else is_visible & (key >= first_visible_position(q_tile) - kv_position)

        lax.fori_loop(0, num_chunks, attend_chunk, 0)

    # Fetch this tile's queries and first keys, unless the grid step before has done so, and the next tile's queries.

    @pl.when(q_tile == 0)
    def _() -> None:
        next_buffer[0] = 0
        q_copy(0, 0).start()
        fetch(0, divide(first_visible_position(0), tile_kv), 0)

    pl.when(q_tile + 1 < num_q_tiles)(lambda: q_copy(q_tile + 1, 1 - q_buffer).start())

    # The state of the softmax before the first key: a sink counts as a key of weight 1 and no value.

    scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)
    if inputs.sinks is None:
        scratch.running_max[...] = jnp.full(scratch.running_max.shape, MASK_VALUE, jnp.float32)
        scratch.running_sum[...] = jnp.zeros(scratch.running_sum.shape, jnp.float32)
    else:
        for head in range(num_heads):
            sink = jnp.full((tile_q, LANES), inputs.sinks[head], jnp.float32)
            scratch.running_max[head // chunk, chunk_rows(head)] = sink
        scratch.running_sum[...] = jnp.ones(scratch.running_sum.shape, jnp.float32)
    q_copy(q_tile, q_buffer).wait()

    # Queries from [query, head] to [head, query] order.

    for first_lane in range(0, lanes.width, LANES):
        tokens_to_rows(scratch.q_tiles.at[q_buffer], first_lane, scratch.head_rows)
        queries_by_head = heads_from_rows(scratch.head_rows, 0, tile_q, num_heads, scratch.q_tiles.dtype)
        for head, queries in enumerate(queries_by_head):
            queries = queries.astype(scratch.queries.dtype)
            scratch.queries[head // chunk, chunk_rows(head), pl.ds(first_lane, LANES)] = queries
    num_kv_tiles = divide(end_position + tile_kv - 1, tile_kv)

    # KV tile after KV tile; the next one, or the next grid step's first one, is fetched meanwhile.

    @pl.loop(divide(first_visible_position(q_tile), tile_kv), num_kv_tiles)
    def _(kv_tile: Scalar) -> None:
        """Fetch the KV tile that is computed after this one, wait for this one, and attend to its sub-tiles."""
        buffer = next_buffer[0]
        next_buffer[0] = 1 - buffer

        pl.when(kv_tile + 1 < num_kv_tiles)(lambda: fetch(q_tile, kv_tile + 1, 1 - buffer))
        pl.when((kv_tile + 1 == num_kv_tiles) & (q_tile + 1 < num_q_tiles))(
            lambda: fetch(q_tile + 1, divide(first_visible_position(q_tile + 1), tile_kv), 1 - buffer)
        )
        wait(kv_tile, buffer)
        kv_position = kv_tile * tile_kv
        num_visible_keys = jnp.minimum(end_position - kv_position, tile_kv)
        first_sub_tile = divide(jnp.maximum(first_visible_position(q_tile) - kv_position, 0), sub_kv)

        @pl.loop(first_sub_tile, divide(num_visible_keys + sub_kv - 1, sub_kv))
        def _(sub_tile_index: Array) -> None:
            """Attend to one sub-tile: unmasked if every query attends to all its keys, else masked, whole or half."""
            offset = pl.multiple_of(sub_tile_index * sub_kv, sub_kv)
            attend_from = partial(attend, kv_position + offset)
            is_unmasked = kv_position + offset + sub_kv - 1 <= first_position  # Every query attends to every key.
            if window is not None:
                is_unmasked &= kv_position + offset > end_position - 1 - window
            needs_whole_sub_tile = num_visible_keys - offset > half_sub_kv
            kv = lambda length: scratch.kv_tiles.at[buffer, :, :, pl.ds(offset, length)]  # noqa: E731
            pl.when(is_unmasked)(lambda: attend_from(kv(sub_kv), is_masked=False))
            pl.when(~is_unmasked & needs_whole_sub_tile)(lambda: attend_from(kv(sub_kv), is_masked=True))
            pl.when(~is_unmasked & ~needs_whole_sub_tile)(lambda: attend_from(kv(half_sub_kv), is_masked=True))

    # Outputs: acc ÷ running_sum, back to [query, head] order and to HBM, once the tile before has left out_tile.

    pl.when(q_tile > 0)(lambda: out_copy(q_tile - 1).wait())

    def output(head: int, first_lane: int) -> Array:
        """Return the 128 lanes from `first_lane` on of the outputs of one query head, [tile_q, 128].

        The output is acc ÷ running_sum, times the scale of one-byte values. In packed rows (H ≤ 64) values lie in the
        upper 64 lanes; they are rotated to begin at lane 0.
        """
        chunk_index, rows = head // chunk, chunk_rows(head)
        result = scratch.acc[chunk_index, rows, pl.ds(first_lane, LANES)] / scratch.running_sum[chunk_index, rows]
        if inputs.scales is not None:
            result = result * inputs.scales[1, head // (num_heads // num_kv_heads)]
        if lanes.is_packed:
            result = pltpu.roll(result, LANES - lanes.value_lane, 1)
        return result.astype(scratch.out_tile.dtype)

    for first_lane in range(0, lanes.width, LANES):
        heads_to_tokens(partial(output, first_lane=first_lane), first_lane, scratch.head_rows, scratch.out_tile)
    out_copy(q_tile).start()

    pl.when(q_tile + 1 == num_q_tiles)(lambda: out_copy(q_tile).wait())


def padded_bytes(buffer: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array in VMEM, with its last two axes padded to whole tiles of the memory.

    A tile of the memory is 128 lanes wide, and has as many rows as 32 bytes hold numbers: 8 rows of float32, 16 of
    bfloat16. `buffer` has at least two axes. Example: bfloat16 [2, 5, 80] takes the bytes of [2, 16, 128], 8,192.
    """
    shape, itemsize = buffer.shape, buffer.dtype.itemsize
    rows = 32 // itemsize
    return itemsize * math.prod((*shape[:-2], -(-shape[-2] // rows) * rows, -(-shape[-1] // LANES) * LANES))
