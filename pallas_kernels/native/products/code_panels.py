"""Quantized matrices as native code reads them: W [K, N] in panels of 32 columns, each a sequence of blocks of K.

    block      super-scales [32], scales [groups, 32], zeros [groups, 32], lower 4 bits [K of a block, 32], upper bits

Minima follow scales, and super-minima super-scales; only some formats have super-scales and zeros. A panel is decoded
to float32 [K, 32], or to bfloat16 in pairs [K ÷ 2, 32, 2] (`panels`), and codes lie in that order, 32 and 32: so one
order is for float32, and one for bfloat16. Of such 32, byte i has the lower 4 bits of code i, and in its upper half
those of code 16 + i. Fifth bits are 4 bytes, bit i that of code i; fifth and sixth bits are 8 bytes, with those of 4
codes in each. Codes of 8 bits are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...code_formats import CodedMatrix, CodeFormat, CodeParts, Codes, are_finite, decode
from .panels import PANEL

VECTOR_COLUMNS = PANEL // 2
"""Codes of a vector: two vectors are a chunk of 32 codes."""


@dataclass(frozen=True)
class BlockLayout:
    """Where the parts of a block of 32 columns are, in bytes from its start, where super-scales are if it has any."""

    code_format: CodeFormat
    scales: int
    """First byte of the scales, and of the minima behind them."""
    zeros: int
    """First byte of the zeros, if the format has them."""
    low_bits: int
    """First byte of the lower 4 bits of the codes, or of whole codes of 8 bits."""
    high_bits: int
    """First byte of fifth, or of fifth and sixth bits."""
    num_bytes: int
    """Bytes of the block."""


def block_layout(code_format: CodeFormat) -> BlockLayout:
    """Return the layout of a block of 32 columns."""
    num_codes = code_format.block * PANEL
    scales = 2 * PANEL * code_format.num_scales if code_format.super_group else 0
    num_groups = code_format.block // code_format.group
    zeros = scales + code_format.num_scales * num_groups * PANEL * code_format.scale_dtype.itemsize
    low_bits = zeros + code_format.has_zeros * num_groups * PANEL
    low_bytes = num_codes if code_format.bits == 8 else num_codes // 2
    high_bytes = 0 if code_format.bits == 8 else num_codes * (code_format.bits - 4) // 8
    high_bits = low_bits + low_bytes
    return BlockLayout(code_format, scales, zeros, low_bits, high_bits, high_bits + high_bytes)


def panel_bytes(code_format: CodeFormat, depth: int) -> int:
    """Return the bytes of a panel of K = `depth`, a multiple of the format's block."""
    return depth // code_format.block * block_layout(code_format).num_bytes


