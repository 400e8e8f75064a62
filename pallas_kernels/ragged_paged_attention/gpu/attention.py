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
that no query of the tile attends to may hold NaN: their scores are replaced, their values zeroed in shared memory.
Page numbers are clamped: behind the last page of a tile's keys, that page is fetched once more.

Letters: A aligned query rows (see `queries`) · M query rows of a tile · T keys of a KV tile · P2 partial results.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Dao et al. 2023 (Flash-Decoding: split-KV).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from .attention_refs import AttentionInputs, AttentionScratch, Launch, Partials, PieceRow
from .memory_ops import (
    COMPUTE_DTYPE,
    LOG2_E,
    MASK_VALUE,
    Ref,
    Scalar,
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
from .plan import PIECE_FIELDS, REDUCTION_BYTES, ROW_ALIGN, Piece

LoopState = tuple[Array, Array, Array, tuple[Scalar, ...]]
"""State of the loop over KV tiles: the online softmax (acc [M, H], running maximum [M], running sum [M]), and the pages
of the KV tile that is fetched next."""


def ragged_attention(inputs: AttentionInputs, launch: Launch) -> Partials | None:
    """Compute attention of one tile class by flash attention with split-KV: all pieces of `launch.section`.

    A tile class is all query tiles of one size, here of M query rows; a piece is a query tile over a range of its
    sequence's keys. The plan assigns the pieces to lists, and one kernel call runs a thread block for each list and KV
    head. Outputs overwrite their queries in `inputs.queries`, a mutable array [K, A, H] of K KV heads and A query rows.
    Return the partial results of tiles whose keys are split, float32 [P2, K, M, H] and [P2, K, M], for `merge` to
    combine; None if the plan has no room for splits (`num_partials` is 0). Of the P2 partial results, those that the
    plan uses for no piece are not written.
    """
    num_kv_heads, _, head_size = inputs.queries.shape
    tiles, tile_kv, dtype, chip = launch.section.tiles, launch.tile_kv, inputs.k_pages.dtype, launch.chip
    kv_tiles = smem_tile((launch.num_stages, tile_kv, head_size), dtype, chip)
    # Pages of one byte a number are converted to bfloat16 in one more tile each for keys and for values.
    bf16_tile = None if dtype == COMPUTE_DTYPE else smem_tile((tile_kv, head_size), COMPUTE_DTYPE, chip)
    # A KV tile is copied page by page, keys and values apart, or by one copy each from a page that is longer than the
    # tile. A tile of queries is copied ROW_ALIGN rows at a time. Each copy by TMA arrives once at its barrier.
    copies_per_stage = 2 * max(tile_kv // inputs.k_pages.shape[2], 1)
    copies_per_query_tile = tiles.tile_rows // ROW_ALIGN
    kv_barriers = plgpu.Barrier(num_arrivals=copies_per_stage, num_barriers=launch.num_stages)
    q_barriers = plgpu.Barrier(num_arrivals=copies_per_query_tile, num_barriers=launch.num_query_tiles)
    scratch = AttentionScratch(
        k_tiles=kv_tiles,
        k_bf16=bf16_tile,
        kv_barriers=kv_barriers if chip.has_tma else None,
        q_barriers=q_barriers if chip.has_tma else None,
        q_tiles=smem_tile((launch.num_query_tiles, tiles.tile_rows, head_size), COMPUTE_DTYPE, chip),
        v_tiles=kv_tiles,
        v_bf16=bf16_tile,
        weights=launch.products.weights_smem(tiles.tile_rows, tile_kv, chip),
    )
    partial_types = None
    if tiles.num_partials:
        state_shape = (tiles.num_partials, num_kv_heads, tiles.tile_rows)
        state_type = jax.ShapeDtypeStruct(state_shape, jnp.float32)
        partial_types = Partials(jax.ShapeDtypeStruct((*state_shape, head_size), jnp.float32), state_type, state_type)

    def kernel(inputs: AttentionInputs, *refs: Any) -> None:
        *partials, scratch = refs  # References to the partial results, if the call has this output, and to the scratch.
        _compute_list(inputs, partials[0] if partials else None, scratch, launch)

    # `approx_math` allows the hardware's approximate exp2 and division; the scratch is for reductions over warps.
    results = plgpu.kernel(
        kernel,
        out_type=() if partial_types is None else (partial_types,),
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
    """Compute the pieces of this thread block's list one after another: a piece is a query tile over a range of keys.

    A piece that is its whole tile overwrites its queries in `inputs.queries` with the outputs. A piece of a split tile
    writes to `partials`, which is None if no tile of the launch can be split. With `launch.reads_ahead`, the next
    piece's row and lengths are loaded while a piece is computed. `launch.num_query_tiles` is the number of buffers for
    queries in shared memory. With two, which requires `reads_ahead`, the next piece's queries are copied meanwhile,
    too (double buffering across pieces). For an empty list, nothing is done.
    """
    # List i is the pieces from plan[lists_offset + i] to plan[lists_offset + i + 1] − 1: with the numbers 0, 3, 3 and 5
    # there, list 0 is the pieces 0 … 2, list 1 is empty, and list 2 is the pieces 3 and 4.
    plan, lists_offset, list_index = inputs.plan, launch.section.lists_offset, lax.axis_index("list")
    begin_piece, end_piece = plan[lists_offset + list_index], plan[lists_offset + list_index + 1]

    def read_row(piece_index: Scalar) -> PieceRow:
        row = _read_piece(inputs, launch, piece_index).row
        return PieceRow(row, inputs.context_lens[row], inputs.query_starts[row + 1] - inputs.query_starts[row])

    def compute_piece(piece_index: Scalar, piece_row: PieceRow | None) -> PieceRow | None:
        """Compute piece `piece_index`: one iteration of the loop over the list, which ends before `end_piece`.

        The loop carries a `PieceRow`, the row (sequence) of a piece with its lengths. With `launch.reads_ahead`,
        `piece_row` is that of this piece, and that of the next piece is returned. Else both are None, and each
        iteration reads its own. The results go to global memory, see `_compute_list`.
        """

        def fetch_next() -> PieceRow | None:
            """Return the next piece's row and lengths; return None, and do nothing, without `launch.reads_ahead`.

            With two query tiles in shared memory, also start to copy the next piece's queries, if the list has a next
            piece. `_compute_piece` calls this after it has started the copies of its first keys.
            """
            if not launch.reads_ahead:
                return None
            # At the last piece of the list, its own row is loaded once more, and nothing uses it.
            next_row = read_row(jnp.minimum(piece_index + 1, end_piece - 1))
            if launch.num_query_tiles > 1:

                @pl.when(piece_index + 1 < end_piece)
                def _() -> None:
                    _fetch_queries(inputs, scratch, launch, piece_index + 1, next_row)

            return next_row

        piece_row = piece_row or read_row(piece_index)  # It is None without `reads_ahead`.
        return _compute_piece(inputs, partials, scratch, launch, piece_index, piece_row, fetch_next)

    @pl.when(begin_piece < end_piece)
    def _() -> None:
        # Without `reads_ahead`, the loop carries None, and `compute_piece` reads each piece's row, the first one's too.
        first_row = read_row(begin_piece)
        if launch.num_query_tiles > 1:
            _fetch_queries(inputs, scratch, launch, begin_piece, first_row)
        lax.fori_loop(begin_piece, end_piece, compute_piece, first_row if launch.reads_ahead else None)


def _read_piece(inputs: AttentionInputs, launch: Launch, index: Scalar) -> Piece:
    """Return the fields of piece `index`, read from the plan.

    `inputs.plan` holds the pieces as a structure of arrays: from `pieces_offset` on, `max_pieces` numbers of the first
    field of `Piece`, then as many of the second one, and so on. With `max_pieces` = 10, field 2 of piece 3 is 23
    numbers after that offset. All fields are loaded, but the compiler drops the loads that the caller does not use.
    """
    section = launch.section
    offsets = [section.pieces_offset + field * section.tiles.max_pieces for field in range(PIECE_FIELDS)]
    return Piece(*[inputs.plan[offset + index] for offset in offsets])


def _query_tile(scratch: AttentionScratch, launch: Launch, index: Scalar) -> tuple[Ref, Ref | None]:
    """Return the tile in shared memory for the queries of piece `index`, and the barrier at which their copies arrive.

    Successive pieces use the query tiles in turn. The barrier is None on chips without TMA.
    """
    tile = lax.rem(index, jnp.int32(launch.num_query_tiles))
    return scratch.q_tiles.at[tile], None if scratch.q_barriers is None else scratch.q_barriers.at[tile]


def _fetch_queries(
    inputs: AttentionInputs, scratch: AttentionScratch, launch: Launch, piece_index: Scalar, piece_row: PieceRow
) -> None:
    """Start the copies of the query tile of piece `piece_index` of the plan, for this thread block's KV head.

    They go from global to shared memory. A query row is one query of one of the G = `group_size` query heads that share
    the KV head; a sequence of n queries has n × G of them. A piece is a tile of one sequence's query rows over a range
    of its keys, and `piece_row` has the lengths of that sequence. `inputs.queries` is [K, A, H]: for each of K KV heads
    the A aligned query rows of the step, in which each sequence begins at a multiple of `ROW_ALIGN` = 8. The tile
    begins at `first_query_row` of its sequence, which is `aligned_row` of the A.

    Example: a sequence of 10 queries and G = 4 has 40 query rows, so a tile that begins at query row 32 has 8. If more
    are left than the tile can hold, `start_query_copies` copies as many as it holds.
    """
    piece = _read_piece(inputs, launch, piece_index)
    aligned_row = pl.multiple_of(piece.aligned_row, ROW_ALIGN)
    rows_left = piece_row.num_queries * launch.group_size - piece.first_query_row
    q_tile, q_barrier = _query_tile(scratch, launch, piece_index)
    start_query_copies(inputs.queries, lax.axis_index("head"), aligned_row, rows_left, q_tile, q_barrier, launch.chip)


def _compute_piece(
    inputs: AttentionInputs,
    partials: Partials | None,
    scratch: AttentionScratch,
    launch: Launch,
    piece_index: Scalar,
    piece_row: PieceRow,
    fetch_next: Callable[[], PieceRow | None],
) -> PieceRow | None:
    """Compute piece `piece_index` by flash attention: one query tile [M, H] over a range of its row's keys.

    KV tiles of `tile_kv` keys go through `num_stages` buffers of shared memory with an online softmax. A piece that is
    its whole tile stores outputs; a piece of a split tile (split-KV) stores its partial result, which `merge` combines
    with the others. `piece_row` is the row of this piece. `fetch_next` is called once the copies of the first keys have
    started, and its result, the row of the next piece or None, is returned.
    """
    chip, tile_kv, num_stages, group_size = launch.chip, launch.tile_kv, launch.num_stages, launch.group_size
    products, options = launch.products, launch.options
    scale, window, soft_cap = options.scale, options.window, options.soft_cap
    row, context_len, num_queries = piece_row
    _, first_query_row, aligned_row, begin_key, end_key, partial_index = _read_piece(inputs, launch, piece_index)
    head, aligned_row = lax.axis_index("head"), pl.multiple_of(aligned_row, ROW_ALIGN)
    _, tile_rows, head_size = scratch.q_tiles.shape
    q_tile, q_barrier = _query_tile(scratch, launch, piece_index)
    num_pages, _, page_size, _ = inputs.k_pages.shape
    pages_per_tile = max(tile_kv // page_size, 1)
    acc_layout, state_layout = products.acc_layout(tile_rows), products.acc_layout(tile_rows).reduce(1)

    # Positions: the queries of the tile attend to keys first_visible_key … last_visible_key, and this piece computes
    # those of them in begin_key … end_key − 1. Query row r of a row is query r // group_size.
    row_position = context_len - num_queries
    first_position = row_position + lax.div(first_query_row, jnp.int32(group_size))
    last_position = row_position + lax.div(first_query_row + (tile_rows - 1), jnp.int32(group_size))
    last_visible_key = jnp.minimum(last_position, context_len - 1)
    first_visible_key = jnp.int32(0) if window is None else jnp.maximum(first_position - window + 1, 0)
    first_tile = lax.div(jnp.maximum(begin_key, first_visible_key), jnp.int32(tile_kv))
    end_tile = lax.div(jnp.minimum(end_key, last_visible_key + 1) + (tile_kv - 1), jnp.int32(tile_kv))
    num_kv_tiles = jnp.maximum(end_tile - first_tile, 0)

    def tile_pages(tile_index: Scalar) -> tuple[Scalar, ...]:
        """Return the indices, in `inputs.k_pages` and `v_pages`, of the pages of KV tile `tile_index` of the piece.

        Tile 0 begins at key `first_tile` × `tile_kv` of the row (sequence): with `first_tile` 2, tiles of 64 keys and
        pages of 16, its pages are the entries 8 … 11 of the row's page table. If a page is longer than a KV tile, the
        result is the one page that contains the tile. Tiles are also asked for that lie behind the piece: pages before
        the first one or after the last one that any query attends to are replaced by that page. The other two clamps,
        to the table and to the cache, guard memory: a caller that passes a context longer than its table, or entries
        that are no pages, gets wrong numbers, but no read beyond the arrays.
        """
        table_len = inputs.page_tables.shape[0] // inputs.context_lens.shape[0]
        pages = []
        for page_of_tile in range(pages_per_tile):
            table_index = lax.div((first_tile + tile_index) * tile_kv + page_of_tile * page_size, jnp.int32(page_size))
            first_index = lax.div(first_visible_key, jnp.int32(page_size))
            last_index = lax.div(last_visible_key, jnp.int32(page_size))
            table_index = jnp.clip(table_index, first_index, last_index)
            page = inputs.page_tables[row * table_len + jnp.minimum(table_index, table_len - 1)] + inputs.first_page[0]
            pages.append(jnp.clip(page, 0, num_pages - 1))
        return tuple(pages)

    def fetch(tile_index: Scalar, pages: tuple[Scalar, ...]) -> None:
        """Start the copies of KV tile `tile_index` of the piece, keys and values of one KV head, into shared memory.

        The tile goes to stage `tile_index` mod `num_stages`, one of the buffers [T, H] of T = `tile_kv` keys. Whole
        `pages` are copied, one after the other, if a page is no longer than a tile. Else the tile is a part of one
        page, from the slot `offset` on. On chips with TMA the copies arrive at the barrier of the stage.
        """
        stage = lax.rem(tile_index, jnp.int32(num_stages))
        barrier = None if scratch.kv_barriers is None else scratch.kv_barriers.at[stage]
        keys_per_copy = min(tile_kv, page_size)
        offset = pl.multiple_of(lax.rem((first_tile + tile_index) * tile_kv, jnp.int32(max(page_size, tile_kv))), 8)
        for page_of_tile, page in enumerate(pages):
            for source, target in ((inputs.k_pages, scratch.k_tiles), (inputs.v_pages, scratch.v_tiles)):
                whole_page = source.at[page, head]
                page_keys = whole_page if page_size <= tile_kv else whole_page.at[pl.ds(offset, keys_per_copy)]
                slots = pl.ds(page_of_tile * keys_per_copy, keys_per_copy)
                start_copy(page_keys, target.at[stage, slots], barrier, chip)

    def fetch_if_needed(tile_index: Scalar, pages: tuple[Scalar, ...]) -> None:
        if chip.has_tma:
            pl.when(tile_index < num_kv_tiles)(lambda: fetch(tile_index, pages))
        else:  # A wait for cp.async copies counts them, so every KV tile starts as many, needed or not.
            fetch(tile_index, pages)

    factor = scale * LOG2_E if soft_cap is None else scale / soft_cap
    if inputs.k_scales is not None:
        factor = factor * inputs.k_scales[head]

    def scores_of(k_tile: Ref, tile_index: Scalar) -> Array:
        """Return the scores [M, T] of the M query rows for the T keys of KV tile `tile_index`, times log₂ e for exp2.

        The scores are scaled, and bounded to ± `soft_cap` if there is one; `factor` holds the scale. They are
        `MASK_VALUE` where a query may not attend to a key. No mask is computed if every query attends to every key of
        the KV tile: if its last key is not after the first query, nor its first key before the last query's window.
        """
        scores = products.scores(q_tile, k_tile, chip) * factor
        if soft_cap is not None:
            # tanh x = 1 − 2 ÷ (1 + e²ˣ). The hardware's tanh has 11 bits: the weight of a score of 50 would be 1 % off.
            scores = (1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2_E)))) * (soft_cap * LOG2_E)
        first_key = (first_tile + tile_index) * tile_kv
        is_unmasked = first_key + (tile_kv - 1) <= first_position
        if window is not None:
            is_unmasked &= first_key > last_visible_key - window
        return lax.cond(is_unmasked, lambda scores: scores, lambda scores: mask_scores(scores, first_key), scores)

    def mask_scores(scores: Array, first_key: Scalar) -> Array:
        """Return scores [M, T] with `MASK_VALUE` for keys after a query's position or before its window, if it has one.

        The KV tile begins at key `first_key`. Row r of the tile is query (`first_query_row` + r) // G of its sequence,
        G = `group_size`, whose queries begin at `row_position`. A window of 4 shows position 9 the keys 6 … 9.
        """
        iota = partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=acc_layout)
        query_position = row_position + lax.div(first_query_row + iota(0), jnp.int32(group_size))
        key_position = first_key + iota(1)
        is_visible = key_position <= query_position
        if window is not None:
            is_visible &= key_position > query_position - window
        return jnp.where(is_visible, scores, MASK_VALUE)

    def zero_hidden_values(v_tile: Ref, tile_index: Scalar) -> None:
        """Zero the values of keys that no query of the tile attends to: they may be NaN, and 0 × NaN is NaN.

        `v_tile` [T, H] is the shared memory of KV tile `tile_index` of the piece. The queries attend to the keys
        `first_visible_key` … `last_visible_key`; a KV tile that lies within this range stays as it is.
        """
        first_key = (first_tile + tile_index) * tile_kv

        @pl.when((first_key < first_visible_key) | (first_key + (tile_kv - 1) > last_visible_key))
        def _() -> None:
            layout = row_layout(head_size, chip)
            values = plgpu.load(v_tile, layout=layout)
            key_position = first_key + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            is_visible = (key_position >= first_visible_key) & (key_position <= last_visible_key)
            v_tile[...] = jnp.where(is_visible, values, jnp.zeros_like(values))

    def attend(tile_index: Scalar, carry: LoopState) -> LoopState:
        """Fetch the KV tile `num_stages` − 1 ahead, wait for this one, and return the state after its keys.

        One step of the online softmax. The state is acc [M, H], the weighted sum of values of M query rows; the running
        maximum and the sum of weights, [M] each; and the pages of the KV tile to fetch next, loaded one iteration
        before they are needed. KV tile n of the piece lies in stage n mod `num_stages` of shared memory. Tiles of
        one-byte pages are converted to bfloat16 first. Scores are times log₂ e, so weights are powers of 2.
        """
        acc, running_max, running_sum, pages = carry
        # The copies overwrite the stage of the tile before this one, which ordinary instructions have read or written.
        fence_before_copy(chip)
        fetch_if_needed(tile_index + (num_stages - 1), pages)
        pages = tile_pages(tile_index + num_stages)
        stage = lax.rem(tile_index, jnp.int32(num_stages))
        kv_barrier = None if scratch.kv_barriers is None else scratch.kv_barriers.at[stage]
        # Without TMA, the copies of the next `num_stages` − 1 KV tiles may still be in flight.
        wait_copies(kv_barrier, 2 * pages_per_tile * (num_stages - 1), chip)
        k_tile, v_tile = scratch.k_tiles.at[stage], scratch.v_tiles.at[stage]
        if scratch.k_bf16 is not None and scratch.v_bf16 is not None:  # Pages of one byte a number.
            for stored_tile, bf16_tile in ((k_tile, scratch.k_bf16), (v_tile, scratch.v_bf16)):
                # On Ampere a row of 128 bytes lies in two blocks, and there is no load of both without bank conflicts.
                stored = plgpu.load(stored_tile, layout=row_layout(head_size, chip), optimized=chip.has_tma)
                bf16_tile[...] = to_compute_dtype(stored, chip)
            k_tile, v_tile = scratch.k_bf16, scratch.v_bf16
        scores = scores_of(k_tile, tile_index)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=1))
        decay = jnp.exp2(running_max - new_max)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
        running_sum = running_sum * decay + jnp.sum(weights, axis=1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        scratch.weights[...] = weights.astype(COMPUTE_DTYPE)
        zero_hidden_values(v_tile, tile_index)
        acc = products.add_values(acc, scratch.weights, v_tile, chip)
        return acc, new_max, running_sum, pages

    # Fetch the first KV tiles, then the next piece's row and queries.
    fence_before_copy(chip)
    if launch.num_query_tiles == 1:
        _fetch_queries(inputs, scratch, launch, piece_index, piece_row)
    for stage in range(num_stages - 1):
        fetch_if_needed(jnp.int32(stage), tile_pages(jnp.int32(stage)))
    next_row = fetch_next()

    # The softmax state before the first key. A sink counts as a key of weight 1 without a value, in one piece only.
    acc = plgpu.layout_cast(jnp.zeros((tile_rows, head_size), jnp.float32), acc_layout)
    running_max = plgpu.layout_cast(jnp.full((tile_rows,), MASK_VALUE, jnp.float32), state_layout)
    running_sum = plgpu.layout_cast(jnp.zeros((tile_rows,), jnp.float32), state_layout)
    if inputs.sinks is not None:
        sink_row = inputs.sinks.at[head, pl.ds(lax.rem(first_query_row, jnp.int32(group_size)), tile_rows)]
        sinks = load_global(sink_row, state_layout) * LOG2_E
        with_sinks = sinks, plgpu.layout_cast(jnp.ones((tile_rows,), jnp.float32), state_layout)
        running_max, running_sum = lax.cond(begin_key == 0, lambda: with_sinks, lambda: (running_max, running_sum))

    # Wait for the queries, then compute KV tile after KV tile. On Ampere no wait counts the copies of the next piece's
    # queries among the later ones: a copy that is not counted can only make a wait longer.
    wait_copies(q_barrier, 2 * pages_per_tile * (num_stages - 1), chip)
    carry = acc, running_max, running_sum, tile_pages(jnp.int32(num_stages - 1))
    acc, running_max, running_sum, _ = lax.fori_loop(0, num_kv_tiles, attend, carry)
    if not chip.has_tma:
        wait_copies(None, 0, chip)
    if inputs.v_scales is not None:
        acc = acc * inputs.v_scales[head]

    @pl.when(partial_index < 0)
    def store_outputs() -> None:
        results = acc / lax.broadcast_in_dim(running_sum, acc.shape, [0])
        num_rows = num_queries * group_size - first_query_row
        store_query_rows(inputs.queries, head, aligned_row, num_rows, results, q_tile, chip)

    @pl.when(partial_index >= 0)
    def store_partial() -> None:
        if partials is not None:
            for target, value in zip(partials, (acc, running_max, running_sum), strict=True):
                store_global(target.at[partial_index, head], value)

    return next_row


def repeat_sinks(sinks: Float[Array, " N"], num_kv_heads: int, tile_rows: int) -> Float[Array, "K G_M"]:
    """Repeat the G sinks of each KV head cyclically to G + M numbers, so that a tile of M rows can begin at any head.

    M is `tile_rows`. The rows of a tile are (query, head) pairs, so its first row may belong to any of the G heads.
    With G = 3 and M = 4, the sinks a b c become a b c a b c a, and a tile that begins at head 2 loads c a b c.
    """
    sinks_KG = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    group_size = sinks_KG.shape[1]
    return jnp.tile(sinks_KG, (1, -(-tile_rows // group_size) + 1))[:, : group_size + tile_rows]
