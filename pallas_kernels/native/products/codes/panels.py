"""Quantized matrices as native code reads them: W [K, N] in panels of 32 columns, each a sequence of blocks of K.

    block      super-scales [32], scales [groups, 32], zeros [groups, 32], lower bits [K of a block, 32], upper bits

Minima follow scales, and super-minima super-scales; only some formats have super-scales and zeros. Of scales of 4 bits
a byte has two: the lower half is a scale, and the upper half the group's minimum, or without minima the scale of a
group of the block's second half. How codes lie is their `Order`; formats of tables and of few bits are always in quads.

A panel that is decoded becomes float32 [K, 32], or bfloat16 in pairs [K ÷ 2, 32, 2] (`products.panels`), and codes lie
in that order, 32 and 32. Of such 32, byte i has the lower 4 bits of code i, and in its upper half those of code 16 + i.
Fifth bits are 4 bytes, bit i that of code i; fifth and sixth bits are 8 bytes, with those of 4 codes in each. Codes of
8 bits are bytes.

Codes that are multiplied as integers lie in quads: the bytes of 4 values of K of a column follow each other, and those
of 32 columns. A byte has a code of 8 bits, or bits of codes of several quads, the lowest bits those of the first: two
of 4 bits, the fifth bits of 8, or the fifth and sixth bits of 4. Example for 4 bits: the first 128 bytes have k = 0 …
7, and column 5 has bytes 20 to 23, with k = 0, 1, 2 and 3 in the lower halves and k = 4, 5, 6 and 7 in the upper ones.
So do the indices of a grid, each of which stands for 4 or 8 values of K, and signs, which are one bit each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ....code_formats import CodedMatrix, CodeFormat, CodeParts, Codes, are_finite, decode
from ..panels import PANEL

VECTOR_COLUMNS = PANEL // 2
"""Codes of a vector: two vectors are a chunk of 32 codes."""


class Order(Enum):
    """In which order the codes of a block lie."""

    VALUES = "values"
    """That of float32 [K, 32]."""
    PAIRS = "pairs"
    """That of bfloat16 [K ÷ 2, 32, 2]."""
    QUADS = "quads"
    """Four values of K of each column, for products of integers."""


@dataclass(frozen=True)
class BlockLayout:
    """Where the parts of a block of 32 columns are, in bytes from its start, where super-scales are if it has any."""

    code_format: CodeFormat
    scales: int
    """First byte of the scales, and of the minima behind them."""
    zeros: int
    """First byte of the zeros, if the format has them."""
    low_bits: int
    """First byte of the lowest bits of the codes, or of whole codes of 8 bits."""
    code_fields: tuple[CodeField, ...]
    """Where the bits of codes lie: the lower ones and those above them, or whole codes."""
    sign_field: CodeField | None
    """Where signs lie, if the format has them."""
    num_bytes: int
    """Bytes of the block."""

    @property
    def high_bits(self) -> int:
        """Return the first byte of what follows the lowest bits, such as fifth, or fifth and sixth bits."""
        return self.code_fields[1].first_byte if len(self.code_fields) > 1 else self.num_bytes


class CodeField(NamedTuple):
    """Some bits of all codes of a block, which are stored together."""

    first_byte: int
    num_bits: int
    """1, 2, 4 or 8."""
    lowest_bit: int
    """Where they are in a code: 0, or behind the bits of the field before."""


def block_layout(code_format: CodeFormat) -> BlockLayout:
    """Return the layout of a block of 32 columns."""
    scales = 2 * PANEL * code_format.num_scales if code_format.super_group else 0
    num_groups = code_format.block // code_format.group
    scale_bytes = code_format.num_scales * num_groups * PANEL * code_format.scale_dtype.itemsize
    zeros = scales + scale_bytes * code_format.scale_bits // 8
    low_bits = zeros + code_format.has_zeros * num_groups * PANEL
    num_codes = code_format.block * PANEL // code_format.values_per_code
    fields, first_byte = list[CodeField](), low_bits
    for num_bits, lowest_bit in _cut_bits(code_format.bits):
        fields.append(CodeField(first_byte, num_bits, lowest_bit))
        first_byte += num_codes * num_bits // 8
    sign_field = CodeField(first_byte, 1, 0) if code_format.has_signs else None
    num_bytes = first_byte + (code_format.block * PANEL // 8 if code_format.has_signs else 0)
    return BlockLayout(code_format, scales, zeros, low_bits, tuple(fields), sign_field, num_bytes)


def _cut_bits(bits: int) -> list[tuple[int, int]]:
    """Return powers of two whose sum is a number of bits, the largest first, with the bits before each.

    Example: 6 bits are the lower 4 and then 2, from bit 4 on.
    """
    sizes = [size for size in (8, 4, 2, 1) if bits & size]
    return [(size, sum(sizes[:index])) for index, size in enumerate(sizes)]


def panel_bytes(code_format: CodeFormat, depth: int) -> int:
    """Return the bytes of a panel of K = `depth`, a multiple of the format's block."""
    return depth // code_format.block * block_layout(code_format).num_bytes


