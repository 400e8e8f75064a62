"""Products of few rows with a weight on a CPU, in native code: as fast as the weight comes from memory.

    x [R, K] · W [K, N]      eight rows of W from end to end, for all rows of x: a column is a lane
    x [R, K] · W [N, K]ᵀ     some rows of x × some of W, a vector of k at once, added up in the end

Each result is one sum in one order, whatever rows it is computed beside: its bits do not depend on how many there are.
Weights of bfloat16 are multiplied in pairs of k where the machine can (AVX512-BF16), and as float32 where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float
from llvmlite import ir

from .cpu_code import (
    F32,
    I16,
    I32,
    I64,
    POINTER,
    SIZES,
    Buffer,
    Code,
    constant,
    declared,
    handler,
    has_long_vectors,
    host_has,
    lanes_for,
    register,
)

MOST_ROWS = 32
"""From there on XLA's own products are as fast."""
PAIR_LANES = 16
"""Of sums of pairs of bfloat16."""
WEIGHTS_AT_ONCE = 4
"""Rows of W that are multiplied at once by some of x."""
UNIT_COLUMNS, UNIT_WEIGHTS = 256, 64
"""Of N, in a unit of work: few enough that threads end together."""
CACHE_LINE = 64
WORTH_HELP = 1 << 16
"""Values of a weight, from which on a second thread is worth waking."""


def product(x: Float[Array, "R K"], weight: Float[Array, "K N"]) -> Float[Array, "R N"]:
    """x · W in float32, both of float32 or both of bfloat16."""
    depth, num_out = weight.shape
    lanes = lanes_for(num_out)
    # Rows of W that are read at once, each from end to end of a unit's columns: a processor guesses what follows.
    at_once = max(n for n in range(1, (8 if has_long_vectors() else 4) + 1) if depth % n == 0)
    vectors = 1 + (num_out % (2 * lanes) == 0)
    in_pairs = _in_pairs(weight) and (lanes, vectors) == (PAIR_LANES, 2) and at_once % 2 == 0
    return _call(_by_columns(weight.dtype == jnp.bfloat16, in_pairs, lanes, vectors, at_once), x, weight, num_out)


def product_by_rows(x: Float[Array, "R K"], weight: Float[Array, "N K"]) -> Float[Array, "R N"]:
    """x · Wᵀ in float32, both of float32 or both of bfloat16."""
    (num_rows, depth), num_out = x.shape, weight.shape[0]
    in_pairs = _in_pairs(weight) and depth % (2 * PAIR_LANES) == 0
    # Of those that divide a unit.
    at_once = max(n for n in range(1, WEIGHTS_AT_ONCE + 1) if num_out % n == 0 == UNIT_WEIGHTS % n)
    lanes = PAIR_LANES if in_pairs else lanes_for(depth)
    rows_at_once = 6 if has_long_vectors() else 3  # With `at_once` of W as many sums stay in registers.
    name = _by_rows(weight.dtype == jnp.bfloat16, in_pairs, num_rows, lanes, at_once, rows_at_once)
    return _call(name, x, weight, num_out)


def _in_pairs(weight: Array) -> bool:
    return weight.dtype == jnp.bfloat16 and host_has("avx512bf16")


def _call(name: str, x: Array, weight: Array, num_out: int) -> Array:
    # Native code reads what it is given as what it was made for.
    if x.dtype != weight.dtype or x.dtype not in (jnp.float32, jnp.bfloat16) or x.shape[0] > MOST_ROWS:
        raise ValueError(
            f"product: got {x.shape[0]} rows of {x.dtype} and a weight of {weight.dtype}, wanted at most {MOST_ROWS} "
            "rows and both float32 or both bfloat16; use jnp.dot"
        )
    return ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], num_out), jnp.float32))(x, weight)


