"""What the TPU kernels share: how a head lies on lanes, and what becomes of its scores.

    one token of one KV head, in lanes of 128         rows of a page table entry [K, S, Z, 128]
      H ≤ 64          K and V side by side            S = 1
      64 < H ≤ 128    K, then V                       S = 2
      128 < H ≤ 256   two of K, then two of V         S = 4

Everything between H and the next multiple of 128 is zero. A minor dimension of 128 is what the compiler never
copies; the KV head is an axis of its own, so that it can be spread over chips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """[T, K, H] each → [T, K, S, 128], as pages hold them."""
        if self.is_packed:
            half = [(0, 0)] * (k.ndim - 1) + [(0, LANES // 2 - self.head_size)]
            return jnp.concatenate([jnp.pad(k, half), jnp.pad(v, half)], axis=-1)[..., None, :]
        padding = [(0, 0)] * (k.ndim - 1) + [(0, self.width - self.head_size)]
        rows = [jnp.pad(x, padding).reshape(*x.shape[:-1], self.num_tiles, LANES) for x in (k, v)]
        return jnp.concatenate(rows, axis=-2)

    def keys(self, tile: Any, head: Any) -> jax.Array:
        """[T, width] of one head from a tile [K, S, T, 128] in VMEM."""
        return self._rows(tile, head, 0)

    def values(self, tile: Any, head: Any) -> jax.Array:
        """[T, width], with the output's lanes from `value_lane` on."""
        return self._rows(tile, head, 0 if self.is_packed else self.num_tiles)

    def _rows(self, tile: Any, head: Any, first: int) -> jax.Array:
        rows = [tile[head, first + index] for index in range(self.num_tiles)]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def base2_scores(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
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


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Indices along one axis; Mosaic has no one-dimensional arrays."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)
