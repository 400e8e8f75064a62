"""Attention on a GPU: flash attention over pages, with the keys of a query tile split over thread blocks (split-KV).

    grid: lists × KV heads, as many thread blocks as the chip holds at once; block (l, h) works through the pieces of
    list l, each a query tile of KV head h over a range of its row's keys (see `plan`)

      queries [K, A, H] ── one tile [M, H] ──▶ shared memory, where there is room while the piece before is computed
      pages [L × C, K, Z, H] ── KV tiles of T keys, by page table ──▶ shared memory, `num_stages` buffers (stages)
          stage 0 │ stage 1 │ …      while one KV tile is computed, the next ones are fetched; a stage is filled
                                     again as soon as the tile after the one in it is begun
      per KV tile   scores [M, T] = Q · Kᵀ      in registers
                    weights [M, T]              to shared memory: every warp needs all of them
                    acc [M, H] += weights · V   in registers

      a piece that is its whole tile   ──▶ outputs, to the place of its queries
      a piece of a split tile          ──▶ partial results (acc, running maximum, running sum), for `merge`

The softmax is computed online: each query row keeps the maximum of its scores so far, the sum of its weights relative
to that maximum, and the weighted sum of values; all are rescaled when the maximum grows. The rows of a tile are (query,
head of the group) pairs; rows behind the last query are computed and not stored. Pages of one byte a number are
converted to bfloat16 through registers into a tile of their own; their scales are applied to scores and results. Slots
that no query of the tile sees may hold NaN: their scores are replaced, and their values are zeroed in shared memory.
Page numbers are clamped: behind the last page that a tile sees, that page is fetched once more.

Letters: A aligned query rows (see `queries`) · M query rows of a tile · T keys of a KV tile · P2 partial results.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Dao et al. 2023 (Flash-Decoding: split-KV).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..interface import AttendOptions
from .memory_ops import (
    COMPUTE_DTYPE,
    LOG2_E,
    MASK_VALUE,
    Chip,
    Ref,
    fence_before_copy,
    load_global,
    plgpu,
    row_layout,
    smem_tile,
    start_copy,
    start_query_copies,
    store_global,
    store_query_rows,
    to_compute_dtype,
    wait_copies,
)
from .plan import PIECE_FIELDS, REDUCTION_BYTES, ROW_ALIGN, Piece, PlanSection


@dataclass(frozen=True)
class Launch:
    """Numbers that are fixed when one launch of the kernel is traced: one tile class over one layer."""

    section: PlanSection
    """Where the pieces of this launch lie in the plan."""
    group: int
    """G: query heads per KV head."""
    options: AttendOptions
    tile_kv: int
    """T: keys of a KV tile."""
    num_stages: int
    """KV tiles in shared memory."""
    reads_ahead: bool
    """Whether the next piece's row and lengths are read while a piece is computed."""
    num_query_tiles: int
    """Tiles of queries in shared memory: with two, the next piece's queries are fetched ahead as well."""
    products: Any
    """The module `mma` or `wgmma`, whose functions compute the products."""
    chip: Chip


class AttentionInputs(NamedTuple):
    """References to global memory that the kernel reads; a field is None where the layer has no such thing."""

    queries: Ref
    """[K, A, H] bfloat16, read and written: outputs take the place of their queries."""
    k_pages: Ref
    """[L × C, K, Z, H] of the cache's dtype: the keys of all layers."""
    v_pages: Ref
    """[L × C, K, Z, H] of the cache's dtype: the values of all layers."""
    page_tables: Ref
    """int32 [R × P]: the page tables of all rows, row after row."""
    context_lens: Ref
    """int32 [R]: tokens of each row, this step's included."""
    query_starts: Ref
    """int32 [R + 1]: index of each row's first query among the step's tokens."""
    plan: Ref
    """int32: the plan of the step, see `plan`."""
    first_page: Ref
    """int32 [1]: index of the layer's page 0 among the pages of all layers."""
    k_scales: Ref | None = None
    """float32 [K]: scales of the keys of one-byte pages."""
    v_scales: Ref | None = None
    """float32 [K]: scales of the values of one-byte pages."""
    sinks: Ref | None = None
    """float32 [K, G + M]: each KV head's G sink logits, repeated, so that a tile that begins at any of them finds M."""


