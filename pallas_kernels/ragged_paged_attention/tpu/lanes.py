"""What the TPU kernels share: how a head lies on lanes, and what becomes of its scores.

    one token of one KV head, in lanes of 128         rows of a page table entry [K, S, Z, 128]
      H ≤ 64          K and V side by side            S = 1
      64 < H ≤ 128    K, then V                       S = 2
      128 < H ≤ 256   two of K, then two of V         S = 4

Everything between H and the next multiple of 128 is zero. A minor dimension of 128 is what the compiler never
copies; the KV head is an axis of its own, so that it can be spread over chips.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LEAST_MAX = -1e30
"""Where running maxima start, and what masked scores are: finite, so that no difference of them is NaN."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class HeadLanes:
    """The lanes of one head of `head_size` values."""

    head_size: int

    @property
    def is_packed(self) -> bool:
        """Key and value share one row of lanes."""
        return self.head_size <= LANES // 2

    @property
    def num_tiles(self) -> int:
        """Rows of lanes that a key takes."""
        return -(-self.head_size // LANES)

    @property
    def num_rows(self) -> int:
        """S: rows of lanes that a token's key and value take together."""
        return 1 if self.is_packed else 2 * self.num_tiles

    @property
    def width(self) -> int:
        """Lanes of a query and of an output, with those that are padding."""
        return self.num_tiles * LANES

    @property
    def value_lane(self) -> int:
        """Where in its rows of lanes an output begins."""
        return LANES // 2 if self.is_packed else 0

    def rows(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """Key and value of one head, [T, H] each → its S rows of lanes, [T, 128] each, as pages hold them."""
        lanes = range(0, self.width, LANES)
        k, v = self.padded(k), self.padded(v)
        pairs = [
            pair
            for lane in lanes
            for pair in self.row_pairs(k[:, lane : lane + LANES], v[:, lane : lane + LANES], lane)
        ]
        return [row for _, row in sorted(pairs, key=lambda pair: pair[0])]

    def row_pairs(self, k: jax.Array, v: jax.Array, lane: int) -> list[tuple[int, jax.Array]]:
        """One tile of lanes of key and value, [T, 128] each, zero behind H → numbered rows of lanes."""
        if self.is_packed:
            return [(0, jnp.where(iota(k.shape, 1) < self.value_lane, k, pltpu.roll(v, self.value_lane, 1)))]
        return [(lane // LANES, k), (self.num_tiles + lane // LANES, v)]

    def padded(self, x: jax.Array) -> jax.Array:
        """[T, H] → [T, width], zero behind H."""
        return x if self.head_size == self.width else jnp.pad(x, [(0, 0), (0, self.width - self.head_size)])

    def keys(self, tile: Any, head: Any) -> jax.Array:
        """[T, width] of one head from a tile [K, S, T, 128] in VMEM."""
        return self._rows(tile, head, 0)

    def values(self, tile: Any, head: Any) -> jax.Array:
        """[T, width], with the output's lanes from `value_lane` on."""
        return self._rows(tile, head, 0 if self.is_packed else self.num_tiles)

    def _rows(self, tile: Any, head: Any, first: int) -> jax.Array:
        return side_by_side([tile[head, first + index] for index in range(self.num_tiles)])


def base2_scores(products: jax.Array, scale: Any, soft_cap: float | None) -> jax.Array:
    """Scores times log₂ e, so that weights are powers of two: exp2 is what the hardware has."""
    if soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)


def dot_nt(a: jax.Array, b: jax.Array) -> jax.Array:
    """a · bᵀ in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=_precision(a))


def dot_nn(a: jax.Array, b: jax.Array) -> jax.Array:
    """a · b in float32."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=_precision(a))


def _precision(a: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if a.dtype == jnp.float32 else None


def wide(x: jax.Array, width: int) -> jax.Array:
    """[rows, 128], the same in all lanes → [rows, width]."""
    return x[:, :width] if width < LANES else side_by_side([x] * (width // LANES))


def side_by_side(parts: list[jax.Array]) -> jax.Array:
    """Along the lanes."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def compute_dtype(dtype: Any, kv_dtype: Any) -> Any:
    """What products of queries of `dtype` with keys of `kv_dtype` are computed in: the wider one."""
    return max(jnp.dtype(dtype), jnp.dtype(kv_dtype), key=lambda each: each.itemsize)


def row_bits(is_kept: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """For `keep`: all bits of the rows of [rows, 128] that are kept. Narrow numbers lie in 32 bits row by row."""
    bits = 8 * like.dtype.itemsize
    packing = 32 // bits
    first = iota((-(-like.shape[0] // packing), like.shape[1]), 0) * packing
    of_one = -1 if packing == 1 else (1 << bits) - 1
    parts = [jnp.where(is_kept(first + index), jnp.int32(of_one) << (bits * index), 0) for index in range(packing)]
    return functools.reduce(jnp.bitwise_or, parts)


def keep(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rows of x as they are, or zero, NaN or not: one operation on 32 bits, where a selection would unpack them."""
    return from_int32(to_int32(x) & bits, x.dtype)


def to_int32(x: jax.Array) -> jax.Array:
    """The same bits; narrow numbers share a row with those of the rows behind theirs."""
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype.itemsize == 4 else pltpu.bitcast(x, jnp.int32)


def from_int32(bits: jax.Array, dtype: Any) -> jax.Array:
    """What `to_int32` was made of."""
    return lax.bitcast_convert_type(bits, dtype) if dtype.itemsize == 4 else pltpu.bitcast(bits, dtype)


def divide(x: Any, by: int) -> Any:
    """x // by of a scalar that is not negative; a shift where it can be one."""
    return lax.shift_right_logical(x, by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Indices along one axis; Mosaic has no one-dimensional arrays."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)
