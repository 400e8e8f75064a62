"""Sizes and features for which a handler of native attention is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from ...native.llvm import LONG_LANES
from .page_shapes import words_of


@dataclass(frozen=True)
class Shape:
    """What decides the code of a handler: handlers of equal shapes are one."""

    is_bf16_packed: bool
    byte_dtype: str | None
    """Dtype of pages of one byte a number; None for others."""
    num_kv_heads: int
    group_size: int
    """Query heads per KV head."""
    head_size: int
    page_size: int
    scale: float
    """Factor of queries."""
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    max_tokens: int
    """Tokens of a tile at most."""
    has_avx512: bool
    """Vectors have 16 lanes, not 8."""
    has_avx512_bf16: bool
    """The processor multiplies pairs of bfloat16 (AVX512-BF16)."""
    has_amx: bool
    """The processor has a matrix unit (AMX)."""

    @property
    def key_words(self) -> int:
        """Return the words of the key of one slot, and of one query."""
        return words_of(self.head_size, is_bf16_packed=self.is_bf16_packed)

    @property
    def value_words(self) -> int:
        """Return the words of one lane of a page's values, and of one query's weights."""
        return words_of(self.page_size, is_bf16_packed=self.is_bf16_packed)

    @property
    def num_queries(self) -> int:
        """Return the largest number of queries of a tile and KV head."""
        return self.max_tokens * self.group_size

    def has_bf16_instructions(self, lanes: int) -> bool:
        """Return whether the processor has instructions for bfloat16 that take and give vectors of `lanes` float32."""
        return self.has_avx512_bf16 and lanes == LONG_LANES

    @property
    def name(self) -> str:
        """Return the name of the handler."""
        sizes = (getattr(self, name) for name in self.__dataclass_fields__)
        name = "_".join(["jpaged_attend", *(str(int(x) if isinstance(x, bool) else x) for x in sizes)])
        return name.replace(".", "p")
