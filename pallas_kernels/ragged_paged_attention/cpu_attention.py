"""Decode rows on a CPU, and new keys and values written into their pages: native code, see cpu_code.

    unit = (row, KV head)      pages of the row ──▶ scores [G, Z] ──▶ weights ──▶ sums [G, H], an online softmax
                               K [H, Z] by columns: a vector is some slots of a page, its queries' sums in registers
                               V [Z, H] by rows:    a vector is some lanes of a head

A page's keys and values are read once, from memory into registers, for all queries of a KV head. Whatever company a
row has, the same is done for it in the same order: its bits do not depend on it, nor on the number of threads.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float, Int
from llvmlite import ir

from ..cpu_code import F32, I16, I32, I64, Code, constant, has_long_vectors, lanes_for, register
from ..cpu_handler import Buffer, handler
from .xla_pages import BITS, LayerPages
from .xla_softmax import LEAST_MAX, Softmax

QUERIES_AT_ONCE = 4
WORTH_HELP = 1 << 17
"""Values of keys, from which on a second thread is worth waking."""
TOKENS_A_UNIT = 16


def decode_rows(
    pages: LayerPages,
    q: Float[Array, "R K G H"],
    tables: Int[Array, "R P"],
    lens: Int[Array, " R"],
    num_seen: Int[Array, " R"],
) -> Softmax:
    """Attend to the first `lens` tokens of each row, but not to its first `num_seen` pages. Keys are transposed.

    Entries of `tables` up to the length must lie in the layer; what a row of length 0 has there is not looked at.
    """
    page_size = pages.page_size
    name = _decode_handler(pages.keys.dtype == BITS, *q.shape[1:], page_size, pages.window, pages.soft_cap)
    of_row = q.shape[:3]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (of_row, of_row, q.shape)]
    first = num_seen if pages.window is None else jnp.maximum(lens - pages.window, 0) // page_size
    queries = q.astype(jnp.float32) * pages.scale
    found = ffi_call(name, shapes)(queries, pages.keys, pages.values, tables, lens, first, pages.first[None])
    return Softmax(*found)


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


@cache
def _decode_handler(
    are_bits: bool,
    num_kv_heads: int,
    group: int,
    head_size: int,
    page_size: int,
    window: int | None,
    soft_cap: float | None,
) -> str:
    kind = I16 if are_bits else F32
    slot_lanes, head_lanes = lanes_for(page_size), lanes_for(head_size)
    # With the queries as many sums stay in registers.
    vectors_at_once = 4 if has_long_vectors() else 2
    slot_span, head_span = (
        lanes * max(n for n in range(1, vectors_at_once + 1) if size // lanes % n == 0)
        for size, lanes in ((page_size, slot_lanes), (head_size, head_lanes))
    )
    no_slots, no_head = (constant(ir.VectorType(F32, lanes), 0.0) for lanes in (slot_lanes, head_lanes))
    queries_at_once = [range(g, min(g + QUERIES_AT_ONCE, group)) for g in range(0, group, QUERIES_AT_ONCE)]
    page_values = head_size * page_size

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        tables, lens = args[3], args[4]
        num_rows = lens.size(0)
        lens_data = lens.data
        total = code.loop(
            0, num_rows, lambda row, sum: [code.build.add(sum, code.load_index(lens_data, row))], carried=[I64(0)]
        )[0]
        first_page = code.load_index(args[6].data, 0)
        is_large = code.build.icmp_signed(">", total, I64(WORTH_HELP // (num_kv_heads * head_size)))
        data = [buffer.data for buffer in (*args[:6], *rets)]
        return [*data, tables.size(1), first_page], code.build.mul(num_rows, I64(num_kv_heads)), is_large

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        q, keys, values, tables, lens, firsts, greatest, totals, sums, table_len, first_page = given
        build, add, mul = code.build, code.build.add, code.build.mul
        weights = code.allocate(F32, group * page_size)
        row, head = build.sdiv(unit, I64(num_kv_heads)), build.srem(unit, I64(num_kv_heads))
        length = code.load_index(lens, row)
        oldest = I64(0) if window is None else code.most(build.sub(length, I64(window)), I64(0))
        # Queries, and what becomes of them, lie one after the other: G of them a unit.
        query = mul(unit, I64(group))
        lane = mul(unit, I64(group * head_size))
        for g in range(group):
            code.store(constant(F32, LEAST_MAX), greatest, add(query, I64(g)))
            code.store(constant(F32, 0.0), totals, add(query, I64(g)))
        code.loop(
            0, group * head_size, lambda at: code.store_vector(no_head, sums, add(lane, at)), step=no_head.type.count
        )

        def score(begin: ir.Value, of: range) -> None:
            """weights[g, z] = q[g] · k[:, z], some queries and slots at once."""

            def some_slots(slot: ir.Value) -> None:
                places = [(i, x) for i in range(len(of)) for x in range(slot_span // slot_lanes)]

                def lane_of_head(h: ir.Value, *scores: ir.Value) -> list[ir.Value]:
                    at = add(add(begin, mul(h, I64(page_size))), slot)
                    k = [
                        code.load_vector(keys, add(at, I64(x)), kind, slot_lanes)
                        for x in range(0, slot_span, slot_lanes)
                    ]
                    if of is queries_at_once[0]:
                        code.fetch(values, at, kind, slot_span)
                    ours = [code.load(q, add(lane, add(I64(g * head_size), h)), F32) for g in of]
                    q_lanes = [code.in_all_lanes(value, slot_lanes) for value in ours]
                    return [
                        code.add_product(q_lanes[i], k[x], score) for (i, x), score in zip(places, scores, strict=True)
                    ]

                scores = code.loop(0, head_size, lane_of_head, carried=[no_slots] * len(places))
                for (i, x), value in zip(places, scores, strict=True):
                    if soft_cap is not None:
                        value = _capped(code, value, soft_cap)
                    code.store_vector(value, weights, add(I64(of[i] * page_size + x * slot_lanes), slot))

            code.loop(0, page_size, some_slots, step=slot_span)

        def weigh(g: int, seen_from: ir.Value, seen_to: ir.Value) -> None:
            """Scores become weights, relative to the greatest so far; what was summed before shrinks accordingly."""
            in_slots = ir.VectorType(I32, slot_lanes)
            places = ir.Constant(in_slots, list(range(slot_lanes)))
            bounds = [code.in_all_lanes(build.trunc(bound, I32), slot_lanes) for bound in (seen_from, seen_to)]

            def is_seen(slot: ir.Value) -> ir.Value:
                at = add(places, code.in_all_lanes(build.trunc(slot, I32), slot_lanes))
                return build.and_(build.icmp_signed(">=", at, bounds[0]), build.icmp_signed("<", at, bounds[1]))

            def scores(slot: ir.Value) -> ir.Value:
                return code.load_vector(weights, add(I64(g * page_size), slot), F32, slot_lanes)

            def see(slot: ir.Value, most: ir.Value) -> list[ir.Value]:
                least = constant(no_slots.type, LEAST_MAX)
                return [code.greater(build.select(is_seen(slot), scores(slot), least), most)]

            place = add(query, I64(g))
            before = code.load(greatest, place, F32)
            most = code.loop(0, page_size, see, step=slot_lanes, carried=[code.in_all_lanes(before, slot_lanes)])
            now = code.reduce(most[0], code.greater)
            in_lanes = code.in_all_lanes(now, slot_lanes)

            def exponentiate(slot: ir.Value, total: ir.Value) -> list[ir.Value]:
                weight = build.select(is_seen(slot), code.exp(build.fsub(scores(slot), in_lanes)), no_slots)
                code.store_vector(weight, weights, add(I64(g * page_size), slot))
                return [build.fadd(total, weight)]

            total = code.loop(0, page_size, exponentiate, step=slot_lanes, carried=[no_slots])
            decay = code.exp(code.in_all_lanes(build.fsub(before, now), head_lanes))
            kept = build.fmul(code.load(totals, place, F32), build.extract_element(decay, I32(0)))
            code.store(now, greatest, place)
            code.store(build.fadd(kept, code.reduce(total[0], build.fadd)), totals, place)

            def shrink(h: ir.Value) -> None:
                at = add(add(lane, I64(g * head_size)), h)
                code.store_vector(build.fmul(code.load_vector(sums, at, F32, head_lanes), decay), sums, at)

            code.loop(0, head_size, shrink, step=head_lanes)

        def sum_values(begin: ir.Value, following: ir.Value, seen_from: ir.Value, seen_to: ir.Value, of: range) -> None:
            """sums[g] += Σ weights[g, z] · v[z], some queries and lanes at once. Dead slots are not looked at."""

            def some_lanes(h: ir.Value) -> None:
                places = [(i, x) for i in range(len(of)) for x in range(0, head_span, head_lanes)]
                at = [add(add(lane, I64(of[i] * head_size + x)), h) for i, x in places]

                def slot_of_page(slot: ir.Value, *so_far: ir.Value) -> list[ir.Value]:
                    row_of_page = add(add(begin, mul(slot, I64(head_size))), h)
                    v = {
                        x: code.load_vector(values, add(row_of_page, I64(x)), kind, head_lanes)
                        for x in range(0, head_span, head_lanes)
                    }
                    if of is queries_at_once[0]:
                        ahead = add(add(following, mul(slot, I64(head_size))), h)
                        code.fetch(keys, ahead, kind, head_span)
                    ours = [code.load(weights, add(I64(g * page_size), slot), F32) for g in of]
                    in_lanes = [code.in_all_lanes(weight, head_lanes) for weight in ours]
                    return [
                        code.add_product(in_lanes[i], v[x], value) for (i, x), value in zip(places, so_far, strict=True)
                    ]

                before = [code.load_vector(sums, place, F32, head_lanes) for place in at]
                for place, value in zip(at, code.loop(seen_from, seen_to, slot_of_page, carried=before), strict=True):
                    code.store_vector(value, sums, place)

            code.loop(0, head_size, some_lanes, step=head_span)

        num_pages = build.sdiv(add(length, I64(page_size - 1)), I64(page_size))

        def begin_of(index: ir.Value) -> ir.Value:
            page = add(first_page, code.load_index(tables, add(mul(row, table_len), index)))
            return mul(add(mul(page, I64(num_kv_heads)), head), I64(page_values))

        def see_page(index: ir.Value) -> None:
            # While keys are multiplied, values are fetched; and while those are summed, keys of the page that follows.
            begin = begin_of(index)
            following = begin_of(code.least(add(index, I64(1)), build.sub(num_pages, I64(1))))
            first_slot = mul(index, I64(page_size))
            seen_from = code.most(build.sub(oldest, first_slot), I64(0))
            seen_to = code.least(build.sub(length, first_slot), I64(page_size))
            for of in queries_at_once:
                score(begin, of)
            for g in range(group):
                weigh(g, seen_from, seen_to)
            for of in queries_at_once:
                sum_values(begin, following, seen_from, seen_to, of)

        code.loop(code.load_index(firsts, row), num_pages, see_page)

    sizes = are_bits, num_kv_heads, group, head_size, page_size, window, soft_cap, slot_span, head_span
    name = "_".join(["jpaged_decode", *(str(size).replace(".", "p") for size in sizes)])
    return register(handler(name, 7, 3, prepare, body))


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
