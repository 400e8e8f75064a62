"""The queries of a tile, multiplied by the matrix unit of an x86 processor (AMX)."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ...native.amx import PANEL, TILE, Matrix, MatrixUnit
from ...native.llvm import I32, I64, Code
from .queries import Queries, Shape

BLOCK = 2 * TILE
"""Slots whose values are summed by one instruction: a tile's row of pairs."""
MOST_BYTES = 1 << 20
"""Bytes of queries, scores, weights and sums together, which must fit a thread's stack."""


class TiledQueries(Queries):
    """Computes all queries of a tile together: a page's pairs are tiles as they lie in memory.

    Rows beyond the last query are overwritten.
    """

    @staticmethod
    def takes(shape: Shape) -> bool:
        """Return whether there is a unit, heads and pages are whole panels, and a tile's queries fit the stack."""
        words = shape.key_words + shape.head_size + shape.page_size + shape.value_words
        is_small = 4 * words * (shape.num_queries + TILE) <= MOST_BYTES
        are_panels = shape.head_size % PANEL == 0 and shape.page_size % PANEL == 0
        return shape.has_amx and shape.is_bf16_packed and are_panels and is_small

    def room(self) -> tuple[int, int]:
        """See `Queries.room`: rows are taken by the tile, and so beyond the last query."""
        return (self.shape.num_queries + TILE,) * 2

    def __init__(self, code: Code, shape: Shape, *, keys: ir.Value, values: ir.Value) -> None:
        super().__init__(code, shape, keys=keys, values=values)
        self.matrix_unit = MatrixUnit(code)
        self.edge = code.allocate(I32, TILE * shape.head_size)
        """Copy of the values of a block whose last slots are unwritten, with zeros there."""

    def begin(self) -> None:
        self.matrix_unit.configure()

    def end(self) -> None:
        self.matrix_unit.release()

    def see_page(
        self, first: ir.Value, last: ir.Value, page: ir.Value, following: ir.Value, first_slot: ir.Value
    ) -> None:
        """Add one page's keys and values to the sums of the tile's tokens `first` to `last` − 1.

        `first_slot` is the position of the page's first slot; `following` is the page that comes next, or that page
        again if there is none.
        """
        code, build, mul, shape = self.code, self.code.build, self.code.build.mul, self.shape
        # Positions ascend in a tile; where they do not, in a shared one, all tokens see whole pages.
        seen_from, _ = self.seen(first, first_slot)
        _, seen_to = self.seen(build.sub(last, I64(1)), first_slot)
        first_query = mul(first, I64(shape.group))
        num_queries = mul(build.sub(last, first), I64(shape.group))
        begin_block = mul(build.sdiv(seen_from, I64(BLOCK)), I64(BLOCK))
        whole = mul(build.sdiv(seen_to, I64(BLOCK)), I64(BLOCK))
        has_edge = build.icmp_signed("<", whole, seen_to)
        end_block = build.add(whole, build.select(has_edge, I64(BLOCK), I64(0)))
        keys = self._matrix(self.keys, mul(page, I64(shape.key_words * shape.page_size)), shape.page_size)
        values = self._matrix(self.values, mul(page, I64(shape.value_words * shape.head_size)), shape.head_size)

        def score(row: ir.Value, num_tiles: int) -> None:
            query = build.add(first_query, row)
            a = self._matrix(self.queries, mul(query, I64(shape.key_words)), shape.key_words)
            scores = self._matrix(self.scores, mul(query, I64(shape.page_size)), shape.page_size)

            def some_slots(slot: ir.Value) -> None:
                at = mul(slot, I64(4))
                c, b = (Matrix(matrix.at(code, 0, at), matrix.stride) for matrix in (scores, keys))
                self.matrix_unit.clear_sums(num_tiles)
                self.matrix_unit.multiply(a, b, num_tiles, 0, shape.key_words)
                self.matrix_unit.store_sums(c, num_tiles)

            code.loop(begin_block, end_block, some_slots, step=PANEL)

        def sum_values(row: ir.Value, num_tiles: int) -> None:
            query = build.add(first_query, row)
            weights = self._matrix(self.weights, mul(query, I64(shape.value_words)), shape.value_words)
            sums = self._matrix(self.sums, mul(query, I64(shape.head_size)), shape.head_size)
            of_edge = Matrix(weights.at(code, 0, mul(whole, I64(2))), weights.stride)
            edge = self._matrix(self.edge, I64(0), shape.head_size)

            def some_lanes(h: ir.Value) -> None:
                at = mul(h, I64(4))
                c, b, b_of_edge = (Matrix(matrix.at(code, 0, at), matrix.stride) for matrix in (sums, values, edge))
                self.matrix_unit.load_sums(c, num_tiles)
                first_pair, end_pair = build.sdiv(begin_block, I64(2)), build.sdiv(whole, I64(2))
                self.matrix_unit.multiply(weights, b, num_tiles, first_pair, end_pair)
                with build.if_then(has_edge):
                    self.matrix_unit.multiply(of_edge, b_of_edge, num_tiles, 0, TILE)
                self.matrix_unit.store_sums(c, num_tiles)

            code.loop(0, shape.head_size, some_lanes, step=PANEL)

        self._by_tiles(num_queries, score)

        def weigh(place: ir.Value) -> None:
            query = build.add(first_query, place)
            self.weigh(query, query, first_slot, end_block)

        code.loop(0, num_queries, weigh)
        with build.if_then(has_edge):
            self._copy_edge(values, whole, seen_to)
        self._by_tiles(num_queries, sum_values)

    def _by_tiles(self, num_rows: ir.Value, body: Callable[[ir.Value, int], None]) -> None:
        """Call body(first row, number of tiles) for all rows: two tiles at a time, and one if no more are left."""
        build = self.code.build
        done = build.mul(build.sdiv(build.add(num_rows, I64(TILE - 1)), I64(2 * TILE)), I64(2 * TILE))
        self.code.loop(0, done, lambda row: body(row, 2), step=2 * TILE)
        with build.if_then(build.icmp_signed("<", done, num_rows)):
            body(done, 1)

    def _copy_edge(self, values: Matrix, begin: ir.Value, end: ir.Value) -> None:
        """Copy the values of slots `begin` … `end` of a page to `edge`, then zeros."""
        code, build, lanes = self.code, self.code.build, self.head_lanes
        head_size = I64(self.shape.head_size)
        first, num_slots = build.sdiv(begin, I64(2)), build.sub(end, begin)

        def copy_pair(pair: ir.Value) -> None:
            # Which numbers of a pair live: both, the first, none.
            live = build.sub(num_slots, build.mul(pair, I64(2)))
            are_both, is_first = (build.icmp_signed(order, live, I64(1)) for order in (">", "=="))
            mask = build.select(are_both, I32(-1), build.select(is_first, I32(0xFFFF), I32(0)))
            in_lanes = code.broadcast(mask, lanes)
            row = values.at(code, build.add(first, pair))

            def copy(h: ir.Value) -> None:
                words = code.load_vector(row, h, I32, lanes)
                to = build.add(build.mul(pair, head_size), h)
                code.store_vector(build.and_(words, in_lanes), self.edge, to)

            code.loop(0, self.shape.head_size, copy, step=lanes)

        code.loop(0, TILE, copy_pair)

    def _matrix(self, base: ir.Value, first_word: ir.Value, words_a_row: int) -> Matrix:
        return Matrix(self.code.build.gep(base, [self.code.build.mul(first_word, I64(4))]), I64(4 * words_a_row))
