"""The queries of one KV head for the tokens of a tile, and their running softmax, in native code.

    page by page:  scores [queries, Z] ──▶ weights ──▶ sums [queries, H]       an online softmax

The queries of all tokens of a tile, one token after the other, and their sums lie in memory of the unit's own. With
bfloat16 pages, queries and weights are rounded to bfloat16 and lie in pairs, see `pages`; a weight is relative to the
maximum so far. Sums are float32. Pages of one byte a number are read without their scales, see `byte_pages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

from llvmlite import ir

from ...native.llvm import (
    EXP2_TERMS,
    EXP2_TERMS_FOR_BF16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LONG_LANES,
    Code,
    constant,
    lanes_for,
)
from ..xla.softmax import INITIAL_MAX
from .byte_pages import as_float32
from .page_shapes import words_of

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


class SlotRange(NamedTuple):
    """Consecutive slots `begin` … `end` − 1 of a page, int64 values; none if `end` ≤ `begin`."""

    begin: ir.Value
    end: ir.Value


@dataclass(frozen=True)
class Shape:
    """Sizes and features for which a handler of native attention is compiled."""

    is_bf16_packed: bool
    byte_dtype: str | None
    """Dtype of pages of one byte a number; None for others."""
    num_kv_heads: int
    group_size: int
    """Query heads per KV head."""
    head_size: int
    page_size: int
    scale: float
    """Factor of queries."""
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    max_tokens: int
    """Tokens of a tile at most."""
    has_avx512: bool
    """Vectors have 16 lanes, not 8."""
    has_avx512_bf16: bool
    """The processor multiplies pairs of bfloat16 (AVX512-BF16)."""
    has_amx: bool
    """The processor has a matrix unit (AMX)."""

    @property
    def key_words(self) -> int:
        """Return the words of the key of one slot, and of one query."""
        return words_of(self.head_size, is_bf16_packed=self.is_bf16_packed)

    @property
    def value_words(self) -> int:
        """Return the words of one lane of a page's values, and of one query's weights."""
        return words_of(self.page_size, is_bf16_packed=self.is_bf16_packed)

    @property
    def num_queries(self) -> int:
        """Return the largest number of queries of a tile and KV head."""
        return self.max_tokens * self.group_size

    @property
    def name(self) -> str:
        """Return the name of the handler."""
        sizes = (getattr(self, name) for name in self.__dataclass_fields__)
        name = "_".join(["jpaged_attend", *(str(int(x) if isinstance(x, bool) else x) for x in sizes)])
        return name.replace(".", "p")


class Queries(ABC):
    """The state of a tile's queries, and their softmax. Subclasses multiply, by vectors or by the matrix unit."""

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
        self.scores = code.allocate(F32, num_score_rows * self.score_stride)
        """Scores of a block of pages, and in float32 also the weights that replace them."""
        self.weights = code.allocate(I32, num_score_rows * self.weight_stride) if shape.is_bf16_packed else self.scores
        if shape.page_size % 2 and shape.is_bf16_packed:
            # The upper half of a query's last word of weights is never written, but is multiplied: it must be 0.
            code.loop(0, num_score_rows * self.weight_stride, lambda word: code.store(I32(0), self.weights, word))
        self.running_max = code.allocate(F32, num_queries)
        self.weight_sums = code.allocate(F32, num_queries * self.slot_lanes)
        """Each query's sum of weights, lane by lane: the lanes are added at the end."""
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

    def exp2(self, x: ir.Value) -> ir.Value:
        """Return the weight of a score x below the maximum, x ≤ 0, as exactly as weights are stored."""
        return self.code.exp2(x, EXP2_TERMS_FOR_BF16 if self.shape.is_bf16_packed else EXP2_TERMS)

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
            query, initial_max = build.add(first_query, query_head), constant(F32, INITIAL_MAX)
            if shape.has_sinks:
                initial_max = code.load(sinks, build.add(build.mul(head, I64(shape.group_size)), query_head), F32)
            code.store(initial_max, self.running_max, query)
            # A sink's weight is 1, and in a single lane.
            first_sum = [1.0 if shape.has_sinks and lane == 0 else 0.0 for lane in range(self.slot_lanes)]
            self._store_weight_sum(ir.Constant(ir.VectorType(F32, self.slot_lanes), first_sum), query)

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
                    has_rounding = self._fills_avx512(self.head_lanes)
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
            weight_sum = code.reduce(self._weight_sum(build.add(first_query, query_head)), build.fadd)
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

    def _fills_avx512(self, lanes: int) -> bool:
        """Return whether the processor has instructions for pairs of bfloat16, and vectors of `lanes` fit them."""
        return self.shape.has_avx512_bf16 and lanes == LONG_LANES

    def update_softmax(
        self, queries: Sequence[ir.Value], score_rows: Sequence[ir.Value], block_start: ir.Value, end_slot: ir.Value
    ) -> None:
        """Emit one step of the online softmax for some queries at once: a block's scores become weights.

        Query `queries[j]` of the tile has its scores and its weights, [rows, slots], in row `score_rows[j]`. Scores are
        capped first if the layer has a soft cap. weight[z] = 2^(score[z] − new maximum) for slots z < `end_slot`, and
        0 for a slot that the query must not attend to; `block_start` is the position of slot 0. If a maximum has grown,
        weight sum and value sums of its query are multiplied by 2^(old − new maximum). Then the weights are added to
        the weight sum. The block's values are added by the caller.

        A maximum, a sum or an exponential waits for its own steps one after the other: those of several queries fill
        these waits, and each query's are the same as alone. Scores are only masked from the first vector on that holds
        a slot which some query must not see.
        """
        code, build, lanes = self.code, self.code.build, self.slot_lanes
        tokens = (build.sdiv(query, I64(self.shape.group_size)) for query in queries)
        visible = [self.visible_slots(token, block_start) for token in tokens]
        begins, ends = zip(*visible, strict=True)
        has_all_begun = build.icmp_signed("<=", reduce(code.max, begins), I64(0))
        first_hidden = build.select(has_all_begun, code.max(reduce(code.min, ends, end_slot), I64(0)), I64(0))
        rows = [ScoreRow(self, row, slots) for row, slots in zip(score_rows, visible, strict=True)]
        with build.if_else(build.icmp_signed("==", first_hidden, end_slot)) as (all_visible, some_hidden):
            with all_visible:
                self._update_rows(queries, rows, end_slot, end_slot)
            with some_hidden:
                first_masked = build.sub(first_hidden, build.srem(first_hidden, I64(lanes)))
                self._update_rows(queries, rows, first_masked, end_slot)

    def _update_rows(
        self, queries: Sequence[ir.Value], rows: Sequence[ScoreRow], first_masked: ir.Value, end_slot: ir.Value
    ) -> None:
        """Emit what `update_softmax` emits; scores are masked from slot `first_masked` on, a multiple of a vector."""
        code, build, lanes = self.code, self.code.build, self.slot_lanes

        def each_vector(step: Callable[..., ir.Value], carried: Sequence[ir.Value]) -> Sequence[ir.Value]:
            """Emit `step(row, slot, the row's value, has_mask)` for each vector of slots; return the last values."""

            def each_row(slot: ir.Value, *values: ir.Value, has_mask: bool) -> list[ir.Value]:
                return [step(row, slot, value, has_mask) for row, value in zip(rows, values, strict=True)]

            carried = code.loop(0, first_masked, partial(each_row, has_mask=False), step=lanes, carried=carried)
            if first_masked is end_slot:
                return carried
            return code.loop(first_masked, end_slot, partial(each_row, has_mask=True), step=lanes, carried=carried)

        old_maxima = [code.load(self.running_max, query, F32) for query in queries]
        largest = each_vector(ScoreRow.update_max, [code.broadcast(old_max, lanes) for old_max in old_maxima])
        new_maxima = [code.reduce(vector, code.maximum) for vector in largest]
        for row, new_max in zip(rows, new_maxima, strict=True):
            row.max_in_lanes = code.broadcast(new_max, lanes)
        zeros = constant(ir.VectorType(F32, lanes), 0.0)
        block_sums = each_vector(ScoreRow.add_weights, [zeros] * len(rows))
        for query, old_max, new_max, block_sum in zip(queries, old_maxima, new_maxima, block_sums, strict=True):
            # An unchanged maximum needs no rescaling of earlier sums; a NaN counts as a change.
            with build.if_then(build.fcmp_unordered("!=", old_max, new_max)):
                self._rescale(query, old_max, new_max)
            self._store_weight_sum(build.fadd(self._weight_sum(query), block_sum), query)

    def _rescale(self, query: ir.Value, old_max: ir.Value, new_max: ir.Value) -> None:
        """Emit the change of a query's maximum: its earlier sums are multiplied by 2^(old − new maximum)."""
        code, build, lanes = self.code, self.code.build, self.head_lanes
        # All lanes of `decay` are equal.
        decay = code.exp2(code.broadcast(build.fsub(old_max, new_max), lanes))
        decay_of_sum = code.broadcast(build.extract_element(decay, I32(0)), self.slot_lanes)
        self._store_weight_sum(build.fmul(self._weight_sum(query), decay_of_sum), query)
        code.store(new_max, self.running_max, query)
        first_sum = build.mul(query, I64(self.shape.head_size))

        def rescale(lane: ir.Value) -> None:
            element = build.add(first_sum, lane)
            rescaled = build.fmul(code.load_vector(self.value_sums, element, F32, lanes), decay)
            code.store_vector(rescaled, self.value_sums, element)

        code.loop(0, self.shape.head_size, rescale, step=lanes)

    def _weight_sum(self, query: ir.Value) -> ir.Value:
        """Return a query's sum of weights, lane by lane."""
        offset = self.code.build.mul(query, I64(self.slot_lanes))
        return self.code.load_vector(self.weight_sums, offset, F32, self.slot_lanes)

    def _store_weight_sum(self, weight_sum: ir.Value, query: ir.Value) -> None:
        self.code.store_vector(weight_sum, self.weight_sums, self.code.build.mul(query, I64(self.slot_lanes)))

    def store_weights(self, weights: ir.Value, element: ir.Value) -> None:
        """Store a vector of weights in the type of pages, from the element at `element` on."""
        if self.shape.is_bf16_packed:
            has_rounding = self._fills_avx512(self.slot_lanes)
            self.code.store_rounded(weights, self.weights, element, has_avx512_bf16=has_rounding)
        else:
            self.code.store_vector(weights, self.weights, element)


