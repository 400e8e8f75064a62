"""The queries of a tile, multiplied by vectors of a page's slots (scores) and of a head's lanes (sums)."""

from __future__ import annotations

from llvmlite import ir

from ...native.llvm import F32, I64, constant
from .queries import PageBlock, Queries, SlotRange


class VectorQueries(Queries):
    """Computes by vectors, page by page, as many queries together as have room for their sums in registers."""

    def begin(self) -> None:
        """See `Queries.begin`: vectors need nothing."""

    def end(self) -> None:
        """See `Queries.end`: vectors need nothing."""

    def attend_block(self, begin_token: ir.Value, end_token: ir.Value, block: PageBlock) -> None:
        """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to a block, here one page.

        Tokens are computed together while their sums fit into registers, and those that are left one by one: if 2
        tokens fit, tokens 0 to 3 of 5 are computed in pairs and token 4 alone. Only the code for single tokens
        prefetches the row's next page, since a decode row is bound by memory.
        """
        code, build = self.code, self.code.build
        num_together, single_token = self.tokens_together, begin_token
        page, page_start = block.page_of(block.begin), build.mul(block.begin, I64(self.shape.page_size))
        # The last page has no next one, so it is prefetched once more, which is harmless.
        next_page = block.page_of(code.min(build.add(block.begin, I64(1)), build.sub(block.end_of_row, I64(1))))

        def attend_together(i: ir.Value) -> None:
            self._attend_tokens(i, num_together, page, None, page_start)

        if num_together > 1:
            single_token = build.sub(end_token, build.srem(build.sub(end_token, begin_token), I64(num_together)))
            code.loop(begin_token, single_token, attend_together, step=num_together)
        code.loop(single_token, end_token, lambda i: self._attend_tokens(i, 1, page, next_page, page_start))

    def _attend_tokens(
        self, i: ir.Value, num_tokens: int, page: ir.Value, next_page: ir.Value | None, page_start: ir.Value
    ) -> None:
        """Emit one step of the online softmax for tokens i … i + `num_tokens` − 1 of the tile and one page.

        For each query of these tokens: scores = q · K, then weights = exp(scores − maximum), then value sums +=
        weights · V. Nothing is done if none of the tokens attends to a slot of the page. If `next_page` is not None,
        this page's values are prefetched while scores are computed, and the next page's keys while values are added.
        Both are indices among the pages of all layers and KV heads; `page_start` is the position of the page's slot 0.
        """
        code, build, shape = self.code, self.code.build, self.shape
        tokens = [build.add(i, I64(j)) for j in range(num_tokens)]
        # Slots that any of these tokens attends to. A slot has weight 0 for a token that must not attend to it.
        begins, ends = zip(*(self.visible_slots(token, page_start) for token in tokens), strict=True)
        begin, end = begins[0], ends[0]
        for token_begin, token_end in zip(begins[1:], ends[1:], strict=True):
            begin, end = code.min(begin, token_begin), code.max(end, token_end)
        first_query = build.mul(i, I64(shape.group_size))
        # Queries that are multiplied together, counted from `first_query`: head h of token t is query t × G + h. There
        # are several chunks only for a single token. The first one reads the page from memory and prefetches.
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

        The page's keys are [words of a head, slots], a word being one float32 or two bfloat16; numbers of one
        byte become float32 as they are loaded. A number j in
        `queries` is query `first_query` + j of the tile, whose scores go to row j of `self.scores` [queries, slots].
        One iteration takes `slot_span` slots for all queries; its inner loop goes over the words and carries the sums.
        With `prefetches_values` it also prefetches the page's values, which are multiplied next.
        """
        code, add, mul, shape = self.code, self.code.build.add, self.code.build.mul, self.shape
        page_size, key_words = shape.page_size, shape.key_words
        page_keys = mul(page, I64(key_words * page_size))
        page_values = mul(page, I64(shape.value_words * shape.head_size))
        zeros = constant(ir.VectorType(F32, self.slot_lanes), 0.0)
        first_words = [mul(add(first_query, I64(query)), I64(key_words)) for query in queries]
        vectors = range(0, self.slot_span, self.slot_lanes)

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
                return code.add_outer(factors, k, scores, has_avx512_bf16=self._fills_avx512(self.slot_lanes))

            scores = code.loop(0, key_words, add_products, carried=[zeros] * (len(queries) * len(vectors)))
            targets = [query * page_size + vector for query in queries for vector in vectors]
            for target, score in zip(targets, scores, strict=True):
                code.store_vector(score, self.scores, add(I64(target), slot))

        code.loop(0, page_size, score_slots, step=self.slot_span)

    def _add_weighted_values(
        self, first_query: ir.Value, queries: list[int], page: ir.Value, next_page: ir.Value | None, slots: SlotRange
    ) -> None:
        """Emit the matrix product that adds Σ_z weights[query, z] · v[z], over the page's `slots`, to the value sums.

        A number j in `queries` is query `first_query` + j of the tile, and row j of the weights. One iteration computes
        `head_span` lanes (numbers of a head) of all queries, with their sums in registers. In bfloat16, word w holds
        slots 2w and 2w + 1: slots 3 … 6 are the words 1 and 2 and the lower half of word 3, since slot 7 may be
        unwritten and hold NaN. Slot 2, before an odd begin, is written and has weight 0. Unless `next_page` is None,
        its keys are prefetched.
        """
        code, build, add, mul, shape = self.code, self.code.build, self.code.build.add, self.code.build.mul, self.shape
        (begin_slot, end_slot), head_size = slots, shape.head_size
        page_values = mul(page, I64(shape.value_words * head_size))
        vectors = range(0, self.head_span, self.head_lanes)
        next_keys = None if next_page is None else mul(next_page, I64(shape.key_words * shape.page_size))

        def add_lanes(lane: ir.Value) -> None:
            """Add the page's values to `head_span` lanes of all queries' sums."""
            sum_offsets = [
                add(mul(add(first_query, I64(query)), I64(head_size)), add(lane, I64(vector)))
                for query in queries
                for vector in vectors
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
                    weight_offsets = (add(I64(query * shape.value_words), word) for query in queries)
                    factors = (code.load(self.weights, weight_offset, self.word) for weight_offset in weight_offsets)
                    return code.add_outer(factors, v, partial_sums, has_avx512_bf16=self._fills_avx512(self.head_lanes))

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
