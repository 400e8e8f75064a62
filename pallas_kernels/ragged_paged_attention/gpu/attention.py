"""Attention on a GPU: pieces of work, each a tile of query rows of one KV head over a range of that row's keys.

    grid: lists × KV heads, as many thread blocks as fit on the chip; block (l, h) does the pieces of list l, one by one

      queries [K, A, H] ── one tile [M, H] ──▶ shared memory
      pages [L × C, K, Z, H] ── tiles of T keys, by page table ──▶ shared memory, `num_stages` buffers
          stage 0 │ stage 1 │ …      the next tiles are on their way while one is computed; a stage is filled
                                     again when the tile behind it has been begun
      per tile    scores [M, T] = Q · Kᵀ      in registers
                  weights [M, T]              to shared memory: every warp needs all of them
                  acc [M, H] += weights · V   in registers

      whole unit ──▶ in the place of its queries
      a piece    ──▶ unfinished sums, maxima, totals in its slot, for gpu_merge

Rows of a tile are (query, head of the group) pairs; rows behind the last query are computed and not written. Pages of
one byte a number become bfloat16 on the way through registers into a tile of their own; their scales are applied to
scores and results. Slots that the unit does not see may hold NaN: their scores are replaced, and their values are
zeroed in shared memory. Page numbers are clamped: what lies behind the last page is that page once more.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Dao et al. 2023 (Flash-Decoding: split keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import gpu_tiles
from .gpu_plan import ALIGN, PIECE_FIELDS, REDUCTION_BYTES, Order
from .gpu_tiles import COMPUTE_DTYPE, LEAST_MAX, LOG2_E, Chip, plgpu
from .kv_scales import LayerScales

Partial = tuple[Array, Array, Array]
"""Unfinished results per slot: weighted values [S, K, M, H], maxima and totals [S, K, M], float32."""


@dataclass(frozen=True)
class Options:
    """What is the same for all tiles of one call."""

    order: Order
    group: int
    scale: float
    window: int | None
    soft_cap: float | None
    tile_kv: int
    num_stages: int
    products: Any
    """`gpu_mma` or `gpu_wgmma`."""
    chip: Chip


def ragged_attention(
    queries: Any,
    k_pages: Array,
    v_pages: Array,
    tables: Int[Array, "R P"],
    context_lens: Int[Array, " R"],
    query_starts: Int[Array, " R1"],
    plan: Int[Array, " plan"],
    first_page: Int[Array, " 1"],
    kv_scales: LayerScales | None,
    sinks: Float[Array, "K G_M"] | None,
    options: Options,
) -> Partial | None:
    """Do the pieces of `options.order`: results take the place of `queries`, a mutable [K, A, H].

    `sinks` repeats each KV head's G sinks so that a tile that begins at any of them finds M in a row. Returns what is
    unfinished, if there can be any.
    """
    num_kv_heads, _, head_size = queries.shape
    tiles, tile_kv, dtype, chip = options.order.tiles, options.tile_kv, k_pages.dtype, options.chip
    kv_tiles = gpu_tiles.tile_memory((options.num_stages, tile_kv, head_size), dtype, chip)
    scratch = {
        "q_tile": gpu_tiles.tile_memory((tiles.tile_rows, head_size), COMPUTE_DTYPE, chip),
        "k_tiles": kv_tiles,
        "v_tiles": kv_tiles,
        "weights": options.products.weights_memory(tiles.tile_rows, tile_kv, chip),
    }
    if dtype != COMPUTE_DTYPE:
        scratch |= dict.fromkeys(("k_wide", "v_wide"), gpu_tiles.tile_memory((tile_kv, head_size), COMPUTE_DTYPE, chip))
    if chip.has_tma:
        copies = 2 * max(tile_kv // k_pages.shape[2], 1)
        scratch["q_here"] = plgpu.Barrier(num_arrivals=tiles.tile_rows // ALIGN)
        scratch["kv_here"] = plgpu.Barrier(num_arrivals=copies, num_barriers=options.num_stages)
    inputs = {
        "queries": queries,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "tables": tables.reshape(-1),
        "context_lens": context_lens,
        "query_starts": query_starts,
        "plan": plan,
        "first_page": first_page,
    }
    if kv_scales is not None:
        inputs |= {"k_scales": kv_scales[0], "v_scales": kv_scales[1]}
    if sinks is not None:
        inputs["sinks"] = sinks
    outputs = {}
    if tiles.num_slots:
        shape = (tiles.num_slots, num_kv_heads, tiles.tile_rows)
        outputs = dict.fromkeys(("maxima", "totals"), jax.ShapeDtypeStruct(shape, jnp.float32))
        outputs = {"sums": jax.ShapeDtypeStruct((*shape, head_size), jnp.float32), **outputs}

    def body(*refs: Any, **memory: Any) -> None:
        _do_list({**dict(zip([*inputs, *outputs], refs, strict=True)), **memory}, options)

    unfinished = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(tiles.num_lists, num_kv_heads),
        grid_names=("list", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=chip.interpret,
        kernel_name=f"ragged_paged_attention_of_{tiles.tile_rows}",
    )(*inputs.values())
    return tuple(unfinished) if outputs else None


def _do_list(refs: dict[str, Any], options: Options) -> None:
    order, plan = options.order, refs["plan"]
    this_list = lax.axis_index("list")
    begin, end = plan[order.list_starts + this_list], plan[order.list_starts + this_list + 1]

    @pl.loop(begin, end)
    def _(piece: Any) -> None:
        fields = [plan[order.pieces + field * order.tiles.max_pieces + piece] for field in range(PIECE_FIELDS)]
        _do_piece(refs, options, *fields)


def _do_piece(
    refs: dict[str, Any], options: Options, row: Any, first: Any, place: Any, begin: Any, end: Any, slot: Any
) -> None:
    chip, tile_kv, stages, group = options.chip, options.tile_kv, options.num_stages, options.group
    head, place = lax.axis_index("head"), pl.multiple_of(place, ALIGN)
    tile_rows, head_size = refs["q_tile"].shape
    num_pages, _, page_size, _ = refs["k_pages"].shape
    per_tile = max(tile_kv // page_size, 1)
    products = options.products
    sums, row_sums = products.sums(tile_rows), products.sums(tile_rows).reduce(1)
    is_quantized = "k_scales" in refs

    # Positions: the unit sees [oldest, newest + 1), this piece does [begin, end) of them.
    context = refs["context_lens"][row]
    num_queries = refs["query_starts"][row + 1] - refs["query_starts"][row]
    start = context - num_queries
    first_position = start + lax.div(first, jnp.int32(group))
    newest = jnp.minimum(start + lax.div(first + (tile_rows - 1), jnp.int32(group)), context - 1)
    oldest = jnp.int32(0) if options.window is None else jnp.maximum(first_position - options.window + 1, 0)
    first_tile = lax.div(jnp.maximum(begin, oldest), jnp.int32(tile_kv))
    end_tile = lax.div(jnp.minimum(end, newest + 1) + (tile_kv - 1), jnp.int32(tile_kv))
    num_tiles = jnp.maximum(end_tile - first_tile, 0)

    def pages_of(index: Any) -> tuple[Any, ...]:
        """Pages of the index-th tile; behind the last page that the unit sees, that page once more.

        The bounds of the table and of the pages hold by contract (a context fits its table, whose entries are pages):
        a broken promise is to give wrong numbers and not to read another's memory.
        """
        table_len = refs["tables"].shape[0] // refs["context_lens"].shape[0]
        found = []
        for part in range(per_tile):
            entry = lax.div((first_tile + index) * tile_kv + part * page_size, jnp.int32(page_size))
            entry = jnp.clip(entry, lax.div(oldest, jnp.int32(page_size)), lax.div(newest, jnp.int32(page_size)))
            page = refs["tables"][row * table_len + jnp.minimum(entry, table_len - 1)] + refs["first_page"][0]
            found.append(jnp.clip(page, 0, num_pages - 1))
        return tuple(found)

    def fetch(index: Any, pages: tuple[Any, ...]) -> None:
        stage = lax.rem(index, jnp.int32(stages))
        barrier = refs["kv_here"].at[stage] if chip.has_tma else None
        size = min(tile_kv, page_size)
        offset = pl.multiple_of(lax.rem((first_tile + index) * tile_kv, jnp.int32(max(page_size, tile_kv))), 8)
        for part, page in enumerate(pages):
            for source, target in (("k_pages", "k_tiles"), ("v_pages", "v_tiles")):
                whole = refs[source].at[page, head]
                some = whole if page_size <= tile_kv else whole.at[pl.ds(offset, size)]
                gpu_tiles.copy_in(some, refs[target].at[stage, pl.ds(part * size, size)], barrier, chip)

    def fetch_if_any(index: Any, pages: tuple[Any, ...]) -> None:
        if chip.has_tma:
            pl.when(index < num_tiles)(lambda: fetch(index, pages))
        else:  # Copies are told apart by their number: there is always one.
            fetch(index, pages)

    factor = options.scale * LOG2_E if options.soft_cap is None else options.scale / options.soft_cap
    factor = factor * refs["k_scales"][head] if is_quantized else factor

    def scores_of(k_tile: Any, index: Any) -> Array:
        """[M, T], times log₂ e, masked."""
        scores = products.scores(refs["q_tile"], k_tile, chip) * factor
        if options.soft_cap is not None:
            # tanh, but not by its instruction: 11 bits of a score of 50 are a hundredth of its weight.
            scores = (1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2_E)))) * (options.soft_cap * LOG2_E)
        keys_from = (first_tile + index) * tile_kv
        is_whole = keys_from + (tile_kv - 1) <= first_position
        if options.window is not None:
            is_whole &= keys_from > newest - options.window
        return lax.cond(is_whole, lambda scores: scores, lambda scores: masked(scores, keys_from), scores)

    def masked(scores: Array, keys_from: Any) -> Array:
        iota = partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=sums)
        position = start + lax.div(first + iota(0), jnp.int32(group))
        key = keys_from + iota(1)
        is_seen = key <= position
        if options.window is not None:
            is_seen &= key > position - options.window
        return jnp.where(is_seen, scores, LEAST_MAX)

    def zero_dead(v_tile: Any, index: Any) -> None:
        """Values outside of what the unit sees may be NaN, which no weight of zero makes harmless."""
        keys_from = (first_tile + index) * tile_kv

        @pl.when((keys_from < oldest) | (keys_from + (tile_kv - 1) > newest))
        def _() -> None:
            layout = gpu_tiles.spread(head_size, chip)
            values = plgpu.load(v_tile, layout=layout)
            key = keys_from + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            v_tile[...] = jnp.where((key >= oldest) & (key <= newest), values, jnp.zeros_like(values))

    def attend(index: Any, carry: Any) -> Any:
        acc, top, total, pages = carry
        gpu_tiles.release(chip)
        fetch_if_any(index + (stages - 1), pages)
        pages = pages_of(index + stages)
        stage = lax.rem(index, jnp.int32(stages))
        gpu_tiles.wait_for(refs["kv_here"].at[stage] if chip.has_tma else None, 2 * per_tile * (stages - 1), chip)
        k_tile, v_tile = refs["k_tiles"].at[stage], refs["v_tiles"].at[stage]
        if is_quantized:
            for narrow, wide in ((k_tile, refs["k_wide"]), (v_tile, refs["v_wide"])):
                # On Ampere a row of 128 bytes lies in two blocks, which are read one after the other.
                stored = plgpu.load(narrow, layout=gpu_tiles.spread(head_size, chip), optimized=chip.has_tma)
                wide[...] = gpu_tiles.as_operand(stored, chip)
            k_tile, v_tile = refs["k_wide"], refs["v_wide"]
        scores = scores_of(k_tile, index)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * decay + jnp.sum(weights, axis=1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        refs["weights"][...] = weights.astype(COMPUTE_DTYPE)
        zero_dead(v_tile, index)
        acc = products.add_values(acc, refs["weights"], v_tile, chip)
        return acc, new_top, total, pages

    gpu_tiles.release(chip)
    num_rows = num_queries * group - first
    gpu_tiles.read_rows(refs["queries"], head, place, num_rows, refs["q_tile"], refs.get("q_here"), chip)
    for index in range(stages - 1):
        fetch_if_any(jnp.int32(index), pages_of(jnp.int32(index)))
    acc = plgpu.layout_cast(jnp.zeros((tile_rows, head_size), jnp.float32), sums)
    top = plgpu.layout_cast(jnp.full((tile_rows,), LEAST_MAX, jnp.float32), row_sums)
    total = plgpu.layout_cast(jnp.zeros((tile_rows,), jnp.float32), row_sums)
    if "sinks" in refs:
        sink_row = refs["sinks"].at[head, pl.ds(lax.rem(first, jnp.int32(group)), tile_rows)]
        sinks = gpu_tiles.read_in(sink_row, row_sums) * LOG2_E
        with_sinks = sinks, plgpu.layout_cast(jnp.ones((tile_rows,), jnp.float32), row_sums)
        top, total = lax.cond(begin == 0, lambda: with_sinks, lambda: (top, total))
    gpu_tiles.wait_for(refs.get("q_here"), 2 * per_tile * (stages - 1), chip)
    acc, top, total, _ = lax.fori_loop(0, num_tiles, attend, (acc, top, total, pages_of(jnp.int32(stages - 1))))
    if not chip.has_tma:
        gpu_tiles.wait_for(None, 0, chip)
    if is_quantized:
        acc = acc * refs["v_scales"][head]

    @pl.when(slot < 0)
    def finish() -> None:
        results = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        gpu_tiles.write_rows(refs["queries"], head, place, num_rows, results, refs["q_tile"], chip)

    @pl.when(slot >= 0)
    def put_aside() -> None:
        for name, value in (("sums", acc), ("maxima", top), ("totals", total)):
            if name in refs:
                gpu_tiles.write_out(refs[name].at[slot, head], value)
