"""Decode on TPU: rows with one query each, whose new key and value are written on the way.

    grid: blocks of BLOCK rows                       VMEM
      long rows, one after another:                    tiles [2, K, S, T, 128]: two slots of one full tile
        full tile │ full tile │ …                        slot a ◀─ DMA ── the next full tile, of whatever row
        no mask, one wait for all pages                  slot b ── compute
      then all rows of the block together:             tails [2, BLOCK, K, S, T, 128]: what is left of each row
        sub-tile 0 │ sub-tile 1 │ … of every row's       the next block's ◀─ DMA ── while this block is computed
        tail, masked; they are independent, so that
        one row's products run while another waits
        for its maximum

    heads side by side on lanes: the queries of `heads` KV heads, G rows each, are block-diagonal
      Q [heads·G, heads·W] · Kᵀ [heads·W, T]      →  scores [heads·G, T], in one product
      P [heads·G, T] · V [T, heads·W]             →  of which the diagonal blocks count

The new key and value are put into the tail while it lies in VMEM, in the aligned block of tokens that the hardware can
address, and that block is copied back under the compute: the page it lies in must belong to this row alone. Slots
behind a row's end may hold NaN: scores and values there are replaced, never multiplied by zero. Outputs take the place
of the queries; rows of the last block that are not decoded keep theirs.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (pages).
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

from .kv_scales import LayerScales
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
    side_by_side,
    wide,
)

BLOCK = 4
"""Rows of one grid step."""
PAIR = 2
"""Rows of a block whose tails are computed together: more of them do not fit into registers."""
SPARE_VMEM = 16 << 20
"""Beside the tiles: queries, outputs, scores and what the compiler spills."""


class DecodeSizes(NamedTuple):
    """Tuned numbers, in tokens but for the last two. `tile` is a multiple of the page size and of the other sizes."""

    tile: int
    """Fetched together."""
    full: int
    """Computed together, of full tiles."""
    tail: int
    """Computed together, of a row's last tile."""
    most_rows: int
    """Rows of scores in one product, at most."""
    height: int
    """Slots of a page that the hardware can address apart from others."""


class _Work(NamedTuple):
    """Tokens of one row that are attended together."""

    index: Any
    tile: Any
    begin: Any
    length: Any


class _Options(NamedTuple):
    """What is known when the kernel is traced."""

    lanes: HeadLanes
    heads: int
    full: int
    tail: int
    height: int
    page_size: int
    table_len: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_new: bool
    has_sinks: bool
    has_scales: bool


def heads_together(num_kv_heads: int, group: int, most_rows: int) -> int:
    """KV heads whose scores are computed in one product: a divisor of their number."""
    fitting = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n * group <= most_rows]
    return max(fitting, default=1)