def _lanes_and_span(size: int, vectors_at_once: int) -> tuple[int, int]:
    """Return the lanes of one vector, and the lanes of all vectors that one iteration takes; both divide `size`.

    With AVX-512 and at most 4 vectors at once, size 96 gives (16, 48): 6 vectors, 3 per iteration.
    """
    lanes = lanes_for(size)
    return lanes, lanes * max(count for count in range(1, vectors_at_once + 1) if size // lanes % count == 0)


class ScoreRow:
    """A query's scores of a block of pages, and the weights that replace them; slots out of `visible` can be masked."""

    max_in_lanes: ir.Value
    """The maximum to which weights are relative, in all lanes."""

    def __init__(self, queries: Queries, row: ir.Value, visible: SlotRange) -> None:
        """Emit what all of the row's vectors share. `row` counts rows of scores."""
        code, build, lanes = queries.code, queries.code.build, queries.slot_lanes
        self._queries = queries
        self._first_score = build.mul(row, I64(queries.score_stride))
        # In elements: a word of bfloat16 weights holds two.
        has_pairs = queries.shape.is_bf16_packed
        self._first_weight = build.mul(row, I64(2 * queries.weight_stride)) if has_pairs else self._first_score
        self._bounds = [code.broadcast(build.trunc(bound, I32), lanes) for bound in visible]

    def update_max(self, slot: ir.Value, largest: ir.Value, has_mask: bool) -> ir.Value:
        """Return the larger of `largest` and a vector of scores; with a soft cap these are capped, in memory too."""
        queries, code = self._queries, self._queries.code
        score = self._load(slot)
        if queries.shape.soft_cap is not None:
            score = code.soft_capped(score, queries.shape.soft_cap)
            code.store_vector(score, queries.scores, self._offset(slot))
        return code.maximum(self._masked(score, slot, INITIAL_MAX) if has_mask else score, largest)

    def add_weights(self, slot: ir.Value, weight_sum: ir.Value, has_mask: bool) -> ir.Value:
        """Store the weights of a vector of slots; return them plus `weight_sum`, lane by lane."""
        queries, build = self._queries, self._queries.code.build
        weight = queries.exp2(build.fsub(self._load(slot), self.max_in_lanes))
        if has_mask:
            weight = self._masked(weight, slot, 0.0)
        queries.store_weights(weight, build.add(self._first_weight, slot))
        return build.fadd(weight_sum, weight)

    def _offset(self, slot: ir.Value) -> ir.Value:
        return self._queries.code.build.add(self._first_score, slot)

    def _load(self, slot: ir.Value) -> ir.Value:
        return self._queries.code.load_vector(self._queries.scores, self._offset(slot), F32, self._queries.slot_lanes)

    def _masked(self, values: ir.Value, slot: ir.Value, hidden: float) -> ir.Value:
        """Return `values` of the slots from `slot` on, with `hidden` in place of those that are masked."""
        code, build, lanes = self._queries.code, self._queries.code.build, self._queries.slot_lanes
        lane_indices = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        element = build.add(lane_indices, code.broadcast(build.trunc(slot, I32), lanes))
        is_behind = build.icmp_signed(">=", element, self._bounds[0])
        is_visible = build.and_(is_behind, build.icmp_signed("<", element, self._bounds[1]))
        return build.select(is_visible, values, constant(values.type, hidden))