@cache
def _by_columns(are_bits: bool, in_pairs: bool, lanes: int, vectors: int, at_once: int) -> str:
    kind, span, per_factor = I16 if are_bits else F32, vectors * lanes, 1 + in_pairs
    none = constant(ir.VectorType(F32, lanes), 0.0)

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        x, weight = args
        depth, num_out = weight.size(0), weight.size(1)
        values = [x.data, weight.data, rets[0].data, x.size(0), depth, num_out]
        return values, _num_units(code, num_out, UNIT_COLUMNS), _is_large(code, depth, num_out)

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        x, weight, out, num_rows, depth, num_out = given
        add, mul = code.build.add, code.build.mul
        begin = mul(unit, I64(UNIT_COLUMNS))
        width = code.least(code.build.sub(num_out, begin), I64(UNIT_COLUMNS))
        # Rows of the result may lie a multiple of 4096 bytes apart, and then all want the same few lines of a cache.
        all_sums = code.allocate(F32, MOST_ROWS * UNIT_COLUMNS)

        def clear(row: ir.Value) -> None:
            start = mul(row, I64(UNIT_COLUMNS))
            code.loop(0, width, lambda column: code.store_vector(none, all_sums, add(start, column)), step=lanes)

        def finish(row: ir.Value) -> None:
            source, target = mul(row, I64(UNIT_COLUMNS)), add(mul(row, num_out), begin)

            def move(column: ir.Value) -> None:
                total = code.load_vector(all_sums, add(source, column), F32, lanes)
                code.store_vector(total, out, add(target, column))

            code.loop(0, width, move, step=lanes)

        def some_depth(k: ir.Value) -> None:
            def some_columns(column: ir.Value) -> None:
                starts = [add(add(mul(add(k, I64(i)), num_out), begin), column) for i in range(at_once)]
                for start in starts:
                    _fetch(code, weight, add(start, mul(num_out, I64(at_once))), kind, span)
                if in_pairs:
                    of_pairs = [
                        [_words(code, weight, start) for start in starts[i : i + 2]] for i in range(0, at_once, 2)
                    ]
                    w = [_interleaved(code, *pair) for pair in of_pairs]
                else:
                    w = [
                        [code.load_vector(weight, add(start, I64(v * lanes)), kind, lanes) for v in range(vectors)]
                        for start in starts
                    ]

                def row_of_x(row: ir.Value) -> None:
                    places = [add(add(mul(row, I64(UNIT_COLUMNS)), column), I64(v * lanes)) for v in range(vectors)]
                    sums = [code.load_vector(all_sums, place, F32, lanes) for place in places]
                    factors = add(mul(row, depth), k)
                    for i, of_factor in enumerate(w):
                        factor = code.in_all_lanes(
                            _one(code, x, add(factors, I64(i * per_factor)), kind, in_pairs), lanes
                        )
                        sums = [
                            _multiply(code, factor, values, total, in_pairs)
                            for values, total in zip(of_factor, sums, strict=True)
                        ]
                    for place, total in zip(places, sums, strict=True):
                        code.store_vector(total, all_sums, place)

                code.loop(0, num_rows, row_of_x)

            code.loop(0, width, some_columns, step=span)

        code.loop(0, num_rows, clear)
        code.loop(0, depth, some_depth, step=at_once)
        code.loop(0, num_rows, finish)

    return _register("columns", prepare, body, are_bits, in_pairs, lanes, vectors, at_once)