def decode_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    pages: Float[Array, "C K S Z L"],
    tables: Int[Array, "R P"],
    context_lens: Int[Array, " R"],
    num_rows: Int[Array, ""],
    first_page: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    kv_scales: LayerScales | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sizes: DecodeSizes,
    interpret: Any = False,
    check_bounds: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "C K S Z L"]]:
    """Attend queries 0 … `num_rows` − 1 to the first `context_lens` tokens of their rows, the last of which is new.

    `k` and `v` are the new keys and values (for pages of one byte, numbers that fit it, in more); without them nothing
    is written: the pages hold them already. `first_page` is added to page numbers. Returns `q`, with outputs in the place of those queries, and the written pages; both arguments are given up.
    """
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, num_lane_rows, page_size, _ = pages.shape
    lanes = HeadLanes(head_size)
    heads = heads_together(num_kv_heads, num_heads // num_kv_heads, sizes.most_rows)
    num_groups = num_kv_heads // heads
    rows = num_heads // num_groups
    block = next(size for size in (BLOCK, 2, 1) if num_tokens % size == 0)

    def per_row(num: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, num, head_size), lambda index, *_: (index, 0, 0))

    of_head = _head_bits(heads, rows, q.dtype)
    inputs: list[Array] = [q, of_head]
    specs = [per_row(num_heads), pl.BlockSpec(of_head.shape, lambda *_: (0, 0, 0))]
    if k is not None and v is not None:
        inputs += [k, v]
        specs += [per_row(num_kv_heads)] * 2
    if sinks is not None:
        inputs.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None] * LOG2_E, (num_heads, LANES)))
        specs.append(pl.BlockSpec((num_heads, LANES), lambda *_: (0, 0)))
    if kv_scales is not None:
        by_head = jnp.repeat(jnp.stack(kv_scales).astype(jnp.float32), num_heads // num_kv_heads, axis=1)
        inputs.append(jnp.broadcast_to(by_head[:, :, None], (2, num_heads, LANES)))
        specs.append(pl.BlockSpec((2, num_heads, LANES), lambda *_: (0, 0, 0)))
    inputs.append(pages)
    specs.append(pl.BlockSpec(memory_space=pl.ANY))
    lens, next_long = _schedule(context_lens, num_rows, sizes.tile, window, block)
    tile = sizes.tile
    tile_shape = (num_kv_heads, num_lane_rows, tile, LANES)
    kernel = partial(
        _kernel,
        options=_Options(
            lanes,
            heads,
            sizes.full,
            sizes.tail,
            sizes.height,
            page_size,
            tables.shape[1],
            scale,
            window,
            soft_cap,
            k is not None,
            sinks is not None,
            kv_scales is not None,
        ),
    )
    tile_bytes = num_kv_heads * num_lane_rows * tile * LANES * pages.dtype.itemsize
    out, pages = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=((num_rows + block - 1) // block,),
            in_specs=specs,
            out_specs=[per_row(num_heads), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM((2, *tile_shape), pages.dtype),
                pltpu.VMEM((2, block, *tile_shape), pages.dtype),
                pltpu.VMEM((block, num_groups, rows, heads * lanes.width), compute_dtype(q, pages)),
                pltpu.VMEM((block, num_groups, rows, LANES), jnp.float32),
                pltpu.VMEM((block, num_groups, rows, LANES), jnp.float32),
                pltpu.VMEM((block, num_groups, rows, lanes.width), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(pages.shape, pages.dtype)],
        input_output_aliases={4: 0, 4 + len(inputs) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not check_bounds,
            vmem_limit_bytes=SPARE_VMEM + (2 + 2 * block) * tile_bytes,
        ),
        interpret=interpret,
        name="ragged_paged_decode",
    )(tables.reshape(-1), lens, next_long, jnp.stack([first_page, num_rows]), *inputs)
    return out, pages


def _head_bits(heads: int, rows: int, dtype: Any) -> Int[Array, "heads rows L"]:
    """For `keep`: of the rows of `heads` KV heads those that belong to each."""
    like = jax.ShapeDtypeStruct((rows, LANES), dtype)
    return jnp.stack([row_bits(lambda row, head=head: row // (rows // heads) == head, like) for head in range(heads)])


def _schedule(lens: Int[Array, " R"], num_rows: Int[Array, ""], tile: int, window: int | None, block: int) -> Any:
    """Lengths, 0 for what is not decoded, with room for a block more; and after each row the next that has full tiles."""
    row = jnp.arange(lens.shape[0])
    lens = jnp.where(row < num_rows, lens, 0)
    first_seen = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    is_long = jnp.maximum(lens - 1, 0) // tile > first_seen // tile
    following = lax.cummin(jnp.where(is_long, row, lens.shape[0]), reverse=True)
    room = (-lens.shape[0]) % block + block
    return jnp.pad(lens, (0, room)), jnp.pad(following, (0, room), constant_values=lens.shape[0])


class _Row(NamedTuple):
    """A row of a block: what is computed of it with scalars, once."""

    row: Any
    length: Any
    """0: not decoded."""
    first: Any
    """Number of the first tile that it sees something of."""
    last: Any
    """Number of the tile that it ends in: its tail. Those between are full."""


def _kernel(
    tables: Any, lens: Any, next_long: Any, scalars: Any, q_ref: Any, of_head: Any, *refs: Any, options: _Options
) -> None:
    """A block of rows. `refs`: new keys and values, sinks if there are any, pages; outputs, pages again; scratch."""
    lanes, heads, full, sub, height, page_size, table_len, scale, window, soft_cap, has_new, has_sinks, has_scales = (
        options
    )
    optional, (_, out_ref, pages, tiles, tails, wide_q, tops, totals, acc) = refs[:-13], refs[-13:-4]
    fetched, tail_fetched, written, next_slot = refs[-4:]
    k_ref, v_ref = optional[:2] if has_new else (None, None)
    sinks_ref = optional[2 * has_new] if has_sinks else None
    scales_ref = optional[-1] if has_scales else None
    block, num_kv_heads, tile = tails.shape[1], tails.shape[2], tails.shape[4]
    _, num_groups, rows, _ = wide_q.shape
    width, pages_per_tile = lanes.width, tile // page_size
    pair = min(PAIR, block)
    this, first_page, num_rows = pl.program_id(0), scalars[0], scalars[1]
    tail_slot = lax.rem(this, 2)

    def row_of(row: Any) -> _Row:
        length = lens[row]
        return _Row(row, length, divide(first_seen(length), tile), divide(jnp.maximum(length - 1, 0), tile))

    def first_seen(length: Any) -> Any:
        return jnp.int32(0) if window is None else jnp.maximum(length - window, 0)

    # Pages into tiles

    def page_copy(row: Any, index: Any, target: Any, place: Any, semaphore: Any) -> Any:
        page = first_page + tables[row * table_len + index]
        return pltpu.make_async_copy(pages.at[page], target.at[:, :, pl.ds(place, page_size)], semaphore)

    def tile_pages(row: _Row, number: Any) -> tuple[Any, Any]:
        """First and last + 1 of the pages of a tile that hold something the row sees."""
        first = number * pages_per_tile
        begin = jnp.maximum(first, divide(first_seen(row.length), page_size))
        return begin, jnp.minimum(first + pages_per_tile, divide(row.length + page_size - 1, page_size))

    def fetch(row: _Row, number: Any, target: Any, semaphore: Any) -> None:
        @pl.loop(*tile_pages(row, number))
        def _(index: Any) -> None:
            place = pl.multiple_of((index - number * pages_per_tile) * page_size, page_size)
            page_copy(row.row, index, target, place, semaphore).start()

    def fetch_full(row: _Row, number: Any, slot: Any) -> None:
        if window is not None:
            fetch(row, number, tiles.at[slot], fetched.at[slot])
            return
        for index in range(pages_per_tile):
            at = number * pages_per_tile + index
            page_copy(row.row, at, tiles.at[slot], index * page_size, fetched.at[slot]).start()

    def fetch_next(row: _Row, number: Any, following: Any, slot: Any) -> None:
        """The next full tile, of this row or of the row `following`, while tile `number` of this row is computed."""
        is_same, is_last = number + 1 < row.last, following >= num_rows
        if window is not None:
            pl.when(is_same)(lambda: fetch_full(row, number + 1, slot))
            other = row_of(jnp.minimum(following, num_rows - 1))
            pl.when(~is_same & ~is_last)(lambda: fetch_full(other, other.first, slot))
            return
        # No branch: the very last tile is fetched once more, and waited for at the end, so that all is one block.
        next_row = jnp.where(is_same | is_last, row.row, following)
        next_number = jnp.where(is_same, number + 1, jnp.where(is_last, number, 0))
        fetch_full(_Row(next_row, None, None, None), next_number, slot)

    def wait_full(row: _Row, number: Any, slot: Any) -> None:
        begin, end = tile_pages(row, number)
        wait_pages(pages_per_tile if window is None else end - begin, fetched.at[slot])

    def wait_tails(rows: list[_Row], slot: Any) -> None:
        """For as many bytes as all their pages have."""
        counts = [jnp.maximum(end - begin, 0) for begin, end in (tile_pages(row, row.last) for row in rows)]
        wait_pages(_fold(jnp.add, counts), tail_fetched.at[slot])

    def wait_pages(number: Any, semaphore: Any) -> None:
        some = pages.at[pl.ds(0, number)]
        pltpu.make_async_copy(some, some, semaphore).wait()

    # Compute

    def attend(works: list[_Work], *, is_masked: bool) -> None:
        """Add `sub` tokens to each row: stage by stage, so that the rows' products and maxima overlap."""
        for number in range(num_groups):
            its_heads = range(number * heads, (number + 1) * heads)
            tops_before = [tops[work.index, number] for work in works]
            scores = []
            for work in works:
                keys = side_by_side([lanes.keys(work.tile, head) for head in its_heads])
                score = dot_nt(wide_q[work.index, number], keys.astype(wide_q.dtype))
                score = base2_scores(score, factor(number, score.shape[1]), soft_cap)
                if is_masked:
                    score = jnp.where(seen(work, iota(score.shape, 1)), score, LEAST_MAX)
                scores.append(score)
            maxima = [
                jnp.maximum(top, jnp.max(score, axis=1, keepdims=True)) for top, score in zip(tops_before, scores)
            ]
            weights = [jnp.exp2(score - wide(top, score.shape[1])) for score, top in zip(scores, maxima)]
            products = []
            for work, weight in zip(works, weights):
                values = [lanes.values(work.tile, head) for head in its_heads]
                if is_masked:
                    alive = row_bits(partial(seen, work), values[0])
                    values = [keep(value, alive) for value in values]
                products.append(dot_nn(weight.astype(wide_q.dtype), side_by_side(values).astype(wide_q.dtype)))
            for work, top, new_top, weight, product in zip(works, tops_before, maxima, weights, products):
                own = product[:, :width]
                for head in range(1, heads):
                    own = jnp.where(
                        is_of_head(iota(own.shape, 0), head), product[:, head * width : (head + 1) * width], own
                    )
                decay = jnp.exp2(top - new_top)
                tops[work.index, number] = new_top
                totals[work.index, number] = totals[work.index, number] * decay + jnp.sum(weight, axis=1, keepdims=True)
                acc[work.index, number] = acc[work.index, number] * wide(decay, width) + own

    def factor(number: int, width: int) -> Any:
        """Of a group's products."""
        return scale if scales_ref is None else wide(scales_ref[0, pl.ds(number * rows, rows)], width) * scale

    def seen(work: _Work, token: Array) -> Array:
        """Whether the row sees tokens of its sub-tile."""
        is_seen = token < work.length - work.begin
        return is_seen if window is None else is_seen & (token >= work.length - work.begin - window)

    def is_of_head(row: Array, head: int) -> Array:
        group = rows // heads
        return (row >= head * group) & (row < (head + 1) * group)

    def begin_row(index: int) -> None:
        """Block-diagonal queries, and the state before the first token."""
        for number in range(num_groups):
            its_rows = pl.ds(number * rows, rows)
            group = rows // heads
            for head in range(heads):
                narrow = q_ref[index, number * rows + head * group : number * rows + (head + 1) * group]
                own = pl.ds(head * group, group), pl.ds(head * width, width)
                wide_q[index, number, *own] = lanes.padded(narrow).astype(wide_q.dtype)
            acc[index, number] = jnp.zeros((rows, width), jnp.float32)
            if sinks_ref is None:
                tops[index, number] = jnp.full((rows, LANES), LEAST_MAX, jnp.float32)
                totals[index, number] = jnp.zeros((rows, LANES), jnp.float32)
            else:
                tops[index, number] = sinks_ref[its_rows]
                totals[index, number] = jnp.ones((rows, LANES), jnp.float32)

    def end_row(index: int) -> None:
        for number in range(num_groups):
            its_rows = pl.ds(number * rows, rows)
            out = acc[index, number] / wide(totals[index, number], width)
            if scales_ref is not None:
                out = out * wide(scales_ref[1, its_rows], width)
            out_ref[index, its_rows] = out[:, lanes.value_lane : lanes.value_lane + lanes.head_size].astype(
                out_ref.dtype
            )

    # The new token

    def put_new(index: int, row: _Row) -> Any:
        """Put it into the tail; returns the copy that takes its block of tokens back to the page."""
        position = jnp.maximum(row.length - 1, 0)
        place = position - row.last * tile
        at = pl.multiple_of(divide(place, height) * height, height)
        is_new = iota((height, LANES), 0) == place - at
        for head in range(num_kv_heads):
            new_rows = lanes.rows(k_ref[index, pl.ds(head, 1)], v_ref[index, pl.ds(head, 1)])
            for lane_row, new in enumerate(new_rows):
                old = tails[tail_slot, index, head, lane_row, pl.ds(at, height)]
                merged = jnp.where(is_new, jnp.broadcast_to(new.astype(old.dtype), old.shape), old)
                tails[tail_slot, index, head, lane_row, pl.ds(at, height)] = merged
        number = divide(position, page_size)
        page = first_page + tables[jnp.minimum(row.row, num_rows - 1) * table_len + number]
        offset = pl.multiple_of(position - place + at - number * page_size, height)
        return pltpu.make_async_copy(
            tails.at[tail_slot, index, :, :, pl.ds(at, height)],
            pages.at[page, :, :, pl.ds(offset, height)],
            written,
        )

    # The block

    these = [row_of(this * block + index) for index in range(block)]

    @pl.when(this == 0)
    def _() -> None:
        next_slot[0] = 0
        wide_q[...] = jnp.zeros(wide_q.shape, wide_q.dtype)

        @pl.when(next_long[0] < num_rows)
        def _() -> None:
            row = row_of(next_long[0])
            fetch_full(row, row.first, 0)

    @pl.loop(jnp.where(this == 0, 0, 1), 2)
    def _(ahead: Any) -> None:
        for index in range(block):
            row = row_of((this + ahead) * block + index)
            slot = lax.rem(this + ahead, 2)
            fetch(row, row.last, tails.at[slot, index], tail_fetched.at[slot])

    for index in range(block):
        begin_row(index)

    @pl.when(next_long[this * block] < (this + 1) * block)
    def full_tiles() -> None:
        @pl.loop(0, block)
        def _(index: Any) -> None:
            row = row_of(this * block + index)

            @pl.loop(row.first, row.last)
            def _(number: Any) -> None:
                slot = next_slot[0]
                next_slot[0] = 1 - slot
                fetch_next(row, number, next_long[row.row + 1], 1 - slot)
                wait_full(row, number, slot)
                for begin in range(0, tile, full):
                    some = tiles.at[slot, :, :, pl.ds(begin, full)]
                    attend([_Work(index, some, number * tile + begin, row.length)], is_masked=window is not None)

    wait_tails(these, tail_slot)
    copies = [put_new(index, row) for index, row in enumerate(these)] if has_new else []
    for row, copy in zip(these, copies, strict=False):
        pl.when(row.length > 0)(copy.start)

    @pl.loop(0, block // pair)
    def tails_of(number: Any) -> None:
        indices = [number * pair + index for index in range(pair)]
        its_rows = [row_of(this * block + index) for index in indices]
        begins = [row.last * tile for row in its_rows]
        remaining = [row.length - begin for row, begin in zip(its_rows, begins, strict=True)]
        unseen = [jnp.maximum(first_seen(row.length) - begin, 0) for row, begin in zip(its_rows, begins, strict=True)]

        @pl.loop(divide(_fold(jnp.minimum, unseen), sub), divide(_fold(jnp.maximum, remaining) + sub - 1, sub))
        def _(number: Any) -> None:
            at = pl.multiple_of(number * sub, sub)
            attend(
                [
                    _Work(index, tails.at[tail_slot, index, :, :, pl.ds(at, sub)], begin + at, row.length)
                    for index, begin, row in zip(indices, begins, its_rows, strict=True)
                ],
                is_masked=True,
            )

    for index in range(block):
        end_row(index)

    @pl.when((this + 1) * block > num_rows)
    def _() -> None:
        for index, row in enumerate(these):

            @pl.when(row.length == 0)
            def _(index: int = index) -> None:
                out_ref[index] = q_ref[index]

    if has_new:
        real = tails.at[tail_slot, pl.ds(0, jnp.minimum(num_rows - this * block, block)), :, :, pl.ds(0, height)]
        pltpu.make_async_copy(real, real, written).wait()

    if window is None:

        @pl.when(((this + 1) * block >= num_rows) & (next_long[0] < num_rows))
        def _() -> None:
            wait_pages(pages_per_tile, fetched.at[next_slot[0]])


def _fold(function: Any, values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result
