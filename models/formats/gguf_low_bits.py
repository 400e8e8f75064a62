"""Where the blocks of GGUF's types of 1 to 4 bits have their codes, signs and scales, as data, and what reads it.

What their bytes mean is read from the descriptions of the types, and from the `gguf` package:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bits:
    """Some bits of several numbers of a block.

    The words of a block are taken `words_together` at a time, and of these, all numbers that the first shift gives come
    before those that the second one gives. Example for 2 bits, with 2 words together, shifts of 0 and 4, and words of a
    byte: numbers 0 and 1 are bits 0 and 1 of bytes 0 and 1, numbers 2 and 3 are bits 4 and 5 of these bytes, and number
    4 is in byte 2.
    """

    first_byte: int
    num_words: int
    num_bits: int
    shifts: Sequence[int] = (0,)
    words_together: int = 1
    word_bytes: int = 1
    word_step: int = 1
    """Words from one that is taken to the next."""
    lowest_bit: int = 0
    """Where the bits are in the numbers."""

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Return the numbers, without what other bits they have: [blocks, numbers], of the words' dtype, or uint16."""
        dtype = np.dtype(f"<u{self.word_bytes}")
        end = self.first_byte + self.num_words * self.word_step * self.word_bytes
        words = np.ascontiguousarray(blocks[:, self.first_byte : end]).view(dtype)[:, :: self.word_step]
        chunks = words.reshape(len(blocks), -1, 1, self.words_together)
        numbers = chunks >> np.array(self.shifts, dtype)[:, None] & dtype.type((1 << self.num_bits) - 1)
        if self.lowest_bit + self.num_bits > 8 and self.word_bytes == 1:
            numbers = numbers.astype(np.uint16)
        return (numbers << numbers.dtype.type(self.lowest_bit)).reshape(len(blocks), -1)


def read_bits(blocks: np.ndarray, parts: Sequence[Bits]) -> np.ndarray:
    """Return numbers whose bits are in one part or in two: [blocks, numbers]."""
    numbers = parts[0].read(blocks)
    for part in parts[1:]:
        numbers = numbers | part.read(blocks)
    return numbers


@dataclass(frozen=True)
class BlockBits:
    """Where a block has what it holds. A float16, or two where there are minima, is the scale, or the super-scale."""

    num_bytes: int
    codes: Sequence[Bits]
    halves: int | None
    """First byte of the float16; None if their bits are in `bits_of_half`."""
    bits_of_half: Sequence[Bits] = ()
    scales: Sequence[Bits] = ()
    """Scales under a super-scale; nothing where there are none."""
    scale_offset: int = 0
    """What is taken away from scales, which have a sign then."""
    minima: Sequence[Bits] = ()
    signs: Sequence[Bits] = ()
    """Each has the signs of 8 numbers, that of the first one in the lowest bit; of 7 bits, the 8th makes them even."""


NIBBLES, PAIRS, BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))
BLOCKS = {
    "Q2_K": BlockBits(84, [Bits(16, 64, 2, PAIRS, 32)], 80, scales=[Bits(0, 16, 4)], minima=[Bits(0, 16, 4, (4,))]),
    "Q3_K": BlockBits(
        110,
        [Bits(32, 64, 2, PAIRS, 32), Bits(0, 32, 1, BITS, 32, lowest_bit=2)],
        108,
        scales=[Bits(96, 8, 4, NIBBLES, 8), Bits(104, 4, 2, PAIRS, 4, lowest_bit=4)],
        scale_offset=32,
    ),
    "IQ4_NL": BlockBits(18, [Bits(2, 16, 4, NIBBLES, 16)], 0),
    "IQ4_XS": BlockBits(
        136,
        [Bits(8, 128, 4, NIBBLES, 16)],
        0,
        scales=[Bits(4, 4, 4, NIBBLES), Bits(2, 1, 2, range(0, 16, 2), word_bytes=2, lowest_bit=4)],
        scale_offset=32,
    ),
    "IQ2_XXS": BlockBits(
        66,
        [Bits(2, 8, 8, (0, 8, 16, 24), word_bytes=4, word_step=2)],
        0,
        scales=[Bits(6, 8, 4, (28,), word_bytes=4, word_step=2)],
        signs=[Bits(6, 8, 7, (0, 7, 14, 21), word_bytes=4, word_step=2)],
    ),
    "IQ2_XS": BlockBits(
        74,
        [Bits(2, 32, 9, word_bytes=2)],
        0,
        scales=[Bits(66, 8, 4, NIBBLES)],
        signs=[Bits(2, 32, 7, (9,), word_bytes=2)],
    ),
    "IQ2_S": BlockBits(
        82,
        [Bits(2, 32, 8), Bits(66, 8, 2, PAIRS, lowest_bit=8)],
        0,
        scales=[Bits(74, 8, 4, NIBBLES)],
        signs=[Bits(34, 32, 8)],
    ),
    "IQ3_XXS": BlockBits(
        98,
        [Bits(2, 64, 8)],
        0,
        scales=[Bits(66, 8, 4, (28,), word_bytes=4)],
        signs=[Bits(66, 8, 7, (0, 7, 14, 21), word_bytes=4)],
    ),
    "IQ3_S": BlockBits(
        110,
        [Bits(2, 64, 8), Bits(66, 8, 1, BITS, lowest_bit=8)],
        0,
        scales=[Bits(106, 4, 4, NIBBLES)],
        signs=[Bits(74, 32, 8)],
    ),
    "IQ1_S": BlockBits(
        50,
        [
            Bits(2, 32, 8),
            Bits(34, 8, 3, (0, 3, 6, 9), word_bytes=2, lowest_bit=8),
            Bits(34, 8, 1, (15, 15, 15, 15), word_bytes=2, lowest_bit=11),
        ],
        0,
        scales=[Bits(34, 8, 3, (12,), word_bytes=2)],
    ),
    "IQ1_M": BlockBits(
        56,
        [Bits(0, 32, 8), Bits(32, 16, 4, NIBBLES, lowest_bit=8)],
        None,
        bits_of_half=[Bits(48 + 2 * i, 1, 4, (12,), word_bytes=2, lowest_bit=4 * i) for i in range(4)],
        scales=[Bits(48, 4, 3, (0, 3, 6, 9), word_bytes=2)],
    ),
    "TQ2_0": BlockBits(66, [Bits(0, 64, 2, PAIRS, 32)], 64),
}
"""Name in GGUF → where a block has what it holds."""
