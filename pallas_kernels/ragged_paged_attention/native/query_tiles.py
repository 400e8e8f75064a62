"""The queries of a tile, multiplied by the matrix unit of an x86 processor (AMX).

    a block of pages:  scores [queries, slots] = Q · K ──▶ weights ──▶ sums [queries, H] += weights · V

All pages of a block are multiplied before its softmax, and its values are summed in tile registers: the fewer blocks,
the fewer sums of rows and moves of tiles. Scores are in units of ln 2, so that weights are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ...native.amx import TILE, Matrix, MatrixUnit
from ...native.llvm import I32, I64, LONG_LANES, Code
from ...native.products.panels import PANEL
from .online_softmax import SlotRange
from .queries import PageBlock, Queries
from .shape import Shape

BLOCK_SLOTS = 256
"""Slots of a block of pages at most, unless a page has more."""
STEP_SLOTS = 2 * TILE
"""Slots whose values are summed by one instruction: a tile's row of pairs."""
QUERIES_AT_ONCE = 4
"""Queries whose softmax is computed at once; they divide a tile."""
STRIDE_PADDING = TILE
"""Words between one query's scores and the next one's beside the scores: rows of 1 KiB would share cache sets."""
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
        of the 32 columns that are multiplied together (`PANEL`). A tile's queries and sums, and the scores and weights
        of two tiles of rows, must fit 1 MiB of the stack (`MAX_STACK_BYTES`).
        """
        are_panels = shape.head_size % PANEL == 0 and shape.page_size % PANEL == 0
        return shape.has_amx and shape.is_bf16_packed and are_panels and fits_stack(shape, 2 * TILE)

    def __init__(self, code: Code, shape: Shape, *, keys: ir.Value, values: ir.Value) -> None:
        super().__init__(code, shape, keys=keys, values=values)
        self.matrix_unit = MatrixUnit(code)
        self.edge = code.allocate(I32, TILE * shape.head_size)
        """Copy of the values of a step of slots whose last ones are unwritten, with zeros there."""
        self.page_values = code.allocate(I64, self.pages_per_block)
        """Offsets of the values of a block's pages, and of their keys, in words: one int64 per page."""

    @property
    def pages_per_block(self) -> int:
        return _pages_per_block(self.shape)

    @property
    def score_stride(self) -> int:
        return self.pages_per_block * self.shape.page_size + STRIDE_PADDING

    @property
    def weight_stride(self) -> int:
        return self.pages_per_block * self.shape.value_words + STRIDE_PADDING

    def num_allocated_queries(self) -> tuple[int, int]:
        """See `Queries.num_allocated_queries`: whole tiles are computed, with rows beyond the last query."""
        return self.shape.num_queries + TILE, 2 * TILE

    def begin(self) -> None:
        self.matrix_unit.configure()

    def end(self) -> None:
        self.matrix_unit.release()

    def attend_block(self, begin_token: ir.Value, end_token: ir.Value, block: PageBlock) -> None:
        """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to a block of pages of their KV head.

        These tokens' queries Q [queries, H] go through the matrix unit by 32: scores [queries, slots] = Q · K, page by
        page, then one online-softmax step for each query, then value sums [queries, H] += weights · V. So scores and
        weights stay in the level-1 cache, and pages in the level-2 cache. Slots are multiplied in steps of 32. If the
        last step holds slots from `end_slot` on, no query attends to these, and their values may be NaN. So the values
        of this step are copied to `self.edge`, with zeros in these slots. With `end_slot` 70, slots 0 … 63 are
        multiplied in place and slots 64 … 69 from the copy (`edge_slot` is 64).
        """
        code, build, mul, shape = self.code, self.code.build, self.code.build.mul, self.shape
        first_entry, block_start = self.start_of(block)
        # The first token sees the first slot and the last token the last one: positions ascend in a query tile, and the
        # tokens of a shared tile attend to whole pages.
        begin_slot, _ = self.visible_slots(begin_token, block_start)
        _, end_slot = self.visible_slots(build.sub(end_token, I64(1)), block_start)
        first_query = mul(begin_token, I64(shape.group_size))
        num_queries = mul(build.sub(end_token, begin_token), I64(shape.group_size))
        # The first step may begin before `begin_slot`: its earlier slots are written, and have weight 0.
        begin_step, edge_step = (build.sdiv(slot, I64(STEP_SLOTS)) for slot in (begin_slot, end_slot))
        edge_slot = mul(edge_step, I64(STEP_SLOTS))
        has_edge = build.icmp_signed("<", edge_slot, end_slot)
        end_of_steps = build.add(edge_slot, build.select(has_edge, I64(STEP_SLOTS), I64(0)))

        self.locate_pages(block, first_entry)
        with build.if_then(has_edge):
            self._copy_edge(edge_slot, end_slot)

        def attend_rows(row: ir.Value, num_tiles: int) -> None:
            """Emit the attention of `num_tiles` tiles of rows, up to the last step that their last token sees."""
            query = build.add(first_query, row)
            end_row = code.min(build.add(row, I64(num_tiles * TILE)), num_queries)
            last_token = build.sdiv(build.sub(end_row, I64(1)), I64(shape.group_size))
            _, end_visible = self.visible_slots(build.add(begin_token, last_token), block_start)
            own_end_step = build.sdiv(build.add(end_visible, I64(STEP_SLOTS - 1)), I64(STEP_SLOTS))
            own_end_slot = code.min(mul(own_end_step, I64(STEP_SLOTS)), end_of_steps)
            own_steps = SlotRange(begin_step, code.min(own_end_step, edge_step))
            sees_edge = build.icmp_signed(">", own_end_slot, edge_slot)

            def update_queries(score_row: ir.Value) -> None:
                rows = [build.add(score_row, I64(j)) for j in range(QUERIES_AT_ONCE)]
                self.update_softmax([build.add(query, row) for row in rows], rows, block_start, own_end_slot)

            with build.if_then(build.icmp_signed("<", mul(begin_step, I64(STEP_SLOTS)), own_end_slot)):
                is_first = build.icmp_signed("==", row, I64(0))
                self.score_rows(query, I64(0), num_tiles, block, first_entry, begin_step, own_end_slot, is_first)
                code.loop(0, build.sub(end_row, row), update_queries, step=QUERIES_AT_ONCE)
                self.sum_rows(query, I64(0), num_tiles, own_steps, sees_edge)

        self._by_tiles(num_queries, attend_rows)

    def start_of(self, block: PageBlock) -> tuple[ir.Value, ir.Value]:
        """Return the first entry of the whole block that a block is or is part of, and the position of its slot 0."""
        build, pages = self.code.build, I64(self.pages_per_block)
        first_entry = build.mul(build.sdiv(block.begin, pages), pages)
        return first_entry, build.mul(first_entry, I64(self.shape.page_size))

    def locate_pages(self, block: PageBlock, first_entry: ir.Value) -> None:
        """Emit the record of where a block's pages lie; keys are as many words as values."""
        code, shape = self.code, self.shape

        def locate_page(entry: ir.Value) -> None:
            offset = code.build.mul(block.page_of(entry), I64(shape.value_words * shape.head_size))
            code.store(offset, self.page_values, code.build.sub(entry, first_entry))

        code.loop(block.begin, block.end, locate_page)

    def score_rows(
        self,
        query: ir.Value,
        score_row: ir.Value,
        num_tiles: int,
        block: PageBlock,
        first_entry: ir.Value,
        begin_step: ir.Value,
        end_slot: ir.Value,
        is_first: ir.Value,
    ) -> None:
        """Compute the scores of `num_tiles` (1 or 2) tiles of 16 queries from `query` on, 32 slots at a time.

        They go to rows of scores from `score_row` on. The slots are those of the block from step `begin_step` on up to
        `end_slot`, a multiple of 32. The first queries of a block read its pages from memory: beside each step of keys,
        the values of the same slots are prefetched, and the keys of a page that this thread will probably attend to
        next.
        """
        code, build, mul, shape = self.code, self.code.build, self.code.build.mul, self.shape
        page_words = I64(shape.key_words * shape.page_size)
        steps_per_page = shape.page_size // STEP_SLOTS
        a = self.queries_from(query).row_tiles(code)
        scores = self.scores_from(score_row)

        def score_page(entry: ir.Value) -> None:
            index = build.sub(entry, first_entry)
            page, ahead = block.page_of(entry), block.prefetched(entry)
            keys = self.matrix(self.keys, mul(page, page_words), shape.page_size)
            first_step = mul(index, I64(steps_per_page))
            end_step = code.min(build.add(first_step, I64(steps_per_page)), build.sdiv(end_slot, I64(STEP_SLOTS)))

            def score_step(step: ir.Value) -> None:
                # A slot is a column of both matrices: a float32 score, or one pair of bfloat16 of a key.
                in_page = build.sub(step, first_step)
                b = Matrix(keys.at(code, 0, mul(in_page, I64(4 * STEP_SLOTS))), keys.stride).column_tiles(code)
                c = Matrix(scores.at(code, 0, mul(step, I64(4 * STEP_SLOTS))), scores.stride)
                with build.if_then(is_first):
                    part = page_words.constant // steps_per_page
                    offset = mul(in_page, I64(part))
                    code.prefetch(self.values, build.add(mul(page, page_words), offset), I32, part)
                    code.prefetch(self.keys, build.add(mul(ahead, page_words), offset), I32, part)
                self.matrix_unit.clear_sums(num_tiles)
                self.matrix_unit.multiply(a, b, num_tiles, 0, shape.key_words // TILE)
                self.matrix_unit.store_sums(c, num_tiles)

            code.loop(code.max(first_step, begin_step), end_step, score_step)

        code.loop(block.begin, block.end, score_page)

    def sum_rows(
        self, query: ir.Value, score_row: ir.Value, num_tiles: int, steps: SlotRange, has_edge: ir.Value
    ) -> None:
        """Add weights · V to the value sums of `num_tiles` (1 or 2) tiles of 16 queries from `query` on.

        Their weights are in the rows from `score_row` on. `steps` of 32 slots are multiplied where they lie, page after
        page, and then the copied step if there is one.
        """
        code, build, mul, shape = self.code, self.code.build, self.code.build.mul, self.shape
        steps_per_page = shape.page_size // STEP_SLOTS
        weights, sums = self.weights_from(score_row), self.sums_from(query)
        # The weights of the copied step: columns from its first slot on, 2 bytes per weight.
        edge_weights = Matrix(weights.at(code, 0, mul(steps.end, I64(2 * STEP_SLOTS))), weights.stride)
        first_page, end_page = (
            build.sdiv(slot, I64(steps_per_page))
            for slot in (steps.begin, build.add(steps.end, I64(steps_per_page - 1)))
        )

        def add_lanes(lane: ir.Value) -> None:
            """Add the steps of each page, then the copied step if there is one, to 32 lanes of the sums."""
            byte_offset = mul(lane, I64(4))
            c = Matrix(sums.at(code, 0, byte_offset), sums.stride)
            self.matrix_unit.load_sums(c, num_tiles)

            def add_page(index: ir.Value) -> None:
                first_step = mul(index, I64(steps_per_page))
                page_weights = Matrix(weights.at(code, 0, mul(first_step, I64(2 * STEP_SLOTS))), weights.stride)
                values = self.matrix(self.values, code.load(self.page_values, index, I64), shape.head_size)
                b = Matrix(values.at(code, 0, byte_offset), values.stride)
                begin = build.sub(code.max(steps.begin, first_step), first_step)
                end = code.min(build.sub(steps.end, first_step), I64(steps_per_page))
                tiles = page_weights.row_tiles(code), b.column_tiles(code)
                self.matrix_unit.multiply(*tiles, num_tiles, begin, end)

            code.loop(first_page, end_page, add_page)
            with build.if_then(has_edge):
                edge_values = Matrix(
                    self.matrix(self.edge, I64(0), shape.head_size).at(code, 0, byte_offset), I64(4 * shape.head_size)
                )
                edge_tiles = edge_weights.row_tiles(code), edge_values.column_tiles(code)
                self.matrix_unit.multiply(*edge_tiles, num_tiles, 0, 1)
            self.matrix_unit.store_sums(c, num_tiles)

        code.loop(0, shape.head_size, add_lanes, step=PANEL)

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

    def _copy_edge(self, begin: ir.Value, end: ir.Value) -> None:
        """Emit a copy of the values of a block's slots `begin` … `end` − 1 into `self.edge`, with zeros up to 32 slots.

        `begin` is a multiple of 32. Row w of words holds slots 2w and 2w + 1. With `begin` 64 and `end` 69, rows 0 and
        1 of `edge` are copied whole, of row 2 only the lower halves (slot 68), and rows 3 … 15 are zeros.
        """
        code, build, lanes = self.code, self.code.build, self.head_lanes
        head_size, page_size = I64(self.shape.head_size), I64(self.shape.page_size)
        offset = code.load(self.page_values, build.sdiv(begin, page_size), I64)
        values = self.matrix(self.values, offset, self.shape.head_size)
        first_pair, num_slots = build.sdiv(build.srem(begin, page_size), I64(2)), build.sub(end, begin)

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

    def queries_from(self, query: ir.Value) -> Matrix:
        """Return the queries from `query` on."""
        return self.matrix(self.queries, self.code.build.mul(query, I64(self.shape.key_words)), self.shape.key_words)

    def sums_from(self, query: ir.Value) -> Matrix:
        """Return the value sums of the queries from `query` on."""
        return self.matrix(self.value_sums, self.code.build.mul(query, I64(self.shape.head_size)), self.shape.head_size)

    def scores_from(self, row: ir.Value) -> Matrix:
        """Return the scores from a row on."""
        return self.matrix(self.softmax.scores, self.code.build.mul(row, I64(self.score_stride)), self.score_stride)

    def weights_from(self, row: ir.Value) -> Matrix:
        """Return the weights from a row on."""
        return self.matrix(self.softmax.weights, self.code.build.mul(row, I64(self.weight_stride)), self.weight_stride)

    def matrix(self, base: ir.Value, first_word: ir.Value, words_a_row: int) -> Matrix:
        """Return the matrix of 32-bit words that begins `first_word` words after `base`."""
        return Matrix(self.code.build.gep(base, [self.code.build.mul(first_word, I64(4))]), I64(4 * words_a_row))


def fits_stack(shape: Shape, num_score_rows: int) -> bool:
    """Return whether a tile's queries and sums, and so many rows of scores and weights, fit `MAX_STACK_BYTES`."""
    num_slots = _pages_per_block(shape) * shape.page_size
    words_of_scores = num_score_rows * (num_slots + num_slots // 2 + 2 * STRIDE_PADDING)
    # The unit also computes rows beyond the last query, fewer than `TILE` = 16, which need memory too.
    words_of_queries = (shape.num_queries + TILE) * (shape.key_words + shape.head_size + LONG_LANES)
    return 4 * (words_of_scores + words_of_queries) <= MAX_STACK_BYTES


def _pages_per_block(shape: Shape) -> int:
    return max(1, BLOCK_SLOTS // shape.page_size)