def stored_bytes(depth: int, parts: CodeParts) -> int:
    """Return the bytes of a matrix; each part but the last has a multiple of 32 columns."""
    return sum(-(-size // PANEL) * panel_bytes(code_format, depth) for code_format, size in parts)


def pack_codes(codes: Codes, code_format: CodeFormat, *, in_pairs: bool, xp: ModuleType = np) -> Any:
    """Return the panels of rows [N, K] of Wᵀ: uint8 [N ÷ 32, bytes of a panel]. N is padded to whole panels by zeros.

    `xp` is numpy, or jax.numpy for codes that are JAX's arrays. Codes that share a byte are put together while each
    column has its K side by side, so that half as many bytes are transposed to [blocks, K of a block, columns]. With
    `in_pairs` the unit that is transposed is two bytes, a pair of K. Example: codes 1 and 17 of a chunk share byte 1.
    They are those of columns 1 and 17; in pairs, chunk 0 has the columns 0 to 15, and codes 1 and 17 are the second
    numbers of the pairs of columns 0 and 8.
    """
    num_rows, depth = codes.codes.shape
    num_panels, num_blocks = -(-num_rows // PANEL), depth // code_format.block

    def panels(rows: Any) -> Any:
        """Return rows [N, n] as [panels, 32 columns, n]."""
        return xp.pad(rows, ((0, num_panels * PANEL - num_rows), (0, 0))).reshape(num_panels, PANEL, -1)

    def transposed(columns: Any, unit: Any) -> Any:
        """Return the bytes of columns [panels, c, n], in units of this dtype, as [panels, blocks, bytes of a block]."""
        units = _viewed(columns, unit, xp).reshape(num_panels, columns.shape[1], num_blocks, -1)
        return _viewed(units.transpose(0, 2, 3, 1), np.uint8, xp).reshape(num_panels, num_blocks, -1)

    numbers, unit = panels(codes.codes), np.uint16 if in_pairs else np.uint8
    if code_format.bits == 8:
        code_bytes = [transposed(numbers, unit)]
    else:
        # Both halves of the columns of a chunk: those whose codes are lower halves of bytes, and the others.
        chunks = (2, 2, PANEL // 4) if in_pairs else (1, 2, PANEL // 2)
        halves = numbers.reshape(num_panels, *chunks, depth)
        low = halves[:, :, 0] & 15 | halves[:, :, 1] << 4
        code_bytes = [transposed(low.reshape(num_panels, PANEL // 2, depth), unit)]
    num_high_bits = code_format.bits % 8 % 4
    if num_high_bits:
        high, codes_per_byte = numbers >> 4, 8 // num_high_bits
        if in_pairs:
            high, codes_per_byte = high[..., 0::2] | high[..., 1::2] << num_high_bits, codes_per_byte // 2
        bits_of_column = 8 // codes_per_byte
        by_byte = high.reshape(num_panels, PANEL // codes_per_byte, codes_per_byte, -1)
        joined = by_byte[:, :, 0]
        for column in range(1, codes_per_byte):
            joined = joined | by_byte[:, :, column] << bits_of_column * column
        code_bytes.append(transposed(joined, np.uint8))
    fields = (transposed(panels(each), each.dtype) for each in codes.arrays)
    return xp.concatenate([*fields, *code_bytes], axis=-1).reshape(num_panels, -1)


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


def decoded_columns(matrix: CodedMatrix, ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Return the columns `ids` of a matrix W [K, N] as rows, in the dtype that it is decoded to; XLA computes them."""
    rows = jnp.zeros((ids.shape[0], matrix.depth), jnp.float32)
    first_column, first_byte = 0, 0
    for code_format, size in matrix.parts:
        num_bytes = stored_bytes(matrix.depth, ((code_format, size),))
        panels = matrix.data[first_byte : first_byte + num_bytes]
        found = _part_columns(panels, code_format, matrix.depth, ids - first_column, matrix.dtype == "bfloat16")
        is_here = (ids >= first_column) & (ids < first_column + size)
        rows = jnp.where(is_here[:, None], found, rows)
        first_column, first_byte = first_column + size, first_byte + num_bytes
    return rows.astype(matrix.dtype)


def _part_columns(
    data: Array, code_format: CodeFormat, depth: int, ids: Int[Array, " T"], in_pairs: bool
) -> Float[Array, "T K"]:
    """Return columns of W by their numbers `ids` in a part of one format, decoded to float32.

    `data` are the bytes of the part's panels. Ids outside of the part give columns that mean nothing. For each k the
    bytes that hold the column's code are gathered, then those that hold the scales of its group. Codes lie in chunks of
    32, as the numbers of a panel do. Example for bfloat16 (`in_pairs`): column 5 and k = 7 are the second number of
    pair 3, whose 64 codes are chunks 6 and 7, so it is code 2 × 5 + 1 = 11 of chunk 6. In float32 it is code 5 of
    chunk 7.
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

    num_groups = code_format.block // code_format.group
    kinds = range(code_format.num_scales)
    kind_bytes = PANEL * num_groups * code_format.scale_dtype.itemsize
    scales = [stored(layout.scales + i * kind_bytes, num_groups, code_format.scale_dtype) for i in kinds]
    super_scales = [stored(2 * PANEL * i, 1, np.dtype(np.float16)) for i in kinds if code_format.super_group]
    zeros = stored(layout.zeros, num_groups, np.dtype(np.uint8)) if code_format.has_zeros else None
    # For each k of a block: the chunk that holds the column's code, and the code's index among the chunk's 32.
    k = jnp.arange(code_format.block)[None, :]
    if in_pairs:
        index_in_pair = 2 * column[:, None] + k % 2
        chunk, code_index = k // 2 * 2 + index_in_pair // PANEL, index_in_pair % PANEL
    else:
        chunk, code_index = jnp.broadcast_to(k, (ids.shape[0], code_format.block)), column[:, None]
    if code_format.bits == 8:
        codes = gathered(layout.low_bits + chunk * PANEL + code_index).astype(jnp.int32)
    else:
        packed = gathered(layout.low_bits + chunk * VECTOR_COLUMNS + code_index % VECTOR_COLUMNS).astype(jnp.int32)
        codes = jnp.where((code_index >= VECTOR_COLUMNS)[:, None, :], packed >> 4, packed & 15)
        num_high_bits = code_format.bits - 4
        if num_high_bits:
            codes_per_byte = 8 // num_high_bits
            offsets = layout.high_bits + chunk * (PANEL // codes_per_byte) + code_index // codes_per_byte
            shifts = (num_high_bits * (code_index % codes_per_byte))[:, None, :]
            high_bits = gathered(offsets).astype(jnp.int32) >> shifts & ((1 << num_high_bits) - 1)
            codes = codes | high_bits << 4
    found = Codes(codes.astype(jnp.uint8).reshape(ids.shape[0], depth), scales, super_scales, zeros)
    return decode(found, code_format, jnp)
