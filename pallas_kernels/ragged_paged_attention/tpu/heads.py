"""Transposes [T, N, H], tokens of all heads, to [N, T, 128] and back, inside VMEM.

    by token  [T, N, H]                          by head  [N, T, 128]
      token 0:  h0 h1 h2 h3 …                      head 0:  t0 t1 t2 t3 …
      token 1:  h0 h1 h2 h3 …         ⇄            head 1:  t0 t1 t2 t3 …

A model's arrays are ordered by token; pages and prefill's products need them by head. Both directions go through a
scratch array `rows`, int32 [T · pitch, 128] in VMEM, 128 lanes at a time: row `token · pitch + head` holds
one head of one token, so that all tokens of one head are one strided load or store. The pitch is odd because rows at an
even distance lie in the same memory bank and would be loaded one by one. Two-byte numbers share an int32 row, two heads
to a row: the low half holds the even head, the high half the odd one, and they are sorted with the next token's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from .lanes import LANES, Ref, Scalar, from_int32, to_int32

LOW_HALF = 0xFFFF
HIGH_HALF = -0x10000
TOKEN_UNROLL = 16
"""Tokens copied by one iteration of an unrolled loop; the number of tokens must be a multiple of it."""


def rows_shape(num_tokens: int, num_heads: int, dtype: DTypeLike) -> tuple[int, int]:
    """Return the shape of the int32 scratch array `rows` for 128 lanes of all heads."""
    return -(-num_tokens * _pitch(num_heads, dtype) // 8) * 8, LANES


def tokens_to_rows(tokens: Ref, first_lane: int, rows: Ref) -> None:
    """Copy 128 lanes of `tokens` [T, N, H], from `first_lane` on, into the scratch `rows`, ordered for reads by head.

    `tokens` has two or four bytes a number. `rows` is int32 [T · pitch, 128], where `pitch` is the distance in rows
    from one token to the next. Numbers of four bytes: row t · pitch + n holds head n of token t. Numbers of two bytes:
    that row holds the token's heads 2n (low halves) and 2n + 1 (high halves). So one head of all tokens is one load
    with a stride of `pitch` rows. Lanes from H on are zeros, and so is the missing last head of a pair if N is odd.
    Tokens after the last whole block of `TOKEN_UNROLL` = 16 tokens are not copied.
    """
    _, num_heads, head_size = tokens.shape
    width = min(LANES, head_size - first_lane)
    num_padding_heads = num_heads % 2 if tokens.dtype.itemsize == 2 else 0

    def copy(block_tokens: Ref, block_rows: Ref, token: int) -> None:
        heads = jnp.pad(block_tokens[token, :, pl.ds(first_lane, width)], ((0, num_padding_heads), (0, LANES - width)))
        block_rows[_rows_of_token(token, num_heads, tokens.dtype)] = to_int32(heads)

    _for_each_token(tokens, rows, copy)


def heads_from_rows(
    rows: Ref, first_token: Scalar, num_tokens: int, num_heads: int, dtype: DTypeLike
) -> Iterator[jax.Array]:
    """Yield the array [num_tokens, 128] of each head in turn, from token `first_token` on, out of the scratch `rows`.

    `tokens_to_rows` has filled `rows`, int32 [tokens · pitch, 128]. A token takes `pitch` rows, an odd number, because
    rows at an even distance would be loaded one by one: 4 heads of two-byte numbers take 2 rows, and a third is unused.

    Four-byte numbers: row t · pitch + n holds head n of token t, so one head of all tokens is one strided load.

    Two-byte numbers: an int32 row holds two numbers per lane. Row t · pitch + n holds head 2n (low halves) and head
    2n + 1 (high halves) of token t. A yielded array of one head packs two consecutive tokens instead, the earlier one
    in the low halves. Example with 2 heads and 2 tokens, as (low, high):

        loaded:   token 0 (h0, h1), token 1 (h0, h1)
        packed:   head 0 (t0, t1),  head 1 (t0, t1)

    So the tokens `first_token` + 0, 2, 4 … and + 1, 3, 5 … are two loads, and `_swap_halves` makes both heads of them.
    If the number of heads is odd, the last row has no second head, and nothing is yielded for it. `num_tokens` must be
    even, because tokens are packed in pairs. `first_token` may be odd, because the pairs are counted from it, and in
    `rows` every token has rows of its own.
    """
    pitch = _pitch(num_heads, dtype)
    for row in range(_rows_per_token(num_heads, dtype)):
        # `start` is the row of the first token that holds head `row`, or heads 2 · row and 2 · row + 1.
        start = first_token * pitch + row
        if jnp.dtype(dtype).itemsize == 4:
            yield from_int32(rows[pl.ds(start, num_tokens, stride=pitch)], dtype)
            continue
        earlier_tokens = rows[pl.ds(start, num_tokens // 2, stride=2 * pitch)]  # The first of each pair of tokens.
        later_tokens = rows[pl.ds(start + pitch, num_tokens // 2, stride=2 * pitch)]
        for head_of_pair, packed_tokens in enumerate(_swap_halves(earlier_tokens, later_tokens)):
            if 2 * row + head_of_pair < num_heads:
                yield from_int32(packed_tokens, dtype)


def heads_to_tokens(load_head: Callable[[int], jax.Array], first_lane: int, rows: Ref, tokens: Ref) -> None:
    """Write `load_head(n)`, the array [T, 128] of head n, to the 128 lanes from `first_lane` on of `tokens` [T, N, H].

    This undoes `tokens_to_rows` and `heads_from_rows`. First each head is stored into the scratch `rows`, int32 [T ·
    pitch, 128], by one store with a stride of `pitch` rows, the distance from one token to the next. Two heads of
    two-byte numbers share a row, so their halves are exchanged and they are stored together: first the tokens 0, 2, 4
    …, then 1, 3, 5 …. Then each token is copied from `rows` to `tokens`. Lanes from H on are dropped. T is a multiple
    of `TOKEN_UNROLL` = 16.
    """
    num_tokens, num_heads, head_size = tokens.shape
    pitch, num_rows = _pitch(num_heads, tokens.dtype), _rows_per_token(num_heads, tokens.dtype)
    width = min(LANES, head_size - first_lane)
    for row in range(num_rows):
        if tokens.dtype.itemsize == 4:
            rows[pl.ds(row, num_tokens, stride=pitch)] = to_int32(load_head(row))
            continue
        even_head = to_int32(load_head(2 * row))
        # With an odd number of heads, the last one has no partner; what takes its place is not copied to `tokens`.
        odd_head = to_int32(load_head(2 * row + 1)) if 2 * row + 1 < num_heads else even_head
        even_tokens, odd_tokens = _swap_halves(even_head, odd_head)
        rows[pl.ds(row, num_tokens // 2, stride=2 * pitch)] = even_tokens
        rows[pl.ds(pitch + row, num_tokens // 2, stride=2 * pitch)] = odd_tokens

    def copy(block_tokens: Ref, block_rows: Ref, token: int) -> None:
        heads = from_int32(block_rows[_rows_of_token(token, num_heads, tokens.dtype)], tokens.dtype)
        block_tokens[token, :, pl.ds(first_lane, width)] = heads[:num_heads, :width]

    _for_each_token(tokens, rows, copy)


def _for_each_token(tokens: Ref, rows: Ref, do: Callable[[Ref, Ref, int], None]) -> None:
    """Call `do(block_tokens, block_rows, token)` for each of `tokens` [T, N, H], in blocks of `TOKEN_UNROLL` = 16.

    `block_tokens` is the token's block [16, N, H]. `block_rows` is the block's rows in the scratch `rows`, `pitch` rows
    for each token. `token` is the token's index in the block, a Python integer. Tokens after the last whole block are
    left out. The loop over blocks runs on the device; only the 16 calls of a block are unrolled, to keep compile times
    short.
    """
    num_tokens, num_heads = tokens.shape[:2]

    @pl.loop(0, num_tokens // TOKEN_UNROLL)
    def _(block: jax.Array) -> None:
        num_rows = TOKEN_UNROLL * _pitch(num_heads, tokens.dtype)  # Rows of one block in `rows`.
        block_tokens = tokens.at[pl.ds(block * TOKEN_UNROLL, TOKEN_UNROLL)]
        block_rows = rows.at[pl.ds(pl.multiple_of(block * num_rows, TOKEN_UNROLL), num_rows)]
        for token in range(TOKEN_UNROLL):
            do(block_tokens, block_rows, token)


def _rows_of_token(token: int, num_heads: int, dtype: DTypeLike) -> slice | pl.Slice:
    return pl.ds(token * _pitch(num_heads, dtype), _rows_per_token(num_heads, dtype))


def _swap_halves(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two int32 arrays: the low halves of a and b, and the high halves of a and b, a's in the low half of each.

    With a = (token 0: head 0, head 1) and b = (token 1: head 0, head 1), low half first, the results are (head 0:
    token 0, token 1) and (head 1: token 0, token 1). Applied to them, the function returns a and b again.
    """
    return (a & LOW_HALF) | (b << 16), lax.shift_right_logical(a, 16) | (b & HIGH_HALF)


def _rows_per_token(num_heads: int, dtype: DTypeLike) -> int:
    """Return the int32 rows that hold all heads of one token."""
    return -(-num_heads * jnp.dtype(dtype).itemsize // 4)


def _pitch(num_heads: int, dtype: DTypeLike) -> int:
    """Return the distance in rows from one token to the next: odd, and at least the rows of a token."""
    return _rows_per_token(num_heads, dtype) | 1
