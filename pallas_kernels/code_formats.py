"""Formats of quantized matrices: each number is a code of a few bits, and groups of numbers share a scale.

    number = code × scale − minimum          of its group along a row of Wᵀ, in float32 with one rounding

A scale is a float16, or a byte that multiplies a float16 of a larger group ("super-scale"), and so is a minimum. A
format without minima has the code `zero` for 0, so that its minimum is zero × scale. Each product that is rounded has
at most 24 bits, so numbers are exactly those that a reader of the file gives which multiplies before it subtracts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, UInt8


@dataclass(frozen=True)
class CodeFormat:
    """How numbers are stored."""

    name: str
    bits: int
    """Bits of a code: 4, 5, 6 or 8."""
    group: int
    """Numbers along a row that share a scale."""
    zero: int = 0
    """The code of 0, where there are no minima."""
    has_minima: bool = False
    super_group: int | None = None
    """Numbers that share a super-scale; None if scales are float16 themselves."""
    is_signed: bool = False
    """Whether scales under a super-scale are signed bytes."""

    @property
    def block(self) -> int:
        """Return the numbers of the smallest part of a row that is stored on its own."""
        return self.super_group or self.group

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Return the dtype of scales and minima."""
        if self.super_group is None:
            return np.dtype(np.float16)
        return np.dtype(np.int8 if self.is_signed else np.uint8)

    @property
    def num_scales(self) -> int:
        """Return how many kinds of scales there are: minima are a second one."""
        return 1 + self.has_minima


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
    )
}
"""Name in GGUF → format."""


@dataclass(frozen=True)
class Codes:
    """Rows of a quantized matrix Wᵀ [N, K], in the normal form of all formats."""

    codes: np.ndarray
    """uint8 [N, K], one code a byte."""
    scales: list[np.ndarray]
    """Scales, and minima if the format has them: each [N, K ÷ group], of the format's `scale_dtype`."""
    super_scales: list[np.ndarray]
    """For each of these, if there are super-scales: float16 [N, K ÷ super-group]."""


CodeParts = tuple[tuple[CodeFormat, int], ...]
"""Formats of a matrix W [K, N], each with the number of columns that are stored in it, in order."""


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["depth", "parts", "dtype"])
@dataclass(frozen=True)
class CodedMatrix:
    """A stored matrix W [K, N] whose numbers are codes."""

    data: UInt8[Array, " B"]
    """The bytes of its panels, see `native.products.code_panels`."""
    depth: int
    """K."""
    parts: CodeParts
    dtype: str
    """float32 or bfloat16: what numbers are decoded to before they are multiplied."""

    @property
    def num_out(self) -> int:
        """Return N."""
        return sum(size for _, size in self.parts)
