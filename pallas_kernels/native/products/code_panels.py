"""Quantized matrices as native code reads them: W [K, N] in panels of 32 columns, each a sequence of blocks of K.

    block      super-scales [32], scales [groups, 32], lower 4 bits [K of a block, 32], upper bits

Minima follow scales, and super-minima super-scales. A panel is decoded to float32 [K, 32], or to bfloat16 in pairs
[K ÷ 2, 32, 2] (`panels`), and codes lie in that order, 32 and 32: so one order is for float32, and one for bfloat16.
Of such 32, byte i has the lower 4 bits of code i, and in its upper half those of code 16 + i. Fifth bits are 4 bytes,
bit i that of code i; fifth and sixth bits are 8 bytes, with those of 4 codes in each. Codes of 8 bits are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...code_formats import CodedMatrix, CodeFormat, CodeParts, Codes
from .panels import PANEL

HALF = PANEL // 2


@dataclass(frozen=True)
class BlockLayout:
    """Where the parts of a block are, in bytes from its begin."""

    code_format: CodeFormat
    super_scales: int
    scales: int
    low_bits: int
    high_bits: int
    num_bytes: int


def block_layout(code_format: CodeFormat) -> BlockLayout:
    """Return the layout of a block of 32 columns."""
    num_codes = code_format.block * PANEL
    scales = 2 * PANEL * code_format.num_scales if code_format.super_group else 0
    num_groups = code_format.block // code_format.group
    low_bits = scales + code_format.num_scales * num_groups * PANEL * code_format.scale_dtype.itemsize
    low_bytes = num_codes if code_format.bits == 8 else num_codes // 2
    high_bytes = 0 if code_format.bits == 8 else num_codes * (code_format.bits - 4) // 8
    high_bits = low_bits + low_bytes
    return BlockLayout(code_format, 0, scales, low_bits, high_bits, high_bits + high_bytes)


def panel_bytes(code_format: CodeFormat, depth: int) -> int:
    """Return the bytes of a panel of K = `depth`, a multiple of the format's block."""
    return depth // code_format.block * block_layout(code_format).num_bytes


def stored_bytes(depth: int, parts: CodeParts) -> int:
    """Return the bytes of a matrix; each part but the last has a multiple of 32 columns."""
    return sum(-(-size // PANEL) * panel_bytes(code_format, depth) for code_format, size in parts)


def pack_codes(codes: Codes, code_format: CodeFormat, *, in_pairs: bool) -> np.ndarray:
    """Return panels, uint8 [N ÷ 32, bytes of a panel], of rows [N, K] of Wᵀ; N is padded to panels of zeros.

    `in_pairs`: in the order of bfloat16.
    """
    num_rows, depth = codes.codes.shape
    num_panels, num_blocks = -(-num_rows // PANEL), depth // code_format.block

    def by_panel(rows: np.ndarray) -> np.ndarray:
        """Return [N, n a row] as [panels, blocks, n a block, 32]."""
        padded = np.pad(rows, ((0, num_panels * PANEL - num_rows), (0, 0)))
        return padded.reshape(num_panels, PANEL, num_blocks, -1).transpose(0, 2, 3, 1)

    numbers = by_panel(codes.codes)
    if in_pairs:
        pairs = numbers.reshape(num_panels, num_blocks, -1, 2, PANEL)
        numbers = pairs.swapaxes(-1, -2).reshape(numbers.shape)
    if code_format.bits == 8:
        code_bytes = [numbers]
    else:
        low = numbers & 15
        code_bytes = [low[..., :HALF] | low[..., HALF:] << 4]
    if code_format.bits == 5:
        code_bytes.append(np.packbits(numbers >> 4, axis=-1, bitorder="little"))
    if code_format.bits == 6:
        fours = (numbers >> 4).reshape(*numbers.shape[:-1], PANEL // 4, 4)
        first, second, third, fourth = (fours[..., i] << 2 * i for i in range(4))
        code_bytes.append(first | second | third | fourth)
    fields = [*map(by_panel, codes.super_scales), *map(by_panel, codes.scales), *code_bytes]
    as_bytes = [np.ascontiguousarray(field).view(np.uint8).reshape(num_panels, num_blocks, -1) for field in fields]
    return np.concatenate(as_bytes, axis=-1).reshape(num_panels, -1)


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
    """Return columns of a part in float32: of any ids, of which those outside mean nothing."""
    layout, num_blocks = block_layout(code_format), depth // code_format.block
    blocks = data.reshape(-1, num_blocks, layout.num_bytes)
    panel, column = ids // PANEL, ids % PANEL

    def gathered(offsets: Int[Array, "T n"]) -> Array:
        """Return bytes of each block of the panels [T, blocks, n], from offsets within a block [T, n]."""
        return blocks[panel[:, None, None], jnp.arange(num_blocks)[None, :, None], offsets[:, None, :]]

    def scales(begin: int, count: int, dtype: np.dtype) -> Array:
        """Return `count` numbers for the column of each block [T, blocks, count], as float32."""
        first = begin + dtype.itemsize * (PANEL * jnp.arange(count)[None, :] + column[:, None])
        if dtype.itemsize == 1:
            found = gathered(first)
            return (jax.lax.bitcast_convert_type(found, jnp.int8) if dtype == np.int8 else found).astype(jnp.float32)
        pairs = jnp.stack([gathered(first), gathered(first + 1)], axis=-1)
        return jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)

    num_groups, num_kinds = code_format.block // code_format.group, code_format.num_scales
    kinds = scales(layout.scales, num_groups * num_kinds, code_format.scale_dtype)
    kinds = kinds.reshape(*kinds.shape[:2], num_kinds, num_groups)
    if code_format.super_group is not None:
        kinds = kinds * scales(layout.super_scales, num_kinds, np.dtype(np.float16))[..., None]
    # The place of the column's code of each k among the 32 of a chunk, and the chunk's number.
    k = jnp.arange(code_format.block)[None, :]
    if in_pairs:
        place = 2 * column[:, None] + k % 2
        chunk, place = k // 2 * 2 + place // PANEL, place % PANEL
    else:
        chunk, place = jnp.broadcast_to(k, (ids.shape[0], code_format.block)), column[:, None]
    if code_format.bits == 8:
        codes = gathered(layout.low_bits + chunk * PANEL + place).astype(jnp.int32)
    else:
        packed = gathered(layout.low_bits + chunk * HALF + place % HALF).astype(jnp.int32)
        codes = jnp.where((place >= HALF)[:, None, :], packed >> 4, packed & 15)
        num_high = code_format.bits - 4
        if num_high:
            per_byte = 8 // num_high
            high = gathered(layout.high_bits + chunk * (PANEL // per_byte) + place // per_byte).astype(jnp.int32)
            high = high >> (num_high * (place % per_byte))[:, None, :] & ((1 << num_high) - 1)
            codes = codes | high << 4
    by_group = codes.reshape(*codes.shape[:2], num_groups, code_format.group).astype(jnp.float32)
    factors = kinds[:, :, 0, :, None]
    minima = kinds[:, :, 1, :, None] if code_format.has_minima else factors * code_format.zero
    return (by_group * factors - minima).reshape(ids.shape[0], depth)
