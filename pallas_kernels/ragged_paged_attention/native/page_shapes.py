"""Shapes and dtypes of the arrays that hold pages on a CPU, which `pages` describes."""

from __future__ import annotations

import jax.numpy as jnp

PACKED_BF16 = jnp.uint32
"""Dtype of arrays that hold pairs of bfloat16."""
BYTE_DTYPES = {"int8": jnp.dtype(jnp.int8), "float8_e4m3fn": jnp.dtype(jnp.uint8)}
"""Dtype of numbers of one byte → dtype of the arrays that hold them."""


def words_of(size: int, *, is_bf16_packed: bool) -> int:
    """Return the number of 32-bit words that hold `size` numbers: one each, or one for two bfloat16."""
    return -(-size // 2) if is_bf16_packed else size


def pages_shapes(
    num_pages: int, num_kv_heads: int, page_size: int, head_size: int, *, is_bf16_packed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the arrays of keys and of values, in words; an odd size has a word that is half used."""
    key_words, value_words = (words_of(size, is_bf16_packed=is_bf16_packed) for size in (head_size, page_size))
    return (num_pages, num_kv_heads, key_words, page_size), (num_pages, num_kv_heads, value_words, head_size)
