"""Keys and values in one byte each: what a stored number stands for, and how one is made.

A page of int8 or float8_e4m3fn holds `quantize(x, scale)`; attention takes it for that number × scale. One scale per
layer and KV head, as an array: other scales are other data and not another program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Scales of all attention layers of a model, positive."""

    k: Float[Array, "L K"]
    v: Float[Array, "L K"]

    def of_layer(self, layer: int) -> LayerScales:
        """Scales of the keys and of the values of one layer, [K] each."""
        return self.k[layer], self.v[layer]


LayerScales = tuple[Float[Array, " K"], Float[Array, " K"]]


def is_quantized(dtype: Any) -> bool:
    """Whether pages of this dtype need scales."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def quantize(x: Float[Array, "T K H"], scale: Float[Array, " K"], dtype: Any) -> Array:
    """The nearest storable numbers to x / scale; beyond the largest, the largest. NaN stays NaN where there is one."""
    scaled = x.astype(jnp.float32) / scale.astype(jnp.float32)[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        most = jnp.iinfo(dtype).max
        return jnp.clip(jnp.round(scaled), -most, most).astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -most, most).astype(dtype)
