"""Blocks of pages that all queries of a tile see whole: the matrix unit multiplies while vectors compute the softmax.

    group of 32 queries    g − 1: value sums ┐           g + 1: scores ┐
                           g: weights of queries 0 … 15 ─┘   16 … 31 ──┘     four queries and 64 slots at a time

A core computes only some hundred instructions ahead. So products stand between the weights of a few slots, and not
behind those of a group. Each query's numbers are the same as in other blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from ...native.amx import TILE, Matrix, Tiles
from ...native.llvm import I64
from ...native.products.panels import PANEL
from .online_softmax import SLOTS_BESIDE, SlotRange
from .queries import PageBlock
from .query_tiles import BLOCK_SLOTS, QUERIES_AT_ONCE, STEP_SLOTS, TiledQueries, fits_stack
from .shape import Shape

GROUP = 2 * TILE
"""Queries that are multiplied together."""
NUM_STEPS = BLOCK_SLOTS // STEP_SLOTS
HEAD_PART = 64
"""Lanes of a head for which one product stands beside the weights of four queries and 16 slots: then all products of a
group are beside weights."""
BIT = ir.IntType(1)


class Products(NamedTuple):
    """Products of a group that stand beside the softmax of another: sums of so many steps each, one after the other."""

    num_steps: int
    tiles: Callable[[ir.Value, ir.Value], tuple[Tiles, Tiles, ir.Value]]
    """(sum, step) → the tiles of both factors, and the step of these."""
    target: Callable[[ir.Value], Matrix]
    """Sum → where it goes."""
    adds: bool
    """Whether it is added to what is there."""


class WholeBlockQueries(TiledQueries):
    """Computes tiles as `TiledQueries` does; where all queries see a block whole, with the softmax beside products."""

    @staticmethod
    def takes(shape: Shape) -> bool:
        """Return whether a tile has two groups, their products fill the softmax evenly, and both fit the stack."""
        is_even = shape.head_size % HEAD_PART == 0 and BLOCK_SLOTS % shape.page_size == 0
        is_small = fits_stack(shape, 2 * GROUP)
        has_groups = shape.num_queries >= 2 * GROUP
        return TiledQueries.takes(shape) and shape.has_avx512_bf16 and has_groups and is_even and is_small

    def num_allocated_queries(self) -> tuple[int, int]:
        """See `Queries.num_allocated_queries`: two groups have scores and weights at a time."""
        return self.shape.num_queries + TILE, 2 * GROUP

    def attend_block(self, begin_token: ir.Value, end_token: ir.Value, block: PageBlock) -> None:
        """See `Queries.attend_block`. A block is whole for queries that fill groups and see all of its slots."""
        build, mul = self.code.build, self.code.build.mul
        first_entry, block_start = self.start_of(block)
        # Positions ascend in a query tile: the last token's window begins last, and the first token's slots end first.
        # All rows of a shared tile, which has no window, see its blocks whole.
        begin_slot, _ = self.visible_slots(build.sub(end_token, I64(1)), block_start)
        _, end_slot = self.visible_slots(begin_token, block_start)
        num_queries = mul(build.sub(end_token, begin_token), I64(self.shape.group_size))
        conditions = [
            build.icmp_signed("==", begin_slot, I64(0)),
            build.icmp_signed("==", end_slot, I64(BLOCK_SLOTS)),
            build.icmp_signed("==", build.sub(block.end, block.begin), I64(self.pages_per_block)),
            build.icmp_signed("==", build.srem(num_queries, I64(GROUP)), I64(0)),
        ]
        is_whole = conditions[0]
        for condition in conditions[1:]:
            is_whole = build.and_(is_whole, condition)
        with build.if_else(is_whole) as (whole, other):
            with whole:
                self.locate_pages(block, first_entry)
                first_query = mul(begin_token, I64(self.shape.group_size))
                self._attend_whole(first_query, build.sdiv(num_queries, I64(GROUP)), block, first_entry)
            with other:
                super().attend_block(begin_token, end_token, block)

    def _attend_whole(
        self, first_query: ir.Value, num_groups: ir.Value, block: PageBlock, first_entry: ir.Value
    ) -> None:
        """Emit the attention of groups of queries from `first_query` on to a block that they see whole."""
        code, build = self.code, self.code.build

        def place(group: ir.Value) -> tuple[ir.Value, ir.Value]:
            """Return the first query of a group, and its first row of scores: groups use two places in turn."""
            rows_before = build.mul(build.and_(group, I64(1)), I64(GROUP))
            return build.add(first_query, build.mul(group, I64(GROUP))), rows_before

        self.score_rows(first_query, I64(0), 2, block, first_entry, I64(0), I64(BLOCK_SLOTS), ir.Constant(BIT, 1))

        def attend_group(group: ir.Value) -> None:
            before, behind = build.sub(group, I64(1)), build.add(group, I64(1))
            has_before, has_behind = (
                build.icmp_signed("<", first, second) for first, second in ((I64(0), group), (behind, num_groups))
            )
            query, row = place(group)
            self._weigh_tile(query, row, self._value_sums(*place(before)), has_before)
            query, row = (build.add(first, I64(TILE)) for first in (query, row))
            self._weigh_tile(query, row, self._scores(*place(behind)), has_behind)

        code.loop(0, num_groups, attend_group)
        last_place = place(build.sub(num_groups, I64(1)))
        self.sum_rows(*last_place, 2, SlotRange(I64(0), I64(NUM_STEPS)), ir.Constant(BIT, 0))

    def _weigh_tile(self, query: ir.Value, row: ir.Value, products: Products, has_products: ir.Value) -> None:
        """Emit the softmax of the tile of 16 queries from `query` on, beside products if `has_products`.

        Their scores and weights are in the rows from `row` on.
        """
        code, build = self.code, self.code.build
        steps_beside = self.shape.head_size // HEAD_PART

        def weigh(first: ir.Value) -> None:
            def multiply(slot: ir.Value, quarter: int) -> None:
                """Emit a quarter of the products that stand beside the weights from `slot` on, `steps_beside` steps."""
                slots_before = build.add(build.mul(first, I64(BLOCK_SLOTS // QUERIES_AT_ONCE)), slot)
                first_step = build.mul(build.sdiv(slots_before, I64(SLOTS_BESIDE)), I64(steps_beside))
                with build.if_then(has_products):
                    for number in range(quarter * steps_beside, (quarter + 1) * steps_beside):
                        self._add_product(products, build.add(first_step, I64(number // 4)), number % 4)

            queries, rows = (
                [build.add(build.add(start, first), I64(j)) for j in range(QUERIES_AT_ONCE)] for start in (query, row)
            )
            self.softmax.update_whole(queries, rows, BLOCK_SLOTS, multiply)

        code.loop(0, TILE, weigh, step=QUERIES_AT_ONCE)

    def _add_product(self, products: Products, step: ir.Value, product: int) -> None:
        """Emit product 0 … 3 of a step, counted over all sums, with the begin and the end of a sum."""
        build, unit, num_steps = self.code.build, self.matrix_unit, I64(products.num_steps)
        number, step = build.sdiv(step, num_steps), build.srem(step, num_steps)
        target = products.target(number)
        if product == 0:
            with build.if_then(build.icmp_signed("==", step, I64(0))):
                if products.adds:
                    unit.load_sums(target, 2)
                else:
                    unit.clear_sums(2)
        a, b, step_of_tiles = products.tiles(number, step)
        unit.add_product(a, b, step_of_tiles, product)
        if product == 3:
            with build.if_then(build.icmp_signed("==", step, I64(products.num_steps - 1))):
                unit.store_sums(target, 2)

    def _scores(self, query: ir.Value, row: ir.Value) -> Products:
        """Return the scores of a group: a sum is those of a step of slots, and goes over the head."""
        code, build = self.code, self.code.build
        queries, scores = self.queries_from(query).row_tiles(code), self.scores_from(row)

        def tiles(number: ir.Value, step: ir.Value) -> tuple[Tiles, Tiles, ir.Value]:
            keys, in_page = self._page_of(self.keys, number, self.shape.page_size)
            first_slot = keys.at(code, 0, build.mul(in_page, I64(4 * STEP_SLOTS)))
            return queries, Matrix(first_slot, keys.stride).column_tiles(code), step

        def target(number: ir.Value) -> Matrix:
            return Matrix(scores.at(code, 0, build.mul(number, I64(4 * STEP_SLOTS))), scores.stride)

        return Products(self.shape.key_words // TILE, tiles, target, adds=False)

    def _value_sums(self, query: ir.Value, row: ir.Value) -> Products:
        """Return the value sums of a group: a sum is 32 lanes of the head, and goes over the slots."""
        code, build = self.code, self.code.build
        weights, sums = self.weights_from(row), self.sums_from(query)

        def tiles(number: ir.Value, step: ir.Value) -> tuple[Tiles, Tiles, ir.Value]:
            values, in_page = self._page_of(self.values, step, self.shape.head_size)
            # A step of slots is as many bytes of weights as of rows of values only within a page.
            first_step = build.sub(step, in_page)
            page_weights = Matrix(weights.at(code, 0, build.mul(first_step, I64(2 * STEP_SLOTS))), weights.stride)
            lanes = Matrix(values.at(code, 0, build.mul(number, I64(4 * PANEL))), values.stride)
            return page_weights.row_tiles(code), lanes.column_tiles(code), in_page

        def target(number: ir.Value) -> Matrix:
            return Matrix(sums.at(code, 0, build.mul(number, I64(4 * PANEL))), sums.stride)

        return Products(NUM_STEPS, tiles, target, adds=True)

    def _page_of(self, base: ir.Value, step: ir.Value, words_a_row: int) -> tuple[Matrix, ir.Value]:
        """Return the keys or values of the page that a step of slots lies in, and the step's number within it."""
        steps_per_page = I64(self.shape.page_size // STEP_SLOTS)
        offset = self.code.load(self.page_values, self.code.build.sdiv(step, steps_per_page), I64)
        return self.matrix(base, offset, words_a_row), self.code.build.srem(step, steps_per_page)
