"""The queries of a tile, multiplied by vectors of a page's slots (scores) and of a head's lanes (sums)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from llvmlite import ir

from ...native.llvm import F32, I64, constant
from .online_softmax import SlotRange
from .queries import PageBlock, Queries

SCORE_ROWS = 48
"""Queries that have scores at the same time, unless a token has more: scores of 64 slots are 12 KiB."""


class QueryRow(NamedTuple):
    """A query of the tile, and the row of scores and weights that it has for a while; int64."""

    query: ir.Value
    row: ir.Value


class TokenGroup(NamedTuple):
    """Tokens of a tile that are computed together."""

    num_tokens: int
    chunks: list[list[QueryRow]]
    """Their queries, those together whose sums fit into registers; there are several chunks only for one token."""
    slots: SlotRange
    """Slots of the page that any of the tokens attends to."""


class VectorQueries(Queries):
    """Computes by vectors, page by page, as many queries together as have room for their sums in registers."""

    @property
    def tokens_at_once(self) -> int:
        """Return the tokens that have rows of scores at the same time."""
        queries_together = self.tokens_together * self.shape.group_size
        return self.tokens_together * max(1, SCORE_ROWS // queries_together)

    def num_allocated_queries(self) -> tuple[int, int]:
        return self.shape.num_queries, self.tokens_at_once * self.shape.group_size

    def begin(self) -> None:
        """See `Queries.begin`: vectors need nothing."""

    def end(self) -> None:
        """See `Queries.end`: vectors need nothing."""

    def attend_block(self, begin_token: ir.Value, end_token: ir.Value, block: PageBlock) -> None:
        """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to a block, here one page.

        Tokens go through the page `tokens_at_once` at a time: scores = q · K of all their queries, then weights =
        2^(scores − maximum), then value sums += weights · V. So the page's keys stay in the level-1 cache, then its
        values. Of these tokens, those are computed together whose sums fit into registers, and those that are left one
        by one: if 2 tokens fit, tokens 0 to 3 of 5 are computed in pairs and token 4 alone.
        """
        code, build = self.code, self.code.build
        page, page_start = block.page_of(block.begin), build.mul(block.begin, I64(self.shape.page_size))
        # The last page has no next one, so it is prefetched once more, which is harmless.
        next_page = block.page_of(code.min(build.add(block.begin, I64(1)), build.sub(block.end_of_row, I64(1))))

        def attend_tokens(first_token: ir.Value) -> None:
            end = code.min(build.add(first_token, I64(self.tokens_at_once)), end_token)
            first_single = build.sub(end, build.srem(build.sub(end, first_token), I64(self.tokens_together)))

            def each_group(emit: Callable[[TokenGroup], None]) -> None:
                """Emit `emit(group)` for the tokens that are computed together, unless none of them sees the page."""

                def emit_group(i: ir.Value, num_tokens: int) -> None:
                    group = self._group(i, num_tokens, first_token, page_start)
                    with build.if_then(build.icmp_signed("<", group.slots.begin, group.slots.end)):
                        emit(group)

                num_together = self.tokens_together
                if num_together > 1:
                    code.loop(first_token, first_single, lambda i: emit_group(i, num_together), step=num_together)
                code.loop(first_single if num_together > 1 else first_token, end, lambda i: emit_group(i, 1))

            each_group(lambda group: self._compute_scores(group, page))
            each_group(lambda group: self._update_softmax(group, page_start))
            each_group(lambda group: self._add_weighted_values(group, page, next_page))

        code.loop(begin_token, end_token, attend_tokens, step=self.tokens_at_once)

    def _group(self, i: ir.Value, num_tokens: int, first_token: ir.Value, page_start: ir.Value) -> TokenGroup:
        """Return tokens i … i + `num_tokens` − 1 of the tile, and the slots of a page that any of them attends to.

        A slot has weight 0 for a token that must not attend to it. `first_token` is the token whose scores are in row 0
        and the following ones, and `page_start` is the position of the page's slot 0.
        """
        code, build, group_size = self.code, self.code.build, self.shape.group_size
        tokens = [build.add(i, I64(j)) for j in range(num_tokens)]
        begins, ends = zip(*(self.visible_slots(token, page_start) for token in tokens), strict=True)
        first_query, first_row = (build.mul(x, I64(group_size)) for x in (i, build.sub(i, first_token)))
        chunks = [
            [
                QueryRow(*(build.add(first, I64(token * group_size + head)) for first in (first_query, first_row)))
                for token in range(num_tokens)
                for head in heads
            ]
            for heads in self.head_chunks
        ]
        return TokenGroup(num_tokens, chunks, SlotRange(reduce(code.min, begins), reduce(code.max, ends)))

    def _update_softmax(self, group: TokenGroup, page_start: ir.Value) -> None:
        """Emit the softmax step of a group's queries, those together that are multiplied together."""
        for chunk in group.chunks:
            queries, rows = zip(*chunk, strict=True)
            self.update_softmax(queries, rows, page_start, I64(self.shape.page_size))

    def _compute_scores(self, group: TokenGroup, page: ir.Value) -> None:
        """Emit the scores of a group's queries. The first ones of a single token prefetch the page's values."""
        for index, chunk in enumerate(group.chunks):
            self._score_queries(chunk, page, prefetches_values=index == 0 and group.num_tokens == 1)

    def _add_weighted_values(self, group: TokenGroup, page: ir.Value, next_page: ir.Value) -> None:
        """Emit the value sums of a group's queries. The first ones of a single token prefetch the next page's keys."""
        for index, chunk in enumerate(group.chunks):
            is_first = index == 0 and group.num_tokens == 1
            self._sum_values(chunk, page, next_page if is_first else None, group.slots)

    def _score_queries(self, queries: list[QueryRow], page: ir.Value, *, prefetches_values: bool) -> None:
        """Emit scores[query, z] = q · k[:, z] for all slots z of a page: a matrix product with its sums in registers.

        The page's keys are [words of a head, slots], a word being one float32 or two bfloat16; numbers of one byte
        become float32 as they are loaded. Scores go to the query's row of `softmax.scores` [rows, slots]. One iteration
        takes `slot_span` slots for all queries; its inner loop goes over the words and carries the sums. With
        `prefetches_values` it also prefetches the page's values, which are multiplied next.
        """
        code, add, mul, shape = self.code, self.code.build.add, self.code.build.mul, self.shape
        page_size, key_words = shape.page_size, shape.key_words
        page_keys = mul(page, I64(key_words * page_size))
        page_values = mul(page, I64(shape.value_words * shape.head_size))
        zeros = constant(ir.VectorType(F32, self.slot_lanes), 0.0)
        first_words = [mul(query, I64(key_words)) for query, _ in queries]
        vectors = range(0, self.slot_span, self.slot_lanes)
        has_bf16_instructions = shape.has_bf16_instructions(self.slot_lanes)

        def score_slots(slot: ir.Value) -> None:
            """Compute and store the scores of all queries for `slot_span` slots from `slot` on."""

            def add_products(word: ir.Value, *scores: ir.Value) -> list[ir.Value]:
                """Return the scores plus the products of one word of each query and of each slot's key."""
                offset = add(mul(word, I64(page_size)), slot)
                first_key = add(page_keys, offset)
                key_offsets = (add(first_key, I64(vector)) for vector in vectors)
                k = self.load_words(self.keys, key_offsets, self.slot_lanes)
                if prefetches_values:  # A page's values are as many words as its keys, so the same offsets cover them.
                    code.prefetch(self.values, add(page_values, offset), self.element, self.slot_span)
                factors = (code.load(self.queries, add(first_word, word), self.word) for first_word in first_words)
                return code.add_outer(factors, k, scores, has_avx512_bf16=has_bf16_instructions)

            scores = code.loop(0, key_words, add_products, carried=[zeros] * (len(queries) * len(vectors)))
            targets = [add(mul(row, I64(page_size)), I64(vector)) for _, row in queries for vector in vectors]
            for target, score in zip(targets, scores, strict=True):
                code.store_vector(score, self.softmax.scores, add(target, slot))

        code.loop(0, page_size, score_slots, step=self.slot_span)

    def _sum_values(
        self, queries: list[QueryRow], page: ir.Value, next_page: ir.Value | None, slots: SlotRange
    ) -> None:
        """Emit the matrix product that adds Σ_z weights[query, z] · v[z], over the page's `slots`, to the value sums.

        A query's weights are in its row. One iteration computes `head_span` lanes (numbers of a head) of
        all queries, with their sums in registers. In bfloat16, word w holds slots 2w and 2w + 1: slots 3 … 6 are the
        words 1 and 2 and the lower half of word 3, since slot 7 may be unwritten and hold NaN. Slot 2, before an odd
        begin, is written and has weight 0. Unless `next_page` is None, its keys are prefetched.
        """
        code, build, add, mul, shape = self.code, self.code.build, self.code.build.add, self.code.build.mul, self.shape
        (begin_slot, end_slot), head_size = slots, shape.head_size
        weights = self.softmax.weights
        page_values = mul(page, I64(shape.value_words * head_size))
        vectors = range(0, self.head_span, self.head_lanes)
        has_bf16_instructions = shape.has_bf16_instructions(self.head_lanes)
        next_keys = None if next_page is None else mul(next_page, I64(shape.key_words * shape.page_size))

        def add_lanes(lane: ir.Value) -> None:
            """Add the page's values to `head_span` lanes of all queries' sums."""
            sum_offsets = [
                add(mul(query, I64(head_size)), add(lane, I64(vector))) for query, _ in queries for vector in vectors
            ]

            def sum_words(first_word: ir.Value, end_word: ir.Value, *, is_half_word: bool = False) -> None:
                """Add the values of words `first_word` … `end_word` − 1; with `is_half_word`, of their lower halves."""

                def add_products(word: ir.Value, *partial_sums: ir.Value) -> list[ir.Value]:
                    """Return the sums plus the products of one word of each query's weights and of the values."""
                    offset = add(mul(word, I64(head_size)), lane)
                    first_value = add(page_values, offset)
                    value_offsets = (add(first_value, I64(vector)) for vector in vectors)
                    v = self.load_words(self.values, value_offsets, self.head_lanes)
                    if is_half_word:  # The lower half of a word is the slot with the even number.
                        v = [build.and_(vector, constant(vector.type, 0xFFFF)) for vector in v]
                    if next_keys is not None:
                        code.prefetch(self.keys, add(next_keys, offset), self.element, self.head_span)
                    weight_offsets = (add(mul(row, I64(shape.value_words)), word) for _, row in queries)
                    factors = (code.load(weights, weight_offset, self.word) for weight_offset in weight_offsets)
                    return code.add_outer(factors, v, partial_sums, has_avx512_bf16=has_bf16_instructions)

                old_sums = code.load_vectors(self.value_sums, sum_offsets, F32, self.head_lanes)
                new_sums = code.loop(first_word, end_word, add_products, carried=old_sums)
                for sum_offset, new_sum in zip(sum_offsets, new_sums, strict=True):
                    code.store_vector(new_sum, self.value_sums, sum_offset)

            if not shape.is_bf16_packed:
                sum_words(begin_slot, end_slot)
                return
            half_word = build.sdiv(end_slot, I64(2))
            sum_words(build.sdiv(begin_slot, I64(2)), half_word)
            with build.if_then(build.icmp_signed("!=", mul(half_word, I64(2)), end_slot)):
                sum_words(half_word, add(half_word, I64(1)), is_half_word=True)

        code.loop(0, head_size, add_lanes, step=self.head_span)
