"""Numbers of one byte in native code: int8 and float8_e4m3fn to float32, and back.

Attention reads them without their scales: those of the keys are factors of the queries, and those of the values are
factors of the outputs, so that a byte costs no more than its conversion.

    int8            byte ──▶ int32 ──▶ float32
    float8_e4m3fn   byte s eeee mmm ──▶ float16 s 0eeee mmm0000000 ──▶ float32        × 256 in the scales

Float16 has its exponents from −14 on, float8_e4m3fn from −6 on: the same bits stand for a number that is 2⁸ smaller.
NaN (0x7F and 0xFF) is read as ±480; there is no infinity.
"""

from __future__ import annotations

from llvmlite import ir

from ...native.llvm import F32, I8, I16, I32, Code, constant, declare

READ_FACTORS = {"int8": 1.0, "float8_e4m3fn": 256.0}
"""Dtype of pages → the factor of what `as_float32` returns, which belongs into the scales."""
LEAST_NORMAL_BITS = (127 - 6) << 23
"""Bits of 2⁻⁶, the smallest normal number of float8_e4m3fn, as float32."""


def as_float32(code: Code, numbers: ir.Value, dtype: str) -> ir.Value:
    """Return a vector of bytes as float32: int8 as they are, float8_e4m3fn divided by READ_FACTORS."""
    build, lanes = code.build, numbers.type.count
    float_type = ir.VectorType(F32, lanes)
    if dtype == "int8":
        return build.sitofp(build.sext(numbers, ir.VectorType(I32, lanes)), float_type)
    # Sign extension has the sign in bits 7 … 15; a shift by 7 takes it to 14 and 15, and 14 belongs to the exponent.
    bits16_type = ir.VectorType(I16, lanes)
    shifted = build.shl(build.sext(numbers, bits16_type), constant(bits16_type, 7))
    bits = build.and_(shifted, constant(bits16_type, 0xBFFF))
    return build.fpext(build.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), float_type)


def as_bytes(code: Code, numbers: ir.Value, dtype: str) -> ir.Value:
    """Return a vector of float32 as bytes, rounded to nearest even, and clipped to ±127 (int8) or ±448.

    NaN becomes one of the bounds.
    """
    build, float_type = code.build, numbers.type
    if dtype == "int8":
        bound = constant(float_type, 127.0)
        clipped = code.maximum(code.minimum(numbers, bound), build.fneg(bound))
        return build.trunc(build.fptosi(_rounded(code, clipped), _int32_of(float_type)), _bytes_of(float_type))
    return _as_float8(code, numbers)


def _as_float8(code: Code, numbers: ir.Value) -> ir.Value:
    """Return a vector of float32 as the bytes of float8_e4m3fn.

    Of a normal number the upper 12 bits of float32 are kept, rounded to nearest even; a carry into the exponent is
    right as it is. Below 2⁻⁶ the byte counts steps of 2⁻⁹, and 8 steps are the byte of 2⁻⁶ itself. With 1.0625, halfway
    between 1 and 1.125, the byte is 0x38, that of 1.
    """
    build, float_type = code.build, numbers.type
    int_type = _int32_of(float_type)

    def word(value: int) -> ir.Constant:
        return constant(int_type, value)

    bits = build.bitcast(numbers, int_type)
    magnitude = build.bitcast(build.and_(bits, word(0x7FFFFFFF)), float_type)
    magnitude = code.minimum(magnitude, constant(float_type, 448.0))
    magnitude_bits = build.bitcast(magnitude, int_type)
    is_odd = build.and_(build.lshr(magnitude_bits, word(20)), word(1))
    rounded = build.lshr(build.add(build.add(magnitude_bits, word(0x7FFFF)), is_odd), word(20))
    normal = build.sub(rounded, word((127 - 7) << 3))  # The exponent's bias is 7, and no longer 127.
    steps = build.fptosi(_rounded(code, build.fmul(magnitude, constant(float_type, 512.0))), int_type)
    is_normal = build.icmp_unsigned(">=", magnitude_bits, word(LEAST_NORMAL_BITS))
    sign = build.and_(build.lshr(bits, word(24)), word(0x80))
    return build.trunc(build.or_(build.select(is_normal, normal, steps), sign), _bytes_of(float_type))


def _rounded(code: Code, numbers: ir.Value) -> ir.Value:
    """Return float32 numbers rounded to integers, to even where two are equally near."""
    name = f"llvm.nearbyint.v{numbers.type.count}f32"
    return code.build.call(declare(code.build.module, name, numbers.type, numbers.type), [numbers])


def _int32_of(vector_type: ir.Type) -> ir.Type:
    return ir.VectorType(I32, vector_type.count)


def _bytes_of(vector_type: ir.Type) -> ir.Type:
    return ir.VectorType(I8, vector_type.count)