class NextPiece(NamedTuple):
    """The row of a piece and its lengths, read while the piece before is computed.

    Registers hold them all that time, which are few: what else the plan says of a piece is read when it begins.
    """

    row: Any
    context_len: Any
    """Tokens of its row."""
    num_queries: Any
    """Queries of its row."""


class Partials(NamedTuple):
    """Partial results of the pieces of split tiles, in global memory, float32."""

    acc: Ref
    """[P2, K, M, H]: weighted sums of values."""
    running_max: Ref
    """[P2, K, M]: largest score of each query row, times log₂ e."""
    running_sum: Ref
    """[P2, K, M]: sum of each query row's weights, relative to that maximum."""


class AttentionScratch(NamedTuple):
    """Shared memory and barriers of one thread block; a field is None where the chip or the dtype has no use for it."""

    k_tiles: Ref
    """[stages, T, H] of the cache's dtype: keys."""
    k_wide: Ref | None
    """[T, H] bfloat16: the keys of one KV tile of one-byte pages, converted."""
    kv_barriers: Ref | None
    """One barrier per stage, at which the copies of its keys and values arrive; None without TMA."""
    q_barriers: Ref | None
    """One barrier per tile of queries, at which its copies arrive; None without TMA."""
    q_tiles: Ref
    """[query tiles, M, H] bfloat16: the queries of a tile, and later its outputs on their way to global memory. Of two,
    one is filled for the next piece."""
    v_tiles: Ref
    """[stages, T, H] of the cache's dtype: values."""
    v_wide: Ref | None
    """[T, H] bfloat16: the values of one KV tile of one-byte pages, converted."""
    weights: Ref
    """[M, T] bfloat16: softmax weights of one KV tile."""


