"""Attention over pages on a CPU, and new keys and values written into them: native code, see cpu_handler.

    unit = (tile, KV head)     a tile: tokens of rows that begin with the same pages, or of one row
      page by page ──▶ scores [queries, Z] ──▶ weights ──▶ sums [queries, H], an online softmax
                       K [H, Z] by columns: a vector is some slots of a page, its queries' sums in registers
                       V [Z, H] by rows:    a vector is some lanes of a head

    shared tiles     decode rows that begin with the same pages: those for all rows at once, then each goes on by itself
    decode rows      that are in no such tile
    prefill tiles    some tokens of one row

A page's keys and values are read once, from memory into registers, for all queries of a KV head, and of a tile from the
caches. Whatever tile a token is in and whatever company it has, the same is done for it in the same order, one page
after the other: its bits do not depend on it, nor on the number of threads, nor on how a prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float, Int
from llvmlite import ir

from ..cpu_code import F32, I16, I32, I64, Code, constant, has_long_vectors, lanes_for, register
from ..cpu_handler import Buffer, handler
from .xla_pages import BITS, LayerPages
from .xla_softmax import LEAST_MAX

WORTH_HELP = 1 << 17
"""Values of keys, from which on a second thread is worth waking."""
TOKENS_A_UNIT = 16
"""Of those that are written."""


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a step. Each array holds places for more of them than there are."""

    counts: Int[Array, 3]
    """Shared tiles, decode rows, prefill tiles."""
    prefill: Int[Array, "3 tiles"]
    """Row, first token, tokens."""
    shared: Int[Array, "3 tiles"]
    """First place in `members`, rows, pages."""
    members: Int[Array, " R"]
    """The rows of all shared tiles, one tile after the other."""
    num_seen: Int[Array, " R"]
    """Pages that each row shares: rows that share none are tiles of their own."""


def attend_tiles(
    pages: LayerPages,
    q: Float[Array, "T K G H"],
    tables: Int[Array, "R P"],
    positions: Int[Array, " T"],
    tiles: TilePlan,
    most_tokens: int,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "T K G H"]:
    """What the tokens of all tiles, at most `most_tokens` each, see up to their positions; zeros for other tokens.

    Keys are transposed. Entries of `tables` up to a token's page must lie in the layer; others are not looked at.
    """
    _, num_kv_heads, group, head_size = q.shape
    shape = _Shape(
        are_bits=pages.keys.dtype == BITS,
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        page_size=pages.page_size,
        window=pages.window,
        soft_cap=pages.soft_cap,
        has_sinks=sinks is not None,
        most_tokens=most_tokens,
        has_long=has_long_vectors(),
    )
    queries = q.astype(jnp.float32) * pages.scale
    arrays = [queries, pages.keys, pages.values, tables, positions, pages.first[None]]
    plan = [tiles.counts, tiles.prefill, tiles.shared, tiles.members, tiles.num_seen]
    no_sinks = jnp.zeros((0,), jnp.float32)
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return ffi_call(_attend_handler(shape), out)(*arrays, *plan, no_sinks if sinks is None else sinks)


def write_pages(
    keys: Array, values: Array, k: Array, v: Array, first_page: Int[Array, ""], slots: Int[Array, " T"]
) -> tuple[Array, Array]:
    """Write k and v [T, K, H], of the pages' dtype, into `slots` of the layer that begins at `first_page`, in place."""
    num_kv_heads, head_size, page_size = keys.shape[1:]
    name = _write_handler(keys.dtype == BITS, num_kv_heads, head_size, page_size)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (keys, values)]
    call = ffi_call(name, shapes, input_output_aliases={0: 0, 1: 1})
    written_keys, written_values = call(keys, values, k, v, slots, first_page[None])
    return written_keys, written_values


