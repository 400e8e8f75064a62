"""Formats of quantized matrices: each number is a code of a few bits, and groups of numbers share a scale.

    number = code × scale − minimum          of its group along a row of Wᵀ, in float32 with one rounding
    number = (code − zero) × scale           in formats without minima; zeros are one for all, or a byte of each group
    number = float × scale                   where a code is itself a small float
    number = (± entry − zero) × scale         where a code is the index of an entry of a table: see `code_tables`

A scale is a float, or a byte that multiplies a float16 of a larger group ("super-scale"), and so is a minimum. Each
product that is rounded has at most 24 bits, or is the last step, so numbers are exactly those that a reader of the file
gives which multiplies before it subtracts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, UInt8

from .code_tables import IQ1_ZERO, IQ4_ZERO, code_table

RUN_LEN = 32
"""Numbers along a row that are decoded together: rows have a multiple of it, and groups divide it or are multiples."""
SCALE_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "power": np.dtype(np.uint8),
}
"""Kinds of scales: floats, or a byte e that stands for 2 to the power of e − 127."""
SMALLEST = float(np.finfo(np.float32).tiny)
MAX_POWER = 240
"""Largest byte of a scale that is a power of two: such numbers are exact in float32, by every way to decode them."""
SMALL_FLOATS = {3: np.dtype(ml_dtypes.float8_e4m3fn), 1: np.dtype(ml_dtypes.float4_e2m1fn)}
"""Bits of the mantissa of codes that are floats → their dtype."""


class Float16Bits(NamedTuple):
    """How a code that is a small float becomes a float16: by shifts alone, and then it is to be multiplied."""

    sign: int
    """Bits that the sign is shifted to the left."""
    magnitude: int
    """Bits that all other bits are shifted to the left."""
    factor: float
    """The small float ÷ this float16: a power of two, since they count exponents from different ones."""


@dataclass(frozen=True)
class CodeFormat:
    """How numbers are stored."""

    name: str
    """What messages call it: as GGUF does, or with the group where formats of one name differ in it."""
    bits: int
    """Bits of a code: 2 to 6, or 8; of a grid, which has up to 4,096 entries, 8 to 12."""
    group: int
    """Numbers along a row that share a scale: a part of RUN_LEN, or a multiple of it, such as all of a row."""
    zero: int = 0
    """The code of 0, where there are neither minima nor zeros."""
    has_minima: bool = False
    has_zeros: bool = False
    """Whether each group has its own code of 0, a byte."""
    super_group: int | None = None
    """Numbers that share a super-scale; None if scales are floats themselves."""
    is_signed: bool = False
    """Whether scales under a super-scale are signed bytes."""
    scale: str = "float16"
    """The kind of scales that have no super-scale, and of minima: a key of SCALE_DTYPES."""
    mantissa_bits: int | None = None
    """Where a code is a float with a sign, the bits of its mantissa, a key of SMALL_FLOATS; None for integers."""
    scale_bits: int = 8
    """Bits of scales and minima under super-scales: 8, or 4 where a byte has two of them."""
    scale_step: float = 1.0
    first_scale: float = 0.0
    """A scale s under a super-scale stands for `first_scale` + s × `scale_step`; of minima it does not."""
    table: str | None = None
    """Where a code is the index of an entry of a table, the table's name for `code_table`."""
    values_per_code: int = 1
    """Numbers along a row that a code stands for: those of an entry, 4 or 8 in a grid."""
    has_signs: bool = False
    """Whether each number has a bit that negates it, once the zero is taken away."""

    @property
    def key(self) -> str:
        """Return a name that tells this format from all others, for names of compiled code."""
        values = (getattr(self, each.name) for each in fields(self))
        return "_".join(str(int(value) if isinstance(value, bool) else value).replace(" ", "") for value in values)

    @property
    def block(self) -> int:
        """Return the numbers of the smallest part of a row that is stored on its own."""
        return self.super_group or max(self.group, RUN_LEN)

    @property
    def run_len(self) -> int:
        """Return how many numbers in a row are decoded with one scale at once."""
        return min(self.group, RUN_LEN)

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Return the dtype of scales and minima."""
        if self.super_group is None:
            return SCALE_DTYPES[self.scale]
        return np.dtype(np.int8 if self.is_signed else np.uint8)

    @property
    def num_scales(self) -> int:
        """Return how many kinds of scales there are: minima are a second one."""
        return 1 + self.has_minima

    @property
    def is_in_quads(self) -> bool:
        """Return whether codes are always unpacked to bytes of four neighbors, also where these are made floats then.

        These are the formats of few bits and of tables, whose entries are such bytes.
        """
        return self.bits < 4 or self.table is not None

    @property
    def byte_table(self) -> np.ndarray | None:
        """Return the 16 bytes that codes of 4 bits stand for, `byte_zero` included; None for other formats.

        Floats of 4 bits are doubled first: they are multiples of a half.
        """
        if self.mantissa_bits == 1:
            return (2 * self.code_values + self.byte_zero).astype(np.uint8)
        return code_table(self.table)[:, 0] if self.table is not None and self.bits == 4 else None

    @property
    def byte_zero(self) -> int:
        """Return what is taken away from bytes: the zero, or for floats of 4 bits twice their largest magnitude."""
        return 12 if self.mantissa_bits == 1 else self.zero

    @property
    def small_float(self) -> np.dtype[Any]:
        """Return the dtype of codes that are floats."""
        assert self.mantissa_bits is not None, "codes that are integers have no such dtype"
        return SMALL_FLOATS[self.mantissa_bits]

    @property
    def float16_bits(self) -> Float16Bits | None:
        """Return how codes that are floats become float16; None for integers."""
        if self.mantissa_bits is None:
            return None
        exponent_bits = self.bits - 1 - self.mantissa_bits
        return Float16Bits(16 - self.bits, 10 - self.mantissa_bits, 2.0 ** (16 - 2 ** (exponent_bits - 1)))

    @property
    def code_values(self) -> np.ndarray:
        """Return what each code stands for before scales and zeros, float32 [2 to the power of the bits].

        It is [entries, values of a code] for a grid.
        """
        if self.table is not None:
            entries = code_table(self.table).astype(np.float32)
            return entries if self.values_per_code > 1 else entries[:, 0]
        codes = np.arange(2**self.bits, dtype=np.uint8)
        return codes.astype(np.float32) if self.mantissa_bits is None else _as_floats(codes, self.mantissa_bits)

    @property
    def largest_code(self) -> float:
        """Return the largest magnitude of what a code stands for before it is multiplied by its scale."""
        if self.has_minima or self.has_zeros:
            return float(2**self.bits)
        return float(np.nanmax(np.abs(self.code_values - self.zero)))

    @property
    def largest_number(self) -> float:
        """Return the largest magnitude that `quantize` has a scale for, in a format that takes floats."""
        limit = self.largest_code if self.mantissa_bits is not None or self.bits < 8 else 127.0
        return limit * float(ml_dtypes.finfo(self.scale_dtype).max)

    @property
    def takes_floats(self) -> bool:
        """Return whether `quantize` gives this format."""
        has_one_scale = not (self.has_minima or self.has_zeros or self.super_group) and self.scale != "power"
        return has_one_scale and not self.is_in_quads and (self.zero > 0) == (self.mantissa_bits is None)


def int8_format(group: int) -> CodeFormat:
    """Return the format of whole bytes, with a float32 that `group` numbers share: int8 where that is a row."""
    return CodeFormat("int8", 8, group, zero=128, scale="float32")


def float8_format(group: int) -> CodeFormat:
    """Return the format of float8_e4m3fn, with a float32 that `group` numbers share."""
    return CodeFormat("fp8", 8, group, scale="float32", mantissa_bits=3)


_GRID = CodeFormat("grid", 8, 32, super_group=256, scale_bits=4, scale_step=0.25, first_scale=0.125)
"""What the formats of grids share: scales of (2 s + 1) ÷ 8."""
_GRID_2 = replace(_GRID, zero=43, values_per_code=8, has_signs=True)
_GRID_1 = replace(_GRID, bits=12, zero=IQ1_ZERO, table="IQ1", values_per_code=8)
CODE_FORMATS = {
    each.name: each
    for each in (
        CodeFormat("Q4_0", 4, 32, zero=8),
        CodeFormat("Q4_1", 4, 32, has_minima=True),
        CodeFormat("Q5_0", 5, 32, zero=16),
        CodeFormat("Q5_1", 5, 32, has_minima=True),
        CodeFormat("Q8_0", 8, 32, zero=128),
        CodeFormat("Q4_K", 4, 32, has_minima=True, super_group=256),
        CodeFormat("Q5_K", 5, 32, has_minima=True, super_group=256),
        CodeFormat("Q6_K", 6, 16, zero=32, super_group=256, is_signed=True),
        CodeFormat("MXFP4", 4, 32, scale="power", mantissa_bits=1),
        CodeFormat("Q2_K", 2, 16, has_minima=True, super_group=256, scale_bits=4),
        CodeFormat("Q3_K", 3, 16, zero=4, super_group=256, is_signed=True),
        CodeFormat("IQ4_NL", 4, 32, zero=IQ4_ZERO, table="IQ4"),
        CodeFormat("IQ4_XS", 4, 32, zero=IQ4_ZERO, super_group=256, is_signed=True, table="IQ4"),
        replace(_GRID_2, name="IQ2_XXS", table="IQ2_XXS"),
        replace(_GRID_2, name="IQ2_XS", bits=9, group=16, table="IQ2_XS"),
        replace(_GRID_2, name="IQ2_S", bits=10, group=16, table="IQ2_S"),
        replace(
            _GRID, name="IQ3_XXS", zero=62, scale_step=0.5, first_scale=0.25, table="IQ3_XXS", values_per_code=4,
            has_signs=True,
        ),
        replace(
            _GRID, name="IQ3_S", bits=9, zero=15, scale_step=2.0, first_scale=1.0, table="IQ3_S", values_per_code=4,
            has_signs=True,
        ),
        replace(_GRID_1, name="IQ1_S"),
        replace(_GRID_1, name="IQ1_M", group=16),
        CodeFormat("TQ2_0", 2, 256, zero=1),
    )
}  # fmt: skip
"""Name in GGUF → format."""


@dataclass(frozen=True)
class Codes:
    """Rows of a quantized matrix Wᵀ [N, K], in the normal form of all formats. Arrays are numpy's or JAX's."""

    codes: Any
    """uint8 [N, K], one code a byte; of a grid uint16 [N, K ÷ values of a code]."""
    scales: list[Any]
    """Scales, and minima if the format has them: each [N, K ÷ group], of the format's `scale_dtype`."""
    super_scales: list[Any]
    """For each of these, if there are super-scales: float16 [N, K ÷ super-group]."""
    zeros: Any = None
    """If the format has them, the code of 0 of each group: uint8 [N, K ÷ group]."""
    signs: Any = None
    """If the format has them, 1 for each number that is negated, else 0: uint8 [N, K]."""

    @property
    def arrays(self) -> list[Any]:
        """Return super-scales, scales, and zeros if there are any: all that groups have, in the order of panels."""
        return [*self.super_scales, *self.scales, *([] if self.zeros is None else [self.zeros])]

    def every(self, step: int) -> Codes:
        """Return the rows 0, `step`, 2 × `step`, …"""
        scales, super_scales = ([each[::step] for each in arrays] for arrays in (self.scales, self.super_scales))
        zeros, signs = (None if each is None else each[::step] for each in (self.zeros, self.signs))
        return Codes(self.codes[::step], scales, super_scales, zeros, signs)


