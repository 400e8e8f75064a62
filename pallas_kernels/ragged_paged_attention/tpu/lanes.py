"""How one head lies on the TPU's vector lanes, and the vector operations that all TPU kernels share.

A vector register of a TPU has 128 lanes, and the last dimension of every array is padded to a multiple of that. The
key and the value of one token and one KV head are S rows of 128 lanes:

    H ≤ 64          key and value side by side in one row             S = 1 ("packed")
    64 < H ≤ 128    one row of key, one row of value                  S = 2
    128 < H ≤ 256   two rows of key, two rows of value                S = 4

Lanes between H and the next multiple of 128 hold zeros (in a packed row: between H and 64). Pages and the tiles that
kernels copy them to are [K, S, tokens, 128]: the compiler never copies an array whose last dimension is 128, and
the KV head is an axis of its own so that it can be sharded over devices.

`width` below is H rounded up to a multiple of 128: the lanes of a query or an output of one head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

LANES = 128
MASK_VALUE = -1e30
"""Score of a masked key, and the start of a running maximum. It is finite so that no difference of scores is NaN."""
LOG2_E = math.log2(math.e)
Ref = Any
"""Type of a field in the kernels' records: inside a kernel a reference to memory or a semaphore; while the call is
built, the array, the block specification or the scratch type that becomes that reference."""
Scalar = int | jax.Array
"""An int32 number inside a kernel: loaded or computed there, or known when the kernel is traced."""


@dataclass(frozen=True)
class HeadLanes:
    """Position of the key, the value, the query and the output of one head of size H in rows of 128 lanes."""

    head_size: int

    @property
    def is_packed(self) -> bool:
        """Return whether a key and its value share one row of lanes."""
        return self.head_size <= LANES // 2

    @property
    def num_tiles(self) -> int:
        """Return the rows of 128 lanes that a key takes: width ÷ 128."""
        return -(-self.head_size // LANES)

    @property
    def num_rows(self) -> int:
        """Return S, the rows of 128 lanes that the key and the value of one token take together."""
        return 1 if self.is_packed else 2 * self.num_tiles

    @property
    def width(self) -> int:
        """Return the lanes of a query or an output, padding included."""
        return self.num_tiles * LANES

    @property
    def value_lane(self) -> int:
        """Return the lane at which values, and therefore outputs, begin: 64 in a packed row, else 0."""
        return LANES // 2 if self.is_packed else 0

    def rows(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """Return the keys and values of one head, [T, H] each, as pages hold them: a list of S arrays [T, 128].

        S is the number of rows of 128 lanes that the key and the value of one token take. If H ≤ 64, S is 1, and key
        and value lie side by side, from lanes 0 and 64 on. Else all rows of the key come first, then all rows of the
        value, padded with zeros: H = 80 gives [key, value], and H = 192 gives [key, rest of the key, value, rest of the
        value].
        """
        k, v = self.padded(k), self.padded(v)
        rows_by_index: dict[int, jax.Array] = {}
        for first_lane in range(0, self.width, LANES):
            lanes = slice(first_lane, first_lane + LANES)
            rows_by_index.update(self.row_pairs(k[:, lanes], v[:, lanes], first_lane))
        return [rows_by_index[index] for index in range(self.num_rows)]

    def row_pairs(self, k: jax.Array, v: jax.Array, first_lane: int) -> list[tuple[int, jax.Array]]:
        """Return (index among the S rows, [T, 128]) for the 128 lanes of key and value that begin at `first_lane`.

        A token and KV head take S rows of 128 lanes. `k` and `v` are these lanes, [T, 128] each, and zero from lane H
        on. With H = 256 (S = 4) and `first_lane` = 128 the result is [(1, k), (3, v)]: rows 0 and 1 hold the key, rows
        2 and 3 the value. A packed row (H ≤ 64, S = 1) holds the key in lanes 0 … 63 and the value, rotated by 64
        lanes, in lanes 64 … 127: then the result is a single pair of index 0.
        """
        if self.is_packed:
            return [(0, jnp.where(iota(k.shape, 1) < self.value_lane, k, pltpu.roll(v, self.value_lane, 1)))]
        return [(first_lane // LANES, k), (self.num_tiles + first_lane // LANES, v)]

    def padded(self, x: jax.Array) -> jax.Array:
        """Pad [T, H] with zeros to [T, width]."""
        return x if self.head_size == self.width else jnp.pad(x, [(0, 0), (0, self.width - self.head_size)])

    def keys(self, tile: Ref, head: Scalar) -> jax.Array:
        """Load the keys [T, width] of KV head `head` from a tile [K, S, T, 128] in VMEM.

        In a packed tile the value lanes come along: a query is zero there, so they add nothing to its scores.
        """
        return self._rows(tile, head, 0)

    def values(self, tile: Ref, head: Scalar) -> jax.Array:
        """Load the values [T, width] of KV head `head` from a tile [K, S, T, 128] in VMEM.

        In a packed tile the lanes before `value_lane` hold the key, so only the result's lanes from there on count.
        """
        return self._rows(tile, head, 0 if self.is_packed else self.num_tiles)

    def _rows(self, tile: Ref, head: Scalar, first_row: int) -> jax.Array:
        return concat_lanes([tile[head, first_row + index] for index in range(self.num_tiles)])


def base2_scores(products: jax.Array, scale: float | jax.Array, soft_cap: float | None) -> jax.Array:
    """Convert products q·k to scores times log₂ e, so that 2^score is the softmax weight: hardware has exp2.

    A score is q·k × scale, with a soft cap c: c × tanh(q·k × scale ÷ c), which lies between −c and c.
    """
    if soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)


def dot_nt(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a · bᵀ, accumulated in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=_precision(a))


def dot_nn(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a · b, accumulated in float32."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=_precision(a))


def _precision(a: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if a.dtype == jnp.float32 else None


def broadcast_lanes(x: jax.Array, width: int) -> jax.Array:
    """Repeat [rows, 128], whose lanes are all equal, to [rows, width]."""
    return x[:, :width] if width < LANES else concat_lanes([x] * (width // LANES))


def concat_lanes(parts: list[jax.Array]) -> jax.Array:
    """Concatenate arrays [rows, lanes] along the lanes."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def diagonal_blocks(x: jax.Array, num_blocks: int) -> jax.Array:
    """Return the diagonal blocks of `x`, one below another: [h·G, h·W] → [h·G, W], where h is `num_blocks`.

    Row i of the result is row i of `x`, of which it takes the lanes b·W … (b + 1)·W − 1 for b = i // G. With h = 2 and
    blocks [[A, B], [C, D]] the result is [A, D].
    """
    num_rows, width = x.shape[0] // num_blocks, x.shape[1] // num_blocks
    diagonal = x[:, :width]
    row = iota(diagonal.shape, 0)
    for block in range(1, num_blocks):
        is_in_block = (row >= block * num_rows) & (row < (block + 1) * num_rows)
        diagonal = jnp.where(is_in_block, x[:, block * width : (block + 1) * width], diagonal)
    return diagonal


