"""The queries of one KV head for the tokens of a tile, and their sums, in native code.

    page by page:  scores [queries, Z] ──▶ weights ──▶ sums [queries, H]       the weights: see `online_softmax`

The queries of all tokens of a tile, one token after the other, and their sums lie in memory of the unit's own. With
bfloat16 pages, queries and weights are rounded to bfloat16 and lie in pairs, see `pages`. Sums are float32. Pages of
one byte a number are read without their scales, see `byte_pages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from llvmlite import ir

from ...native.llvm import F32, I8, I16, I32, I64, Code, constant, lanes_for
from .byte_pages import as_float32
from .online_softmax import OnlineSoftmax, SlotRange
from .shape import Shape

TOKENS_AHEAD = 8
"""Tokens whose queries are prefetched while others are copied."""


class PageBlock(NamedTuple):
    """Entries `begin` … `end` − 1 of a page table, at least one, that are attended to in one step; int64."""

    begin: ir.Value
    end: ir.Value
    end_of_row: ir.Value
    """End of all entries that are attended to."""
    page_of: Callable[[ir.Value], ir.Value]
    """Table entry → the page's index among the pages of all layers and KV heads."""
    prefetched: Callable[[ir.Value], ir.Value]
    """Table entry → a page that this thread will probably attend to after this block."""


