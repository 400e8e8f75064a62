"""The pages of one layer as the loops of the XLA path see them: where they are, and how queries meet keys.

XLA:CPU copies a whole bfloat16 array to write a row of it, and converts all of it before a loop that reads some. Pages
of bfloat16 are kept there as the bits of their numbers, uint16, and become float32 by a shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BITS = jnp.uint16
"""Of bfloat16 numbers."""


def as_stored(new: Float[Array, "T K H"], dtype: Any) -> Array:
    """Keys or values as pages of that dtype hold them."""
    return lax.bitcast_convert_type(new.astype(jnp.bfloat16), BITS) if dtype == BITS else new.astype(dtype)


def as_float32(stored: Array) -> Float[Array, ...]:
    """What pages hold, exactly."""
    if stored.dtype != BITS:
        return stored.astype(jnp.float32)
    return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)


@dataclass(frozen=True)
class LayerPages:
    """Keys and values of one layer, and what makes scores of them."""

    keys: Float[Array, "C K H Z"]
    """Or [C, K, Z, H], if they are not transposed."""
    values: Float[Array, "C K Z H"]
    are_keys_transposed: bool
    first: Int[Array, ""]
    """Where the layer's pages begin."""
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def page_size(self) -> int:
        return self.values.shape[2]

    def scores(self, q: Float[Array, "*rows K M H"], keys: Float[Array, "*rows K H S"]) -> Array:
        """Products [*rows, K, M, S] of queries and keys, one of which the caller has scaled; capped if the layer is."""
        spec = "...mh,...hs->...ms" if self.are_keys_transposed else "...mh,...sh->...ms"
        scores = jnp.einsum(spec, q, keys, preferred_element_type=jnp.float32)
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)
