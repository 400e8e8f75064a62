"""The blocks of GGUF's quantized types as codes, scales and minima.

A block holds 32 numbers of a row, or 256 in the types whose names end with K. What its bytes mean is read from the
descriptions of the types: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import numpy as np

from ...pallas_kernels.code_formats import CODE_FORMATS, CodeFormat, Codes
from .gguf_low_bits import BLOCKS, BlockBits, read_bits


def codes_of(stored: np.ndarray, code_format: CodeFormat) -> Codes:
    """Return rows of blocks, uint8 [N, bytes of a row] as a file of GGUF has them, as codes."""
    num_rows = len(stored)
    blocks = np.ascontiguousarray(stored).reshape(-1, BLOCK_BYTES[code_format.name])  # [blocks of all rows, bytes]
    signs = None
    if (of_block := BLOCKS.get(code_format.name)) is not None:
        (codes, scales, super_scales), signs = _read_bits(blocks, of_block, code_format), _read_signs(blocks, of_block)
    else:
        codes, scales, super_scales = _READERS[code_format.name](blocks)
    if code_format.has_minima and not super_scales:
        scales[1] = -scales[1]  # These types add what others subtract.
    return Codes(
        codes.reshape(num_rows, -1),
        [each.reshape(num_rows, -1) for each in scales],
        [each.reshape(num_rows, -1) for each in super_scales],
        signs=None if signs is None else signs.reshape(num_rows, -1),
    )


_Read = tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]
"""Codes [blocks, codes], scales and minima [blocks, groups], super-scales [blocks, 1]."""


def _read_bits(blocks: np.ndarray, of_block: BlockBits, code_format: CodeFormat) -> _Read:
    """Read a type that is described by data."""
    codes = read_bits(blocks, of_block.codes).astype(np.uint8 if code_format.bits <= 8 else np.uint16)
    if of_block.halves is None:
        halves = [read_bits(blocks, of_block.bits_of_half).view(np.float16)]
    else:
        halves = _halves(blocks, of_block.halves, code_format.num_scales)
    if not of_block.scales:
        return codes, halves, []
    numbers = [read_bits(blocks, each).astype(np.uint8) for each in (of_block.scales, of_block.minima) if each]
    if of_block.scale_offset:
        numbers = [(each - np.uint8(of_block.scale_offset)).view(np.int8) for each in numbers]
    return codes, numbers, halves


def _read_signs(blocks: np.ndarray, of_block: BlockBits) -> np.ndarray | None:
    """Return the sign of each number, 0 or 1: uint8 [blocks, numbers]; None for a type without."""
    if not of_block.signs:
        return None
    signs = read_bits(blocks, of_block.signs).astype(np.uint8)
    if of_block.signs[0].num_bits == 7:
        signs |= (np.bitwise_count(signs) & 1) << 7
    return np.unpackbits(signs, axis=-1, bitorder="little")


def _halves(blocks: np.ndarray, first_byte: int, count: int) -> list[np.ndarray]:
    """Return `count` float16 of each block, from a byte on, each [blocks, 1]."""
    pairs = np.ascontiguousarray(blocks[:, first_byte : first_byte + 2 * count]).view(np.float16)
    return [pairs[:, i : i + 1] for i in range(count)]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of all bytes [blocks, n], and behind them the high ones: [blocks, 2 n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _read_4_bits(blocks: np.ndarray) -> _Read:
    """Read Q4_0 and Q4_1: one or two float16, then 16 bytes."""
    num_halves = (blocks.shape[1] - 16) // 2
    return _nibbles(blocks[:, 2 * num_halves :]), _halves(blocks, 0, num_halves), []


def _read_5_bits(blocks: np.ndarray) -> _Read:
    """Read Q5_0 and Q5_1: one or two float16, the fifth bits of 32 codes, then 16 bytes with the others."""
    num_halves = (blocks.shape[1] - 20) // 2
    begin = 2 * num_halves
    fifth = np.unpackbits(blocks[:, begin : begin + 4], axis=-1, bitorder="little")
    return _nibbles(blocks[:, begin + 4 :]) | fifth << 4, _halves(blocks, 0, num_halves), []


def _read_8_bits(blocks: np.ndarray) -> _Read:
    """Read Q8_0: a float16, then 32 signed bytes."""
    return blocks[:, 2:] ^ 128, _halves(blocks, 0, 1), []


def _read_small_floats(blocks: np.ndarray) -> _Read:
    """Read MXFP4: a power of two, then 16 bytes."""
    return _nibbles(blocks[:, 1:]), [blocks[:, :1]], []


def _scales_and_minima(packed: np.ndarray) -> list[np.ndarray]:
    """Return the 8 scales and the 8 minima, 6 bits each, that 12 bytes of each block hold: uint8 [blocks, 8].

    Those of the first four groups are the lower 6 bits of bytes 0 to 3 and of bytes 4 to 7. Of the last four, bytes 8
    to 11 hold the lower 4 bits, scale and minimum, and the upper bits of bytes 0 to 7 the other 2.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    return [scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)]


def _read_4_bits_k(blocks: np.ndarray) -> _Read:
    """Read Q4_K: two float16, 12 bytes of scales and minima, then 32 bytes for each 64 numbers."""
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32))
    return codes, _scales_and_minima(blocks[:, 4:16]), _halves(blocks, 0, 2)


def _read_5_bits_k(blocks: np.ndarray) -> _Read:
    """Read Q5_K: as Q4_K, with 32 bytes between, whose bits i are the fifth bits of numbers 32 i to 32 i + 31."""
    codes = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(len(blocks), 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes | fifth << 4, _scales_and_minima(blocks[:, 4:16]), _halves(blocks, 0, 2)


def _read_6_bits_k(blocks: np.ndarray) -> _Read:
    """Read Q6_K: 128 bytes of lower bits, 64 of upper ones, 16 signed scales, a float16.

    Each half of 128 numbers has 64 and 32 of these bytes. Lower bits are those of 64 numbers, then of the next 64;
    a byte of upper bits has those of numbers j, 32 + j, 64 + j and 96 + j.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(len(blocks), 2, 4, 32)
    shifts = 2 * np.arange(4, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    return low | high << 4, [blocks[:, 192:208].view(np.int8)], _halves(blocks, 208, 1)


_READERS = {
    "Q4_0": _read_4_bits,
    "Q4_1": _read_4_bits,
    "Q5_0": _read_5_bits,
    "Q5_1": _read_5_bits,
    "Q8_0": _read_8_bits,
    "Q4_K": _read_4_bits_k,
    "Q5_K": _read_5_bits_k,
    "Q6_K": _read_6_bits_k,
    "MXFP4": _read_small_floats,
}
BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210,
    "MXFP4": 17,
} | {name: of_block.num_bytes for name, of_block in BLOCKS.items()}  # fmt: skip
"""Bytes of a block of each type."""
assert _READERS.keys() | BLOCKS.keys() == BLOCK_BYTES.keys() == CODE_FORMATS.keys()