def quantize(rows: Any, code_format: CodeFormat, xp: ModuleType = np) -> Codes:
    """Return float rows [N, K] as codes of a format that `takes_floats`; `xp` is numpy, or jax.numpy for JAX's arrays.

    A group's scale is its largest magnitude ÷ the largest code of its sign: that of the largest number itself for 4 and
    5 bits, where there is one more negative code. Numbers are multiplied by the reciprocal of the scale as it is stored
    and rounded to the nearest, so both libraries give the same codes: XLA would make such products of divisions. Scales
    below the normal numbers of float32, which XLA does not know, are 0. Numbers that are not finite, or larger than
    `largest_number`, give scales that are not finite.
    """
    num_rows, depth = rows.shape
    groups = rows.astype(xp.float32).reshape(num_rows, depth // code_format.group, code_format.group)
    scales = _scales_of_groups(groups, code_format, xp)
    divisors = scales.astype(xp.float32)
    inverses = xp.where(divisors == 0, xp.float32(0), 1 / xp.where(divisors == 0, xp.float32(1), divisors))
    divided = groups * inverses[..., None]
    codes = _nearest_codes(divided, code_format, xp)
    return Codes(codes.reshape(num_rows, depth), [scales], [])


def _code_limit(code_format: CodeFormat) -> float:
    """Return the magnitude, in scales, of the lowest code that `quantize` gives."""
    if code_format.mantissa_bits is not None:
        return float(ml_dtypes.finfo(code_format.small_float).max)
    return 127.0 if code_format.bits == 8 else float(code_format.zero)


def _scales_of_groups(groups: Any, code_format: CodeFormat, xp: ModuleType) -> Any:
    """Return the scale of each group of float32 numbers [N, groups, group], as the format stores it: [N, groups]."""
    largest, limit = xp.abs(groups).max(axis=-1), _code_limit(code_format)
    # Reciprocals of constants multiply here: XLA makes a product of a division by a constant.
    if code_format.mantissa_bits is not None or code_format.bits == 8:
        scales = largest * xp.float32(1 / limit)
    else:
        # The number of the largest magnitude becomes the lowest code, which has no positive counterpart.
        signed = xp.where(groups.max(axis=-1) == largest, largest, -largest)
        scales = signed * xp.float32(-1 / limit)
    with np.errstate(over="ignore"):
        return xp.where(xp.abs(scales) < SMALLEST, xp.float32(0), scales).astype(code_format.scale_dtype)


def _nearest_codes(divided: Any, code_format: CodeFormat, xp: ModuleType) -> Any:
    """Return the nearest code of each number, which was divided by its scale before, as bytes."""
    limit = _code_limit(code_format)
    if code_format.mantissa_bits is not None:
        return xp.clip(divided, -limit, limit).astype(code_format.small_float).view(xp.uint8)
    # Scales tell which numbers were NaN; a conversion of NaN to an integer would be undefined.
    whole = xp.nan_to_num(xp.rint(divided), nan=0.0)
    highest = 127.0 if code_format.bits == 8 else limit - 1
    return (xp.clip(whole, -limit, highest) + xp.float32(code_format.zero)).astype(xp.uint8)


def decode(codes: Codes, code_format: CodeFormat, xp: ModuleType = np) -> Any:
    """Return the numbers of codes, float32 [N, K]; `xp` is numpy, or jax.numpy for JAX's arrays."""
    num_rows, depth = codes.codes.shape[0], codes.codes.shape[1] * code_format.values_per_code
    scales = [scale_values(each, code_format, xp) for each in codes.scales]
    if code_format.super_group is not None:
        scales[0] = scales[0] * xp.float32(code_format.scale_step) + xp.float32(code_format.first_scale)
        groups_together = code_format.super_group // code_format.group
        super_scales = (each.astype(xp.float32).repeat(groups_together, axis=1) for each in codes.super_scales)
        scales = [each * of_these for each, of_these in zip(scales, super_scales, strict=True)]
    if code_format.mantissa_bits is None and code_format.table is None:
        values = codes.codes.astype(xp.float32)
    else:
        values = xp.asarray(code_format.code_values)[codes.codes]
    if code_format.has_signs:
        values = values.reshape(num_rows, depth)
        values = xp.where(codes.signs != 0, xp.float32(2 * code_format.zero) - values, values)
    values = values.reshape(num_rows, depth // code_format.group, code_format.group)
    factors = scales[0][..., None]
    if code_format.has_minima:
        numbers = values * factors - scales[1][..., None]
    else:
        zeros = xp.float32(code_format.zero) if codes.zeros is None else codes.zeros.astype(xp.float32)[..., None]
        numbers = (values - zeros) * factors
    return numbers.reshape(num_rows, depth)


def are_finite(codes: Codes, code_format: CodeFormat) -> bool:
    """Return whether all numbers of codes (numpy) are finite: their scales, products, and codes of 8 bits."""
    floats = codes.super_scales or codes.scales  # Scales under a super-scale are integers.
    if code_format.super_group is None and code_format.scale == "power":
        are_scales_finite = all((each <= MAX_POWER).all() for each in floats)
    else:
        limit = np.float32(1 if code_format.super_group else code_format.largest_code)
        with np.errstate(over="ignore", invalid="ignore"):
            are_scales_finite = all(np.isfinite(each.astype(np.float32) * limit).all() for each in floats)
    has_nans = code_format.mantissa_bits == 3
    return are_scales_finite and not (has_nans and bool(((codes.codes & 0x7F) == 0x7F).any()))


def scale_values(scales: Any, code_format: CodeFormat, xp: ModuleType) -> Any:
    """Return scales or minima in float32. The byte 0 of a power of two gives 0: XLA knows no such small numbers."""
    if code_format.super_group is None and code_format.scale == "power":
        return (scales.astype(xp.uint32) << 23).view(xp.float32)  # The bits of a float32 that has an exponent alone.
    return scales.astype(xp.float32)


def _as_floats(codes: np.ndarray, mantissa_bits: int) -> np.ndarray:
    return codes.view(SMALL_FLOATS[mantissa_bits]).astype(np.float32)


CodeParts = tuple[tuple[CodeFormat, int], ...]
"""Formats of a matrix W [K, N], each with the number of columns that are stored in it, in order."""


def joined_parts(parts: Iterable[tuple[CodeFormat, int]]) -> CodeParts:
    """Return the parts of a matrix with those of one format that follow each other joined."""
    joined = list[tuple[CodeFormat, int]]()
    for code_format, size in parts:
        num_before = joined.pop()[1] if joined and joined[-1][0] == code_format else 0
        joined.append((code_format, num_before + size))
    return tuple(joined)


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["depth", "parts", "dtype"])
@dataclass(frozen=True)
class CodedMatrix:
    """A stored matrix W [K, N] whose numbers are codes."""

    data: UInt8[Array, " B"]
    """The bytes of its panels, see `native.products.codes.panels`: their order depends on the processor."""
    depth: int
    """K."""
    parts: CodeParts
    dtype: str
    """float32 or bfloat16: that of the run, which numbers are decoded to where they are not multiplied as integers."""

    @property
    def num_out(self) -> int:
        """Return N."""
        return sum(size for _, size in self.parts)
