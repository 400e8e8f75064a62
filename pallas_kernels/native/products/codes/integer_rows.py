"""Rows as integers: 32 values of a row share a scale, and their integers are cut into bytes.

    record     planes of bytes [3, 32], scale float32, sums float32 [7]       128 bytes

A value is scale × integer. An integer has 24 bits in three planes of bytes, or 16 bits in two, and then the place of
the third is not used. Plane 0 has the highest bits, and each byte has a sign.

Weights are code × scale − minimum, so a product with them also needs the sum of the row's values over each run. A
record has −Σ of its 32 values, of its two halves and of its four quarters. Slots are 4 bytes of a record.
"""

from __future__ import annotations

import math

from llvmlite import ir

from ...llvm import F32, I8, I32, I64, LONG_LANES, Code, constant, declare
from ..panels import DEPTH

RECORD_SLOTS = DEPTH
"""Slots of a record: as many as its values have as float32."""
PLANE_SLOTS = DEPTH // 4
"""Slots of a plane: a slot has the bytes of 4 values."""
SCALE_SLOT = 3 * PLANE_SLOTS
"""The slot of the scale; the sums follow it."""
FIRST_SUM_SLOTS = {32: SCALE_SLOT + 1, 16: SCALE_SLOT + 2, 8: SCALE_SLOT + 4}
"""Values of a run → the slot of the first run's sum."""
SMALLEST_MAGNITUDE = 2.0**-100
"""If all 32 magnitudes are smaller, they count as 0: their scale would not be a normal float32."""
INFINITY_BITS = 0x7F800000
"""The bits of the float32 infinity; those of a NaN, without its sign, are larger."""


def row_slots(depth: int) -> int:
    """Return the slots of a row of K = `depth`: an odd number of records, or rows would share sets of a cache."""
    return (-(-depth // DEPTH) | 1) * RECORD_SLOTS


def sum_slot(run_len: int, run: int) -> int:
    """Return the slot that has −Σ of run `run` of `run_len` values."""
    return FIRST_SUM_SLOTS[run_len] + run


def emit_record(code: Code, record: ir.Value, num_planes: int) -> None:
    """Emit code that makes a record of 32 float32, in their place, at the address `record`.

    If one of them is a NaN or an infinity, the scale and the sums are NaN.
    """
    build, integer_vector = code.build, ir.VectorType(I32, LONG_LANES)
    values = code.load_vectors(record, (I64(0), I64(LONG_LANES)), F32, LONG_LANES)
    magnitudes = [
        build.and_(build.bitcast(each, integer_vector), constant(integer_vector, 0x7FFFFFFF)) for each in values
    ]

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return build.select(build.icmp_unsigned(">", a, b), a, b)

    largest_bits = code.reduce(larger(*magnitudes), larger)
    largest = build.bitcast(largest_bits, F32)
    is_finite = build.icmp_unsigned("<", largest_bits, I32(INFINITY_BITS))
    has_scale = build.and_(is_finite, build.fcmp_ordered(">=", largest, constant(F32, SMALLEST_MAGNITUDE)))
    # 127 · 2¹⁶ rather than 2²³ − 1: with the rounded reciprocal an integer may be one more, and its highest byte must
    # still be 127.
    largest_integer = float(127 << 8 * (num_planes - 1))
    inverse = code.broadcast(build.fdiv(constant(F32, largest_integer), largest), LONG_LANES)
    zero_or_nan = build.select(is_finite, constant(F32, 0.0), constant(F32, math.nan))
    scale = build.select(has_scale, build.fmul(largest, constant(F32, 1 / largest_integer)), zero_or_nan)
    round_ = declare(build.module, f"llvm.rint.v{LONG_LANES}f32", values[0].type, values[0].type)
    sums_of_8 = list[ir.Value]()
    for half, half_values in enumerate(values):
        scaled = build.select(has_scale, build.fmul(half_values, inverse), constant(half_values.type, 0.0))
        integers = build.fptosi(build.call(round_, [scaled]), integer_vector)
        _store_planes(code, record, half, integers, num_planes)
        for first in (0, LONG_LANES // 2):
            lanes = ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8)))
            sums_of_8.append(code.reduce(build.shuffle_vector(integers, integers, lanes), build.add))
    code.store(scale, record, SCALE_SLOT)
    sums_of_16 = [build.add(*sums_of_8[first : first + 2]) for first in (0, 2)]
    for slot, each in enumerate([build.add(*sums_of_16), *sums_of_16, *sums_of_8], FIRST_SUM_SLOTS[DEPTH]):
        code.store(build.fmul(build.sitofp(build.neg(each), F32), scale), record, slot)


def _store_planes(code: Code, record: ir.Value, half: int, integers: ir.Value, num_planes: int) -> None:
    """Emit the stores of the bytes of 16 integers: the lowest ones first, which then are taken away."""
    build = code.build
    for plane in reversed(range(num_planes)):
        as_bytes = build.trunc(integers, ir.VectorType(I8, LONG_LANES))
        code.store_vector(as_bytes, record, I64(plane * DEPTH + half * LONG_LANES))
        rest = build.sub(integers, build.sext(as_bytes, integers.type))
        integers = build.ashr(rest, constant(integers.type, 8))
