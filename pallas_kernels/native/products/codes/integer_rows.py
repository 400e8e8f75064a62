"""Rows whose values are rounded to 16 bits: 32 values of a row share a scale, and are stored with their sums.

    record     values int16 [32], scale float32, sums int32 [7], sums float32 [7], nothing      128 bytes

A value is scale × integer, and the largest magnitude of the 32 becomes ± 32,767. What is taken away from each code of a
group is multiplied by a sum of the row's values, so their sums are there too: over all 32, over 16 and 16, and over 8,
8, 8 and 8. As int32 they are the sums of the integers × −8, as float32 those of the values × −1.
"""

from __future__ import annotations

import math

from llvmlite import ir

from ...llvm import F32, I16, I32, I64, LONG_LANES, Code, constant
from ..panels import DEPTH

RECORD_WORDS = DEPTH
"""Words of 4 bytes of a record: as many as its values have as float32."""
SCALE_WORD = DEPTH // 2
"""Word of a record that has the scale; the int32 sums follow it."""
LARGEST = 32767.0
SUM_FACTOR = -8
"""What the int32 sums are multiplied by: zeros of formats are 8 × a power of two."""
RUN_LENS = 32, 16, 8
"""Values of the sums, the most first."""
NUM_SUMS = sum(DEPTH // run_len for run_len in RUN_LENS)
ROUNDER = 1.5 * 2**23
"""A float32 of few integer bits, added to this, has these as its lowest bits: it is rounded to nearest even."""
SMALLEST, INFINITY_BITS = 2.0**-110, 0x7F800000
"""Magnitudes below the first count as 0: their reciprocals would be no float32."""


def sum_word(run_len: int, run: int, *, is_float: bool) -> int:
    """Return the word of a record that has the sum of run `run` of `run_len` values."""
    shorter = RUN_LENS[: RUN_LENS.index(run_len)]
    return SCALE_WORD + 1 + NUM_SUMS * is_float + sum(DEPTH // longer for longer in shorter) + run


def emit_record(code: Code, record: ir.Value) -> None:
    """Emit code that makes a record of 32 float32, in their place. A NaN or an infinity makes its scale NaN."""
    build, words = code.build, ir.VectorType(I32, LONG_LANES)
    values = code.load_vectors(record, (I64(0), I64(LONG_LANES)), F32, LONG_LANES)
    magnitudes = [build.and_(build.bitcast(each, words), constant(words, 0x7FFFFFFF)) for each in values]

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return build.select(build.icmp_unsigned(">", a, b), a, b)

    largest_bits = code.reduce(larger(*magnitudes), larger)
    largest = build.bitcast(largest_bits, F32)
    is_finite = build.icmp_unsigned("<", largest_bits, I32(INFINITY_BITS))
    is_normal = build.and_(is_finite, build.fcmp_ordered(">=", largest, constant(F32, SMALLEST)))
    inverse = build.select(is_normal, build.fdiv(constant(F32, LARGEST), largest), constant(F32, 0.0))
    otherwise = build.select(is_finite, constant(F32, 0.0), constant(F32, math.nan))
    scale = build.select(is_normal, build.fmul(largest, constant(F32, 1 / LARGEST)), otherwise)
    sums_of_8 = list[ir.Value]()
    for half, each in enumerate(values):
        factors = code.broadcast(inverse, LONG_LANES)
        bits = build.bitcast(code.add_product(each, factors, constant(each.type, ROUNDER)), words)
        integers = build.trunc(bits, ir.VectorType(I16, LONG_LANES))
        code.store_vector(integers, record, I64(half * LONG_LANES))
        extended = build.sext(integers, words)
        for first in (0, LONG_LANES // 2):
            lanes = ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8)))
            sums_of_8.append(code.reduce(build.shuffle_vector(extended, extended, lanes), build.add))
    code.store(scale, record, SCALE_WORD)
    sums_of_16 = [build.add(*sums_of_8[first : first + 2]) for first in (0, 2)]
    sums = [build.add(*sums_of_16), *sums_of_16, *sums_of_8]
    for index, each in enumerate(sums):
        code.store(build.mul(each, I32(SUM_FACTOR)), record, SCALE_WORD + 1 + index)
        value = build.fmul(build.sitofp(build.neg(each), F32), scale)
        code.store(value, record, SCALE_WORD + 1 + NUM_SUMS + index)