class Queries(ABC):
    """The queries of a tile, their softmax and their sums. Subclasses multiply, by vectors or by the matrix unit."""

    def __init__(self, code: Code, shape: Shape, *, keys: ir.Value, values: ir.Value) -> None:
        """Emit the allocation of a tile's queries, scores, weights, sums and softmax state on the thread's stack.

        `keys` and `values` are the addresses of the keys and values of all layers. A query is one head of one token.
        Queries are multiplied together while all their sums stay in registers: at most 6 queries with AVX-512. So a
        group of 2 heads takes 3 tokens at a time (`tokens_together`), and a group of 8 heads takes one token at a time,
        heads 0 … 3 and then 4 … 7 (`head_chunks`). A span is the slots, or lanes of a head, that one iteration takes.
        """
        self.code, self.shape = code, shape
        self.keys, self.values = keys, values
        self.word = I32 if shape.is_bf16_packed else F32
        self.element = self.word if shape.byte_dtype is None else I8
        """Type of what lies in pages; a query and a weight are words."""
        # AVX-512 has 32 registers: 4 × 6 hold sums, and 4 hold keys or values. AVX2 has 16: 2 × 4 and 2.
        vectors_at_once, queries_at_once = (4, 6) if shape.has_avx512 else (2, 4)
        self.slot_lanes, self.slot_span = _lanes_and_span(shape.page_size, vectors_at_once)
        self.head_lanes, self.head_span = _lanes_and_span(shape.head_size, vectors_at_once)
        self.tokens_together = max(1, queries_at_once // shape.group_size)
        num_chunks = -(-shape.group_size // queries_at_once)
        bounds = [shape.group_size * chunk // num_chunks for chunk in range(num_chunks + 1)]
        self.head_chunks = [range(begin, end) for begin, end in pairwise(bounds)]
        """Ranges of a token's query heads that are multiplied together."""
        num_queries, num_score_rows = self.num_allocated_queries()
        self.queries = code.allocate(self.word, num_queries * shape.key_words)
        self.value_sums = code.allocate(F32, num_queries * shape.head_size)
        self.softmax = OnlineSoftmax(
            code,
            shape,
            num_queries=num_queries,
            num_rows=num_score_rows,
            score_stride=self.score_stride,
            weight_stride=self.weight_stride,
            value_sums=self.value_sums,
        )
        # Of each token of the tile, see `set_token`.
        num_tokens = -(-num_queries // shape.group_size)
        self.tokens, self.rows, self.lens = (code.allocate(I64, num_tokens) for _ in range(3))

    @property
    def pages_per_block(self) -> int:
        """Return how many pages are attended to in one step of the online softmax."""
        return 1

    @property
    def score_stride(self) -> int:
        """Return the distance in float32 numbers from one query's scores to the next one's."""
        return self.shape.page_size

    @property
    def weight_stride(self) -> int:
        """Return the distance in words from one query's weights to the next one's."""
        return self.shape.value_words

    @abstractmethod
    def attend_block(self, begin_token: ir.Value, end_token: ir.Value, block: PageBlock) -> None:
        """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to a block of pages of a KV head."""

    @abstractmethod
    def num_allocated_queries(self) -> tuple[int, int]:
        """Return the number of queries that memory is allocated for, and of those whose scores are kept at once."""

    @abstractmethod
    def begin(self) -> None:
        """Emit what comes before the first page."""

    @abstractmethod
    def end(self) -> None:
        """Emit what comes after the last page."""

    def set_token(self, i: ir.Value, token: ir.Value, row: ir.Value, positions: ir.Value) -> None:
        """Emit the record of token i of the tile: its index in the step, its row, and its length: position + 1."""
        self.code.store(token, self.tokens, i)
        self.code.store(row, self.rows, i)
        self.code.store(self.code.build.add(self.code.load_index(positions, token), I64(1)), self.lens, i)

    def row(self, i: ir.Value) -> ir.Value:
        """Return the row of the step that token i of the tile belongs to."""
        return self.code.load(self.rows, i, I64)

    def num_pages(self, i: ir.Value) -> ir.Value:
        """Return the number of pages up to the position of token i."""
        build, page_size = self.code.build, self.shape.page_size
        return build.sdiv(build.add(self.code.load(self.lens, i, I64), I64(page_size - 1)), I64(page_size))

    def first_page(self, i: ir.Value) -> ir.Value:
        """Return the index in its row's page table of the first page that token i attends to."""
        return self.code.build.sdiv(self._first_visible(i), I64(self.shape.page_size))

    def _first_visible(self, i: ir.Value) -> ir.Value:
        """Return the first position that token i attends to: later than 0 with a window."""
        if self.shape.window is None:
            return I64(0)
        return self.code.max(self.code.build.sub(self.code.load(self.lens, i, I64), I64(self.shape.window)), I64(0))

    def visible_slots(self, i: ir.Value, block_start: ir.Value) -> SlotRange:
        """Return the slots of a block that token i of the tile attends to; `block_start` is the position of slot 0."""
        code, build = self.code, self.code.build
        first_visible = code.max(build.sub(self._first_visible(i), block_start), I64(0))
        length = build.sub(code.load(self.lens, i, I64), block_start)
        return SlotRange(first_visible, code.min(length, I64(self.pages_per_block * self.shape.page_size)))

    def first_query_of_token(self, i: ir.Value, head: ir.Value) -> ir.Value:
        """Return the index of token i's first query for a KV head in the array of all queries, [T, K, G]."""
        build = self.code.build
        heads_before = build.mul(self.code.load(self.tokens, i, I64), I64(self.shape.num_kv_heads))
        return build.mul(build.add(heads_before, head), I64(self.shape.group_size))

    def load_words(self, base: ir.Value, offsets: Iterable[ir.Value], lanes: int) -> list[ir.Value]:
        """Load a vector of a page's keys or values from each offset on, as words; bytes become float32."""
        loaded = self.code.load_vectors(base, offsets, self.element, lanes)
        if self.shape.byte_dtype is None:
            return loaded
        return [as_float32(self.code, numbers, self.shape.byte_dtype) for numbers in loaded]

    def _scale_of(self, scales: ir.Value, head: ir.Value, *, of_values: bool) -> ir.Value:
        """Return the scale of the keys or of the values of a KV head in all lanes; `scales` is [2, K]."""
        index = self.code.build.add(head, I64(self.shape.num_kv_heads)) if of_values else head
        return self.code.broadcast(self.code.load(scales, index, F32), self.head_lanes)

    def prefetch(self, i: ir.Value, head: ir.Value, q: ir.Value, out: ir.Value) -> None:
        """Emit prefetches of the queries `TOKENS_AHEAD` tokens after token i, and of the outputs of token i.

        The heads of a token are too short, and too far from those of the next one, for the processor to prefetch them.
        """
        code, build, shape = self.code, self.code.build, self.shape
        num_values = shape.group_size * shape.head_size
        first_value = build.mul(self.first_query_of_token(i, head), I64(shape.head_size))
        value_ahead = build.add(first_value, I64(TOKENS_AHEAD * shape.num_kv_heads * num_values))
        code.prefetch(q, value_ahead, F32, num_values)
        code.prefetch(out, first_value, F32, num_values, for_writing=True)

    def start(self, i: ir.Value, head: ir.Value, q: ir.Value, sinks: ir.Value, scales: ir.Value) -> None:
        """Emit code that copies the G queries of token i and KV head `head` into the tile, and starts their softmax.

        `q` holds all queries of the step, float32 [T, K, G, H], which are multiplied by the scale and rounded to the
        dtype of the pages. With pages of one byte they stay float32, and are multiplied by the keys' scale of the head
        too; `scales`, float32 [2, K], holds those of keys and of values. Value sums start at 0, the running maximum at
        a finite minimum and the weight sum at 0. With attention sinks, whose logits `sinks` [K, G] holds, a sink counts
        as a first key with value zero: its logit is the first maximum, and the weight sum starts at 1.
        """
        code, build, shape = self.code, self.code.build, self.shape
        first_query = build.mul(i, I64(shape.group_size))

        def start_query(query_head: ir.Value) -> None:
            sink = None
            if shape.has_sinks:
                sink = code.load(sinks, build.add(build.mul(head, I64(shape.group_size)), query_head), F32)
            self.softmax.start(build.add(first_query, query_head), sink)

        code.loop(0, shape.group_size, start_query)
        first_source = self.first_query_of_token(i, head)
        # In bfloat16 a query of an odd head size ends with a zero.
        stored_size = 2 * shape.key_words if shape.is_bf16_packed else shape.head_size
        key_scale = None if shape.byte_dtype is None else self._scale_of(scales, head, of_values=False)

        def copy_query(query_head: ir.Value) -> None:
            source = build.mul(build.add(first_source, query_head), I64(shape.head_size))
            target = build.mul(build.add(first_query, query_head), I64(stored_size))

            def copy_lanes(lane: ir.Value) -> None:
                values = code.load_vector(q, build.add(source, lane), F32, self.head_lanes)
                scaled = build.fmul(values, constant(values.type, shape.scale))
                if key_scale is not None:
                    scaled = build.fmul(scaled, key_scale)
                if shape.is_bf16_packed:
                    has_rounding = shape.has_bf16_instructions(self.head_lanes)
                    code.store_rounded(scaled, self.queries, build.add(target, lane), has_avx512_bf16=has_rounding)
                else:
                    code.store_vector(scaled, self.queries, build.add(target, lane))

            code.loop(0, shape.head_size, copy_lanes, step=self.head_lanes)
            if stored_size > shape.head_size:
                code.store(I16(0), self.queries, build.add(target, I64(shape.head_size)))

        code.loop(0, shape.group_size, copy_query)
        zeros = constant(ir.VectorType(F32, self.head_lanes), 0.0)
        first_sum = build.mul(first_query, I64(shape.head_size))

        def clear_sums(lane: ir.Value) -> None:
            code.store_vector(zeros, self.value_sums, build.add(first_sum, lane))

        code.loop(0, shape.group_size * shape.head_size, clear_sums, step=self.head_lanes)

    def finish(self, i: ir.Value, head: ir.Value, out: ir.Value, scales: ir.Value) -> None:
        """Emit the outputs of the tile's token i for the G queries of KV head `head`: value sums ÷ weight sums.

        Each output has H lanes and is written to `out` [T, K, G, H]; it is zeros for a query that attended to no key.
        With pages of one byte it is multiplied by the values' scale of the head, in `scales` [2, K].
        """
        value_scale = None if self.shape.byte_dtype is None else self._scale_of(scales, head, of_values=True)
        code, build, group_size, head_size = self.code, self.code.build, self.shape.group_size, self.shape.head_size
        first_query, out_query = build.mul(i, I64(group_size)), self.first_query_of_token(i, head)

        def finish_query(query_head: ir.Value) -> None:
            """Write the output of one of the G queries. Without any key both sums are 0, so 0 is divided by 1."""
            weight_sum = self.softmax.weight_sum(build.add(first_query, query_head))
            is_empty = build.fcmp_ordered("==", weight_sum, constant(F32, 0.0))
            weight_sum = code.broadcast(build.select(is_empty, constant(F32, 1.0), weight_sum), self.head_lanes)

            def divide_lanes(lane: ir.Value) -> None:
                source, target = (
                    build.add(build.mul(build.add(base_query, query_head), I64(head_size)), lane)
                    for base_query in (first_query, out_query)
                )
                values = code.load_vector(self.value_sums, source, F32, self.head_lanes)
                mean = build.fdiv(values, weight_sum)
                code.store_vector(mean if value_scale is None else build.fmul(mean, value_scale), out, target)

            code.loop(0, head_size, divide_lanes, step=self.head_lanes)

        code.loop(0, group_size, finish_query)

    def update_softmax(
        self, queries: Sequence[ir.Value], score_rows: Sequence[ir.Value], block_start: ir.Value, end_slot: ir.Value
    ) -> None:
        """Emit the softmax step of some queries for the slots of a block before `end_slot`.

        Query `queries[j]` of the tile has row `score_rows[j]` of scores and of weights; `block_start` is the position
        of slot 0.
        """
        tokens = (self.code.build.sdiv(query, I64(self.shape.group_size)) for query in queries)
        visible = [self.visible_slots(token, block_start) for token in tokens]
        self.softmax.update(queries, score_rows, visible, end_slot)


def _lanes_and_span(size: int, vectors_at_once: int) -> tuple[int, int]:
    """Return the lanes of one vector, and the lanes of all vectors that one iteration takes; both divide `size`.

    With AVX-512 and at most 4 vectors at once, size 96 gives (16, 48): 6 vectors, 3 per iteration.
    """
    lanes = lanes_for(size)
    return lanes, lanes * max(count for count in range(1, vectors_at_once + 1) if size // lanes % count == 0)