def ragged_attention(inputs: AttentionInputs, launch: Launch) -> Partials | None:
    """Compute the pieces of `launch.section`: outputs take the place of their queries in `inputs.queries`.

    `inputs` are the arrays that become references; `queries` is a mutable one. Return the partial results of tiles
    that are split, or None if none can be.
    """
    num_kv_heads, _, head_size = inputs.queries.shape
    tiles, tile_kv, dtype, chip = launch.section.tiles, launch.tile_kv, inputs.k_pages.dtype, launch.chip
    kv_tiles = smem_tile((launch.num_stages, tile_kv, head_size), dtype, chip)
    wide_tile = None if dtype == COMPUTE_DTYPE else smem_tile((tile_kv, head_size), COMPUTE_DTYPE, chip)
    copies_per_stage = 2 * max(tile_kv // inputs.k_pages.shape[2], 1)
    scratch = AttentionScratch(
        k_tiles=kv_tiles,
        k_wide=wide_tile,
        kv_barriers=plgpu.Barrier(num_arrivals=copies_per_stage, num_barriers=launch.num_stages)
        if chip.has_tma
        else None,
        q_barriers=plgpu.Barrier(num_arrivals=tiles.tile_rows // ROW_ALIGN, num_barriers=launch.num_query_tiles)
        if chip.has_tma
        else None,
        q_tiles=smem_tile((launch.num_query_tiles, tiles.tile_rows, head_size), COMPUTE_DTYPE, chip),
        v_tiles=kv_tiles,
        v_wide=wide_tile,
        weights=launch.products.weights_smem(tiles.tile_rows, tile_kv, chip),
    )
    outputs = None
    if tiles.num_partials:
        shape = (tiles.num_partials, num_kv_heads, tiles.tile_rows)
        per_row = jax.ShapeDtypeStruct(shape, jnp.float32)
        outputs = Partials(jax.ShapeDtypeStruct((*shape, head_size), jnp.float32), per_row, per_row)

    def body(inputs: AttentionInputs, *refs: Any) -> None:
        *partials, scratch = refs
        _compute_list(inputs, partials[0] if partials else None, scratch, launch)

    results = plgpu.kernel(
        body,
        out_type=() if outputs is None else (outputs,),
        scratch_types=(scratch,),
        grid=(tiles.num_lists, num_kv_heads),
        grid_names=("list", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=chip.interpret,
        kernel_name=f"ragged_paged_attention_of_{tiles.tile_rows}",
    )(inputs)
    return results[0] if results else None


def _compute_list(
    inputs: AttentionInputs, partials: Partials | None, scratch: AttentionScratch, launch: Launch
) -> None:
    """Compute the pieces of this thread block's list, one after another.

    Each piece is known, and its queries are on their way if there are two tiles for them, when the one before it ends.
    """
    section, plan = launch.section, inputs.plan
    this_list = lax.axis_index("list")
    begin, end = plan[section.lists_at + this_list], plan[section.lists_at + this_list + 1]

    def read(index: Any) -> NextPiece:
        row = _planned(inputs, launch, index).row
        return NextPiece(row, inputs.context_lens[row], inputs.query_starts[row + 1] - inputs.query_starts[row])

    def compute(index: Any, piece: NextPiece | None) -> NextPiece | None:
        def fetch_next() -> NextPiece | None:
            if not launch.reads_ahead:
                return None
            following = read(jnp.minimum(index + 1, end - 1))
            if launch.num_query_tiles > 1:
                pl.when(index + 1 < end)(lambda: _fetch_queries(inputs, scratch, launch, index + 1, following))
            return following

        return _compute_piece(inputs, partials, scratch, launch, index, piece or read(index), fetch_next)

    @pl.when(begin < end)
    def _() -> None:
        first = read(begin)
        if launch.num_query_tiles > 1:
            _fetch_queries(inputs, scratch, launch, begin, first)
        lax.fori_loop(begin, end, compute, first if launch.reads_ahead else None)


def _planned(inputs: AttentionInputs, launch: Launch, index: Any) -> Piece:
    """Return the fields of a piece, read from the plan; a field that is not used is not read."""
    section = launch.section
    offsets = [section.pieces_at + field * section.tiles.max_pieces for field in range(PIECE_FIELDS)]
    return Piece(*[inputs.plan[offset + index] for offset in offsets])


def _query_tile(scratch: AttentionScratch, launch: Launch, index: Any) -> tuple[Ref, Ref | None]:
    """Return the tile of a piece's queries, and the barrier at which their copies arrive."""
    tile = lax.rem(index, jnp.int32(launch.num_query_tiles))
    return scratch.q_tiles.at[tile], None if scratch.q_barriers is None else scratch.q_barriers.at[tile]


def _fetch_queries(
    inputs: AttentionInputs, scratch: AttentionScratch, launch: Launch, index: Any, piece: NextPiece
) -> None:
    """Start the copies of a piece's queries to its tile."""
    planned = _planned(inputs, launch, index)
    aligned_row = pl.multiple_of(planned.aligned_row, ROW_ALIGN)
    num_rows = piece.num_queries * launch.group - planned.first_query_row
    q_tile, q_barrier = _query_tile(scratch, launch, index)
    start_query_copies(inputs.queries, lax.axis_index("head"), aligned_row, num_rows, q_tile, q_barrier, launch.chip)


def _compute_piece(
    inputs: AttentionInputs,
    partials: Partials | None,
    scratch: AttentionScratch,
    launch: Launch,
    index: Any,
    piece: NextPiece,
    fetch_next: Callable[[], NextPiece | None],
) -> NextPiece | None:
    """Fetch the keys of the list's piece `index`, compute its attention, and store outputs or a partial result.

    Return the next piece as `fetch_next` does, which is called once the first keys are on their way.
    """
    chip, tile_kv, stages, group = launch.chip, launch.tile_kv, launch.num_stages, launch.group
    products, options = launch.products, launch.options
    scale, window, soft_cap = options.scale, options.window, options.soft_cap
    row, context_len, num_queries = piece
    _, first, aligned_row, begin, end, partial_index = _planned(inputs, launch, index)
    head, aligned_row = lax.axis_index("head"), pl.multiple_of(aligned_row, ROW_ALIGN)
    _, tile_rows, head_size = scratch.q_tiles.shape
    q_tile, q_barrier = _query_tile(scratch, launch, index)
    num_pages, _, page_size, _ = inputs.k_pages.shape
    pages_per_tile = max(tile_kv // page_size, 1)
    acc_layout, per_row = products.acc_layout(tile_rows), products.acc_layout(tile_rows).reduce(1)

    # Positions: the tile sees the keys [oldest, newest + 1), and this piece computes [begin, end) of them.
    start = context_len - num_queries
    first_position = start + lax.div(first, jnp.int32(group))
    newest = jnp.minimum(start + lax.div(first + (tile_rows - 1), jnp.int32(group)), context_len - 1)
    oldest = jnp.int32(0) if window is None else jnp.maximum(first_position - window + 1, 0)
    first_tile = lax.div(jnp.maximum(begin, oldest), jnp.int32(tile_kv))
    end_tile = lax.div(jnp.minimum(end, newest + 1) + (tile_kv - 1), jnp.int32(tile_kv))
    num_kv_tiles = jnp.maximum(end_tile - first_tile, 0)

    def pages_of(index: Any) -> tuple[Any, ...]:
        """Return the pages of the index-th KV tile; behind the last page that the tile sees, that page once more.

        By contract a context fits its page table, and the table's entries are pages. Clamping to the table and to the
        pages makes a broken contract give wrong numbers instead of reading other memory.
        """
        table_len = inputs.page_tables.shape[0] // inputs.context_lens.shape[0]
        pages = []
        for part in range(pages_per_tile):
            entry = lax.div((first_tile + index) * tile_kv + part * page_size, jnp.int32(page_size))
            entry = jnp.clip(entry, lax.div(oldest, jnp.int32(page_size)), lax.div(newest, jnp.int32(page_size)))
            page = inputs.page_tables[row * table_len + jnp.minimum(entry, table_len - 1)] + inputs.first_page[0]
            pages.append(jnp.clip(page, 0, num_pages - 1))
        return tuple(pages)

    def fetch(index: Any, pages: tuple[Any, ...]) -> None:
        """Start the copies of the index-th KV tile into its stage."""
        stage = lax.rem(index, jnp.int32(stages))
        barrier = None if scratch.kv_barriers is None else scratch.kv_barriers.at[stage]
        size = min(tile_kv, page_size)
        offset = pl.multiple_of(lax.rem((first_tile + index) * tile_kv, jnp.int32(max(page_size, tile_kv))), 8)
        for part, page in enumerate(pages):
            for source, target in ((inputs.k_pages, scratch.k_tiles), (inputs.v_pages, scratch.v_tiles)):
                whole_page = source.at[page, head]
                keys = whole_page if page_size <= tile_kv else whole_page.at[pl.ds(offset, size)]
                start_copy(keys, target.at[stage, pl.ds(part * size, size)], barrier, chip)

    def fetch_if_any(index: Any, pages: tuple[Any, ...]) -> None:
        if chip.has_tma:
            pl.when(index < num_kv_tiles)(lambda: fetch(index, pages))
        else:  # cp.async copies are told apart by their number, so there is always one.
            fetch(index, pages)

    factor = scale * LOG2_E if soft_cap is None else scale / soft_cap
    if inputs.k_scales is not None:
        factor = factor * inputs.k_scales[head]

    def scores_of(k_tile: Ref, index: Any) -> Array:
        """Return the scores [M, T] of the index-th KV tile, times log₂ e, masked where a query sees no key."""
        scores = products.scores(q_tile, k_tile, chip) * factor
        if soft_cap is not None:
            # tanh by exp2, because the hardware's tanh has 11 bits: of a score of 50 that is a hundredth of its weight.
            scores = (1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2_E)))) * (soft_cap * LOG2_E)
        first_key = (first_tile + index) * tile_kv
        is_unmasked = first_key + (tile_kv - 1) <= first_position
        if window is not None:
            is_unmasked &= first_key > newest - window
        return lax.cond(is_unmasked, lambda scores: scores, lambda scores: masked(scores, first_key), scores)

    def masked(scores: Array, first_key: Any) -> Array:
        iota = partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=acc_layout)
        position = start + lax.div(first + iota(0), jnp.int32(group))
        key = first_key + iota(1)
        is_seen = key <= position
        if window is not None:
            is_seen &= key > position - window
        return jnp.where(is_seen, scores, MASK_VALUE)

    def zero_unseen(v_tile: Ref, index: Any) -> None:
        """Zero the values of keys that the tile does not see: they may be NaN, which a weight of 0 does not hide."""
        first_key = (first_tile + index) * tile_kv

        @pl.when((first_key < oldest) | (first_key + (tile_kv - 1) > newest))
        def _() -> None:
            layout = row_layout(head_size, chip)
            values = plgpu.load(v_tile, layout=layout)
            key = first_key + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            v_tile[...] = jnp.where((key >= oldest) & (key <= newest), values, jnp.zeros_like(values))

    def attend(index: Any, carry: Any) -> Any:
        """Fetch the KV tile `stages` − 1 ahead, wait for the index-th one, and add it to the softmax state."""
        acc, running_max, running_sum, pages = carry
        fence_before_copy(chip)
        fetch_if_any(index + (stages - 1), pages)
        pages = pages_of(index + stages)
        stage = lax.rem(index, jnp.int32(stages))
        kv_barrier = None if scratch.kv_barriers is None else scratch.kv_barriers.at[stage]
        wait_copies(kv_barrier, 2 * pages_per_tile * (stages - 1), chip)
        k_tile, v_tile = scratch.k_tiles.at[stage], scratch.v_tiles.at[stage]
        if scratch.k_wide is not None and scratch.v_wide is not None:
            for narrow, wide in ((k_tile, scratch.k_wide), (v_tile, scratch.v_wide)):
                # On Ampere a row of 128 bytes lies in two blocks, which are read one after the other.
                stored = plgpu.load(narrow, layout=row_layout(head_size, chip), optimized=chip.has_tma)
                wide[...] = to_compute_dtype(stored, chip)
            k_tile, v_tile = scratch.k_wide, scratch.v_wide
        scores = scores_of(k_tile, index)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=1))
        decay = jnp.exp2(running_max - new_max)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
        running_sum = running_sum * decay + jnp.sum(weights, axis=1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        scratch.weights[...] = weights.astype(COMPUTE_DTYPE)
        zero_unseen(v_tile, index)
        acc = products.add_values(acc, scratch.weights, v_tile, chip)
        return acc, new_max, running_sum, pages

    # Fetch the first KV tiles, and what the next piece begins with.
    fence_before_copy(chip)
    if launch.num_query_tiles == 1:
        _fetch_queries(inputs, scratch, launch, index, piece)
    for stage in range(stages - 1):
        fetch_if_any(jnp.int32(stage), pages_of(jnp.int32(stage)))
    following = fetch_next()

    # The softmax state before the first key. In the first piece, a sink counts as a key of weight 1 and no value.
    acc = plgpu.layout_cast(jnp.zeros((tile_rows, head_size), jnp.float32), acc_layout)
    running_max = plgpu.layout_cast(jnp.full((tile_rows,), MASK_VALUE, jnp.float32), per_row)
    running_sum = plgpu.layout_cast(jnp.zeros((tile_rows,), jnp.float32), per_row)
    if inputs.sinks is not None:
        sink_row = inputs.sinks.at[head, pl.ds(lax.rem(first, jnp.int32(group)), tile_rows)]
        sinks = load_global(sink_row, per_row) * LOG2_E
        with_sinks = sinks, plgpu.layout_cast(jnp.ones((tile_rows,), jnp.float32), per_row)
        running_max, running_sum = lax.cond(begin == 0, lambda: with_sinks, lambda: (running_max, running_sum))

    # Wait for the queries, then compute KV tile after KV tile. On Ampere the copies of the next piece's queries are
    # counted by no wait: they are older than the KV tiles of every wait in the loop.
    wait_copies(q_barrier, 2 * pages_per_tile * (stages - 1), chip)
    carry = acc, running_max, running_sum, pages_of(jnp.int32(stages - 1))
    acc, running_max, running_sum, _ = lax.fori_loop(0, num_kv_tiles, attend, carry)
    if not chip.has_tma:
        wait_copies(None, 0, chip)
    if inputs.v_scales is not None:
        acc = acc * inputs.v_scales[head]

    @pl.when(partial_index < 0)
    def store_outputs() -> None:
        results = acc / lax.broadcast_in_dim(running_sum, acc.shape, [0])
        num_rows = num_queries * group - first
        store_query_rows(inputs.queries, head, aligned_row, num_rows, results, q_tile, chip)

    @pl.when(partial_index >= 0)
    def store_partial() -> None:
        if partials is not None:
            for target, value in zip(partials, (acc, running_max, running_sum), strict=True):
                store_global(target.at[partial_index, head], value)

    return following


def repeat_sinks(sinks: Float[Array, " N"], num_kv_heads: int, tile_rows: int) -> Float[Array, "K G_M"]:
    """Repeat the sinks of each KV head's G query heads to G + M numbers: from any of them on there are M in a row."""
    by_head = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    group = by_head.shape[1]
    return jnp.tile(by_head, (1, -(-tile_rows // group) + 1))[:, : group + tile_rows]
