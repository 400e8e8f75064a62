"""The queries of one KV head for the tokens of a tile, and their running softmax, in native code.

    page by page:  scores [queries, Z] ──▶ weights ──▶ sums [queries, H]       an online softmax

The queries of all tokens of a tile, one token after the other, and their sums lie in memory of the unit's own. With
bfloat16 pages, queries and weights are rounded to bfloat16 and lie in pairs, see `pages`; a weight is relative to the
maximum so far. Sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from llvmlite import ir

from ...native.llvm import F32, I32, I64, LONG_LANES, Code, constant, lanes_for
from ..xla.softmax import INITIAL_MAX
from .pages import words_of


class SlotRange(NamedTuple):
    """Consecutive slots `begin` … `end` − 1 of a page, int64 values; none if `end` ≤ `begin`."""

    begin: ir.Value
    end: ir.Value


@dataclass(frozen=True)
class Shape:
    """Sizes and features for which a handler of native attention is compiled."""

    is_bf16_packed: bool
    num_kv_heads: int
    group_size: int
    """Query heads per KV head."""
    head_size: int
    page_size: int
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


class Queries:
    """Computes by vectors of a page's slots (scores) and of a head's lanes (sums); a subclass uses the matrix unit."""

    def __init__(self, code: Code, shape: Shape, *, keys: ir.Value, values: ir.Value) -> None:
        """Emit the allocation of a tile's queries, scores, weights, sums and softmax state on the thread's stack.

        `keys` and `values` are the addresses of the keys and values of all layers. A query is one head of one token.
        As many queries are multiplied together as have their sums in registers: those of `tokens_together` tokens, or
        one of `head_chunks` if a token has more. A span is the slots, or lanes of a head, that one iteration takes.
        """
        self.code, self.shape = code, shape
        self.keys, self.values = keys, values
        self.word = I32 if shape.is_bf16_packed else F32
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
        self.scores = code.allocate(F32, num_score_rows * shape.page_size)
        """Scores, and in float32 also the weights that replace them."""
        self.weights = code.allocate(I32, num_score_rows * shape.value_words) if shape.is_bf16_packed else self.scores
        if shape.page_size % 2 and shape.is_bf16_packed:
            # The upper half of a query's last word of weights is never written, but is multiplied: it must be 0.
            code.loop(0, num_score_rows * shape.value_words, lambda word: code.store(I32(0), self.weights, word))
        self.running_max, self.weight_sums = (code.allocate(F32, shape.num_queries) for _ in range(2))
        self.tokens, self.rows, self.lens = (code.allocate(I64, shape.max_tokens) for _ in range(3))

    def num_allocated_queries(self) -> tuple[int, int]:
        """Return the number of queries that memory is allocated for, and of those whose scores are kept at once."""
        return self.shape.num_queries, self.tokens_together * self.shape.group_size

    def begin(self) -> None:
        """Emit what comes before the first page."""

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

    def visible_slots(self, i: ir.Value, page_start: ir.Value) -> SlotRange:
        """Return the slots of a page that token i of the tile attends to; `page_start` is the position of slot 0."""
        code, build = self.code, self.code.build
        first_visible = code.max(build.sub(self._first_visible(i), page_start), I64(0))
        length = build.sub(code.load(self.lens, i, I64), page_start)
        return SlotRange(first_visible, code.min(length, I64(self.shape.page_size)))

    def first_query_of_token(self, i: ir.Value, head: ir.Value) -> ir.Value:
        """Return the index of token i's first query for a KV head in the array of all queries, [T, K, G]."""
        build = self.code.build
        heads_before = build.mul(self.code.load(self.tokens, i, I64), I64(self.shape.num_kv_heads))
        return build.mul(build.add(heads_before, head), I64(self.shape.group_size))

    def start(self, i: ir.Value, head: ir.Value, q: ir.Value, sinks: ir.Value) -> None:
        """Emit code that copies token i's queries of KV head `head` into the tile, and starts their softmax state.

        `q` holds all queries, [T, K, G, words], and `sinks` the sinks' logits, [K, G]. A sink counts as a first key
        with value zero: the maximum starts at its logit, and the sum of weights at 1.
        """
        code, build, shape = self.code, self.code.build, self.shape
        first_query = build.mul(i, I64(shape.group_size))

        def start_query(query_head: ir.Value) -> None:
            query, initial_max = build.add(first_query, query_head), constant(F32, INITIAL_MAX)
            if shape.has_sinks:
                initial_max = code.load(sinks, build.add(build.mul(head, I64(shape.group_size)), query_head), F32)
            code.store(initial_max, self.running_max, query)
            code.store(constant(F32, 1.0 if shape.has_sinks else 0.0), self.weight_sums, query)

        code.loop(0, shape.group_size, start_query)
        source, target = (build.mul(x, I64(shape.key_words)) for x in (self.first_query_of_token(i, head), first_query))

        def copy_word(element: ir.Value) -> None:
            code.store(code.load(q, build.add(source, element), self.word), self.queries, build.add(target, element))

        code.loop(0, shape.group_size * shape.key_words, copy_word)
        zeros = constant(ir.VectorType(F32, self.head_lanes), 0.0)
        first_sum = build.mul(first_query, I64(shape.head_size))

        def clear_sums(element: ir.Value) -> None:
            code.store_vector(zeros, self.value_sums, build.add(first_sum, element))

        code.loop(0, shape.group_size * shape.head_size, clear_sums, step=self.head_lanes)

    def finish(self, i: ir.Value, head: ir.Value, out: ir.Value) -> None:
        """Emit the outputs of token i's G queries of KV head `head`: value sums ÷ weight sums.

        They are written to `out` [T, K, G, H]; zeros for a query that attended to no key.
        """
        code, build, group_size, head_size = self.code, self.code.build, self.shape.group_size, self.shape.head_size
        first_query, out_query = build.mul(i, I64(group_size)), self.first_query_of_token(i, head)

        def finish_query(query_head: ir.Value) -> None:
            """Write the output of one of the token's G queries; a sum of 0 is divided by as 1."""
            weight_sum = code.load(self.weight_sums, build.add(first_query, query_head), F32)
            is_empty = build.fcmp_ordered("==", weight_sum, constant(F32, 0.0))
            weight_sum = code.broadcast(build.select(is_empty, constant(F32, 1.0), weight_sum), self.head_lanes)

            def divide_lanes(lane: ir.Value) -> None:
                source, target = (
                    build.add(build.mul(build.add(query, query_head), I64(head_size)), lane)
                    for query in (first_query, out_query)
                )
                values = code.load_vector(self.value_sums, source, F32, self.head_lanes)
                code.store_vector(build.fdiv(values, weight_sum), out, target)

            code.loop(0, head_size, divide_lanes, step=self.head_lanes)

        code.loop(0, group_size, finish_query)

    def attend_page(
        self, begin_token: ir.Value, end_token: ir.Value, page: ir.Value, next_page: ir.Value, page_start: ir.Value
    ) -> None:
        """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to one page of their KV head.

        `page` and `next_page` are indices among the pages of all layers and KV heads; `page_start` is the position
        of the page's slot 0. As many tokens are computed together as have their sums in registers, the remaining ones
        one by one: if 2 of 5 fit, tokens 0 to 3 in pairs and token 4 alone. Only the code for single tokens prefetches
        `next_page`, since a decode row is bound by memory.
        """
        code, build = self.code, self.code.build
        num_together, single_token = self.tokens_together, begin_token

        def attend_together(i: ir.Value) -> None:
            self._attend_tokens(i, num_together, page, None, page_start)

        if num_together > 1:
            single_token = build.sub(end_token, build.srem(build.sub(end_token, begin_token), I64(num_together)))
            code.loop(begin_token, single_token, attend_together, step=num_together)
        code.loop(single_token, end_token, lambda i: self._attend_tokens(i, 1, page, next_page, page_start))

    def _attend_tokens(
        self, i: ir.Value, num_tokens: int, page: ir.Value, next_page: ir.Value | None, page_start: ir.Value
    ) -> None:
        """Emit the attention of `num_tokens` tokens from i on to a page, one step of the online softmax.

        If `next_page` is not None, this page's values are prefetched while scores are computed, and the next page's
        keys while weighted values are added. Nothing is done if none of the tokens attends to a slot of the page.
        """
        code, build, shape = self.code, self.code.build, self.shape
        tokens = [build.add(i, I64(j)) for j in range(num_tokens)]
        # Slots that any of these tokens attends to. A slot has weight 0 for a token that must not attend to it.
        begins, ends = zip(*(self.visible_slots(token, page_start) for token in tokens), strict=True)
        begin, end = begins[0], ends[0]
        for token_begin, token_end in zip(begins[1:], ends[1:], strict=True):
            begin, end = code.min(begin, token_begin), code.max(end, token_end)
        first_query = build.mul(i, I64(shape.group_size))
        # Queries that are multiplied together, counted from `first_query`: head h of token t is query t × G + h.
        query_chunks = [
            [token * shape.group_size + head for token in range(num_tokens) for head in heads]
            for heads in self.head_chunks
        ]
        with build.if_then(build.icmp_signed("<", begin, end)):
            for index, queries in enumerate(query_chunks):
                self._compute_scores(first_query, queries, page, index == 0 and next_page is not None)

            def update_query(query_index: ir.Value) -> None:
                self.update_softmax(build.add(first_query, query_index), query_index, page_start, I64(shape.page_size))

            code.loop(0, num_tokens * shape.group_size, update_query)
            for index, queries in enumerate(query_chunks):
                page_to_prefetch = next_page if index == 0 else None
                self._add_weighted_values(first_query, queries, page, page_to_prefetch, SlotRange(begin, end))

    def _compute_scores(
        self, first_query: ir.Value, queries: list[int], page: ir.Value, prefetches_values: bool
    ) -> None:
        """Emit scores[query, z] = q · k[:, z] for all slots z of a page: a matrix product with its sums in registers.

        The page's keys are [words of a head, slots], a word being one float32 or two bfloat16. `queries` are offsets
        from `first_query`, and the rows of `self.scores` that are written. One iteration takes `slot_span` slots for
        all queries; its inner loop goes over the words and carries the sums. `prefetches_values` adds prefetches of the
        page's values.
        """
        code, add, mul, shape = self.code, self.code.build.add, self.code.build.mul, self.shape
        page_size, key_words = shape.page_size, shape.key_words
        page_keys = mul(page, I64(key_words * page_size))
        page_values = mul(page, I64(shape.value_words * shape.head_size))
        zeros = constant(ir.VectorType(F32, self.slot_lanes), 0.0)
        query_words = [mul(add(first_query, I64(query)), I64(key_words)) for query in queries]
        vectors = range(0, self.slot_span, self.slot_lanes)

        def some_slots(slot: ir.Value) -> None:
            """Compute and store the scores of all queries for `slot_span` slots from `slot` on."""

            def word_of_head(word: ir.Value, *scores: ir.Value) -> list[ir.Value]:
                """Return the scores plus the products of one word of each query and of each slot's key."""
                offset = add(mul(word, I64(page_size)), slot)
                address = add(page_keys, offset)
                addresses = (add(address, I64(vector)) for vector in vectors)
                k = code.load_vectors(self.keys, addresses, self.word, self.slot_lanes)
                if prefetches_values:
                    code.prefetch(self.values, add(page_values, offset), self.word, self.slot_span)
                factors = (code.load(self.queries, add(first_word, word), self.word) for first_word in query_words)
                return code.add_outer(factors, k, scores, has_avx512_bf16=self._fills_avx512(self.slot_lanes))

            scores = code.loop(0, key_words, word_of_head, carried=[zeros] * (len(queries) * len(vectors)))
            targets = [query * page_size + vector for query in queries for vector in vectors]
            for target, score in zip(targets, scores, strict=True):
                code.store_vector(score, self.scores, add(I64(target), slot))

        code.loop(0, page_size, some_slots, step=self.slot_span)

    def _fills_avx512(self, lanes: int) -> bool:
        """Return whether the processor has instructions for pairs of bfloat16, and vectors of `lanes` fit them."""
        return self.shape.has_avx512_bf16 and lanes == LONG_LANES

    def update_softmax(self, query: ir.Value, score_row: ir.Value, page_start: ir.Value, end_slot: ir.Value) -> None:
        """Emit one step of the online softmax for one query: turn a page's scores into weights, and update its state.

        `query` is the query's index in the tile, `score_row` its row of scores and of weights. Slots 0 … `end_slot` − 1
        are read; those that the query must not attend to get weight 0. `page_start` is the position of slot 0.
        Weights are relative to the new running maximum. If it has grown, the weight sum and value sums are rescaled.
        """
        code, build, add, mul, shape = self.code, self.code.build, self.code.build.add, self.code.build.mul, self.shape
        slot_lanes, head_lanes = self.slot_lanes, self.head_lanes
        begin, visible_end = self.visible_slots(build.sdiv(query, I64(shape.group_size)), page_start)
        row_scores = mul(score_row, I64(shape.page_size))
        # Offset of the row of weights. Those of bfloat16 are counted one by one, two to a word.
        row_weights = mul(score_row, I64(2 * shape.value_words)) if shape.is_bf16_packed else row_scores
        zeros = constant(ir.VectorType(F32, slot_lanes), 0.0)
        lane_indices = ir.Constant(ir.VectorType(I32, slot_lanes), list(range(slot_lanes)))
        bounds = [code.broadcast(build.trunc(bound, I32), slot_lanes) for bound in (begin, visible_end)]

        def is_visible(slot: ir.Value) -> ir.Value:
            element = add(lane_indices, code.broadcast(build.trunc(slot, I32), slot_lanes))
            return build.and_(build.icmp_signed(">=", element, bounds[0]), build.icmp_signed("<", element, bounds[1]))

        def load_scores(slot: ir.Value) -> ir.Value:
            return code.load_vector(self.scores, add(row_scores, slot), F32, slot_lanes)

        def update_max(slot: ir.Value, largest: ir.Value) -> list[ir.Value]:
            score, masked = load_scores(slot), constant(zeros.type, INITIAL_MAX)
            if shape.soft_cap is not None:
                score = _capped(code, score, shape.soft_cap)
                code.store_vector(score, self.scores, add(row_scores, slot))
            return [code.maximum(build.select(is_visible(slot), score, masked), largest)]

        old_max = code.load(self.running_max, query, F32)
        largest = code.loop(0, end_slot, update_max, step=slot_lanes, carried=[code.broadcast(old_max, slot_lanes)])
        new_max = code.reduce(largest[0], code.maximum)
        max_in_lanes = code.broadcast(new_max, slot_lanes)

        def add_weights(slot: ir.Value, page_sum: ir.Value) -> list[ir.Value]:
            """Store the weights of a vector of slots, and return their sum with `page_sum`, lane by lane."""
            weight = build.select(is_visible(slot), code.exp(build.fsub(load_scores(slot), max_in_lanes)), zeros)
            element = add(row_weights, slot)
            if shape.is_bf16_packed:
                code.store_rounded(weight, self.weights, element, has_avx512_bf16=self._fills_avx512(slot_lanes))
            else:
                code.store_vector(weight, self.weights, element)
            return [build.fadd(page_sum, weight)]

        page_sum = code.reduce(code.loop(0, end_slot, add_weights, step=slot_lanes, carried=[zeros])[0], build.fadd)
        # If the maximum has not changed, the earlier sums need no rescaling. A NaN counts as a change.
        has_changed = build.fcmp_unordered("!=", old_max, new_max)
        with build.if_then(has_changed):
            decay = code.exp(code.broadcast(build.fsub(old_max, new_max), head_lanes))
            old_sum = code.load(self.weight_sums, query, F32)
            code.store(build.fmul(old_sum, build.extract_element(decay, I32(0))), self.weight_sums, query)
            code.store(new_max, self.running_max, query)
            first_sum = mul(query, I64(shape.head_size))

            def rescale(lane: ir.Value) -> None:
                element = add(first_sum, lane)
                rescaled = build.fmul(code.load_vector(self.value_sums, element, F32, head_lanes), decay)
                code.store_vector(rescaled, self.value_sums, element)

            code.loop(0, shape.head_size, rescale, step=head_lanes)
        code.store(build.fadd(code.load(self.weight_sums, query, F32), page_sum), self.weight_sums, query)

    def _add_weighted_values(
        self, first_query: ir.Value, queries: list[int], page: ir.Value, next_page: ir.Value | None, slots: SlotRange
    ) -> None:
        """Emit the matrix product that adds Σ_z weights[query, z] · v[z], over the page's `slots`, to the value sums.

        `queries` are offsets from `first_query`, and the rows of the weights. One iteration computes `head_span` lanes
        (numbers of a head) of all queries, with their sums in registers. In bfloat16, word w holds slots 2w and 2w + 1.
        If `slots.end` is odd, only the lower half of the last word is used: slot `end` may be unwritten and hold NaN.
        The slot before an odd `slots.begin` is written, and has weight 0. `next_page`: prefetch its keys, unless None.
        """
        code, build, add, mul, shape = self.code, self.code.build, self.code.build.add, self.code.build.mul, self.shape
        (begin_slot, end_slot), head_size = slots, shape.head_size
        page_values = mul(page, I64(shape.value_words * head_size))
        vectors = range(0, self.head_span, self.head_lanes)
        next_keys = None if next_page is None else mul(next_page, I64(shape.key_words * shape.page_size))

        def add_lanes(lane: ir.Value) -> None:
            """Add the page's values to `head_span` lanes of all queries' sums."""
            sum_addresses = [
                add(mul(add(first_query, I64(query)), I64(head_size)), add(lane, I64(vector)))
                for query in queries
                for vector in vectors
            ]

            def sum_words(first_word: ir.Value, end_word: ir.Value, *, is_half_word: bool = False) -> None:
                """Add the values of some words of slots; with `is_half_word`, only those in the lower halves."""

                def word_of_page(word: ir.Value, *partial_sums: ir.Value) -> list[ir.Value]:
                    """Return the sums plus the products of one word of each query's weights and of the values."""
                    offset = add(mul(word, I64(head_size)), lane)
                    row = add(page_values, offset)
                    addresses = (add(row, I64(vector)) for vector in vectors)
                    v = code.load_vectors(self.values, addresses, self.word, self.head_lanes)
                    if is_half_word:
                        v = [build.and_(vector, constant(vector.type, 0xFFFF)) for vector in v]
                    if next_keys is not None:
                        code.prefetch(self.keys, add(next_keys, offset), self.word, self.head_span)
                    addresses = (add(I64(query * shape.value_words), word) for query in queries)
                    factors = (code.load(self.weights, address, self.word) for address in addresses)
                    return code.add_outer(factors, v, partial_sums, has_avx512_bf16=self._fills_avx512(self.head_lanes))

                old_sums = code.load_vectors(self.value_sums, sum_addresses, F32, self.head_lanes)
                new_sums = code.loop(first_word, end_word, word_of_page, carried=old_sums)
                for address, new_sum in zip(sum_addresses, new_sums, strict=True):
                    code.store_vector(new_sum, self.value_sums, address)

            if not shape.is_bf16_packed:
                sum_words(begin_slot, end_slot)
                return
            half_word = build.sdiv(end_slot, I64(2))
            sum_words(build.sdiv(begin_slot, I64(2)), half_word)
            with build.if_then(build.icmp_signed("!=", mul(half_word, I64(2)), end_slot)):
                sum_words(half_word, add(half_word, I64(1)), is_half_word=True)

        code.loop(0, head_size, add_lanes, step=self.head_span)


def _lanes_and_span(size: int, vectors_at_once: int) -> tuple[int, int]:
    """Return the lanes of one vector, and the lanes of all vectors that one iteration takes; both divide `size`.

    With AVX-512 and at most 4 vectors at once, size 96 gives (16, 48): 6 vectors, 3 per iteration.
    """
    lanes = lanes_for(size)
    return lanes, lanes * max(count for count in range(1, vectors_at_once + 1) if size // lanes % count == 0)


def _capped(code: Code, score: ir.Value, cap: float) -> ir.Value:
    """Return cap × tanh(score ÷ cap): tanh |x| is (1 − y) ÷ (1 + y) with y = exp(−2 |x|), which cannot overflow."""
    build, vector_type = code.build, score.type
    is_negative = build.fcmp_ordered("<", score, constant(vector_type, 0.0))
    magnitude = build.select(is_negative, build.fneg(score), score)
    exponential = code.exp(build.fmul(magnitude, constant(vector_type, -2.0 / cap)))
    one = constant(vector_type, 1.0)
    tanh = build.fdiv(build.fsub(one, exponential), build.fadd(one, exponential))
    capped = build.fmul(constant(vector_type, cap), tanh)
    return build.select(is_negative, build.fneg(capped), capped)