def compute_dtype(dtype: DTypeLike, kv_dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype in which queries of `dtype` are multiplied with keys of `kv_dtype`: the wider of the two."""
    return max(jnp.dtype(dtype), jnp.dtype(kv_dtype), key=lambda each: each.itemsize)


def row_mask_bits(is_kept: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """Build the int32 mask that `zero_rows` applies to an array of the shape and dtype of `like`, [rows, 128].

    `is_kept` maps an array of row indices to booleans: whether `zero_rows` leaves that row as it is. Four rows of
    one-byte numbers, or two of two-byte numbers, share one row of 32-bit numbers, so each of them owns 8 or 16 bits of
    the mask: all ones if the row is kept, else zeros. Example: row 5 of two-byte numbers owns the upper 16 bits of mask
    row 2. Rows after the last one of `like`, where its rows are no multiple of 4 or 2, get bits that nothing reads.
    """
    bits_per_number = 8 * like.dtype.itemsize
    numbers_per_word = 32 // bits_per_number
    first_row = iota((-(-like.shape[0] // numbers_per_word), like.shape[1]), 0) * numbers_per_word
    ones = -1 if numbers_per_word == 1 else (1 << bits_per_number) - 1  # As int32, 32 ones are −1.
    row_masks = [
        jnp.where(is_kept(first_row + index), jnp.int32(ones) << (bits_per_number * index), 0)
        for index in range(numbers_per_word)
    ]
    return functools.reduce(jnp.bitwise_or, row_masks)


def zero_rows(x: jax.Array, mask_bits: jax.Array) -> jax.Array:
    """Zero the rows of `x` [rows, 128] that `mask_bits`, made by `row_mask_bits`, does not keep; NaN becomes zero, too.

    This is one AND on 32-bit registers; a select would unpack numbers of one or two bytes first.
    """
    return from_int32(to_int32(x) & mask_bits, x.dtype)


def to_int32(x: jax.Array) -> jax.Array:
    """View the bits of `x` as int32; of one- and two-byte numbers, 4 or 2 consecutive rows share one row."""
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype.itemsize == 4 else pltpu.bitcast(x, jnp.int32)


def from_int32(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Undo `to_int32` for numbers of `dtype`."""
    return lax.bitcast_convert_type(bits, dtype) if jnp.dtype(dtype).itemsize == 4 else pltpu.bitcast(bits, dtype)


def divide(x: Scalar, divisor: int) -> jax.Array:
    """Return x // divisor for a scalar x ≥ 0 and a divisor ≥ 1: a shift where `divisor` is a power of two."""
    if divisor & (divisor - 1) == 0:
        return lax.shift_right_logical(x, divisor.bit_length() - 1)
    return lax.div(x, divisor)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Return int32 indices along one axis of `shape`; Mosaic has no one-dimensional arrays."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)
