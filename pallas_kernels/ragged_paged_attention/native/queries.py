"""The queries of one KV head for the tokens of a tile, and their running softmax, in native code.

    page by page:  scores [queries, Z] ──▶ weights ──▶ sums [queries, H]       an online softmax

Queries, of all tokens one after the other, and their sums lie in the unit's own memory. Numbers of bfloat16 lie in
pairs, see `pages`: queries are rounded to it, and so are weights, one relative to the maximum so far; sums are
float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from ...native.llvm import F32, I32, I64, LONG_LANES, Code, constant, lanes_for
from ..xla.softmax import INITIAL_MAX
from .pages import words_of

SlotRange = tuple[ir.Value, ir.Value]
"""The first of consecutive slots of a page, and the slot after the last; equal or descending if there are none."""


@dataclass(frozen=True)
class Shape:
    """Sizes and features for which a handler of native attention is compiled."""

    is_bf16_packed: bool
    num_kv_heads: int
    group: int
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
        """Return the most queries of a tile."""
        return self.max_tokens * self.group

    @property
    def name(self) -> str:
        """Return the name of the handler."""
        sizes = (getattr(self, name) for name in self.__dataclass_fields__)
        name = "_".join(["jpaged_attend", *(str(int(x) if isinstance(x, bool) else x) for x in sizes)])
        return name.replace(".", "p")


class Queries:
    """Computes by vectors of a page's slots (scores) and of a head's lanes (sums); a subclass uses the matrix unit."""

    def __init__(self, code: Code, shape: Shape, *, keys: ir.Value, values: ir.Value) -> None:
        """`keys` and `values` are the addresses of the keys and values of all layers."""
        self.code, self.shape = code, shape
        self.keys, self.values = keys, values
        self.word = I32 if shape.is_bf16_packed else F32
        # With a vector of each query or of what it is multiplied with, as many sums stay in registers.
        vectors_at_once, queries_at_once = (4, 6) if shape.has_avx512 else (2, 4)
        self.slot_lanes, self.slot_span = _lanes_and_span(shape.page_size, vectors_at_once)
        self.head_lanes, self.head_span = _lanes_and_span(shape.head_size, vectors_at_once)
        self.tokens_at_once = max(1, queries_at_once // shape.group)
        num_parts = -(-shape.group // queries_at_once)
        bounds = [shape.group * part // num_parts for part in range(num_parts + 1)]
        self.parts = [range(*bounds[part : part + 2]) for part in range(num_parts)]
        """Groups of a token's queries that are multiplied together."""
        num_queries, num_scored = self.room()
        self.queries = code.allocate(self.word, num_queries * shape.key_words)
        self.sums = code.allocate(F32, num_queries * shape.head_size)
        self.scores = code.allocate(F32, num_scored * shape.page_size)
        """Scores, and in float32 also the weights that replace them."""
        self.weights = code.allocate(I32, num_scored * shape.value_words) if shape.is_bf16_packed else self.scores
        if shape.page_size % 2 and shape.is_bf16_packed:
            code.loop(0, num_scored * shape.value_words, lambda at: code.store(I32(0), self.weights, at))
        self.max_scores, self.totals = (code.allocate(F32, shape.num_queries) for _ in range(2))
        self.tokens, self.rows, self.lens = (code.allocate(I64, shape.max_tokens) for _ in range(3))

    def room(self) -> tuple[int, int]:
        """Return the number of queries that memory is allocated for, and of those whose scores are kept at once."""
        return self.shape.num_queries, self.tokens_at_once * self.shape.group

    def begin(self) -> None:
        """Emit what comes before the first page."""

    def end(self) -> None:
        """Emit what comes after the last page."""

    def set_token(self, i: ir.Value, token: ir.Value, row: ir.Value, positions: ir.Value) -> None:
        """Record token i of the tile: its index in the step, its row and its length."""
        self.code.store(token, self.tokens, i)
        self.code.store(row, self.rows, i)
        self.code.store(self.code.build.add(self.code.load_index(positions, token), I64(1)), self.lens, i)

    def row(self, i: ir.Value) -> ir.Value:
        return self.code.load(self.rows, i, I64)

    def num_pages(self, i: ir.Value) -> ir.Value:
        """Return the number of pages up to the position of token i."""
        build, page_size = self.code.build, self.shape.page_size
        return build.sdiv(build.add(self.code.load(self.lens, i, I64), I64(page_size - 1)), I64(page_size))

    def first_page(self, i: ir.Value) -> ir.Value:
        return self.code.build.sdiv(self._oldest(i), I64(self.shape.page_size))

    def _oldest(self, i: ir.Value) -> ir.Value:
        """Return the first position that token i sees."""
        if self.shape.window is None:
            return I64(0)
        return self.code.max(self.code.build.sub(self.code.load(self.lens, i, I64), I64(self.shape.window)), I64(0))

    def seen(self, i: ir.Value, first_slot: ir.Value) -> SlotRange:
        """Return the slots of a page that token i sees."""
        code, build = self.code, self.code.build
        seen_from = code.max(build.sub(self._oldest(i), first_slot), I64(0))
        length = build.sub(code.load(self.lens, i, I64), first_slot)
        return seen_from, code.min(length, I64(self.shape.page_size))

    def of_token(self, i: ir.Value, head: ir.Value) -> ir.Value:
        """Return the index of the first query of token i among those of all tokens and heads."""
        build = self.code.build
        heads_before = build.mul(self.code.load(self.tokens, i, I64), I64(self.shape.num_kv_heads))
        return build.mul(build.add(heads_before, head), I64(self.shape.group))

    def start(self, i: ir.Value, head: ir.Value, q: ir.Value, sinks: ir.Value) -> None:
        """Initialise the softmax of token i: empty, or with the sinks."""
        code, build, shape = self.code, self.code.build, self.shape
        first = build.mul(i, I64(shape.group))

        def start(g: ir.Value) -> None:
            place, max_score = build.add(first, g), constant(F32, INITIAL_MAX)
            if shape.has_sinks:
                max_score = code.load(sinks, build.add(build.mul(head, I64(shape.group)), g), F32)
            code.store(max_score, self.max_scores, place)
            code.store(constant(F32, 1.0 if shape.has_sinks else 0.0), self.totals, place)

        code.loop(0, shape.group, start)
        source, target = (build.mul(x, I64(shape.key_words)) for x in (self.of_token(i, head), first))

        def copy(at: ir.Value) -> None:
            code.store(code.load(q, build.add(source, at), self.word), self.queries, build.add(target, at))

        code.loop(0, shape.group * shape.key_words, copy)
        lane, none = build.mul(first, I64(shape.head_size)), constant(ir.VectorType(F32, self.head_lanes), 0.0)

        def clear(at: ir.Value) -> None:
            code.store_vector(none, self.sums, build.add(lane, at))

        code.loop(0, shape.group * shape.head_size, clear, step=self.head_lanes)

    def finish(self, i: ir.Value, head: ir.Value, out: ir.Value) -> None:
        """Write the weighted means of token i to `out`; zeros where no key was seen."""
        code, build, group, head_size = self.code, self.code.build, self.shape.group, self.shape.head_size
        first, target = build.mul(i, I64(group)), self.of_token(i, head)

        def finish(g: ir.Value) -> None:
            total = code.load(self.totals, build.add(first, g), F32)
            is_none = build.fcmp_ordered("==", total, constant(F32, 0.0))
            total = code.broadcast(build.select(is_none, constant(F32, 1.0), total), self.head_lanes)

            def divide(h: ir.Value) -> None:
                at, to = (build.add(build.mul(build.add(x, g), I64(head_size)), h) for x in (first, target))
                sums = code.load_vector(self.sums, at, F32, self.head_lanes)
                code.store_vector(build.fdiv(sums, total), out, to)

            code.loop(0, head_size, divide, step=self.head_lanes)

        code.loop(0, group, finish)

    def see_page(
        self, first: ir.Value, last: ir.Value, page: ir.Value, following: ir.Value, first_slot: ir.Value
    ) -> None:
        """Let tokens first … last attend to `page`, an index among the pages of all layers and KV heads.

        `first_slot` is the position of the page's first slot, `following` the page that comes next. As many tokens are
        computed together as have their sums in registers.
        """
        code, build = self.code, self.code.build
        num_together, alone = self.tokens_at_once, first
        if num_together > 1:
            alone = build.sub(last, build.srem(build.sub(last, first), I64(num_together)))
            code.loop(first, alone, lambda i: self._see(i, num_together, page, None, first_slot), step=num_together)
        code.loop(alone, last, lambda i: self._see(i, 1, page, following, first_slot))

    def _see(self, i: ir.Value, count: int, page: ir.Value, following: ir.Value | None, first_slot: ir.Value) -> None:
        """Let `count` tokens from i on attend to a page; with `following`, prefetch what is read next."""
        code, build, shape = self.code, self.code.build, self.shape
        tokens = [build.add(i, I64(j)) for j in range(count)]
        # Slots of the page that any of them sees: those that a token does not see weigh nothing for it.
        seen_from, seen_to = zip(*(self.seen(token, first_slot) for token in tokens), strict=True)
        any_from, any_to = seen_from[0], seen_to[0]
        for one_from, one_to in zip(seen_from[1:], seen_to[1:], strict=True):
            any_from, any_to = code.min(any_from, one_from), code.max(any_to, one_to)
        first = build.mul(i, I64(shape.group))
        with build.if_then(build.icmp_signed("<", any_from, any_to)):
            for part in self.parts:
                self._score(first, count, part, page, following is not None and part is self.parts[0])

            def weigh(place: ir.Value) -> None:
                self.weigh(build.add(first, place), place, first_slot, I64(shape.page_size))

            code.loop(0, count * shape.group, weigh)
            for part in self.parts:
                of_part = following if part is self.parts[0] else None
                self._sum_values(first, count, part, page, of_part, (any_from, any_to))

    def _score(self, first: ir.Value, count: int, part: range, page: ir.Value, fetches: bool) -> None:
        """Compute scores[query, z] = q · k[:, z], some queries and slots at a time."""
        code, add, mul, shape = self.code, self.code.build.add, self.code.build.mul, self.shape
        page_size, key_words = shape.page_size, shape.key_words
        begin = mul(page, I64(key_words * page_size))
        values = mul(page, I64(shape.value_words * shape.head_size))
        none = constant(ir.VectorType(F32, self.slot_lanes), 0.0)
        places = [j * shape.group + g for j in range(count) for g in part]
        queries = [mul(add(first, I64(place)), I64(key_words)) for place in places]
        vectors = range(0, self.slot_span, self.slot_lanes)

        def some_slots(slot: ir.Value) -> None:
            def word_of_head(word: ir.Value, *scores: ir.Value) -> list[ir.Value]:
                in_page = add(mul(word, I64(page_size)), slot)
                at = add(begin, in_page)
                k = [code.load_vector(self.keys, add(at, I64(x)), self.word, self.slot_lanes) for x in vectors]
                if fetches:
                    code.prefetch(self.values, add(values, in_page), self.word, self.slot_span)
                factors = (code.load(self.queries, add(query, word), self.word) for query in queries)
                return code.add_outer(factors, k, scores, has_avx512_bf16=self._fills_avx512(self.slot_lanes))

            scores = code.loop(0, key_words, word_of_head, carried=[none] * (len(queries) * len(vectors)))
            for index, place in enumerate(places):
                for x, score in zip(vectors, scores[index * len(vectors) :], strict=False):
                    code.store_vector(score, self.scores, add(I64(place * page_size + x), slot))

        code.loop(0, page_size, some_slots, step=self.slot_span)

    def _fills_avx512(self, lanes: int) -> bool:
        """Return whether vectors of `lanes` are long enough for the instructions for pairs."""
        return self.shape.has_avx512_bf16 and lanes == LONG_LANES

    def weigh(self, query: ir.Value, place: ir.Value, first_slot: ir.Value, end: ir.Value) -> None:
        """Turn scores into weights, relative to the maximum so far, and scale the earlier sums accordingly.

        The query's scores are those at `place`, of the slots up to `end`.
        """
        code, build, add, mul, shape = self.code, self.code.build, self.code.build.add, self.code.build.mul, self.shape
        slot_lanes, head_lanes = self.slot_lanes, self.head_lanes
        seen_from, seen_to = self.seen(build.sdiv(query, I64(shape.group)), first_slot)
        scores_of = mul(place, I64(shape.page_size))
        # In numbers of bfloat16.
        weights_of = mul(place, I64(2 * shape.value_words)) if shape.is_bf16_packed else scores_of
        none = constant(ir.VectorType(F32, slot_lanes), 0.0)
        places = ir.Constant(ir.VectorType(I32, slot_lanes), list(range(slot_lanes)))
        bounds = [code.broadcast(build.trunc(bound, I32), slot_lanes) for bound in (seen_from, seen_to)]

        def is_seen(slot: ir.Value) -> ir.Value:
            at = add(places, code.broadcast(build.trunc(slot, I32), slot_lanes))
            return build.and_(build.icmp_signed(">=", at, bounds[0]), build.icmp_signed("<", at, bounds[1]))

        def scores(slot: ir.Value) -> ir.Value:
            return code.load_vector(self.scores, add(scores_of, slot), F32, slot_lanes)

        def see(slot: ir.Value, most: ir.Value) -> list[ir.Value]:
            score, least = scores(slot), constant(none.type, INITIAL_MAX)
            if shape.soft_cap is not None:
                score = _capped(code, score, shape.soft_cap)
                code.store_vector(score, self.scores, add(scores_of, slot))
            return [code.maximum(build.select(is_seen(slot), score, least), most)]

        before = code.load(self.max_scores, query, F32)
        most = code.loop(0, end, see, step=slot_lanes, carried=[code.broadcast(before, slot_lanes)])
        now = code.reduce(most[0], code.maximum)
        in_lanes = code.broadcast(now, slot_lanes)

        def exponentiate(slot: ir.Value, total: ir.Value) -> list[ir.Value]:
            weight = build.select(is_seen(slot), code.exp(build.fsub(scores(slot), in_lanes)), none)
            at = add(weights_of, slot)
            if shape.is_bf16_packed:
                code.store_rounded(weight, self.weights, at, has_avx512_bf16=self._fills_avx512(slot_lanes))
            else:
                code.store_vector(weight, self.weights, at)
            return [build.fadd(total, weight)]

        total = code.reduce(code.loop(0, end, exponentiate, step=slot_lanes, carried=[none])[0], build.fadd)
        # Where the maximum has not changed, nothing shrinks.
        has_changed = build.fcmp_unordered("!=", before, now)
        with build.if_then(has_changed):
            decay = code.exp(code.broadcast(build.fsub(before, now), head_lanes))
            kept = code.load(self.totals, query, F32)
            code.store(build.fmul(kept, build.extract_element(decay, I32(0))), self.totals, query)
            code.store(now, self.max_scores, query)
            lane = mul(query, I64(shape.head_size))

            def shrink(h: ir.Value) -> None:
                at = add(lane, h)
                code.store_vector(build.fmul(code.load_vector(self.sums, at, F32, head_lanes), decay), self.sums, at)

            code.loop(0, shape.head_size, shrink, step=head_lanes)
        code.store(build.fadd(code.load(self.totals, query, F32), total), self.totals, query)

    def _sum_values(
        self, first: ir.Value, count: int, part: range, page: ir.Value, following: ir.Value | None, seen: SlotRange
    ) -> None:
        """Add Σ weights[query, z] · v[z] to the sums, some queries and lanes at a time.

        Slots that no query sees are not read.
        """
        code, build, add, mul, shape = self.code, self.code.build, self.code.build.add, self.code.build.mul, self.shape
        (seen_from, seen_to), head_size = seen, shape.head_size
        begin = mul(page, I64(shape.value_words * head_size))
        places = [j * shape.group + g for j in range(count) for g in part]
        vectors = range(0, self.head_span, self.head_lanes)
        keys = None if following is None else mul(following, I64(shape.key_words * shape.page_size))

        def some_lanes(h: ir.Value) -> None:
            at = [add(mul(add(first, I64(place)), I64(head_size)), add(h, I64(x))) for place in places for x in vectors]

            def sum_words(first_word: ir.Value, end: ir.Value, *, are_halves: bool = False) -> None:
                def word_of_page(word: ir.Value, *so_far: ir.Value) -> list[ir.Value]:
                    in_page = add(mul(word, I64(head_size)), h)
                    row = add(begin, in_page)
                    v = [code.load_vector(self.values, add(row, I64(x)), self.word, self.head_lanes) for x in vectors]
                    if are_halves:
                        v = [build.and_(x, constant(x.type, 0xFFFF)) for x in v]
                    if keys is not None:
                        code.prefetch(self.keys, add(keys, in_page), self.word, self.head_span)
                    starts = (add(I64(place * shape.value_words), word) for place in places)
                    factors = (code.load(self.weights, start, self.word) for start in starts)
                    return code.add_outer(factors, v, so_far, has_avx512_bf16=self._fills_avx512(self.head_lanes))

                before = [code.load_vector(self.sums, place, F32, self.head_lanes) for place in at]
                after = code.loop(first_word, end, word_of_page, carried=before)
                for place, value in zip(at, after, strict=True):
                    code.store_vector(value, self.sums, place)

            if not shape.is_bf16_packed:
                sum_words(seen_from, seen_to)
                return
            whole = build.sdiv(seen_to, I64(2))
            sum_words(build.sdiv(seen_from, I64(2)), whole)
            with build.if_then(build.icmp_signed("!=", mul(whole, I64(2)), seen_to)):
                sum_words(whole, add(whole, I64(1)), are_halves=True)

        code.loop(0, head_size, some_lanes, step=self.head_span)


def _lanes_and_span(size: int, vectors_at_once: int) -> tuple[int, int]:
    """Return the lanes of a vector, and of as many vectors as are taken together; both divide `size`."""
    lanes = lanes_for(size)
    return lanes, lanes * max(n for n in range(1, vectors_at_once + 1) if size // lanes % n == 0)


def _capped(code: Code, score: ir.Value, cap: float) -> ir.Value:
    """Return cap × tanh(score ÷ cap) by an exponential that cannot overflow: tanh|x| = (1 − e⁻²|ˣ|) ÷ (1 + e⁻²|ˣ|)."""
    build, kind = code.build, score.type
    is_negative = build.fcmp_ordered("<", score, constant(kind, 0.0))
    size = build.select(is_negative, build.fneg(score), score)
    small = code.exp(build.fmul(size, constant(kind, -2.0 / cap)))
    one = constant(kind, 1.0)
    capped = build.fmul(constant(kind, cap), build.fdiv(build.fsub(one, small), build.fadd(one, small)))
    return build.select(is_negative, build.fneg(capped), capped)
