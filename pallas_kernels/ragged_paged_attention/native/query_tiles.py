"""The queries of a tile, multiplied by the matrix unit of an x86 processor (AMX)."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ...native.amx import TILE, Matrix, MatrixUnit
from ...native.llvm import I32, I64, Code
from ...native.panels import PANEL
from .queries import Queries, Shape

BLOCK_SLOTS = 2 * TILE
"""Slots whose values are summed by one instruction: a tile's row of pairs."""
MAX_STACK_BYTES = 1 << 20
"""Bytes of queries, scores, weights and sums together, which must fit a thread's stack."""


class TiledQueries(Queries):
    """Computes all queries of a tile together; a page's pairs are loaded into tile registers as they lie in memory.

    The matrix unit works on whole tiles, so rows beyond the last query are overwritten.
    """

    @staticmethod
    def takes(shape: Shape) -> bool:
        """Return whether the matrix unit can compute this shape.

        The processor must have a matrix unit and the pages must be bfloat16. Head size and page size must be multiples
        of the 32 columns that are multiplied together (`PANEL`). A tile's queries, sums, scores and weights must fit
        1 MiB of the stack (`MAX_STACK_BYTES`).
        """
        # Words of 4 bytes for each query: its own, its value sums, its scores, its weights. The unit also computes rows
        # beyond the last query, fewer than `TILE` = 16, which need memory too.
        words = shape.key_words + shape.head_size + shape.page_size + shape.value_words
        is_small = 4 * words * (shape.num_queries + TILE) <= MAX_STACK_BYTES
        are_panels = shape.head_size % PANEL == 0 and shape.page_size % PANEL == 0
        return shape.has_amx and shape.is_bf16_packed and are_panels and is_small

    def num_allocated_queries(self) -> tuple[int, int]:
        """See `Queries.num_allocated_queries`: whole tiles are computed, with rows beyond the last query."""
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

    def attend_page(
        self, begin_token: ir.Value, end_token: ir.Value, page: ir.Value, next_page: ir.Value, page_start: ir.Value
    ) -> None:
        """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to one page of their KV head.

        All of these tokens' queries Q [queries, H] go through the matrix unit: scores [queries, Z] = Q · K, then one
        online-softmax step for each query, then value sums [queries, H] += weights · V. Slots are multiplied in blocks
        of 32. If the last block holds slots from `end_slot` on, no query attends to these, and their values may be NaN.
        So the values of this block are copied to `self.edge`, with zeros in these slots. With `end_slot` 70, slots
        0 … 63 are multiplied in place and slots 64 … 69 from the copy (`edge_slot` is 64).

        `page` is an index among the pages of all layers and KV heads, and `page_start` is the position of its slot 0.
        `next_page` is not used: nothing is prefetched here.
        """
        code, build, mul, shape = self.code, self.code.build, self.code.build.mul, self.shape
        # The first token sees the first slot and the last token the last one: positions ascend in a query tile, and the
        # tokens of a shared tile attend to whole pages.
        begin_slot, _ = self.visible_slots(begin_token, page_start)
        _, end_slot = self.visible_slots(build.sub(end_token, I64(1)), page_start)
        first_query = mul(begin_token, I64(shape.group_size))
        num_queries = mul(build.sub(end_token, begin_token), I64(shape.group_size))
        # The first block may begin before `begin_slot`: its earlier slots are written, and have weight 0.
        begin_block = mul(build.sdiv(begin_slot, I64(BLOCK_SLOTS)), I64(BLOCK_SLOTS))
        edge_slot = mul(build.sdiv(end_slot, I64(BLOCK_SLOTS)), I64(BLOCK_SLOTS))
        has_edge = build.icmp_signed("<", edge_slot, end_slot)
        end_block = build.add(edge_slot, build.select(has_edge, I64(BLOCK_SLOTS), I64(0)))
        keys = self._matrix(self.keys, mul(page, I64(shape.key_words * shape.page_size)), shape.page_size)
        values = self._matrix(self.values, mul(page, I64(shape.value_words * shape.head_size)), shape.head_size)

        def score_rows(row: ir.Value, num_tiles: int) -> None:
            """Compute the scores of `num_tiles` (1 or 2) tiles of 16 queries from `row` on, 32 slots at a time."""
            query = build.add(first_query, row)
            a = self._matrix(self.queries, mul(query, I64(shape.key_words)), shape.key_words)
            scores = self._matrix(self.scores, mul(query, I64(shape.page_size)), shape.page_size)

            def score_slots(slot: ir.Value) -> None:
                # A slot is a column of both matrices: a float32 score, or one pair of bfloat16 of a key.
                byte_offset = mul(slot, I64(4))
                c, b = (Matrix(matrix.at(code, 0, byte_offset), matrix.stride) for matrix in (scores, keys))
                self.matrix_unit.clear_sums(num_tiles)
                tiles = a.row_tiles(code), b.column_tiles(code)
                self.matrix_unit.multiply(*tiles, num_tiles, 0, shape.key_words // TILE)
                self.matrix_unit.store_sums(c, num_tiles)

            code.loop(begin_block, end_block, score_slots, step=PANEL)

        def sum_values(row: ir.Value, num_tiles: int) -> None:
            """Add weights · V to the value sums of `num_tiles` (1 or 2) tiles of 16 queries from `row` on."""
            query = build.add(first_query, row)
            weights = self._matrix(self.weights, mul(query, I64(shape.value_words)), shape.value_words)
            sums = self._matrix(self.value_sums, mul(query, I64(shape.head_size)), shape.head_size)
            # The weights of the copied block: columns from `edge_slot` on, 2 bytes per weight.
            edge_weights = Matrix(weights.at(code, 0, mul(edge_slot, I64(2))), weights.stride)
            edge_values = self._matrix(self.edge, I64(0), shape.head_size)

            def add_lanes(lane: ir.Value) -> None:
                """Add the whole blocks of slots, then the copied block if there is one, to 32 lanes of the sums."""
                byte_offset = mul(lane, I64(4))
                c, b, edge_b = (
                    Matrix(matrix.at(code, 0, byte_offset), matrix.stride) for matrix in (sums, values, edge_values)
                )
                self.matrix_unit.load_sums(c, num_tiles)
                first_step, end_step = (build.sdiv(slot, I64(BLOCK_SLOTS)) for slot in (begin_block, edge_slot))
                tiles = weights.row_tiles(code), b.column_tiles(code)
                self.matrix_unit.multiply(*tiles, num_tiles, first_step, end_step)
                with build.if_then(has_edge):
                    edge_tiles = edge_weights.row_tiles(code), edge_b.column_tiles(code)
                    self.matrix_unit.multiply(*edge_tiles, num_tiles, 0, 1)
                self.matrix_unit.store_sums(c, num_tiles)

            code.loop(0, shape.head_size, add_lanes, step=PANEL)

        self._by_tiles(num_queries, score_rows)

        def update_query(query_index: ir.Value) -> None:
            query = build.add(first_query, query_index)
            self.update_softmax(query, query, page_start, end_block)

        code.loop(0, num_queries, update_query)
        with build.if_then(has_edge):
            self._copy_edge(values, edge_slot, end_slot)
        self._by_tiles(num_queries, sum_values)

    def _by_tiles(self, num_rows: ir.Value, body: Callable[[ir.Value, int], None]) -> None:
        """Emit `body(first row, number of tiles)` for the rows of a matrix: two tiles of 16 rows at a time.

        If only 1 to 16 rows are left at the end, `body` gets one tile. So 40 rows are two tiles at row 0 and one at row
        32, and 50 rows are two tiles at row 0 and two at row 32. The last tile may reach beyond `num_rows`: its memory
        has room for whole tiles.
        """
        build = self.code.build
        single_tile_row = build.mul(build.sdiv(build.add(num_rows, I64(TILE - 1)), I64(2 * TILE)), I64(2 * TILE))
        self.code.loop(0, single_tile_row, lambda row: body(row, 2), step=2 * TILE)
        with build.if_then(build.icmp_signed("<", single_tile_row, num_rows)):
            body(single_tile_row, 1)

    def _copy_edge(self, values: Matrix, begin: ir.Value, end: ir.Value) -> None:
        """Emit a copy of the values of a page's slots `begin` … `end` − 1 into `self.edge`, with zeros up to 32 slots.

        `begin` is a multiple of 32. Row w of words holds slots 2w and 2w + 1. With `begin` 64 and `end` 69, rows 0 and
        1 of `edge` are copied whole, of row 2 only the lower halves (slot 68), and rows 3 … 15 are zeros.
        """
        code, build, lanes = self.code, self.code.build, self.head_lanes
        head_size = I64(self.shape.head_size)
        first_pair, num_slots = build.sdiv(begin, I64(2)), build.sub(end, begin)

        def copy_pair(pair: ir.Value) -> None:
            """Copy one row of words, which holds two slots, and clear the slots that are not before `end`."""
            # Slots of this pair before `end`: both, only the first one (the lower half of a word), or neither.
            num_valid = build.sub(num_slots, build.mul(pair, I64(2)))
            has_both, has_first = (build.icmp_signed(order, num_valid, I64(1)) for order in (">", "=="))
            mask = build.select(has_both, I32(-1), build.select(has_first, I32(0xFFFF), I32(0)))
            mask_in_lanes = code.broadcast(mask, lanes)
            row = values.at(code, build.add(first_pair, pair))

            def copy_lanes(lane: ir.Value) -> None:
                words = code.load_vector(row, lane, I32, lanes)
                target = build.add(build.mul(pair, head_size), lane)
                code.store_vector(build.and_(words, mask_in_lanes), self.edge, target)

            code.loop(0, self.shape.head_size, copy_lanes, step=lanes)

        code.loop(0, TILE, copy_pair)

    def _matrix(self, base: ir.Value, first_word: ir.Value, words_a_row: int) -> Matrix:
        """Return the matrix of 32-bit words that begins `first_word` words after `base`."""
        return Matrix(self.code.build.gep(base, [self.code.build.mul(first_word, I64(4))]), I64(4 * words_a_row))