@cache
def _by_rows(are_bits: bool, in_pairs: bool, num_rows: int, lanes: int, at_once: int, rows_at_once: int) -> str:
    kind = I16 if are_bits else F32
    none = constant(ir.VectorType(F32, lanes), 0.0)

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        x, weight = args
        num_out, depth = weight.size(0), weight.size(1)
        values = [x.data, weight.data, rets[0].data, depth, num_out]
        return values, _num_units(code, num_out, UNIT_WEIGHTS), _is_large(code, depth, num_out)

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        x, weight, out, depth, num_out = given
        add, mul = code.build.add, code.build.mul

        def some_rows(rows: range, weight_row: ir.Value) -> None:
            places = [(row, of) for row in rows for of in range(at_once)]

            def add_products(k: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                def load(base: ir.Value, row: ir.Value) -> ir.Value:
                    place = add(mul(row, depth), k)
                    return _words(code, base, place) if in_pairs else code.load_vector(base, place, kind, lanes)

                w = [load(weight, add(weight_row, I64(of))) for of in range(at_once)]
                factors = {row: load(x, I64(row)) for row in rows}
                return [
                    _multiply(code, factors[row], w[of], total, in_pairs)
                    for (row, of), total in zip(places, sums, strict=True)
                ]

            step = 2 * PAIR_LANES if in_pairs else lanes
            sums = code.loop(0, depth, add_products, step=step, carried=[none] * len(places))
            for (row, of), total in zip(places, sums, strict=True):
                place = add(mul(I64(row), num_out), add(weight_row, I64(of)))
                code.store(code.reduce(total, code.build.fadd), out, place)

        def some_weights(weight_row: ir.Value) -> None:
            for first in range(0, num_rows, rows_at_once):
                some_rows(range(first, min(first + rows_at_once, num_rows)), weight_row)

        begin = mul(unit, I64(UNIT_WEIGHTS))
        end = code.least(add(begin, I64(UNIT_WEIGHTS)), num_out)
        code.loop(begin, end, some_weights, step=at_once)

    return _register("rows", prepare, body, are_bits, in_pairs, num_rows, lanes, at_once, rows_at_once)


def _register(kind: str, prepare: Callable[..., object], body: Callable[..., None], *sizes: int) -> str:
    name = "_".join(["jpaged_product_by", kind, *(str(int(size)) for size in sizes)])
    return register(handler(name, 2, 1, prepare, body))  # type: ignore[arg-type]


def _num_units(code: Code, num_out: ir.Value, of_unit: int) -> ir.Value:
    return code.build.sdiv(code.build.add(num_out, I64(of_unit - 1)), I64(of_unit))


def _is_large(code: Code, depth: ir.Value, num_out: ir.Value) -> ir.Value:
    return code.build.icmp_signed(">", code.build.mul(depth, num_out), I64(WORTH_HELP))


def _multiply(code: Code, a: ir.Value, b: ir.Value, total: ir.Value, in_pairs: bool) -> ir.Value:
    """total + a × b, lane by lane; of pairs of bfloat16, a lane is the sum of two products."""
    if not in_pairs:
        return code.add_product(a, b, total)
    pairs = ir.VectorType(BFLOAT16, 2 * PAIR_LANES)
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = declared(code.build.module, name, total.type, total.type, pairs, pairs)
    return code.build.call(function, [total, code.build.bitcast(a, pairs), code.build.bitcast(b, pairs)])


def _one(code: Code, x: ir.Value, place: ir.Value, kind: ir.Type, in_pairs: bool) -> ir.Value:
    """A value of x as float32, or a pair of them as 32 bits."""
    if in_pairs:
        return code.build.load(code.build.bitcast(code.at(x, place, I16), I32.as_pointer()), align=2)
    if kind is F32:
        return code.load(x, place, F32)
    bits = code.build.shl(code.build.zext(code.load(x, place, I16), I32), I32(16))
    return code.build.bitcast(bits, F32)


def _words(code: Code, base: ir.Value, place: ir.Value) -> ir.Value:
    """Two vectors' worth of bfloat16, as bits."""
    kind = ir.VectorType(I16, 2 * PAIR_LANES)
    return code.build.load(code.build.bitcast(code.at(base, place, I16), kind.as_pointer()), align=2)


def _interleaved(code: Code, even: ir.Value, odd: ir.Value) -> list[ir.Value]:
    """Lane by lane a pair: of the first half of the lanes, and of the second."""
    halves = (range(at, at + PAIR_LANES) for at in (0, PAIR_LANES))
    orders = ([lane + of for lane in half for of in (0, 2 * PAIR_LANES)] for half in halves)
    kind = ir.VectorType(I32, 2 * PAIR_LANES)
    return [code.build.shuffle_vector(even, odd, ir.Constant(kind, order)) for order in orders]


def _fetch(code: Code, base: ir.Value, place: ir.Value, kind: ir.Type, count: int) -> None:
    """Ask for `count` values, of which nothing is read. An address beyond the end does no harm."""
    start = code.build.bitcast(code.at(base, place, kind), POINTER)
    function = declared(code.build.module, "llvm.prefetch.p0", ir.VoidType(), POINTER, I32, I32, I32)
    for offset in range(0, count * SIZES[kind], CACHE_LINE):
        code.build.call(function, [code.build.gep(start, [I64(offset)]), I32(0), I32(3), I32(1)])


class _Bfloat16(ir.Type):
    """Which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


BFLOAT16 = _Bfloat16()
