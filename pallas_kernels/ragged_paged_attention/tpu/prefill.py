"""Prefill on TPU: tiles of queries of one row, over tiles of that row's keys.

    queries [T, N, H], as the model made them
      ├─ row 0 ──────────────┤├─ row 1 ──┤             a tile has at most tile_q queries of one row
      [tile  ][tile  ][tile  ][tile  ][ti]

    grid: one tile of queries after another            VMEM: two slots of one tile of keys [K, S, T, 128]
      keys:  tile │ tile │ … │ tile on the diagonal      slot a ◀─ DMA ── the next tile, or the next grid
      in pieces:  whole     masked    masked, half       slot b ── compute     step's first one
      for each bunch of b query heads of one KV head:
        Q [b·tile_q, W] · Kᵀ → scores [b·tile_q, T],  P · V → added to acc [N/b, b·tile_q, W] in VMEM

All keys and values are in the pages already. A tile's queries come by DMA, the next tile's under the compute, and are
laid out by query head; its outputs go back by DMA under the next tile's compute, to the place of its queries.

Source: Dao 2023, arXiv:2307.08691 (tiles of queries outside, of keys inside).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .kv_scales import LayerScales
from .tpu_heads import give_tokens, heads_of, rows_shape, take_tokens
from .tpu_pages import PageCopies
from .tpu_tiles import (
    LANES,
    LEAST_MAX,
    LOG2_E,
    HeadLanes,
    base2_scores,
    compute_dtype,
    divide,
    dot_nn,
    dot_nt,
    iota,
    keep,
    row_bits,
    wide,
)

MOST_ROWS = 1024
"""Of the scores that are computed together: query heads of a bunch × queries of a tile."""
SPARE_VMEM = 12 << 20
"""Beside tiles and accumulators: what the compiler spills."""


NUM_SCALARS = 6
"""Arguments that lie in scalar memory: the first of `_Refs`."""


class QueryTiles(NamedTuple):
    """Tiles of queries, in order; `num_tiles` of them are real."""

    rows: Int[Array, " M"]
    tokens: Int[Array, " M"]
    """Where among the step's tokens each begins."""
    positions: Int[Array, " M"]
    """Of its first query, in its sequence."""
    lens: Int[Array, " M"]
    num_tiles: Int[Array, ""]


class _Options(NamedTuple):
    """What is known when the kernel is traced."""

    lanes: HeadLanes
    sub: int
    page_size: int
    table_len: int
    scale: float
    window: int | None
    soft_cap: float | None


class _Refs(NamedTuple):
    """Memory that the kernel works on, in the order of `pallas_call`; what is not used is None."""

    tables: Any
    tile_rows: Any
    tile_tokens: Any
    tile_positions: Any
    tile_lens: Any
    scalars: Any
    sinks: Any
    scales: Any
    q: Any
    pages: Any
    out: Any
    q_tiles: Any
    """Two slots: the next tile's queries come while this one's are used."""
    out_tile: Any
    queries: Any
    """By bunch of heads."""
    kv_tiles: Any
    """Two slots."""
    tops: Any
    totals: Any
    acc: Any
    heads_rows: Any
    """Of `tpu_heads`."""
    q_came: Any
    out_went: Any
    fetched: Any
    next_slot: Any


def heads_of_bunch(group: int, tile_q: int) -> int:
    """Query heads whose scores are computed together: a divisor of those of one KV head."""
    return max(size for size in range(1, group + 1) if group % size == 0 and (size == 1 or size * tile_q <= MOST_ROWS))


