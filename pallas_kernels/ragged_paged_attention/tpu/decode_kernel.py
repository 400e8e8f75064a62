"""The body of the decode kernel: one block of rows. What it computes, and the picture of it, stand in `tpu_decode`.

DecodeKernel.run:  next block's tails ◀─ DMA    begin_rows    full_tiles    put_new ─ DMA ▶    tails    end_rows
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .tpu_pages import PageCopies
from .tpu_tiles import (
    LANES,
    LEAST_MAX,
    HeadLanes,
    base2_scores,
    divide,
    dot_nn,
    dot_nt,
    iota,
    keep,
    row_bits,
    side_by_side,
    wide,
)

MOST_PRODUCTS, MOST_PRODUCT_ROWS, MOST_PRODUCT_HEADS = 8, 160, 32
MOST_MASKED = 256
"""Keys of a full tile computed together in a layer with a window: of more, its masks make the compiler spill."""


class DecodeSizes(NamedTuple):
    """Tuned numbers, in tokens but for the last two. `tile` is a multiple of the page size and of the other sizes."""

    tile: int
    """Fetched together."""
    full: int
    """Computed together, of full tiles; `MOST_MASKED` at most in a layer with a window."""
    tail: int
    """Computed together, of a row's last tile."""
    most_rows: int
    """Rows of scores in one product, at most."""
    height: int
    """Slots of a page that the hardware can address apart from others."""


class DecodeRefs(NamedTuple):
    """Memory that the kernel works on, in the order of `pallas_call`; what is not used is None."""

    tables: Any
    lens: Any
    next_long: Any
    scalars: Any
    q: Any
    k: Any
    v: Any
    sinks: Any
    scales: Any
    pages_in: Any
    out: Any
    pages: Any
    tiles: Any
    tails: Any
    wide_q: Any
    tops: Any
    totals: Any
    acc: Any
    fetched: Any
    tail_fetched: Any
    written: Any
    next_slot: Any


class Row(NamedTuple):
    """A row of a block: what is computed of it with scalars, once."""

    number: Any
    length: Any
    """0: not decoded."""
    first: Any
    """Number of the first tile that it sees something of."""
    last: Any
    """Number of the tile that it ends in: its tail. Those between are full."""


class Work(NamedTuple):
    """Tokens of one row that are attended together: those from position `begin` on, which lie in `tile`."""

    index: Any
    """Of the row in its block."""
    tile: Any
    begin: Any
    length: Any
    """Of the row."""


