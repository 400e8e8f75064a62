"""Decode on TPU: rows with one query each, whose new key and value are written on the way.

    grid: one row after another                        VMEM: two slots of one tile [K, S, T, 128]
      row r:  tile 0 │ tile 1 │ … │ last tile            slot a ◀─ DMA ── pages of the next tile
              full, no mask         masked, gets         slot b ── compute
                                    the new token        the next row's first tile comes during the last one
                                                         of this row; which slot is next is kept in SMEM

    heads side by side on lanes: the queries of `heads` KV heads, G rows each, are block-diagonal
      Q [heads·G, heads·128] · Kᵀ [heads·128, T]  →  scores [heads·G, T], in one product
      P [heads·G, T] · V [T, heads·128]           →  of which the diagonal blocks count

A tile is fetched page by page and, if it is full, waited for at once. The new key and value are put into the last
tile while it lies in VMEM, in the aligned block of tokens that the hardware can address, and that block is copied back
under the compute: the page it lies in must belong to this row alone. Slots behind a row's end may hold NaN: scores and
values there are replaced, never multiplied by zero.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (pages).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .tpu_tiles import LANES, LEAST_MAX, LOG2_E, HeadLanes, base2_scores, dot_nn, dot_nt, iota

MOST_ROWS = 32
"""Rows of scores that are computed together at most. Half as many, or as many again, takes longer (bundles)."""
SPARE_VMEM = 16 << 20
"""Beside the tiles: queries, outputs, scores and what the compiler spills."""

State = tuple[tuple[Array, Array, Array], ...]
"""Per group of heads: running maximum [rows, 1], running sum [rows, 1], weighted values [rows, width]."""


def heads_together(num_kv_heads: int, group: int) -> int:
    """KV heads whose scores are computed in one product: a divisor of their number."""
    fitting = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n * group <= MOST_ROWS]
    return max(fitting, default=1)


def decode_attention(
    q: Float[Array, "R N H"],
    new: Float[Array, "R K S L"] | None,
    pages: Float[Array, "C K S Z L"],
    tables: Int[Array, "R P"],
    context_lens: Int[Array, " R"],
    num_rows: Int[Array, ""],
    first_page: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: int,
    interpret: Any = False,
    check_bounds: bool = False,
) -> tuple[Float[Array, "R N H"], Float[Array, "C K S Z L"]]:
    """Attend the first `num_rows` rows to their first `context_lens` tokens, the last of which is `new`.

    `new` is packed by `HeadLanes.pack`; None writes nothing: the pages hold the last token already. `first_page` is
    added to page numbers. `tile` counts tokens, a multiple of the page size. Returns outputs, arbitrary from
    `num_rows` on, and the written pages, for which `pages` is given up.
    """
    num_q_rows, num_heads, head_size = q.shape
    _, num_kv_heads, num_lane_rows, page_size, _ = pages.shape
    lanes = HeadLanes(head_size)
    group = num_heads // num_kv_heads
    heads = heads_together(num_kv_heads, group)
    num_groups = num_kv_heads // heads
    num_used = heads * group
    rows = -(-num_used // _sublanes(q.dtype)) * _sublanes(q.dtype)

    def by_group(x: Array) -> Array:
        """[…, N, width] → […, groups, rows, width]; rows behind the last head are padding."""
        x = x.reshape(*x.shape[:-2], num_groups, num_used, x.shape[-1])
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - num_used), (0, 0)])

    queries = by_group(jnp.pad(q, ((0, 0), (0, 0), (0, lanes.width - head_size))))
    row_block = pl.BlockSpec((1, num_groups, rows, lanes.width), lambda row, *_: (row, 0, 0, 0))
    inputs: list[Array] = [queries]
    specs = [row_block]
    if new is not None:
        inputs.append(new.reshape(num_q_rows, num_kv_heads * num_lane_rows, LANES))
        specs.append(pl.BlockSpec((1, num_kv_heads * num_lane_rows, LANES), lambda row, *_: (row, 0, 0)))
    if sinks is not None:
        inputs.append(by_group(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (num_heads, LANES))))
        specs.append(pl.BlockSpec((num_groups, rows, LANES), lambda *_: (0, 0, 0)))
    inputs.append(pages)
    specs.append(pl.BlockSpec(memory_space=pl.ANY))
    tile_shape = (2, num_kv_heads, num_lane_rows, tile, LANES)
    kernel = partial(
        _kernel,
        lanes=lanes,
        heads=heads,
        group=group,
        page_size=page_size,
        table_len=tables.shape[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_new=new is not None,
        has_sinks=sinks is not None,
    )
    out, pages = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows,),
            in_specs=specs,
            out_specs=[row_block, pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM(tile_shape, pages.dtype),
                pltpu.VMEM((num_groups, rows, heads * lanes.width), q.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(queries.shape, q.dtype), jax.ShapeDtypeStruct(pages.shape, pages.dtype)],
        input_output_aliases={3 + len(inputs) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not check_bounds,
            vmem_limit_bytes=SPARE_VMEM + 2 * num_kv_heads * num_lane_rows * tile * LANES * pages.dtype.itemsize,
        ),
        interpret=interpret,
        name="ragged_paged_decode",
    )(tables.reshape(-1), context_lens, jnp.stack([first_page, num_rows]), *inputs)
    out = out[:, :, :num_used, lanes.value_lane : lanes.value_lane + head_size]
    return out.reshape(q.shape), pages


def _kernel(
    tables: Any,
    context_lens: Any,
    scalars: Any,
    q_ref: Any,
    *refs: Any,
    lanes: HeadLanes,
    heads: int,
    group: int,
    page_size: int,
    table_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    has_new: bool,
    has_sinks: bool,
) -> None:
    """One row. `refs`: new and sinks if there are any, pages, out, pages again, tiles, queries, semaphores, slot."""
    optional, (_pages_in, out_ref, pages, tiles, wide_q, fetched, written, next_slot) = refs[:-8], refs[-8:]
    new_ref: Any = optional[0] if has_new else None
    sinks_ref = optional[-1] if has_sinks else None
    num_kv_heads, tile = tiles.shape[1], tiles.shape[3]
    num_groups, rows = q_ref.shape[1], q_ref.shape[2]
    width = lanes.width
    row = pl.program_id(0)
    first_page, num_rows = scalars[0], scalars[1]
    length = context_lens[row]
    last = (length - 1) // tile

    def first_seen(of_row: Any) -> Any:
        return jnp.int32(0) if window is None else jnp.maximum(context_lens[of_row] - window, 0)

    # Pages into tiles

    def page_copy(of_row: Any, index: Any, place: Any, slot: Any) -> Any:
        page = first_page + tables[of_row * table_len + index]
        return pltpu.make_async_copy(pages.at[page], tiles.at[slot, :, :, pl.ds(place, page_size)], fetched.at[slot])

    def each_page(of_row: Any, number: Any, slot: Any, do: Any) -> None:
        """The pages of a tile that hold something the row sees."""
        first = number * (tile // page_size)
        begin = jnp.maximum(first, first_seen(of_row) // page_size)
        end = jnp.minimum(first + tile // page_size, (context_lens[of_row] + page_size - 1) // page_size)

        @pl.loop(begin, end)
        def _(index: Any) -> None:
            do(page_copy(of_row, index, pl.multiple_of((index - first) * page_size, page_size), slot))

    def fetch(of_row: Any, number: Any, slot: Any) -> None:
        each_page(of_row, number, slot, lambda copy: copy.start())

    def fetch_full(number: Any, slot: Any) -> None:
        for index in range(tile // page_size):
            page_copy(row, number * (tile // page_size) + index, index * page_size, slot).start()

    def wait(number: Any, slot: Any) -> None:
        each_page(row, number, slot, lambda copy: copy.wait())

    def wait_full(slot: Any) -> None:
        pltpu.make_async_copy(tiles.at[slot], tiles.at[slot], fetched.at[slot]).wait()

    # Compute

    def attend(state: State, number: Any, slot: Any, *, is_masked: bool) -> State:
        def seen(shape: tuple[int, ...], axis: int) -> Array:
            positions = number * tile + iota(shape, axis)
            is_seen = positions < length
            return is_seen if window is None else is_seen & (positions >= length - window)

        return tuple(attend_group(index, slot, *each, seen if is_masked else None) for index, each in enumerate(state))

    def attend_group(index: int, slot: Any, top: Array, total: Array, acc: Array, seen: Any) -> Any:
        its_heads = range(index * heads, (index + 1) * heads)
        keys = [lanes.keys(tiles.at[slot], head) for head in its_heads]
        values = [lanes.values(tiles.at[slot], head) for head in its_heads]
        scores = base2_scores(dot_nt(wide_q[index], _side_by_side(keys)), scale, soft_cap)
        if seen is not None:
            scores = jnp.where(seen(scores.shape, 1), scores, LEAST_MAX)
            alive = seen(values[0].shape, 0)
            values = [jnp.where(alive, value, jnp.zeros_like(value)) for value in values]
        new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        weights, decay = jnp.exp2(scores - new_top), jnp.exp2(top - new_top)
        total = total * decay + jnp.sum(weights, axis=1, keepdims=True)
        products = dot_nn(weights.astype(tiles.dtype), _side_by_side(values))
        own = products[:, :width]
        for head in range(1, heads):
            is_own = iota((rows, width), 0) // group == head
            own = jnp.where(is_own, products[:, head * width : (head + 1) * width], own)
        return new_top, total, acc * decay + own

    def initial() -> State:
        no_values = jnp.zeros((rows, width), jnp.float32)
        if sinks_ref is None:
            start = jnp.full((rows, 1), LEAST_MAX, jnp.float32), jnp.zeros((rows, 1), jnp.float32), no_values
            return (start,) * num_groups
        tops = [sinks_ref[index, :, :1] * LOG2_E for index in range(num_groups)]
        return tuple((top, jnp.ones((rows, 1), jnp.float32), no_values) for top in tops)

    # The new token

    def put_new(slot: Any) -> Any:
        """Put it into the tile; returns the copy that takes its block of tokens back to the page."""
        position, block = length - 1, _sublanes(tiles.dtype)
        place = position - last * tile
        at = pl.multiple_of(place // block * block, block)
        for head in range(num_kv_heads):
            for lane_row in range(lanes.num_rows):
                old = tiles[slot, head, lane_row, pl.ds(at, block)]
                new = new_ref[0, pl.ds(head * lanes.num_rows + lane_row, 1)]
                merged = jnp.where(iota(old.shape, 0) == place - at, jnp.broadcast_to(new, old.shape), old)
                tiles[slot, head, lane_row, pl.ds(at, block)] = merged
        page = first_page + tables[row * table_len + position // page_size]
        offset = pl.multiple_of(position % page_size // block * block, block)
        return pltpu.make_async_copy(
            tiles.at[slot, :, :, pl.ds(at, block)], pages.at[page, :, :, pl.ds(offset, block)], written
        )

    # The row

    @pl.when(row == 0)
    def begin() -> None:
        next_slot[0] = 0
        fetch(0, first_seen(0) // tile, 0)

    for index in range(num_groups):
        narrow = q_ref[0, index]
        wide = _side_by_side([narrow] * heads)
        is_diagonal = iota(wide.shape, 0) // group == iota(wide.shape, 1) // width
        wide_q[index] = wide if heads == 1 else jnp.where(is_diagonal, wide, jnp.zeros_like(wide))

    def full_tile(number: Any, carry: tuple[State, Any]) -> tuple[State, Any]:
        state, slot = carry
        if window is not None:  # Few tiles, of which the first begins amid a page.
            fetch(row, number + 1, 1 - slot)
            wait(number, slot)
            return attend(state, number, slot, is_masked=True), 1 - slot

        @pl.when(number + 1 < last)
        def _() -> None:
            fetch_full(number + 1, 1 - slot)

        @pl.when(number + 1 == last)
        def _() -> None:
            fetch(row, number + 1, 1 - slot)

        wait_full(slot)
        return attend(state, number, slot, is_masked=False), 1 - slot

    state, slot = lax.fori_loop(first_seen(row) // tile, last, full_tile, (initial(), next_slot[0]))

    @pl.when(row + 1 < num_rows)
    def look_ahead() -> None:
        fetch(row + 1, first_seen(row + 1) // tile, 1 - slot)

    next_slot[0] = 1 - slot
    wait(last, slot)
    back = put_new(slot) if has_new else None
    if back is not None:
        back.start()
    state = attend(state, last, slot, is_masked=True)
    for index, (_, total, acc) in enumerate(state):
        out_ref[0, index] = (acc / total).astype(out_ref.dtype)
    if back is not None:
        back.wait()


def _side_by_side(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _sublanes(dtype: Any) -> int:
    """Rows of one hardware tile: tokens that can be addressed apart from their neighbours."""
    return 32 // jnp.dtype(dtype).itemsize
