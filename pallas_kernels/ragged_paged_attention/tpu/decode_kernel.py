"""The body of the decode kernel: one grid step, a block of rows. `decode` draws what it computes and where it lies.

`DecodeKernel.run` in order: start fetching the next block's tails; prepare this block's queries and softmax state;
compute its full tiles; wait for its tails, put the new tokens into them and start writing these to their pages; compute
the tails; write the outputs; wait for the writes.
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

from ..interface import AttendOptions
from .decode_refs import DecodeInputs, DecodeOutputs, DecodeScalars, DecodeScratch, DecodeSizes
from .lanes import (
    LANES,
    MASK_VALUE,
    HeadLanes,
    Ref,
    base2_scores,
    broadcast_lanes,
    concat_lanes,
    divide,
    dot_nn,
    dot_nt,
    iota,
    row_mask_bits,
    zero_rows,
)
from .pages import PageCopies

MAX_UNROLLED_PRODUCTS, MAX_UNROLLED_ROWS, MAX_UNROLLED_HEADS = 8, 160, 32
"""Products, rows of scores and KV heads in one stretch of instructions without a loop; with more, registers spill."""
MAX_MASKED_KEYS = 256
"""Keys of a full tile in one product of a layer with a window; with more, the masks make the compiler spill."""


class Row(NamedTuple):
    """Scalars of one row of the block."""

    index: Any
    """Index of the row in the step."""
    context_len: Any
    """Tokens of the row; 0 if it is not decoded."""
    first_tile: Any
    """Number of the first KV tile that holds a key the row sees."""
    last_tile: Any
    """Number of the KV tile that the row ends in, its tail. The tiles between the two are full."""


class SubTile(NamedTuple):
    """Consecutive tokens of one row that are attended together."""

    row_in_block: Any
    kv: Ref
    """[K, S, tokens, 128] in VMEM: their keys and values."""
    begin: Any
    """Position of the first of them."""
    context_len: Any
    """Tokens of the row."""


class DecodeKernel:
    """One grid step over `block_rows` rows, whose scores come from `num_products` products per sub-tile."""

    def __init__(
        self,
        scalars: DecodeScalars,
        inputs: DecodeInputs,
        outputs: DecodeOutputs,
        scratch: DecodeScratch,
        sizes: DecodeSizes,
        table_len: int,
        options: AttendOptions,
    ):
        """Take the references of one grid step; `table_len` counts the entries of one row's page table."""
        self.scalars, self.inputs, self.outputs, self.scratch, self.sizes = scalars, inputs, outputs, scratch, sizes
        self.scale, self.window, self.soft_cap = options.scale, options.window, options.soft_cap
        _, self.block_rows, self.num_kv_heads, _, self.tile, _ = scratch.tail_tiles.shape
        self.num_buffers = scratch.full_tiles.shape[0]
        _, self.num_products, self.product_rows, _ = scratch.diagonal_q.shape
        self.lanes, self.heads = HeadLanes(inputs.q.shape[2]), self.num_kv_heads // self.num_products
        first_page = scalars.first_page_and_count[0]
        self.copies = PageCopies(outputs.pages, scalars.page_tables, table_len, first_page, self.tile)
        self.full = self.sizes.full if self.window is None else math.gcd(self.sizes.full, MAX_MASKED_KEYS)
        self.block, self.num_rows = pl.program_id(0), scalars.first_page_and_count[1]
        self.last_row = jnp.maximum(self.num_rows - 1, 0)  # A call without rows has a grid step, too.
        self.tail_buffer = lax.rem(self.block, 2)
        compute_dtype = scratch.diagonal_q.dtype
        dtype = compute_dtype if compute_dtype == jnp.float32 else scratch.tail_tiles.dtype
        self.tail_rows = min(tail_rows_together(dtype), self.block_rows)
        self.max_products = max_unrolled_products(self.product_rows, self.heads, dtype)

    def run(self) -> None:
        """Compute the block."""
        pl.when(self.block == 0)(self._begin_call)

        @pl.loop(jnp.where(self.block == 0, 0, 1), 2)
        def _(ahead: Any) -> None:
            self._fetch_tails(self.block + ahead)

        for index in range(self.block_rows):
            self._begin_row(index)
        next_long = self.scalars.next_long
        pl.when(next_long[self.block * self.block_rows] < (self.block + 1) * self.block_rows)(self._attend_full_tiles)
        rows = [self._row(self.block * self.block_rows + index) for index in range(self.block_rows)]
        self._wait_tails(rows)
        if self.inputs.k is not None:
            copies = [self._put_new_token(index, row) for index, row in enumerate(rows)]
            for row, copy in zip(rows, copies, strict=True):
                pl.when(row.context_len > 0)(copy.start)
        pl.loop(0, self.block_rows // self.tail_rows)(self._attend_tails)
        for index in range(self.block_rows):
            self._end_row(index)
        min_len = functools.reduce(jnp.minimum, (row.context_len for row in rows))
        pl.when(min_len == 0)(functools.partial(self._keep_queries, rows))
        if self.inputs.k is not None:
            num_written = sum(jnp.minimum(row.context_len, 1) for row in rows)
            slots = pl.ds(0, self.sizes.write_slots)
            written = self.scratch.tail_tiles.at[self.tail_buffer, pl.ds(0, num_written), :, :, slots]
            pl.when(num_written > 0)(pltpu.make_async_copy(written, written, self.scratch.write_sem).wait)

    # Rows

    def _row(self, index: Any) -> Row:
        context_len = self.scalars.context_lens[index]
        first, last = self._first_seen(context_len), jnp.maximum(context_len - 1, 0)
        return Row(index, context_len, divide(first, self.tile), divide(last, self.tile))

    def _first_seen(self, context_len: Any) -> Any:
        """Return the first position that the query of a row of this length sees."""
        return jnp.int32(0) if self.window is None else jnp.maximum(context_len - self.window, 0)

    def _span(self, row: Row, tile_index: Any) -> tuple[Any, Any]:
        """Return the pages of a tile that hold any key the row sees: the first, and the last + 1."""
        return self.copies.span(tile_index, self._first_seen(row.context_len), row.context_len)

    def _begin_call(self) -> None:
        """Zero the off-diagonal blocks of `diagonal_q` and fetch the first full tiles, before the first block."""
        scratch, first_long = self.scratch, self.scalars.next_long[0]
        scratch.next_buffer[0] = 0
        scratch.next_fetch[0], scratch.next_fetch[1] = first_long, self._first_tile(first_long)
        scratch.diagonal_q[...] = jnp.zeros(scratch.diagonal_q.shape, scratch.diagonal_q.dtype)

        @pl.loop(0, jnp.where(first_long < self.num_rows, self.num_buffers - 1, 0))
        def _(buffer: Any) -> None:
            self._fetch_ahead(buffer)
            self._advance()

    def _begin_row(self, index: int) -> None:
        """Put a row's queries on the diagonal, and set its softmax state to that before the first key.

        A sink counts as a key that carries no value: weight 1 and its logit as the maximum.
        """
        scratch, group, width = self.scratch, self.product_rows // self.heads, self.lanes.width
        for product in range(self.num_products):
            query_heads = pl.ds(product * self.product_rows, self.product_rows)
            for head in range(self.heads):
                q = self.inputs.q[index, pl.ds(product * self.product_rows + head * group, group)]
                block = pl.ds(head * group, group), pl.ds(head * width, width)
                scratch.diagonal_q[index, product, *block] = self.lanes.padded(q).astype(scratch.diagonal_q.dtype)
            scratch.acc[index, product] = jnp.zeros((self.product_rows, width), jnp.float32)
            state = self.product_rows, LANES
            if self.inputs.sinks is None:
                scratch.running_max[index, product] = jnp.full(state, MASK_VALUE, jnp.float32)
                scratch.running_sum[index, product] = jnp.zeros(state, jnp.float32)
            else:
                scratch.running_max[index, product] = self.inputs.sinks[query_heads]
                scratch.running_sum[index, product] = jnp.ones(state, jnp.float32)

    def _end_row(self, index: int) -> None:
        """Write a row's outputs: acc ÷ running_sum, without the padding lanes."""
        scratch, lanes = self.scratch, self.lanes
        for product in range(self.num_products):
            query_heads = pl.ds(product * self.product_rows, self.product_rows)
            out = scratch.acc[index, product] / broadcast_lanes(scratch.running_sum[index, product], lanes.width)
            if self.inputs.scales is not None:
                out = out * broadcast_lanes(self.inputs.scales[1, query_heads], lanes.width)
            out = out[:, lanes.value_lane : lanes.value_lane + lanes.head_size]
            self.outputs.out[index, query_heads] = out.astype(self.outputs.out.dtype)

    def _keep_queries(self, rows: list[Row]) -> None:
        """Give tokens of the block that are not decoded their queries back: they are prefill's, or padding."""
        for index, row in enumerate(rows):

            @pl.when(row.context_len == 0)
            def _(index: int = index) -> None:
                self.outputs.out[index] = self.inputs.q[index]

    # Full tiles

    def _wait_full(self, row: Row, tile_index: Any, buffer: Any) -> None:
        semaphore = self.scratch.full_sems.at[buffer]
        if self.window is None:
            tile = self.scratch.full_tiles.at[buffer]
            pltpu.make_async_copy(tile, tile, semaphore).wait()
        else:
            begin, end = self._span(row, tile_index)
            self.copies.wait(end - begin, semaphore)

    def _fetch_ahead(self, buffer: Any) -> None:
        """Fetch the full tile at `next_fetch`, if there is one, into a buffer."""
        index, tile_index = self.scratch.next_fetch[0], self.scratch.next_fetch[1]
        row, is_any = self._row(jnp.minimum(index, self.last_row)), index < self.num_rows
        target, semaphore = self.scratch.full_tiles.at[buffer], self.scratch.full_sems.at[buffer]
        if self.window is None:
            self.copies.fetch_full(row.index, tile_index, target, semaphore, is_wanted=is_any)
        else:
            span = self._span(row, tile_index)
            pl.when(is_any)(lambda: self.copies.fetch(row.index, tile_index, span, target, semaphore))

    def _advance(self) -> None:
        """Set `next_fetch` to the full tile after it: of the same row, or the first of the next row that has any."""
        next_fetch = self.scratch.next_fetch
        index, tile_index = next_fetch[0], next_fetch[1]
        row = self._row(jnp.minimum(index, self.last_row))
        is_any, next_long = index < self.num_rows, self.scalars.next_long[row.index + 1]
        is_same = is_any & (tile_index + 1 < row.last_tile)
        next_fetch[0] = jnp.where(is_same | ~is_any, index, next_long)
        next_fetch[1] = jnp.where(is_same, tile_index + 1, self._first_tile(next_long))

    def _first_tile(self, index: Any) -> Any:
        """Return the number of the first KV tile that holds a key which row `index` sees; any, without such a row."""
        return 0 if self.window is None else self._row(jnp.minimum(index, self.last_row)).first_tile

    def _attend_full_tiles(self) -> None:
        """Attend every row of the block to its full tiles, each in sub-tiles of `full` tokens."""
        scratch, full = self.scratch, self.full

        @pl.loop(0, self.block_rows)
        def _(index: Any) -> None:
            row = self._row(self.block * self.block_rows + index)

            @pl.loop(row.first_tile, row.last_tile)
            def _(tile_index: Any) -> None:
                buffer = scratch.next_buffer[0]
                self._fetch_ahead((buffer - 1) & (self.num_buffers - 1))
                self._wait_full(row, tile_index, buffer)
                # Behind the wait, since the compiler moves no instruction of the tile's computation before it.
                scratch.next_buffer[0] = (buffer + 1) & (self.num_buffers - 1)
                self._advance()

                def attend(number: Any) -> None:
                    at = pl.multiple_of(number * full, full)
                    kv = scratch.full_tiles.at[buffer, :, :, pl.ds(at, full)]
                    sub_tile = SubTile(index, kv, tile_index * self.tile + at, row.context_len)
                    self._attend([sub_tile], is_masked=self.window is not None)

                if self.window is None:
                    unrolled_loop(self.tile // full, self.max_products // self.num_products, attend)
                else:  # The first sub-tiles may lie before the window.
                    num_unseen = jnp.maximum(self._first_seen(row.context_len) - tile_index * self.tile, 0)
                    pl.loop(divide(num_unseen, full), self.tile // full)(attend)

    # Tails

    def _fetch_tails(self, block: Any) -> None:
        buffer = lax.rem(block, 2)
        for index in range(self.block_rows):
            row = self._row(block * self.block_rows + index)
            target, semaphore = self.scratch.tail_tiles.at[buffer, index], self.scratch.tail_sems.at[buffer]
            self.copies.fetch(row.index, row.last_tile, self._span(row, row.last_tile), target, semaphore)

    def _wait_tails(self, rows: list[Row]) -> None:
        for row in rows:
            begin, end = self._span(row, row.last_tile)
            wait = functools.partial(self.copies.wait, end - begin, self.scratch.tail_sems.at[self.tail_buffer])
            pl.when(end > begin)(wait)  # What a wait for no bytes does is not documented.

    def _attend_tails(self, number: Any) -> None:
        """Attend `tail_rows` rows of the block together to their tails, in sub-tiles of `sizes.tail` tokens."""
        size = self.sizes.tail
        indices = [number * self.tail_rows + index for index in range(self.tail_rows)]
        rows = [self._row(self.block * self.block_rows + index) for index in indices]
        begins = [row.last_tile * self.tile for row in rows]
        ends = [row.context_len - begin for row, begin in zip(rows, begins, strict=True)]
        unseen = [
            jnp.maximum(self._first_seen(row.context_len) - begin, 0) for row, begin in zip(rows, begins, strict=True)
        ]
        first, last = functools.reduce(jnp.minimum, unseen), functools.reduce(jnp.maximum, ends)

        @pl.loop(divide(first, size), divide(last + size - 1, size))
        def _(number: Any) -> None:
            at = pl.multiple_of(number * size, size)
            tails = [self.scratch.tail_tiles.at[self.tail_buffer, index, :, :, pl.ds(at, size)] for index in indices]
            sub_tiles = [
                SubTile(index, tail, begin + at, row.context_len)
                for index, tail, begin, row in zip(indices, tails, begins, rows, strict=True)
            ]
            self._attend(sub_tiles, is_masked=True)

    def _put_new_token(self, index: int, row: Row) -> Any:
        """Put a row's new key and value into its tail.

        Return the copy, not yet started, that takes the tail's aligned block of `write_slots` slots to the page.
        """
        k, v = self.inputs.k, self.inputs.v
        assert k is not None
        assert v is not None
        size, page_size = self.sizes.write_slots, self.copies.page_size
        position = jnp.maximum(row.context_len - 1, 0)
        offset = position - row.last_tile * self.tile
        at = pl.multiple_of(divide(offset, size) * size, size)
        tail = self.scratch.tail_tiles.at[self.tail_buffer, index]
        is_new = iota((size, LANES), 0) == offset - at
        for head in range(self.num_kv_heads):
            new_rows = self.lanes.rows(k[index, pl.ds(head, 1)], v[index, pl.ds(head, 1)])
            for lane_row, new in enumerate(new_rows):
                old = tail[head, lane_row, pl.ds(at, size)]
                new = jnp.broadcast_to(new.astype(old.dtype), old.shape)
                tail[head, lane_row, pl.ds(at, size)] = jnp.where(is_new, new, old)
        page_index = divide(position, page_size)
        page = self.copies.page(jnp.minimum(row.index, self.last_row), page_index)
        page_offset = pl.multiple_of(row.last_tile * self.tile + at - page_index * page_size, size)
        target = self.outputs.pages.at[page, :, :, pl.ds(page_offset, size)]
        return pltpu.make_async_copy(tail.at[:, :, pl.ds(at, size)], target, self.scratch.write_sem)

    # Attention

    def _attend(self, sub_tiles: list[SubTile], *, is_masked: bool) -> None:
        """Add one sub-tile of each of some rows to these rows' states, product after product."""
        attend_product = functools.partial(self._attend_product, sub_tiles, is_masked)
        unrolled_loop(self.num_products, self.max_products // len(sub_tiles), attend_product)

    def _attend_product(self, sub_tiles: list[SubTile], is_masked: bool, product: Any) -> None:
        """Do one step of the online softmax for h KV heads: stage by stage over the rows, so that these overlap."""
        scores = [self._scores(sub_tile, product, is_masked=is_masked) for sub_tile in sub_tiles]
        old_maxima = [self.scratch.running_max[sub_tile.row_in_block, product] for sub_tile in sub_tiles]
        maxima = [
            jnp.maximum(old, jnp.max(score, axis=1, keepdims=True))
            for old, score in zip(old_maxima, scores, strict=True)
        ]
        weights = [
            jnp.exp2(score - broadcast_lanes(new, score.shape[1])) for score, new in zip(scores, maxima, strict=True)
        ]
        weighted = [
            self._weighted_values(sub_tile, product, weight, is_masked=is_masked)
            for sub_tile, weight in zip(sub_tiles, weights, strict=True)
        ]
        for sub_tile, old, new, weight, values in zip(sub_tiles, old_maxima, maxima, weights, weighted, strict=True):
            self._add(sub_tile.row_in_block, product, jnp.exp2(old - new), new, weight, values)

    def _heads_of(self, product: Any) -> list[Any]:
        """Return the h KV heads of a product."""
        return [product * self.heads + index for index in range(self.heads)]

    def _scores(self, sub_tile: SubTile, product: Any, *, is_masked: bool) -> Array:
        """Return the scores [h·G, T] of a sub-tile, times log₂ e."""
        scratch, lanes = self.scratch, self.lanes
        keys = concat_lanes([lanes.keys(sub_tile.kv, head) for head in self._heads_of(product)])
        products = dot_nt(scratch.diagonal_q[sub_tile.row_in_block, product], keys.astype(scratch.diagonal_q.dtype))
        factor: Any = self.scale
        if self.inputs.scales is not None:
            k_scales = self.inputs.scales[0, pl.ds(product * self.product_rows, self.product_rows)]
            factor = broadcast_lanes(k_scales, products.shape[1]) * self.scale
        scores = base2_scores(products, factor, self.soft_cap)
        return jnp.where(self._is_seen(sub_tile, iota(scores.shape, 1)), scores, MASK_VALUE) if is_masked else scores

    def _weighted_values(self, sub_tile: SubTile, product: Any, weights: Array, *, is_masked: bool) -> Array:
        """Return `weights` [h·G, T] times the values of all h KV heads: [h·G, h·W]."""
        dtype = self.scratch.diagonal_q.dtype
        values = [self.lanes.values(sub_tile.kv, head) for head in self._heads_of(product)]
        if is_masked:
            mask_bits = row_mask_bits(functools.partial(self._is_seen, sub_tile), values[0])
            values = [zero_rows(value, mask_bits) for value in values]
        return dot_nn(weights.astype(dtype), concat_lanes(values).astype(dtype))

    def _add(self, index: Any, product: Any, decay: Array, new_max: Array, weights: Array, weighted: Array) -> None:
        """Add a sub-tile to the state of row `index`: of `weighted` [h·G, h·W], the blocks on the diagonal."""
        scratch, width, group = self.scratch, self.lanes.width, self.product_rows // self.heads
        own = weighted[:, :width]
        row = iota(own.shape, 0)
        for head in range(1, self.heads):
            is_own = (row >= head * group) & (row < (head + 1) * group)
            own = jnp.where(is_own, weighted[:, head * width : (head + 1) * width], own)
        scratch.running_max[index, product] = new_max
        new_sum = scratch.running_sum[index, product] * decay + jnp.sum(weights, axis=1, keepdims=True)
        scratch.running_sum[index, product] = new_sum
        scratch.acc[index, product] = scratch.acc[index, product] * broadcast_lanes(decay, width) + own

    def _is_seen(self, sub_tile: SubTile, token: Array) -> Array:
        """Say for tokens of a sub-tile, counted from its begin, whether the row's query sees them."""
        is_seen = token < sub_tile.context_len - sub_tile.begin
        if self.window is None:
            return is_seen
        return is_seen & (token >= sub_tile.context_len - sub_tile.begin - self.window)


def tail_rows_together(dtype: Any) -> int:
    """Return the rows of a block whose tails are computed together; more of them do not fit into registers.

    `dtype` is that of the pages, or float32 if products are computed in float32.
    """
    return 1 if dtype == jnp.float32 else 2


def max_unrolled_products(rows: int, heads: int, dtype: Any) -> int:
    """Return how many products of `rows` rows and `heads` KV heads may stand in one stretch of instructions.

    With more, the compiler spills registers. `dtype` is as in `tail_rows_together`. A product in float32 takes six
    passes, of three parts of each number; float8 numbers are widened in many steps.
    """
    limit = {"float32": 1, "float8_e4m3fn": MAX_UNROLLED_PRODUCTS // 2}.get(dtype.name, MAX_UNROLLED_PRODUCTS)
    max_heads = MAX_UNROLLED_HEADS // 2 if dtype.name == "int8" else MAX_UNROLLED_HEADS
    return max(min(limit, MAX_UNROLLED_ROWS // rows, max_heads // heads), 1)


def unroll_factor(num: int, max_unroll: int) -> int:
    """Return how many of `num` iterations are unrolled: all if `max_unroll` allows it, else a divisor of `num`."""
    return num if num <= max_unroll else math.gcd(num, max(max_unroll, 1))


def unrolled_loop(num: int, max_unroll: int, do: Callable[[Any], None]) -> None:
    """Call `do(0)` … `do(num − 1)` in a loop of stretches of `unroll_factor` calls, or unrolled if one suffices."""
    size = unroll_factor(num, max_unroll)

    def stretch(number: Any) -> None:
        for index in range(size):
            do(number * size + index)

    if size == num:
        stretch(0)
    else:
        pl.loop(0, num // size)(stretch)
