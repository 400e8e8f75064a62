"""Prefill on TPU: tiles of queries of one row, over tiles of that row's keys.

    queries [K, G, A, width], rows one after another, each from a multiple of ALIGN on
             ├─ row 0 ──────┤├─ row 1 ─┤        a tile of queries may reach into the next row;
             [tile][tile][til|e   ]              of its outputs only its own blocks of ALIGN are written

    grid: one tile of queries after another            VMEM: two slots of one tile of keys [K, S, T, 128]
      keys:  tile │ tile │ … │ tile on the diagonal      slot a ◀─ DMA ── the next tile, or the next grid
             full: no mask    masked                     slot b ── compute     step's first one
      for each KV head:  Q [G·tile_q, width] · Kᵀ → scores [G·tile_q, T]
                         P · V → added to acc [K, G·tile_q, width] in VMEM

All keys and values are in the pages already. Queries and outputs come and go by DMA: the next tile's queries under the
compute, a tile's outputs under the next tile's. Outputs take the place of the queries that they belong to.

Source: Dao 2023, arXiv:2307.08691 (tiles of queries outside, of keys inside).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .tpu_tiles import LANES, LEAST_MAX, LOG2_E, HeadLanes, base2_scores, dot_nn, dot_nt, iota

ALIGN = 16
"""Rows of queries begin at multiples of it, which the hardware can address in every dtype."""
SPARE_VMEM = 12 << 20
"""Beside tiles and accumulators: scores and what the compiler spills."""


class QueryTiles(NamedTuple):
    """Tiles of queries, in order; `num_tiles` of them are real."""

    rows: Int[Array, " M"]
    places: Int[Array, " M"]
    """Where in the aligned queries each begins."""
    positions: Int[Array, " M"]
    """Of its first query, in its sequence."""
    lens: Int[Array, " M"]
    num_tiles: Int[Array, ""]


def prefill_attention(
    q: Float[Array, "K G A W"],
    pages: Float[Array, "C K S Z L"],
    tables: Int[Array, "R P"],
    query_tiles: QueryTiles,
    first_page: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    *,
    head_size: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: int,
    tile_q: int,
    interpret: Any = False,
    check_bounds: bool = False,
) -> Float[Array, "K G A W"]:
    """Attend aligned queries, W lanes each, to the first tokens of their rows, causally.

    A ≥ the last tile's place + `tile_q`. `tile` counts keys, a multiple of the page size. The result overwrites `q`,
    which is given up; what lies between the rows is arbitrary.
    """
    num_kv_heads, group, _, width = q.shape
    num_lane_rows, page_size = pages.shape[2:4]
    rows = group * tile_q
    inputs: list[Array] = []
    specs = []
    if sinks is not None:
        by_row = sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1, 1)
        inputs.append(jnp.broadcast_to(by_row, (num_kv_heads, group, tile_q, LANES)).reshape(num_kv_heads, rows, LANES))
        specs.append(pl.BlockSpec((num_kv_heads, rows, LANES), lambda *_: (0, 0, 0)))
    inputs += [q, pages]
    specs += [pl.BlockSpec(memory_space=pl.ANY)] * 2
    scratch = [
        ((2, num_kv_heads, group, tile_q, width), q.dtype),
        ((num_kv_heads, group, tile_q, width), q.dtype),
        ((2, num_kv_heads, num_lane_rows, tile, LANES), pages.dtype),
        ((num_kv_heads, rows, LANES), jnp.float32),
        ((num_kv_heads, rows, LANES), jnp.float32),
        ((num_kv_heads, rows, width), jnp.float32),
    ]
    num_bytes = sum(jnp.dtype(dtype).itemsize * _size(shape) for shape, dtype in scratch)
    kernel = partial(
        _kernel,
        lanes=HeadLanes(head_size),
        page_size=page_size,
        table_len=tables.shape[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    scalars = jnp.stack([first_page, query_tiles.num_tiles])
    out: Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(query_tiles.num_tiles,),
            in_specs=specs,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                *(pltpu.VMEM(shape, dtype) for shape, dtype in scratch),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={6 + len(inputs) - 2: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not check_bounds,
            vmem_limit_bytes=SPARE_VMEM + num_bytes + 6 * 4 * rows * tile,
        ),
        interpret=interpret,
        name="ragged_paged_prefill",
    )(tables.reshape(-1), *query_tiles[:4], scalars, *inputs)
    return out


def _kernel(
    tables: Any,
    tile_rows: Any,
    tile_places: Any,
    tile_positions: Any,
    tile_lens: Any,
    scalars: Any,
    *refs: Any,
    lanes: HeadLanes,
    page_size: int,
    table_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    """One tile of queries. `refs`: sinks if there are any, queries, pages, out, then VMEM, semaphores and SMEM."""
    sinks_ref = refs[0] if has_sinks else None
    q_hbm, pages, out_hbm, q_tiles, out_tile, kv_tiles, tops, totals, acc, q_came, out_went, fetched, next_slot = refs[
        -13:
    ]
    num_kv_heads, group, tile_q, width = out_tile.shape
    tile = kv_tiles.shape[3]
    rows = group * tile_q
    this = pl.program_id(0)
    first_page, count = scalars[0], scalars[1]
    position, end = tile_positions[this], tile_positions[this] + tile_lens[this]
    q_slot = this % 2

    def first_seen(index: Any) -> Any:
        return jnp.int32(0) if window is None else jnp.maximum(tile_positions[index] - window + 1, 0)

    # Copies

    def q_copy(index: Any, slot: Any) -> Any:
        place = pl.multiple_of(tile_places[index], ALIGN)
        return pltpu.make_async_copy(q_hbm.at[:, :, pl.ds(place, tile_q)], q_tiles.at[slot], q_came.at[slot])

    def each_out(index: Any, do: Any) -> None:
        """The blocks of a tile's outputs that are its own."""

        @pl.loop(0, (tile_lens[index] + ALIGN - 1) // ALIGN)
        def _(block: Any) -> None:
            source = pl.ds(pl.multiple_of(block * ALIGN, ALIGN), ALIGN)
            target = pl.ds(pl.multiple_of(tile_places[index] + block * ALIGN, ALIGN), ALIGN)
            do(pltpu.make_async_copy(out_tile.at[:, :, source], out_hbm.at[:, :, target], out_went))

    def each_page(index: Any, number: Any, slot: Any, do: Any) -> None:
        """The pages of a tile of keys that some query of a tile of queries sees."""
        first = number * (tile // page_size)
        its_end = tile_positions[index] + tile_lens[index]
        begin = jnp.maximum(first, first_seen(index) // page_size)
        past = jnp.minimum(first + tile // page_size, (its_end + page_size - 1) // page_size)

        @pl.loop(begin, past)
        def _(page_index: Any) -> None:
            page = first_page + tables[tile_rows[index] * table_len + page_index]
            place = pl.multiple_of((page_index - first) * page_size, page_size)
            do(
                pltpu.make_async_copy(
                    pages.at[page], kv_tiles.at[slot, :, :, pl.ds(place, page_size)], fetched.at[slot]
                )
            )

    def fetch(index: Any, number: Any, slot: Any) -> None:
        each_page(index, number, slot, lambda copy: copy.start())

    # Compute

    def attend(number: Any, slot: Any, *, is_masked: bool) -> None:
        def attend_head(head: Any, _: Any) -> Any:
            queries = q_tiles[q_slot, head].reshape(rows, width)
            keys, values = lanes.keys(kv_tiles.at[slot], head), lanes.values(kv_tiles.at[slot], head)
            scores = base2_scores(dot_nt(queries, keys), scale, soft_cap)
            if is_masked:
                at = number * tile + iota(scores.shape, 1)
                own = position + iota((group, tile_q, tile), 1).reshape(scores.shape)
                is_seen = at <= jnp.minimum(own, end - 1)
                of_values = number * tile + iota(values.shape, 0)
                is_alive = of_values < end
                if window is not None:
                    is_seen &= at > own - window
                    is_alive &= of_values >= first_seen(this)
                scores = jnp.where(is_seen, scores, LEAST_MAX)
                values = jnp.where(is_alive, values, jnp.zeros_like(values))
            top = tops[head, :, :1]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            weights, decay = jnp.exp2(scores - new_top), jnp.exp2(top - new_top)
            tops[head] = jnp.broadcast_to(new_top, (rows, LANES))
            totals[head] = totals[head] * decay + jnp.sum(weights, axis=1, keepdims=True)
            acc[head] = acc[head] * decay + dot_nn(weights.astype(values.dtype), values)
            return 0

        lax.fori_loop(0, num_kv_heads, attend_head, 0)

    @pl.when(this == 0)
    def _() -> None:
        next_slot[0] = 0
        q_copy(0, 0).start()
        fetch(0, first_seen(0) // tile, 0)

    @pl.when(this + 1 < count)
    def _() -> None:
        q_copy(this + 1, 1 - q_slot).start()

    if sinks_ref is None:
        tops[...] = jnp.full(tops.shape, LEAST_MAX, jnp.float32)
        totals[...] = jnp.zeros(totals.shape, jnp.float32)
    else:
        tops[...] = sinks_ref[...] * LOG2_E
        totals[...] = jnp.ones(totals.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)
    q_copy(this, q_slot).wait()
    num_tiles = (end + tile - 1) // tile

    def kv_tile(number: Any, slot: Any) -> Any:
        @pl.when(number + 1 < num_tiles)
        def _() -> None:
            fetch(this, number + 1, 1 - slot)

        @pl.when((number + 1 == num_tiles) & (this + 1 < count))
        def _() -> None:
            fetch(this + 1, first_seen(this + 1) // tile, 1 - slot)

        each_page(this, number, slot, lambda copy: copy.wait())
        is_whole = (number + 1) * tile - 1 <= position  # Every query sees every key.
        if window is not None:
            is_whole &= number * tile > end - 1 - window

        @pl.when(is_whole)
        def _() -> None:
            attend(number, slot, is_masked=False)

        @pl.when(~is_whole)
        def _() -> None:
            attend(number, slot, is_masked=True)

        return 1 - slot

    next_slot[0] = lax.fori_loop(first_seen(this) // tile, num_tiles, kv_tile, next_slot[0])

    @pl.when(this > 0)
    def _() -> None:
        each_out(this - 1, lambda copy: copy.wait())

    def write_head(head: Any, _: Any) -> Any:
        out_tile[head] = (acc[head] / totals[head, :, :1]).astype(out_tile.dtype).reshape(group, tile_q, width)
        return 0

    lax.fori_loop(0, num_kv_heads, write_head, 0)
    each_out(this, lambda copy: copy.start())

    @pl.when(this + 1 == count)
    def _() -> None:
        each_out(this, lambda copy: copy.wait())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