class DecodeKernel:
    """One grid step: `block` rows. Scores of `heads` KV heads, `rows` rows, are one product; there are `num_groups`."""

    def __init__(
        self,
        ref: DecodeRefs,
        *,
        lanes: HeadLanes,
        heads: int,
        sizes: DecodeSizes,
        page_size: int,
        table_len: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ):
        self.ref, self.lanes, self.heads, self.sizes = ref, lanes, heads, sizes
        self.scale, self.window, self.soft_cap = scale, window, soft_cap
        _, self.block, self.num_kv_heads, _, self.tile, _ = ref.tails.shape
        _, self.num_groups, self.rows, _ = ref.wide_q.shape
        self.copies = PageCopies(ref.pages, ref.tables, table_len, ref.scalars[0], page_size, self.tile)
        self.full = sizes.full if window is None else math.gcd(sizes.full, MOST_MASKED)
        self.this, self.num_rows = pl.program_id(0), ref.scalars[1]
        self.tail_slot = lax.rem(self.this, 2)
        dtype = ref.wide_q.dtype if ref.wide_q.dtype == jnp.float32 else ref.tails.dtype
        self.pair = min(rows_paired(dtype), self.block)
        self.most_products = products_at_once(self.rows, heads, dtype)

    def run(self) -> None:
        """All of the block."""
        pl.when(self.this == 0)(self._begin)

        @pl.loop(jnp.where(self.this == 0, 0, 1), 2)
        def _(ahead: Any) -> None:
            self._fetch_tails(self.this + ahead)

        for index in range(self.block):
            self._begin_row(index)
        pl.when(self.ref.next_long[self.this * self.block] < (self.this + 1) * self.block)(self._full_tiles)
        rows = [self._row(self.this * self.block + index) for index in range(self.block)]
        self._wait_tails(rows)
        if self.ref.k is not None:
            copies = [self._put_new(index, row) for index, row in enumerate(rows)]
            for row, copy in zip(rows, copies, strict=True):
                pl.when(row.length > 0)(copy.start)
        pl.loop(0, self.block // self.pair)(self._tails_of_pair)
        for index in range(self.block):
            self._end_row(index)
        least = functools.reduce(jnp.minimum, (row.length for row in rows))
        pl.when(least == 0)(functools.partial(self._keep_queries, rows))
        if self.ref.k is not None:
            num_written = sum(jnp.minimum(row.length, 1) for row in rows)
            some = self.ref.tails.at[self.tail_slot, pl.ds(0, num_written), :, :, pl.ds(0, self.sizes.height)]
            pl.when(num_written > 0)(pltpu.make_async_copy(some, some, self.ref.written).wait)
        if self.window is None:
            is_last = (self.this + 1) * self.block >= self.num_rows
            pl.when(is_last & (self.ref.next_long[0] < self.num_rows))(
                lambda: self._wait_for_all_of(self.ref.next_slot[0])
            )

    # Rows

    def _row(self, number: Any) -> Row:
        length = self.ref.lens[number]
        first, last = self._first_seen(length), jnp.maximum(length - 1, 0)
        return Row(number, length, divide(first, self.tile), divide(last, self.tile))

    def _first_seen(self, length: Any) -> Any:
        return jnp.int32(0) if self.window is None else jnp.maximum(length - self.window, 0)

    def _span(self, row: Row, number: Any) -> tuple[Any, Any]:
        """Pages of a tile that the row sees something of."""
        return self.copies.span(number, self._first_seen(row.length), row.length)

    def _begin(self) -> None:
        """Before the first block: zeros between the blocks of the block-diagonal queries, and the first full tile."""
        ref = self.ref
        ref.next_slot[0] = 0
        ref.wide_q[...] = jnp.zeros(ref.wide_q.shape, ref.wide_q.dtype)

        @pl.when(ref.next_long[0] < self.num_rows)
        def _() -> None:
            row = self._row(ref.next_long[0])
            self._fetch_full(row, row.first, 0)

    def _begin_row(self, index: int) -> None:
        """Block-diagonal queries, and the state before the first token."""
        ref, group, width = self.ref, self.rows // self.heads, self.lanes.width
        for number in range(self.num_groups):
            its_rows = pl.ds(number * self.rows, self.rows)
            for head in range(self.heads):
                queries = self.lanes.padded(ref.q[index, pl.ds(number * self.rows + head * group, group)])
                block = pl.ds(head * group, group), pl.ds(head * width, width)
                ref.wide_q[index, number, *block] = queries.astype(ref.wide_q.dtype)
            ref.acc[index, number] = jnp.zeros((self.rows, width), jnp.float32)
            if ref.sinks is None:
                ref.tops[index, number] = jnp.full((self.rows, LANES), LEAST_MAX, jnp.float32)
                ref.totals[index, number] = jnp.zeros((self.rows, LANES), jnp.float32)
            else:
                ref.tops[index, number] = ref.sinks[its_rows]
                ref.totals[index, number] = jnp.ones((self.rows, LANES), jnp.float32)

    def _end_row(self, index: int) -> None:
        ref, lanes = self.ref, self.lanes
        for number in range(self.num_groups):
            its_rows = pl.ds(number * self.rows, self.rows)
            out = ref.acc[index, number] / wide(ref.totals[index, number], lanes.width)
            if ref.scales is not None:
                out = out * wide(ref.scales[1, its_rows], lanes.width)
            out = out[:, lanes.value_lane : lanes.value_lane + lanes.head_size]
            ref.out[index, its_rows] = out.astype(ref.out.dtype)

    def _keep_queries(self, rows: list[Row]) -> None:
        """Of those tokens of the block that are not decoded here: they are prefill's, or nobody's."""
        for index, row in enumerate(rows):

            @pl.when(row.length == 0)
            def _(index: int = index) -> None:
                self.ref.out[index] = self.ref.q[index]

    # Full tiles

    def _fetch_full(self, row: Row, number: Any, slot: Any) -> None:
        target, semaphore = self.ref.tiles.at[slot], self.ref.fetched.at[slot]
        if self.window is None:
            self.copies.fetch_full(row.number, number, target, semaphore)
        else:
            self.copies.fetch(row.number, number, self._span(row, number), target, semaphore)

    def _wait_full(self, row: Row, number: Any, slot: Any) -> None:
        if self.window is None:
            self._wait_for_all_of(slot)
        else:
            begin, end = self._span(row, number)
            self.copies.wait(end - begin, self.ref.fetched.at[slot])

    def _wait_for_all_of(self, slot: Any) -> None:
        """Of a full tile, whichever it is."""
        tile = self.ref.tiles.at[slot]
        pltpu.make_async_copy(tile, tile, self.ref.fetched.at[slot]).wait()

    def _fetch_next(self, row: Row, number: Any, slot: Any) -> None:
        """The next full tile, of this row or of another, while tile `number` of this row is computed."""
        following = self.ref.next_long[row.number + 1]
        is_same, is_last = number + 1 < row.last, following >= self.num_rows
        if self.window is not None:
            other = self._row(jnp.minimum(following, self.num_rows - 1))
            pl.when(is_same)(lambda: self._fetch_full(row, number + 1, slot))
            pl.when(~is_same & ~is_last)(lambda: self._fetch_full(other, other.first, slot))
            return
        # No branch, so that all is one block of instructions: the very last tile is fetched once more.
        next_row = jnp.where(is_same | is_last, row.number, following)
        next_number = jnp.where(is_same, number + 1, jnp.where(is_last, number, 0))
        self._fetch_full(row._replace(number=next_row), next_number, slot)

    def _full_tiles(self) -> None:
        ref, full = self.ref, self.full

        @pl.loop(0, self.block)
        def _(index: Any) -> None:
            row = self._row(self.this * self.block + index)

            @pl.loop(row.first, row.last)
            def _(number: Any) -> None:
                slot = ref.next_slot[0]
                ref.next_slot[0] = 1 - slot
                self._fetch_next(row, number, 1 - slot)
                self._wait_full(row, number, slot)

                def attend(piece: Any) -> None:
                    at = pl.multiple_of(piece * full, full)
                    work = Work(index, ref.tiles.at[slot, :, :, pl.ds(at, full)], number * self.tile + at, row.length)
                    self._attend([work], is_masked=self.window is not None)

                if self.window is None:
                    in_turns(self.tile // full, self.most_products // self.num_groups, attend)
                else:  # The first pieces may lie before the window.
                    unseen = jnp.maximum(self._first_seen(row.length) - number * self.tile, 0)
                    pl.loop(divide(unseen, full), self.tile // full)(attend)

    # Tails

    def _fetch_tails(self, block: Any) -> None:
        slot = lax.rem(block, 2)
        for index in range(self.block):
            row = self._row(block * self.block + index)
            target, semaphore = self.ref.tails.at[slot, index], self.ref.tail_fetched.at[slot]
            self.copies.fetch(row.number, row.last, self._span(row, row.last), target, semaphore)

    def _wait_tails(self, rows: list[Row]) -> None:
        for row in rows:
            begin, end = self._span(row, row.last)
            self.copies.wait(jnp.maximum(end - begin, 0), self.ref.tail_fetched.at[self.tail_slot])

    def _tails_of_pair(self, number: Any) -> None:
        sub = self.sizes.tail
        indices = [number * self.pair + index for index in range(self.pair)]
        rows = [self._row(self.this * self.block + index) for index in indices]
        begins = [row.last * self.tile for row in rows]
        ends = [row.length - begin for row, begin in zip(rows, begins, strict=True)]
        unseen = [jnp.maximum(self._first_seen(row.length) - begin, 0) for row, begin in zip(rows, begins, strict=True)]
        first, last = functools.reduce(jnp.minimum, unseen), functools.reduce(jnp.maximum, ends)

        @pl.loop(divide(first, sub), divide(last + sub - 1, sub))
        def _(piece: Any) -> None:
            at = pl.multiple_of(piece * sub, sub)
            tails = [self.ref.tails.at[self.tail_slot, index, :, :, pl.ds(at, sub)] for index in indices]
            works = [
                Work(index, tail, begin + at, row.length)
                for index, tail, begin, row in zip(indices, tails, begins, rows, strict=True)
            ]
            self._attend(works, is_masked=True)

    def _put_new(self, index: int, row: Row) -> Any:
        """Put the new token into the tail; returns the copy that takes its block of slots back to the page."""
        ref, height, page_size = self.ref, self.sizes.height, self.copies.page_size
        position = jnp.maximum(row.length - 1, 0)
        place = position - row.last * self.tile
        at = pl.multiple_of(divide(place, height) * height, height)
        tail = ref.tails.at[self.tail_slot, index]
        is_new = iota((height, LANES), 0) == place - at
        for head in range(self.num_kv_heads):
            new_rows = self.lanes.rows(ref.k[index, pl.ds(head, 1)], ref.v[index, pl.ds(head, 1)])
            for lane_row, new in enumerate(new_rows):
                old = tail[head, lane_row, pl.ds(at, height)]
                new = jnp.broadcast_to(new.astype(old.dtype), old.shape)
                tail[head, lane_row, pl.ds(at, height)] = jnp.where(is_new, new, old)
        number = divide(position, page_size)
        page = self.copies.page(jnp.minimum(row.number, self.num_rows - 1), number)
        offset = pl.multiple_of(row.last * self.tile + at - number * page_size, height)
        target = ref.pages.at[page, :, :, pl.ds(offset, height)]
        return pltpu.make_async_copy(tail.at[:, :, pl.ds(at, height)], target, ref.written)

    # Attention

    def _attend(self, works: list[Work], *, is_masked: bool) -> None:
        """Add tokens to each row's state: stage by stage, so that the rows' products and maxima overlap."""
        attend_group = functools.partial(self._attend_group, works, is_masked)
        in_turns(self.num_groups, self.most_products // len(works), attend_group)

    def _attend_group(self, works: list[Work], is_masked: bool, group: Any) -> None:
        scores = [self._scores(work, group, is_masked=is_masked) for work in works]
        before = [self.ref.tops[work.index, group] for work in works]
        tops = [
            jnp.maximum(top, jnp.max(score, axis=1, keepdims=True)) for top, score in zip(before, scores, strict=True)
        ]
        weights = [jnp.exp2(score - wide(top, score.shape[1])) for score, top in zip(scores, tops, strict=True)]
        products = [
            self._product(work, group, weight, is_masked=is_masked) for work, weight in zip(works, weights, strict=True)
        ]
        for work, old, top, weight, product in zip(works, before, tops, weights, products, strict=True):
            self._add(work.index, group, jnp.exp2(old - top), top, weight, product)

    def _heads_of(self, group: Any) -> list[Any]:
        return [group * self.heads + index for index in range(self.heads)]

    def _scores(self, work: Work, group: Any, *, is_masked: bool) -> Array:
        """[rows, T], times log₂ e."""
        ref, lanes = self.ref, self.lanes
        keys = side_by_side([lanes.keys(work.tile, head) for head in self._heads_of(group)])
        products = dot_nt(ref.wide_q[work.index, group], keys.astype(ref.wide_q.dtype))
        factor: Any = self.scale
        if ref.scales is not None:
            factor = wide(ref.scales[0, pl.ds(group * self.rows, self.rows)], products.shape[1]) * self.scale
        scores = base2_scores(products, factor, self.soft_cap)
        return jnp.where(self._is_seen(work, iota(scores.shape, 1)), scores, LEAST_MAX) if is_masked else scores

    def _product(self, work: Work, group: Any, weights: Array, *, is_masked: bool) -> Array:
        """Weighted values of all heads of the group for each of its rows, [rows, heads·W]."""
        dtype = self.ref.wide_q.dtype
        values = [self.lanes.values(work.tile, head) for head in self._heads_of(group)]
        if is_masked:
            alive = row_bits(functools.partial(self._is_seen, work), values[0])
            values = [keep(value, alive) for value in values]
        return dot_nn(weights.astype(dtype), side_by_side(values).astype(dtype))

    def _add(self, index: Any, group: Any, decay: Array, top: Array, weights: Array, product: Array) -> None:
        """A row's state with these tokens; of the products, the blocks on the diagonal."""
        ref, width, height = self.ref, self.lanes.width, self.rows // self.heads
        own = product[:, :width]
        row = iota(own.shape, 0)
        for head in range(1, self.heads):
            is_own = (row >= head * height) & (row < (head + 1) * height)
            own = jnp.where(is_own, product[:, head * width : (head + 1) * width], own)
        ref.tops[index, group] = top
        ref.totals[index, group] = ref.totals[index, group] * decay + jnp.sum(weights, axis=1, keepdims=True)
        ref.acc[index, group] = ref.acc[index, group] * wide(decay, width) + own

    def _is_seen(self, work: Work, token: Array) -> Array:
        """Whether the row sees tokens of its piece."""
        is_seen = token < work.length - work.begin
        return is_seen if self.window is None else is_seen & (token >= work.length - work.begin - self.window)


def rows_paired(dtype: Any) -> int:
    """Rows of a block whose tails are computed together: more of them do not fit into registers.

    `dtype` is that of the pages, or float32 if products are computed in it.
    """
    return 1 if dtype == jnp.float32 else 2


def products_at_once(rows: int, heads: int, dtype: Any) -> int:
    """Products in one stretch of instructions, each of so many rows of scores and of so many KV heads.

    Of more the compiler spills registers. `dtype` as in `rows_paired`. Those in float32 take six passes, of three parts
    of each number; float8 is widened in many steps.
    """
    most = {"float32": 1, "float8_e4m3fn": MOST_PRODUCTS // 2}.get(dtype.name, MOST_PRODUCTS)
    most_heads = MOST_PRODUCT_HEADS // 2 if dtype.name == "int8" else MOST_PRODUCT_HEADS
    return max(min(most, MOST_PRODUCT_ROWS // rows, most_heads // heads), 1)


def at_once(num: int, most: int) -> int:
    """How many of `num` are in one stretch: a divisor, all of them if so many may be."""
    return num if num <= most else math.gcd(num, max(most, 1))


def in_turns(num: int, most: int, do: Callable[[Any], None]) -> None:
    """`do` 0 … `num` − 1: a loop over stretches of at most `most`, or no loop if one stretch does."""
    size = at_once(num, most)

    def stretch(number: Any) -> None:
        for index in range(size):
            do(number * size + index)

    if size == num:
        stretch(0)
    else:
        pl.loop(0, num // size)(stretch)
