"""Rows as integers: 32 values of a row share a scale, and their integers are cut into bytes.

    record     planes of bytes [2 or 3, 32], nothing if there are 2, scale float32, sums float32 [7]       128 bytes

A value is scale × integer. An integer has 16 bits in two planes, or 24 bits in three: plane 0 has the highest bits, and
each byte has a sign. What formats take away from codes is multiplied by sums of the row's values instead, which are
those of all 32 values, of 16 and 16, and of 8, 8, 8 and 8, times −1. A slot is 4 bytes of a record.
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
RUN_LENS = 32, 16, 8
"""Values of the sums, the most first."""
SMALLEST_MAGNITUDE = 2.0**-100
"""If all 32 magnitudes are smaller, they count as 0: their reciprocals would be no float32."""
INFINITY_BITS = 0x7F800000
"""The bits of the float32 infinity; those of a NaN, without its sign, are larger."""


def row_slots(depth: int) -> int:
    """Return the slots of a row of K = `depth`: an odd number of records, or rows would share sets of a cache."""
    return (-(-depth // DEPTH) | 1) * RECORD_SLOTS


def sum_slot(run_len: int, run: int) -> int:
    """Return the slot that has the sum of run `run` of `run_len` values."""
    return SCALE_SLOT + 1 + sum(DEPTH // longer for longer in RUN_LENS[: RUN_LENS.index(run_len)]) + run


def emit_record(code: Code, record: ir.Value, num_planes: int) -> None:
    """Emit code that makes a record of 32 float32, in their place. A NaN or an infinity makes its scale NaN."""
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
    is_normal = build.and_(is_finite, build.fcmp_ordered(">=", largest, constant(F32, SMALLEST_MAGNITUDE)))
    # Its highest byte is 127, also where a product with the rounded reciprocal is one more.
    largest_integer = float(127 << 8 * (num_planes - 1))
    inverse = code.broadcast(build.fdiv(constant(F32, largest_integer), largest), LONG_LANES)
    otherwise = build.select(is_finite, constant(F32, 0.0), constant(F32, math.nan))
    scale = build.select(is_normal, build.fmul(largest, constant(F32, 1 / largest_integer)), otherwise)
    round_ = declare(build.module, f"llvm.rint.v{LONG_LANES}f32", values[0].type, values[0].type)
    sums_of_8 = list[ir.Value]()
    for half, each in enumerate(values):
        divided = build.select(is_normal, build.fmul(each, inverse), constant(each.type, 0.0))
        integers = build.fptosi(build.call(round_, [divided]), integer_vector)
        _store_planes(code, record, half, integers, num_planes)
        for first in (0, LONG_LANES // 2):
            lanes = ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8)))
            sums_of_8.append(code.reduce(build.shuffle_vector(integers, integers, lanes), build.add))
    code.store(scale, record, SCALE_SLOT)
    sums_of_16 = [build.add(*sums_of_8[first : first + 2]) for first in (0, 2)]
    for slot, each in enumerate([build.add(*sums_of_16), *sums_of_16, *sums_of_8], SCALE_SLOT + 1):
        code.store(build.fmul(build.sitofp(build.neg(each), F32), scale), record, slot)


def _store_planes(code: Code, record: ir.Value, half: int, integers: ir.Value, num_planes: int) -> None:
    """Emit the stores of the bytes of 16 integers: the lowest ones first, which then are taken away."""
    build = code.build
    for plane in reversed(range(num_planes)):
        as_bytes = build.trunc(integers, ir.VectorType(I8, LONG_LANES))
        code.store_vector(as_bytes, record, I64(plane * DEPTH + half * LONG_LANES))
        rest = build.sub(integers, build.sext(as_bytes, integers.type))
        integers = build.ashr(rest, constant(integers.type, 8))