Tiles = dict[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of each buffer in VMEM."""


def prefill_tiles(
    tile_q: int, num_heads: int, num_kv_heads: int, head_size: int, tile: int, dtype: Any, kv_dtype: Any
) -> Tiles:
    """The buffers for tiles of `tile_q` queries of `dtype` and `tile` keys of `kv_dtype`."""
    lanes, bunch = HeadLanes(head_size), heads_of_bunch(num_heads // num_kv_heads, tile_q)
    num_bunches, rows = num_heads // bunch, bunch * tile_q
    return {
        "q_tiles": ((2, tile_q, num_heads, head_size), dtype),
        "out_tile": ((tile_q, num_heads, head_size), dtype),
        "queries": ((num_bunches, rows, lanes.width), compute_dtype(dtype, kv_dtype)),
        "kv_tiles": ((2, num_kv_heads, lanes.num_rows, tile, LANES), kv_dtype),
        "tops": ((num_bunches, rows, LANES), jnp.float32),
        "totals": ((num_bunches, rows, LANES), jnp.float32),
        "acc": ((num_bunches, rows, lanes.width), jnp.float32),
        "heads_rows": (rows_shape(tile_q, num_heads, dtype), jnp.int32),
    }


def prefill_vmem(tiles: Tiles, sub: int) -> int:
    """Bytes of VMEM that prefill may need: its buffers, three arrays of scores, and the rest."""
    rows = tiles["queries"][0][1]
    return SPARE_VMEM + sum(padded_bytes(shape, dtype) for shape, dtype in tiles.values()) + 3 * 4 * rows * sub


def prefill_attention(
    q: Float[Array, "T N H"],
    pages: Float[Array, "C K S Z L"],
    tables: Int[Array, "R P"],
    query_tiles: QueryTiles,
    first_page: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    kv_scales: LayerScales | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: int,
    sub: int,
    tile_q: int,
    interpret: Any = False,
    check_bounds: bool = False,
) -> Float[Array, "T N H"]:
    """Attend the queries of `query_tiles` to the first tokens of their rows, causally; all others stay as they are.

    `tile` counts keys, a multiple of the page size and of `sub`; `tile_q` is the most queries of a tile. Outputs take
    the place of their queries in `q`, which is given up.
    """
    _, num_heads, head_size = q.shape
    _, num_kv_heads, _, page_size, _ = pages.shape
    lanes = HeadLanes(head_size)
    in_hbm, in_scalar_memory = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.SMEM))
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {}
    if sinks is not None:
        inputs["sinks"] = sinks.astype(jnp.float32) * LOG2_E, in_scalar_memory
    if kv_scales is not None:
        inputs["scales"] = jnp.stack(kv_scales).astype(jnp.float32), in_scalar_memory
    inputs |= {"q": (q, in_hbm), "pages": (pages, in_hbm)}
    tiles = prefill_tiles(tile_q, num_heads, num_kv_heads, head_size, tile, q.dtype, pages.dtype)
    scratch = {name: pltpu.VMEM(shape, dtype) for name, (shape, dtype) in tiles.items()} | {
        "q_came": pltpu.SemaphoreType.DMA((2,)),
        "out_went": pltpu.SemaphoreType.DMA(()),
        "fetched": pltpu.SemaphoreType.DMA((2,)),
        "next_slot": pltpu.SMEM((1,), jnp.int32),
    }
    names = [*_Refs._fields[:NUM_SCALARS], *inputs, "out", *scratch]
    options = _Options(lanes, sub, page_size, tables.shape[1], scale, window, soft_cap)

    def kernel(*refs: Any) -> None:
        given = dict(zip(names, refs, strict=True))
        _kernel(_Refs(**{name: given.get(name) for name in _Refs._fields}), options)

    scalars = jnp.stack([first_page, query_tiles.num_tiles])
    out: Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=NUM_SCALARS,
            grid=(query_tiles.num_tiles,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=in_hbm,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={names.index("q"): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not check_bounds,
            vmem_limit_bytes=prefill_vmem(tiles, sub),
        ),
        interpret=interpret,
        name="ragged_paged_prefill",
    )(tables.reshape(-1), *query_tiles[:4], scalars, *(array for array, _ in inputs.values()))
    return out


def _kernel(ref: _Refs, options: _Options) -> None:
    """One tile of queries."""
    lanes, sub, page_size, table_len, scale, window, soft_cap = options
    tile_positions, tile_lens, next_slot = ref.tile_positions, ref.tile_lens, ref.next_slot
    tile_q, num_heads = ref.out_tile.shape[:2]
    num_kv_heads, tile = ref.kv_tiles.shape[1], ref.kv_tiles.shape[3]
    num_bunches, bunch = ref.queries.shape[0], num_heads // ref.queries.shape[0]
    is_half_whole = sub // 2 % (LANES if sub > LANES else 32 // ref.kv_tiles.dtype.itemsize) == 0
    half = sub // 2 if is_half_whole else sub
    this, first_page, count = pl.program_id(0), ref.scalars[0], ref.scalars[1]
    position, end = tile_positions[this], tile_positions[this] + tile_lens[this]
    q_slot = lax.rem(this, 2)
    copies = PageCopies(ref.pages, ref.tables, table_len, first_page, page_size, tile)

    def first_seen(index: Any) -> Any:
        return jnp.int32(0) if window is None else jnp.maximum(tile_positions[index] - window + 1, 0)

    def rows_of(head: int) -> Any:
        """Those of a query head among its bunch's."""
        return pl.ds(head % bunch * tile_q, tile_q)

    # Copies

    def q_copy(index: Any, slot: Any) -> Any:
        some = pl.ds(0, tile_lens[index])
        its_tokens = pl.ds(ref.tile_tokens[index], tile_lens[index])
        return pltpu.make_async_copy(ref.q.at[its_tokens], ref.q_tiles.at[slot, some], ref.q_came.at[slot])

    def out_copy(index: Any) -> Any:
        some = pl.ds(0, tile_lens[index])
        its_tokens = pl.ds(ref.tile_tokens[index], tile_lens[index])
        return pltpu.make_async_copy(ref.out_tile.at[some], ref.out.at[its_tokens], ref.out_went)

    def span(index: Any, number: Any) -> tuple[Any, Any]:
        """Pages of a tile of keys that some query of a tile of queries sees."""
        return copies.span(number, first_seen(index), tile_positions[index] + tile_lens[index])

    def fetch(index: Any, number: Any, slot: Any) -> None:
        copies.fetch(ref.tile_rows[index], number, span(index, number), ref.kv_tiles.at[slot], ref.fetched.at[slot])

    def wait(number: Any, slot: Any) -> None:
        begin, past = span(this, number)
        copies.wait(past - begin, ref.fetched.at[slot])

    # Compute

    def attend(begin: Any, some: Any, *, is_masked: bool) -> None:
        """Add the tokens from `begin` on, which lie in `some` [K, S, n, 128], to every bunch of heads."""

        def attend_bunch(number: Any, _: Any) -> Any:
            dtype, head = ref.queries.dtype, divide(number, num_bunches // num_kv_heads)
            keys, values = lanes.keys(some, head), lanes.values(some, head)
            factor = scale if ref.scales is None else scale * ref.scales[0, head]
            scores = base2_scores(dot_nt(ref.queries[number], keys.astype(dtype)), factor, soft_cap)
            if is_masked:
                at = begin + iota(scores.shape, 1)
                own = position + iota((bunch, tile_q, scores.shape[1]), 1).reshape(scores.shape)
                is_seen = at <= jnp.minimum(own, end - 1)
                if window is not None:
                    is_seen &= at > own - window
                scores = jnp.where(is_seen, scores, LEAST_MAX)
                values = keep(values, row_bits(is_alive, values))
            top = ref.tops[number]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            weights, decay = jnp.exp2(scores - wide(new_top, scores.shape[1])), jnp.exp2(top - new_top)
            ref.tops[number] = new_top
            ref.totals[number] = ref.totals[number] * decay + jnp.sum(weights, axis=1, keepdims=True)
            product = dot_nn(weights.astype(dtype), values.astype(dtype))
            ref.acc[number] = ref.acc[number] * wide(decay, lanes.width) + product
            return 0

        def is_alive(token: Array) -> Array:
            """Seen by some query: slots behind the row's end may hold NaN, as may pages that the window has left."""
            alive = token < end - begin
            return alive if window is None else alive & (token >= first_seen(this) - begin)

        lax.fori_loop(0, num_bunches, attend_bunch, 0)

    # The tile of queries

    @pl.when(this == 0)
    def _() -> None:
        next_slot[0] = 0
        q_copy(0, 0).start()
        fetch(0, divide(first_seen(0), tile), 0)

    @pl.when(this + 1 < count)
    def _() -> None:
        q_copy(this + 1, 1 - q_slot).start()

    ref.acc[...] = jnp.zeros(ref.acc.shape, jnp.float32)
    if ref.sinks is None:
        ref.tops[...] = jnp.full(ref.tops.shape, LEAST_MAX, jnp.float32)
        ref.totals[...] = jnp.zeros(ref.totals.shape, jnp.float32)
    else:
        for head in range(num_heads):
            sink = jnp.full((tile_q, LANES), ref.sinks[head], jnp.float32)
            ref.tops[head // bunch, rows_of(head)] = sink
        ref.totals[...] = jnp.ones(ref.totals.shape, jnp.float32)
    q_copy(this, q_slot).wait()

    for lane in range(0, lanes.width, LANES):
        take_tokens(ref.q_tiles.at[q_slot], lane, ref.heads_rows)
        for head, some in enumerate(heads_of(ref.heads_rows, 0, tile_q, num_heads, ref.q_tiles.dtype)):
            ref.queries[head // bunch, rows_of(head), pl.ds(lane, LANES)] = some.astype(ref.queries.dtype)
    num_tiles = divide(end + tile - 1, tile)

    @pl.loop(divide(first_seen(this), tile), num_tiles)
    def _(number: Any) -> None:
        slot = next_slot[0]
        next_slot[0] = 1 - slot

        @pl.when(number + 1 < num_tiles)
        def _() -> None:
            fetch(this, number + 1, 1 - slot)

        @pl.when((number + 1 == num_tiles) & (this + 1 < count))
        def _() -> None:
            fetch(this + 1, divide(first_seen(this + 1), tile), 1 - slot)

        wait(number, slot)
        begin = number * tile
        visible = jnp.minimum(end - begin, tile)
        first = divide(jnp.maximum(first_seen(this) - begin, 0), sub)

        @pl.loop(first, divide(visible + sub - 1, sub))
        def _(piece: Any) -> None:
            at = pl.multiple_of(piece * sub, sub)
            some = partial(attend, begin + at)
            is_whole = begin + at + sub - 1 <= position  # Every query sees every key.
            if window is not None:
                is_whole &= begin + at > end - 1 - window
            is_long = visible - at > half
            keys_of = lambda length: ref.kv_tiles.at[slot, :, :, pl.ds(at, length)]  # noqa: E731
            pl.when(is_whole)(lambda: some(keys_of(sub), is_masked=False))
            pl.when(~is_whole & is_long)(lambda: some(keys_of(sub), is_masked=True))
            pl.when(~is_whole & ~is_long)(lambda: some(keys_of(half), is_masked=True))

    @pl.when(this > 0)
    def _() -> None:
        out_copy(this - 1).wait()

    def output(head: int, lane: int) -> Array:
        number, its_rows = head // bunch, rows_of(head)
        out = ref.acc[number, its_rows, pl.ds(lane, LANES)] / ref.totals[number, its_rows]
        if ref.scales is not None:
            out = out * ref.scales[1, head // (num_heads // num_kv_heads)]
        if lanes.is_packed:
            out = pltpu.roll(out, LANES - lanes.value_lane, 1)
        return out.astype(ref.out_tile.dtype)

    for lane in range(0, lanes.width, LANES):
        give_tokens(partial(output, lane=lane), lane, ref.heads_rows, ref.out_tile)
    out_copy(this).start()

    @pl.when(this + 1 == count)
    def _() -> None:
        out_copy(this).wait()


def padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """What an array takes in VMEM, whose tiles are 128 lanes wide and, of bytes, 32 rows high."""
    itemsize = jnp.dtype(dtype).itemsize
    rows = 32 // itemsize
    return itemsize * math.prod((*shape[:-2], -(-shape[-2] // rows) * rows, -(-shape[-1] // LANES) * LANES))
