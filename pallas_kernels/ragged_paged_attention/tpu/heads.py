"""Tokens of many heads, laid out by head, and back: what pages and prefill need and a model does not give.

    by token  [T, N, H]                          by head  [N, T, 128]
      token 0:  h0 h1 h2 h3 …                      head 0:  t0 t1 t2 t3 …
      token 1:  h0 h1 h2 h3 …         ⇄            head 1:  t0 t1 t2 t3 …

Both ways go through rows of 32 bits in VMEM, [T · pitch, 128]: those of one head are then a strided load apart. The
pitch is odd, so that the rows of one load lie in different banks: with an even one they are loaded one by one. Of
two-byte numbers two heads share a row, and their halves are sorted with the next token's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .tpu_tiles import LANES, from_int32, to_int32

LOW = 0xFFFF
HIGH = -0x10000
TOKENS = 16
"""Taken and given together: their number is a multiple of it."""


def rows_shape(num_tokens: int, num_heads: int, dtype: Any) -> tuple[int, int]:
    """Shape of the rows of 32 bits that both ways go through, one tile of lanes at a time."""
    return -(-num_tokens * _pitch(num_heads, dtype) // 8) * 8, LANES


def take_tokens(tokens: Any, lane: int, rows: Any) -> None:
    """One tile of lanes of `tokens` [T, N, H], of two or four bytes a number, into rows; zeros behind H."""
    _, num_heads, head_size = tokens.shape
    width = min(LANES, head_size - lane)
    odd_head = num_heads % 2 if tokens.dtype.itemsize == 2 else 0

    def take(its_tokens: Any, its_rows: Any, token: int) -> None:
        heads = jnp.pad(its_tokens[token, :, pl.ds(lane, width)], ((0, odd_head), (0, LANES - width)))
        its_rows[_rows_of(token, num_heads, tokens.dtype)] = to_int32(heads)

    _each_token(tokens, rows, take)


def heads_of(rows: Any, first: Any, num_tokens: int, num_heads: int, dtype: Any) -> Iterator[jax.Array]:
    """Of each head [num_tokens, 128], from token `first` on."""
    pitch = _pitch(num_heads, dtype)
    for row in range(_num_rows(num_heads, dtype)):
        place = first * pitch + row
        if jnp.dtype(dtype).itemsize == 4:
            yield from_int32(rows[pl.ds(place, num_tokens, stride=pitch)], dtype)
            continue
        even = rows[pl.ds(place, num_tokens // 2, stride=2 * pitch)]
        odd = rows[pl.ds(place + pitch, num_tokens // 2, stride=2 * pitch)]
        for head, bits in enumerate(_swap_halves(even, odd)):
            if 2 * row + head < num_heads:
                yield from_int32(bits, dtype)


def give_tokens(head: Callable[[int], jax.Array], lane: int, rows: Any, tokens: Any) -> None:
    """`head(n)` [T, 128] for each head, one tile of lanes → `tokens` [T, N, H]."""
    num_tokens, num_heads, head_size = tokens.shape
    pitch, num_rows = _pitch(num_heads, tokens.dtype), _num_rows(num_heads, tokens.dtype)
    width = min(LANES, head_size - lane)
    for row in range(num_rows):
        if tokens.dtype.itemsize == 4:
            rows[pl.ds(row, num_tokens, stride=pitch)] = to_int32(head(row))
            continue
        first = to_int32(head(2 * row))
        second = to_int32(head(2 * row + 1)) if 2 * row + 1 < num_heads else first
        even, odd = _swap_halves(first, second)
        rows[pl.ds(row, num_tokens // 2, stride=2 * pitch)] = even
        rows[pl.ds(pitch + row, num_tokens // 2, stride=2 * pitch)] = odd

    def give(its_tokens: Any, its_rows: Any, token: int) -> None:
        heads = from_int32(its_rows[_rows_of(token, num_heads, tokens.dtype)], tokens.dtype)
        its_tokens[token, :, pl.ds(lane, width)] = heads[:num_heads, :width]

    _each_token(tokens, rows, give)


def _each_token(tokens: Any, rows: Any, do: Callable[[Any, Any, int], None]) -> None:
    """Some tokens at a time, since what is unrolled takes long to compile: their rows begin at a multiple of eight."""
    num_tokens, num_heads = tokens.shape[:2]

    @pl.loop(0, num_tokens // TOKENS)
    def _(index: Any) -> None:
        length = TOKENS * _pitch(num_heads, tokens.dtype)
        its_tokens = tokens.at[pl.ds(index * TOKENS, TOKENS)]
        its_rows = rows.at[pl.ds(pl.multiple_of(index * length, TOKENS), length)]
        for token in range(TOKENS):
            do(its_tokens, its_rows, token)


def _rows_of(token: int, num_heads: int, dtype: Any) -> Any:
    return pl.ds(token * _pitch(num_heads, dtype), _num_rows(num_heads, dtype))


def _swap_halves(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of low and high halves → a row of both low halves, a's first, and one of both high halves."""
    return (a & LOW) | (b << 16), lax.shift_right_logical(a, 16) | (b & HIGH)


def _num_rows(num_heads: int, dtype: Any) -> int:
    return -(-num_heads * jnp.dtype(dtype).itemsize // 4)


def _pitch(num_heads: int, dtype: Any) -> int:
    return _num_rows(num_heads, dtype) | 1
