"""Keys and values in one byte each, int8 or float8_e4m3fn: how numbers are quantized, and their scales.

A page holds `quantize(x, scale)`, and attention computes with that number × scale. There is one scale per layer and KV
head, in an array, so that other scales do not need another program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    channels: Float[Array, "L K H"] | None = None
    """Powers of two, a factor for each channel of a layer's keys: a key is divided by them before its page's scale, and
    the queries are multiplied by them, both without rounding. None stands for ones.

    Models with a bias of keys, such as Qwen2, have a few channels far larger than the others, which would get all of a
    byte's range."""
    offsets: Float[Array, "L K H"] | None = None
    """What is subtracted from each channel of a layer's keys, before the factors. All scores of a query change by the
    same number, which the softmax does not see. Zeros, as None, in layers with sinks or a soft cap, which see it."""

    def of_layer(self, layer: int | Int[Array, ""]) -> LayerScales:
        """Return the scales of the keys and of the values of one layer, [K] each."""
        return self.k[layer], self.v[layer]

    def with_channels(
        self, layer: int | Int[Array, ""], q: Float[Array, "T N H"], k: Float[Array, "T K H"] | None
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"] | None]:
        """Return queries and keys of a layer as pages of one byte have them: by factors and offsets of channels.

        Queries are multiplied by the factors of their KV head, and keys are divided by them after the subtraction.
        Query head n of N belongs to KV head n // (N ÷ K).
        """
        if self.offsets is not None and k is not None:
            k = k.astype(jnp.float32) - self.offsets[layer][None]
        if self.channels is None:
            return q, k
        factors = self.channels[layer]
        q = q * jnp.repeat(factors, q.shape[1] // factors.shape[0], axis=0).astype(q.dtype)[None]
        return q, None if k is None else k / factors.astype(k.dtype)[None]


LayerScales = tuple[Float[Array, " K"], Float[Array, " K"]]


def is_quantized(dtype: DTypeLike) -> bool:
    """Return whether pages of this dtype need scales."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def largest_number(dtype: DTypeLike) -> float:
    """Return the largest number that a page of this dtype holds: 127 in int8, 448 in float8_e4m3fn."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


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


def scale_shapes(num_layers: int, num_kv_heads: int, head_size: int, sharding: Any = None) -> KVScales:
    """Return the abstract scales of a cache, float32: those of keys and values [L, K], and of channels [L, K, H]."""
    by_head = num_layers, num_kv_heads
    k, v = (jax.ShapeDtypeStruct(by_head, jnp.float32, sharding=sharding) for _ in range(2))
    of_channels = (jax.ShapeDtypeStruct((*by_head, head_size), jnp.float32, sharding=sharding) for _ in range(2))
    return kv_scales(k, v, *of_channels)


def kv_scales(k: Any, v: Any, channels: Any, offsets: Any) -> KVScales:
    """Return scales that are numpy arrays or abstract shapes, which become arrays of JAX later."""
    return KVScales(k, v, channels, offsets)


def scaled_by_head(x: Float[Array, "T K *G H"], scales: Float[Array, " K"]) -> Float[Array, "T K *G H"]:
    """Return x with each KV head's numbers times its scale."""
    return x * scales.astype(jnp.float32).reshape(1, -1, *[1] * (x.ndim - 2))