@dataclass(frozen=True)
class _Shape:
    """What a handler is made for."""

    are_bits: bool
    num_kv_heads: int
    group: int
    head_size: int
    page_size: int
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    most_tokens: int
    has_long: bool

    @property
    def name(self) -> str:
        sizes = (getattr(self, name) for name in self.__dataclass_fields__)
        return "_".join(["jpaged_attend", *(str(int(x) if isinstance(x, bool) else x) for x in sizes)]).replace(
            ".", "p"
        )


@cache
def _attend_handler(shape: _Shape) -> str:
    num_kv_heads, group, page_size = shape.num_kv_heads, shape.group, shape.page_size

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        build, (q, keys, values, tables, positions, first, counts, prefill, shared, members, num_seen, sinks) = (
            code.build,
            args,
        )
        num_shared, num_decode, num_prefill = (code.load_index(counts.data, i) for i in range(3))
        token_size, num_tokens = num_kv_heads * group * shape.head_size, q.size(0)
        _clear_padding(code, rets[0].data, token_size, num_tokens, num_decode, num_prefill, prefill)
        num_tiles = build.add(build.add(num_shared, num_decode), num_prefill)
        # Decode rows see as many tokens as their positions say; a prefill tile is worth help by itself.
        total = code.loop(
            0,
            num_decode,
            lambda row, sum: [build.add(sum, code.load_index(positions.data, row))],
            carried=[build.mul(num_prefill, I64(WORTH_HELP))],
        )[0]
        is_large = build.icmp_signed(">", total, I64(WORTH_HELP // (num_kv_heads * shape.head_size)))
        data = [
            buffer.data for buffer in (q, keys, values, tables, positions, prefill, shared, members, num_seen, sinks)
        ]
        sizes = [tables.size(1), prefill.size(1), shared.size(1), num_shared, num_decode]
        return (
            [*data, rets[0].data, *sizes, code.load_index(first.data, 0)],
            build.mul(num_tiles, I64(num_kv_heads)),
            is_large,
        )

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        (
            q, keys, values, tables, positions, prefill, shared, members, num_seen, sinks, out,
            table_len, most_prefill, most_shared, num_shared, num_decode, first_page,
        ) = given  # fmt: skip
        build, add, sub, mul = code.build, code.build.add, code.build.sub, code.build.mul
        tile, head = build.sdiv(unit, I64(num_kv_heads)), build.srem(unit, I64(num_kv_heads))
        queries = _Queries(code, shape, q, keys, values, out, head)

        # Which tokens, of which rows; and how many pages all of them go through together.
        is_shared = build.icmp_signed("<", tile, num_shared)
        decode = sub(tile, num_shared)
        is_decode = build.and_(build.not_(is_shared), build.icmp_signed("<", decode, num_decode))
        index = sub(decode, num_decode)

        def of_tile(array: ir.Value, size: ir.Value, kind: int, index: ir.Value) -> ir.Value:
            return code.load_index(array, add(mul(I64(kind), size), index))

        # An index that is none of this kind's reads the first of it, and is not used.
        at_prefill = build.select(build.or_(is_shared, is_decode), I64(0), index)
        at_shared = build.select(is_shared, tile, I64(0))
        at_decode = build.select(is_decode, decode, I64(0))
        row, start, length = (of_tile(prefill, most_prefill, kind, at_prefill) for kind in range(3))
        place, num_members, num_pages = (of_tile(shared, most_shared, kind, at_shared) for kind in range(3))
        # A row of a shared tile is no tile of its own.
        alone = build.select(build.icmp_signed("==", code.load_index(num_seen, at_decode), I64(0)), I64(1), I64(0))
        count = build.select(is_shared, num_members, build.select(is_decode, alone, length))

        def note(i: ir.Value) -> None:
            at = build.select(is_shared, add(place, i), I64(0))
            member = code.load_index(members, at)
            token = build.select(is_shared, member, build.select(is_decode, decode, add(start, i)))
            queries.note(i, token, build.select(is_shared, member, build.select(is_decode, decode, row)), positions)
            queries.start(i, sinks)

        code.loop(0, count, note)

        def page_of(row: ir.Value, index: ir.Value) -> ir.Value:
            page = add(first_page, code.load_index(tables, add(mul(row, table_len), index)))
            return mul(add(mul(page, I64(num_kv_heads)), head), I64(shape.head_size * page_size))

        def see(first: ir.Value, last: ir.Value, begin: ir.Value, end: ir.Value) -> None:
            """Tokens first … last of the tile go through pages begin … end of the first one's row."""
            row = queries.row(first)

            def see_page(index: ir.Value) -> None:
                following = page_of(row, code.least(add(index, I64(1)), sub(end, I64(1))))
                queries.see_page(first, last, page_of(row, index), following, mul(index, I64(page_size)))

            code.loop(begin, end, see_page)

        with build.if_then(build.icmp_signed(">", count, I64(0))):
            to_end = queries.num_pages(sub(count, I64(1)))
            together = build.select(is_shared, num_pages, to_end)
            see(I64(0), count, queries.first_page(I64(0)), together)
            with build.if_then(is_shared):
                code.loop(0, count, lambda i: see(i, add(i, I64(1)), together, queries.num_pages(i)))
            code.loop(0, count, queries.finish)

    return register(handler(shape.name, 12, 1, prepare, body))


def _clear_padding(
    code: Code,
    out: ir.Value,
    token_size: int,
    num_tokens: ir.Value,
    num_decode: ir.Value,
    num_prefill: ir.Value,
    prefill: Buffer,
) -> None:
    """Zeros for the tokens behind the last tile's."""
    build = code.build
    last = code.most(build.sub(num_prefill, I64(1)), I64(0))
    start, length = (
        code.load_index(prefill.data, build.add(build.mul(I64(kind), prefill.size(1)), last)) for kind in (1, 2)
    )
    has_prefill = build.icmp_signed(">", num_prefill, I64(0))
    end = build.select(has_prefill, build.add(start, length), num_decode)
    zero = constant(F32, 0.0)
    code.loop(
        build.mul(end, I64(token_size)), build.mul(num_tokens, I64(token_size)), lambda at: code.store(zero, out, at)
    )


class _Queries:
    """The queries of one KV head for the tokens of a tile, and what they have seen so far."""

    def __init__(
        self,
        code: Code,
        shape: _Shape,
        q: ir.Value,
        keys: ir.Value,
        values: ir.Value,
        out: ir.Value,
        head: ir.Value,
    ) -> None:
        self.code, self.shape, self.head = code, shape, head
        self.q, self.keys, self.values, self.sums = q, keys, values, out
        self.kind = I16 if shape.are_bits else F32
        # With a vector of each query or of what it is multiplied with, as many sums stay in registers.
        vectors_at_once, queries_at_once = (4, 6) if shape.has_long else (2, 4)
        self.slot_lanes, self.slot_span = _lanes_and_span(shape.page_size, vectors_at_once)
        self.head_lanes, self.head_span = _lanes_and_span(shape.head_size, vectors_at_once)
        self.tokens_at_once = max(1, queries_at_once // shape.group)
        num_parts = -(-shape.group // queries_at_once)
        bounds = [shape.group * part // num_parts for part in range(num_parts + 1)]
        self.parts = [range(*bounds[part : part + 2]) for part in range(num_parts)]
        """Queries of a token that are multiplied at once."""
        most = shape.most_tokens
        self.weights = code.allocate(F32, self.tokens_at_once * shape.group * shape.page_size)
        self.greatest, self.totals = (code.allocate(F32, most * shape.group) for _ in range(2))
        self.tokens, self.rows, self.lens = (code.allocate(I64, most) for _ in range(3))

    def note(self, i: ir.Value, token: ir.Value, row: ir.Value, positions: ir.Value) -> None:
        """Token i of the tile."""
        self.code.store(token, self.tokens, i)
        self.code.store(row, self.rows, i)
        self.code.store(self.code.build.add(self.code.load_index(positions, token), I64(1)), self.lens, i)

    def row(self, i: ir.Value) -> ir.Value:
        return self.code.load(self.rows, i, I64)

    def num_pages(self, i: ir.Value) -> ir.Value:
        """That token i looks at, if not from the first on."""
        build = self.code.build
        return build.sdiv(
            build.add(self.code.load(self.lens, i, I64), I64(self.shape.page_size - 1)), I64(self.shape.page_size)
        )

    def first_page(self, i: ir.Value) -> ir.Value:
        return self.code.build.sdiv(self._oldest(i), I64(self.shape.page_size))

    def _oldest(self, i: ir.Value) -> ir.Value:
        """The first position that token i sees."""
        if self.shape.window is None:
            return I64(0)
        return self.code.most(self.code.build.sub(self.code.load(self.lens, i, I64), I64(self.shape.window)), I64(0))

    def _seen(self, i: ir.Value, first_slot: ir.Value) -> tuple[ir.Value, ir.Value]:
        """From which slot of a page to which token i sees it: none, if that is not ahead."""
        code, build = self.code, self.code.build
        seen_from = code.most(build.sub(self._oldest(i), first_slot), I64(0))
        length = build.sub(code.load(self.lens, i, I64), first_slot)
        return seen_from, code.least(length, I64(self.shape.page_size))

    def _lane(self, i: ir.Value) -> ir.Value:
        """Where the queries of token i begin, and their sums."""
        build, shape = self.code.build, self.shape
        of_token = build.mul(self.code.load(self.tokens, i, I64), I64(shape.num_kv_heads))
        return build.mul(build.add(of_token, self.head), I64(shape.group * shape.head_size))

    def start(self, i: ir.Value, sinks: ir.Value) -> None:
        """Nothing seen but the sinks."""
        code, build, group = self.code, self.code.build, I64(self.shape.group)

        def start(g: ir.Value) -> None:
            place, first = build.add(build.mul(i, group), g), constant(F32, LEAST_MAX)
            if self.shape.has_sinks:
                first = code.load(sinks, build.add(build.mul(self.head, group), g), F32)
            code.store(first, self.greatest, place)
            code.store(constant(F32, 1.0 if self.shape.has_sinks else 0.0), self.totals, place)

        code.loop(0, self.shape.group, start)
        lane, none = self._lane(i), constant(ir.VectorType(F32, self.head_lanes), 0.0)
        code.loop(
            0,
            self.shape.group * self.shape.head_size,
            lambda at: code.store_vector(none, self.sums, build.add(lane, at)),
            step=self.head_lanes,
        )

    def finish(self, i: ir.Value) -> None:
        """Sums become means; zeros where nothing was seen."""
        code, build, head_size = self.code, self.code.build, self.shape.head_size
        lane = self._lane(i)

        def finish(g: ir.Value) -> None:
            total = code.load(self.totals, build.add(build.mul(i, I64(self.shape.group)), g), F32)
            is_none = build.fcmp_ordered("==", total, constant(F32, 0.0))
            total = code.in_all_lanes(build.select(is_none, constant(F32, 1.0), total), self.head_lanes)

            def divide(h: ir.Value) -> None:
                at = build.add(build.add(lane, build.mul(g, I64(head_size))), h)
                sums = code.load_vector(self.sums, at, F32, self.head_lanes)
                code.store_vector(build.fdiv(sums, total), self.sums, at)

            code.loop(0, head_size, divide, step=self.head_lanes)

        code.loop(0, self.shape.group, finish)

    def see_page(
        self, first: ir.Value, last: ir.Value, begin: ir.Value, following: ir.Value, first_slot: ir.Value
    ) -> None:
        """Tokens first … last see a page, those at once that have their sums in registers.

        The page lies at `begin`, its first slot is that position; `following` is where the next one lies.
        """
        code, build = self.code, self.code.build
        at_once, alone = self.tokens_at_once, first
        if at_once > 1:
            alone = build.sub(last, build.srem(build.sub(last, first), I64(at_once)))
            code.loop(first, alone, lambda i: self._see(i, at_once, begin, None, first_slot), step=at_once)
        code.loop(alone, last, lambda i: self._see(i, 1, begin, following, first_slot))

    def _see(self, i: ir.Value, count: int, begin: ir.Value, following: ir.Value | None, first_slot: ir.Value) -> None:
        """As many tokens from i on see a page. For a token alone with it, what is to be read next is fetched ahead."""
        code, build = self.code, self.code.build
        tokens = [build.add(i, I64(j)) for j in range(count)]
        # Slots of the page that any of them sees: those that a token does not see weigh nothing for it.
        seen_from, seen_to = zip(*(self._seen(token, first_slot) for token in tokens), strict=True)
        any_from, any_to = seen_from[0], seen_to[0]
        for one_from, one_to in zip(seen_from[1:], seen_to[1:], strict=True):
            any_from, any_to = code.least(any_from, one_from), code.most(any_to, one_to)
        lanes = [self._lane(token) for token in tokens]
        with build.if_then(build.icmp_signed("<", any_from, any_to)):
            for part in self.parts:
                self._score(lanes, part, begin, following is not None and part is self.parts[0])
            code.loop(0, count * self.shape.group, lambda place: self._weigh(i, place, first_slot))
            for part in self.parts:
                self._sum_values(lanes, part, begin, following if part is self.parts[0] else None, any_from, any_to)

    def _score(self, lanes: list[ir.Value], part: range, begin: ir.Value, fetches: bool) -> None:
        """weights[query, z] = q · k[:, z], some queries and slots at once."""
        code, build, add = self.code, self.code.build, self.code.build.add
        head_size, page_size, group = self.shape.head_size, self.shape.page_size, self.shape.group
        none = constant(ir.VectorType(F32, self.slot_lanes), 0.0)
        queries = [(lane, g, j * group + g) for j, lane in enumerate(lanes) for g in part]
        vectors = range(0, self.slot_span, self.slot_lanes)

        def some_slots(slot: ir.Value) -> None:
            def lane_of_head(h: ir.Value, *scores: ir.Value) -> list[ir.Value]:
                at = add(add(begin, build.mul(h, I64(page_size))), slot)
                k = [code.load_vector(self.keys, add(at, I64(x)), self.kind, self.slot_lanes) for x in vectors]
                if fetches:
                    code.fetch(self.values, at, self.kind, self.slot_span)
                found = []
                for index, (lane, g, _) in enumerate(queries):
                    ours = code.in_all_lanes(
                        code.load(self.q, add(lane, add(I64(g * head_size), h)), F32), self.slot_lanes
                    )
                    so_far = scores[index * len(k) : (index + 1) * len(k)]
                    found += [code.add_product(ours, x, score) for x, score in zip(k, so_far, strict=True)]
                return found

            scores = code.loop(0, head_size, lane_of_head, carried=[none] * (len(queries) * len(vectors)))
            for index, (_, _, place) in enumerate(queries):
                for x, score in zip(vectors, scores[index * len(vectors) :], strict=False):
                    if self.shape.soft_cap is not None:
                        score = _capped(code, score, self.shape.soft_cap)
                    code.store_vector(score, self.weights, add(I64(place * page_size + x), slot))

        code.loop(0, page_size, some_slots, step=self.slot_span)

    def _weigh(self, first: ir.Value, place: ir.Value, first_slot: ir.Value) -> None:
        """Scores become weights, relative to the greatest so far; what was summed before shrinks accordingly.

        Those of the query at `place`, counted from token `first` on.
        """
        code, build, add, mul = self.code, self.code.build, self.code.build.add, self.code.build.mul
        head_size, page_size, slot_lanes, head_lanes = (
            self.shape.head_size, self.shape.page_size, self.slot_lanes, self.head_lanes,
        )  # fmt: skip
        group = I64(self.shape.group)
        token = add(first, build.sdiv(place, group))
        seen_from, seen_to = self._seen(token, first_slot)
        scores_of = mul(place, I64(page_size))
        state = add(mul(first, group), place)
        lane = add(self._lane(token), mul(build.srem(place, group), I64(head_size)))
        none = constant(ir.VectorType(F32, slot_lanes), 0.0)
        places = ir.Constant(ir.VectorType(I32, slot_lanes), list(range(slot_lanes)))
        bounds = [code.in_all_lanes(build.trunc(bound, I32), slot_lanes) for bound in (seen_from, seen_to)]

        def is_seen(slot: ir.Value) -> ir.Value:
            at = add(places, code.in_all_lanes(build.trunc(slot, I32), slot_lanes))
            return build.and_(build.icmp_signed(">=", at, bounds[0]), build.icmp_signed("<", at, bounds[1]))

        def scores(slot: ir.Value) -> ir.Value:
            return code.load_vector(self.weights, add(scores_of, slot), F32, slot_lanes)

        def see(slot: ir.Value, most: ir.Value) -> list[ir.Value]:
            least = constant(none.type, LEAST_MAX)
            return [code.greater(build.select(is_seen(slot), scores(slot), least), most)]

        before = code.load(self.greatest, state, F32)
        most = code.loop(0, page_size, see, step=slot_lanes, carried=[code.in_all_lanes(before, slot_lanes)])
        now = code.reduce(most[0], code.greater)
        in_lanes = code.in_all_lanes(now, slot_lanes)

        def exponentiate(slot: ir.Value, total: ir.Value) -> list[ir.Value]:
            weight = build.select(is_seen(slot), code.exp(build.fsub(scores(slot), in_lanes)), none)
            code.store_vector(weight, self.weights, add(scores_of, slot))
            return [build.fadd(total, weight)]

        total = code.loop(0, page_size, exponentiate, step=slot_lanes, carried=[none])
        decay = code.exp(code.in_all_lanes(build.fsub(before, now), head_lanes))
        kept = build.fmul(code.load(self.totals, state, F32), build.extract_element(decay, I32(0)))
        code.store(now, self.greatest, state)
        code.store(build.fadd(kept, code.reduce(total[0], build.fadd)), self.totals, state)

        def shrink(h: ir.Value) -> None:
            at = add(lane, h)
            code.store_vector(build.fmul(code.load_vector(self.sums, at, F32, head_lanes), decay), self.sums, at)

        code.loop(0, head_size, shrink, step=head_lanes)

    def _sum_values(
        self,
        lanes: list[ir.Value],
        part: range,
        begin: ir.Value,
        following: ir.Value | None,
        seen_from: ir.Value,
        seen_to: ir.Value,
    ) -> None:
        """sums[query] += Σ weights[query, z] · v[z], some queries and lanes at once. Dead slots are not looked at."""
        code, build, add = self.code, self.code.build, self.code.build.add
        head_size, page_size, group = self.shape.head_size, self.shape.page_size, self.shape.group
        queries = [(lane, g, j * group + g) for j, lane in enumerate(lanes) for g in part]
        vectors = range(0, self.head_span, self.head_lanes)

        def some_lanes(h: ir.Value) -> None:
            at = [add(add(lane, I64(g * head_size + x)), h) for lane, g, _ in queries for x in vectors]

            def slot_of_page(slot: ir.Value, *so_far: ir.Value) -> list[ir.Value]:
                in_page = add(build.mul(slot, I64(head_size)), h)
                row = add(begin, in_page)
                v = [code.load_vector(self.values, add(row, I64(x)), self.kind, self.head_lanes) for x in vectors]
                if following is not None:
                    code.fetch(self.keys, add(following, in_page), self.kind, self.head_span)
                found = []
                for index, (_, _, place) in enumerate(queries):
                    weight = code.load(self.weights, add(I64(place * page_size), slot), F32)
                    in_lanes = code.in_all_lanes(weight, self.head_lanes)
                    ours = so_far[index * len(v) : (index + 1) * len(v)]
                    found += [code.add_product(in_lanes, x, value) for x, value in zip(v, ours, strict=True)]
                return found

            before = [code.load_vector(self.sums, place, F32, self.head_lanes) for place in at]
            for place, value in zip(at, code.loop(seen_from, seen_to, slot_of_page, carried=before), strict=True):
                code.store_vector(value, self.sums, place)

        code.loop(0, head_size, some_lanes, step=self.head_span)


def _lanes_and_span(size: int, vectors_at_once: int) -> tuple[int, int]:
    """Of a vector, and of as many as are taken at once, both dividing `size`."""
    lanes = lanes_for(size)
    return lanes, lanes * max(n for n in range(1, vectors_at_once + 1) if size // lanes % n == 0)


def _capped(code: Code, score: ir.Value, cap: float) -> ir.Value:
    """cap × tanh(score ÷ cap), by an exponential that cannot overflow: tanh |x| = (1 − e⁻²|ˣ|) ÷ (1 + e⁻²|ˣ|)."""
    build, kind = code.build, score.type
    is_negative = build.fcmp_ordered("<", score, constant(kind, 0.0))
    size = build.select(is_negative, build.fneg(score), score)
    small = code.exp(build.fmul(size, constant(kind, -2.0 / cap)))
    one = constant(kind, 1.0)
    capped = build.fmul(constant(kind, cap), build.fdiv(build.fsub(one, small), build.fadd(one, small)))
    return build.select(is_negative, build.fneg(capped), capped)


@cache
def _write_handler(are_bits: bool, num_kv_heads: int, head_size: int, page_size: int) -> str:
    kind = I16 if are_bits else F32
    token_values, page_values = num_kv_heads * head_size, head_size * page_size

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        num_tokens = args[4].size(0)
        num_units = code.build.sdiv(code.build.add(num_tokens, I64(TOKENS_A_UNIT - 1)), I64(TOKENS_A_UNIT))
        is_large = code.build.icmp_signed(">", num_tokens, I64(WORTH_HELP // token_values))
        data = [buffer.data for buffer in (*rets, *args[2:5])]
        return [*data, code.load_index(args[5].data, 0), num_tokens], num_units, is_large

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        keys, values, k, v, slots, first_page, num_tokens = given
        build, add, mul = code.build, code.build.add, code.build.mul
        begin = mul(unit, I64(TOKENS_A_UNIT))

        def write(token: ir.Value) -> None:
            slot = code.load_index(slots, token)
            page, place = build.sdiv(slot, I64(page_size)), build.srem(slot, I64(page_size))
            of_token = mul(token, I64(token_values))
            of_page = mul(add(first_page, page), I64(num_kv_heads * page_values))
            for head in range(num_kv_heads):
                source = add(of_token, I64(head * head_size))
                target = add(of_page, I64(head * page_values))

                def write_lane(h: ir.Value, source: ir.Value = source, target: ir.Value = target) -> None:
                    at = add(add(target, mul(h, I64(page_size))), place)
                    code.store(code.load(k, add(source, h), kind), keys, at)
                    at = add(add(target, mul(place, I64(head_size))), h)
                    code.store(code.load(v, add(source, h), kind), values, at)

                code.loop(0, head_size, write_lane)

        code.loop(begin, code.least(add(begin, I64(TOKENS_A_UNIT)), num_tokens), write)

    name = "_".join(["jpaged_write", *map(str, (are_bits, num_kv_heads, head_size, page_size))])
    return register(handler(name, 6, 2, prepare, body))