def stored_bytes(depth: int, parts: CodeParts) -> int:
    """Return the bytes of a matrix; each part but the last has a multiple of 32 columns."""
    return sum(-(-size // PANEL) * panel_bytes(code_format, depth) for code_format, size in parts)


def pack_codes(codes: Codes, code_format: CodeFormat, order: Order, *, xp: ModuleType = np) -> Any:
    """Return the panels of rows [N, K] of Wᵀ: uint8 [N ÷ 32, bytes of a panel]. N is padded to whole panels by zeros.

    `xp` is numpy, or jax.numpy for codes that are JAX's arrays. Codes that share a byte are put together while each
    column has its K side by side, so that fewer bytes are transposed to [blocks, K of a block, columns].
    """
    num_rows, depth = codes.codes.shape[0], codes.codes.shape[1] * code_format.values_per_code
    num_panels, num_blocks = -(-num_rows // PANEL), depth // code_format.block

    def panels(rows: Any) -> Any:
        """Return rows [N, n] as [panels, 32 columns, n]."""
        return xp.pad(rows, ((0, num_panels * PANEL - num_rows), (0, 0))).reshape(num_panels, PANEL, -1)

    def transposed(columns: Any, unit: Any) -> Any:
        """Return the bytes of columns [panels, c, n], in units of this dtype, as [panels, blocks, bytes of a block]."""
        units = _viewed(columns, unit, xp).reshape(num_panels, columns.shape[1], num_blocks, -1)
        return _viewed(units.transpose(0, 2, 3, 1), np.uint8, xp).reshape(num_panels, num_blocks, -1)

    fields = [transposed(panels(each), each.dtype) for each in _stored_arrays(codes, code_format, num_blocks, xp)]
    numbers = panels(codes.codes)
    if order is Order.QUADS or code_format.is_in_quads:
        code_bytes = []
        for _, num_bits, lowest_bit in block_layout(code_format).code_fields:
            bits = (numbers >> lowest_bit & ((1 << num_bits) - 1)).astype(np.uint8)
            code_bytes.append(transposed(_in_quads(bits, num_bits, xp), np.uint32))
        if codes.signs is not None:
            code_bytes.append(transposed(_in_quads(panels(codes.signs), 1, xp), np.uint32))
    else:
        unit = np.uint16 if order is Order.PAIRS else np.uint8
        planes = _in_chunks(numbers, code_format.bits, in_pairs=order is Order.PAIRS)
        code_bytes = [transposed(planes[0], unit), *(transposed(plane, np.uint8) for plane in planes[1:])]
    return xp.concatenate([*fields, *code_bytes], axis=-1).reshape(num_panels, -1)


def _stored_arrays(codes: Codes, code_format: CodeFormat, num_blocks: int, xp: ModuleType) -> list[Any]:
    """Return all arrays that groups have, in the order of panels, with two scales of 4 bits in each byte."""
    if code_format.scale_bits == 8:
        return codes.arrays
    if code_format.has_minima:
        scales, minima = codes.scales
        return [*codes.super_scales, scales | minima << 4]
    halves = codes.scales[0].reshape(-1, num_blocks, 2, code_format.block // code_format.group // 2)
    return [*codes.super_scales, (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes.codes), -1)]


def _in_quads(numbers: Any, bits: int, xp: ModuleType) -> Any:
    """Return numbers of some bits, bytes [panels, 32, K], as uint32 [panels, 32, K × bits ÷ 32], see `Order.QUADS`."""
    quads = _viewed(numbers, np.uint32, xp).reshape(*numbers.shape[:2], -1, 8 // bits)
    joined = quads[..., 0]
    for index in range(1, 8 // bits):
        joined = joined | quads[..., index] << bits * index
    return joined


def _in_chunks(numbers: Any, bits: int, *, in_pairs: bool) -> list[Any]:
    """Return codes [panels, 32, K] as bytes [panels, n, K]: their lower 4 bits, then the bits above them if there are.

    With `in_pairs` the unit that is to be transposed is two bytes, a pair of K. Example: codes 1 and 17 of a chunk
    share byte 1. They are those of columns 1 and 17; in pairs, chunk 0 has the columns 0 to 15, and codes 1 and 17 are
    the second numbers of the pairs of columns 0 and 8.
    """
    if bits == 8:
        return [numbers]
    num_panels, _, depth = numbers.shape
    # Both halves of the columns of a chunk: those whose codes are lower halves of bytes, and the others.
    chunks = (2, 2, PANEL // 4) if in_pairs else (1, 2, PANEL // 2)
    halves = numbers.reshape(num_panels, *chunks, depth)
    low = halves[:, :, 0] & 15 | halves[:, :, 1] << 4
    planes = [low.reshape(num_panels, PANEL // 2, depth)]
    num_high_bits = bits - 4
    if num_high_bits:
        high, codes_per_byte = numbers >> 4, 8 // num_high_bits
        if in_pairs:
            high, codes_per_byte = high[..., 0::2] | high[..., 1::2] << num_high_bits, codes_per_byte // 2
        bits_of_column = 8 // codes_per_byte
        by_byte = high.reshape(num_panels, PANEL // codes_per_byte, codes_per_byte, -1)
        joined = by_byte[:, :, 0]
        for column in range(1, codes_per_byte):
            joined = joined | by_byte[:, :, column] << bits_of_column * column
        planes.append(joined)
    return planes


def _viewed(array: Any, dtype: Any, xp: ModuleType) -> Any:
    """Return the bytes of an array as another dtype, along its last axis."""
    return (np.ascontiguousarray(array) if xp is np else array).view(dtype)


def are_panels_finite(data: np.ndarray, depth: int, parts: CodeParts) -> bool:
    """Return whether all numbers in the bytes of a matrix are finite. `depth` is K."""
    first_byte = 0
    for code_format, size in parts:
        layout, num_bytes = block_layout(code_format), stored_bytes(depth, ((code_format, size),))
        blocks = data[first_byte : first_byte + num_bytes].reshape(-1, layout.num_bytes)
        scales = _viewed(blocks[:, layout.scales : layout.zeros], code_format.scale_dtype, np)
        super_scales = [_viewed(blocks[:, : layout.scales], np.float16, np)] if code_format.super_group else []
        if not are_finite(Codes(blocks[:, layout.low_bits : layout.high_bits], [scales], super_scales), code_format):
            return False
        first_byte += num_bytes
    return True


def decoded_columns(matrix: CodedMatrix, order: Order, ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Return the columns `ids` of a matrix W [K, N] as rows, in the dtype that it is decoded to; XLA computes them."""
    rows = jnp.zeros((ids.shape[0], matrix.depth), jnp.float32)
    first_column, first_byte = 0, 0
    for code_format, size in matrix.parts:
        num_bytes = stored_bytes(matrix.depth, ((code_format, size),))
        panels = matrix.data[first_byte : first_byte + num_bytes]
        found = _part_columns(panels, code_format, matrix.depth, ids - first_column, order)
        is_here = (ids >= first_column) & (ids < first_column + size)
        rows = jnp.where(is_here[:, None], found, rows)
        first_column, first_byte = first_column + size, first_byte + num_bytes
    return rows.astype(matrix.dtype)


def _part_columns(
    data: Array, code_format: CodeFormat, depth: int, ids: Int[Array, " T"], order: Order
) -> Float[Array, "T K"]:
    """Return columns of W by their numbers `ids` in a part of one format, decoded to float32.

    `data` are the bytes of the part's panels. Ids outside of the part give columns that mean nothing. For each k the
    bytes that hold the column's code are gathered, then those that hold the scales of its group.
    """
    layout, num_blocks = block_layout(code_format), depth // code_format.block
    blocks = data.reshape(-1, num_blocks, layout.num_bytes)
    panel, column = ids // PANEL, ids % PANEL

    def gathered(offsets: Int[Array, "T n"]) -> Array:
        """Return bytes of each block of the panels [T, blocks, n], from offsets within a block [T, n]."""
        return blocks[panel[:, None, None], jnp.arange(num_blocks)[None, :, None], offsets[:, None, :]]

    def stored(begin: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return `count` numbers of the column of each block, from a byte on, for each id: [T, blocks × count]."""
        offsets = begin + dtype.itemsize * (PANEL * jnp.arange(count)[None, :] + column[:, None])
        as_bytes = jnp.stack([gathered(offsets + i) for i in range(dtype.itemsize)], axis=-1)
        as_bytes = as_bytes[..., 0] if dtype.itemsize == 1 else as_bytes
        return jax.lax.bitcast_convert_type(as_bytes, dtype).reshape(ids.shape[0], -1)

    def numbers_of(bits: CodeBits) -> Array:
        """Return the number that some bits of each code of the column are: int32 [T, blocks, K of a block]."""
        shifted = gathered(bits.offsets).astype(jnp.int32) >> bits.shifts[:, None, :]
        return shifted & ((1 << bits.num_bits) - 1)

    num_groups = code_format.block // code_format.group

    def small_scales() -> list[Array]:
        """Return scales of 4 bits, and minima if there are: uint8 [T, groups of the row]."""
        num_bytes = code_format.num_scales * num_groups // 2
        packed = stored(layout.scales, num_bytes, np.dtype(np.uint8)).reshape(ids.shape[0], num_blocks, num_bytes)
        halves = [packed & 15, packed >> 4]
        scales = halves if code_format.has_minima else [jnp.concatenate(halves, axis=-1)]
        return [each.reshape(ids.shape[0], -1) for each in scales]

    # The scales of all groups, then, if the format has them, their minima; super-scales alike.
    scale_bytes = PANEL * num_groups * code_format.scale_dtype.itemsize
    scale_begins = [layout.scales + i * scale_bytes for i in range(code_format.num_scales)]
    if code_format.scale_bits == 8:
        scales = [stored(begin, num_groups, code_format.scale_dtype) for begin in scale_begins]
    else:
        scales = small_scales()
    num_super_scales = code_format.num_scales if code_format.super_group else 0
    super_scales = [stored(2 * PANEL * i, 1, np.dtype(np.float16)) for i in range(num_super_scales)]
    zeros = stored(layout.zeros, num_groups, np.dtype(np.uint8)) if code_format.has_zeros else None
    if order is Order.QUADS or code_format.is_in_quads:
        num_codes = code_format.block // code_format.values_per_code
        places = [_place_in_quads(field, num_codes, column) for field in layout.code_fields]
    else:
        places = _places_in_chunks(layout, column, in_pairs=order is Order.PAIRS)
    codes = jnp.zeros((), jnp.int32)
    for place, field in zip(places, layout.code_fields, strict=True):
        codes = codes | numbers_of(place) << field.lowest_bit
    signs = None
    if layout.sign_field is not None:
        signs = numbers_of(_place_in_quads(layout.sign_field, code_format.block, column)).reshape(ids.shape[0], depth)
    found = Codes(codes.reshape(ids.shape[0], -1), scales, super_scales, zeros, signs)
    return decode(found, code_format, jnp)


class CodeBits(NamedTuple):
    """Where some bits of the codes of a block lie, of one column for each id."""

    offsets: Int[Array, "T K"]
    """The byte that has them, from the block's begin on."""
    shifts: Int[Array, "T K"]
    """How many bits of the byte are below them."""
    num_bits: int


def _place_in_quads(field: CodeField, num_codes: int, column: Int[Array, " T"]) -> CodeBits:
    """Return where the bits of a field lie that is in quads, which has some of the bits of `num_codes` codes."""
    k, codes_together = jnp.arange(num_codes)[None, :], 32 // field.num_bits  # In the 4 bytes of a column.
    offsets = field.first_byte + 4 * (k // codes_together * PANEL + column[:, None]) + k % 4
    shifts = jnp.broadcast_to(k % codes_together // 4 * field.num_bits, offsets.shape)
    return CodeBits(offsets, shifts, field.num_bits)


def _places_in_chunks(layout: BlockLayout, column: Int[Array, " T"], *, in_pairs: bool) -> list[CodeBits]:
    """Return where the bits of codes lie that are in chunks of 32: the lower 4 or all 8, then those above them.

    Example for pairs: column 5 and k = 7 are the second number of pair 3, whose 64 codes are chunks 6 and 7, so it is
    code 2 × 5 + 1 = 11 of chunk 6. Else it is code 5 of chunk 7.
    """
    bits, k = layout.code_format.bits, jnp.arange(layout.code_format.block)[None, :]
    # For each k of a block: the chunk that holds the column's code, and the code's index among the chunk's 32.
    if in_pairs:
        index_in_pair = 2 * column[:, None] + k % 2
        chunk, index = k // 2 * 2 + index_in_pair // PANEL, index_in_pair % PANEL
    else:
        chunk, index = jnp.broadcast_to(k, (column.shape[0], k.shape[1])), column[:, None]
    if bits == 8:
        return [CodeBits(layout.low_bits + chunk * PANEL + index, jnp.zeros_like(chunk), 8)]
    offsets = layout.low_bits + chunk * VECTOR_COLUMNS + index % VECTOR_COLUMNS
    places = [CodeBits(offsets, jnp.where(index >= VECTOR_COLUMNS, 4, 0), 4)]
    if bits > 4:
        codes_per_byte = 8 // (bits - 4)
        offsets = layout.high_bits + chunk * (PANEL // codes_per_byte) + index // codes_per_byte
        places.append(CodeBits(offsets, (bits - 4) * (index % codes_per_byte), bits - 4))
    return places
