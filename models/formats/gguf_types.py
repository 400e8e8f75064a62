"""The types of a GGUF file's tensors by number: names and sizes.

The same is in the `gguf` package, whose import takes a twentieth of a start; a test compares the two. What the bytes of
a type mean is not known here.
"""

from __future__ import annotations

from typing import NamedTuple


class StoredType(NamedTuple):
    """How a tensor's values are stored: in blocks, each of so many values and bytes."""

    name: str
    block_size: int
    block_bytes: int


STORED_TYPES = {
    0: StoredType("F32", 1, 4),
    1: StoredType("F16", 1, 2),
    2: StoredType("Q4_0", 32, 18),
    3: StoredType("Q4_1", 32, 20),
    6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24),
    8: StoredType("Q8_0", 32, 34),
    9: StoredType("Q8_1", 32, 40),
    10: StoredType("Q2_K", 256, 84),
    11: StoredType("Q3_K", 256, 110),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    15: StoredType("Q8_K", 256, 292),
    16: StoredType("IQ2_XXS", 256, 66),
    17: StoredType("IQ2_XS", 256, 74),
    18: StoredType("IQ3_XXS", 256, 98),
    19: StoredType("IQ1_S", 256, 50),
    20: StoredType("IQ4_NL", 32, 18),
    21: StoredType("IQ3_S", 256, 110),
    22: StoredType("IQ2_S", 256, 82),
    23: StoredType("IQ4_XS", 256, 136),
    24: StoredType("I8", 1, 1),
    25: StoredType("I16", 1, 2),
    26: StoredType("I32", 1, 4),
    27: StoredType("I64", 1, 8),
    28: StoredType("F64", 1, 8),
    29: StoredType("IQ1_M", 256, 56),
    30: StoredType("BF16", 1, 2),
    34: StoredType("TQ1_0", 256, 54),
    35: StoredType("TQ2_0", 256, 66),
    39: StoredType("MXFP4", 32, 17),
    40: StoredType("NVFP4", 64, 36),
    41: StoredType("Q1_0", 128, 18),
}
"""The types by the numbers that files have. Numbers that are left out were types of earlier versions of the format."""
