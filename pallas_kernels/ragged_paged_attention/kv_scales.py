"""Keys and values in one byte each, int8 or float8_e4m3fn: how numbers are quantized, and their scales.

A page holds `quantize(x, scale)`, and attention computes with that number × scale. There is one scale per layer and KV
head, in an array, so that other scales do not need another program.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Positive scales of the keys and of the values of all L attention layers of a model."""

    k: Float[Array, "L K"]
    v: Float[Array, "L K"]

    def of_layer(self, layer: int | Int[Array, ""]) -> LayerScales:
        """Return the scales of the keys and of the values of one layer, [K] each."""
        return self.k[layer], self.v[layer]


LayerScales = tuple[Float[Array, " K"], Float[Array, " K"]]


def is_quantized(dtype: DTypeLike) -> bool:
    """Return whether pages of this dtype need scales."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def quantize(x: Float[Array, "T K H"], scale: Float[Array, " K"], dtype: DTypeLike) -> Array:
    """Return x / scale, rounded to the nearest numbers of `dtype` and clipped to ± its largest number.

    `x` holds the keys or values of T tokens, [T, K, H], and `scale` one positive number per KV head. `dtype` is int8,
    clipped to ±127 so that the range is symmetric, or float8_e4m3fn, clipped to ±448, in which NaN stays NaN. Where
    nothing was clipped, the result times `scale` is `x` but for rounding: in int8 with scale 0.5, 3.2 becomes 6.
    """
    scaled = x.astype(jnp.float32) / scale.astype(jnp.float32)[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        max_number = jnp.iinfo(dtype).max
        return jnp.clip(jnp.round(scaled), -max_number, max_number).astype(dtype)
    max_number = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -max_number, max_number).astype(dtype)
