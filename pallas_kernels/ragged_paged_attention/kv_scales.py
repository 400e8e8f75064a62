"""Keys and values in one byte each, int8 or float8_e4m3fn: how numbers are quantized, and their scales.

A page holds `quantize(x, scale)`, and attention computes with that number × scale. There is one scale per layer and KV
head, in an array, so that other scales do not need another program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")


class ChannelScales(NamedTuple):
    """A factor and an offset for each channel of the keys, or of the values, of all L layers."""

    factors: Float[Array, "L K H"]
    """Powers of two, so that they are divided and multiplied by without rounding."""
    offsets: Float[Array, "L K H"]

    def removed(self, layer: int | Int[Array, ""], x: Float[Array, "T K H"]) -> Float[Array, "T K H"]:
        """Return (x − offsets) ÷ factors of one layer, float32."""
        return (x.astype(jnp.float32) - self.offsets[layer][None]) / self.factors[layer][None]


def _by_query_head(channels: Float[Array, "K H"], x: Float[Array, "T N H"]) -> Float[Array, "1 N H"]:
    """Return the numbers of each KV head's channels for each of the query heads of `x`."""
    return jnp.repeat(channels, x.shape[1] // channels.shape[0], axis=0)[None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Positive scales of the keys and of the values of all L attention layers of a model."""

    k: Float[Array, "L K"]
    v: Float[Array, "L K"]
    key_channels: ChannelScales | None = None
    """The softmax does not see an offset of the keys: it changes all scores of a query by the same number. Offsets are
    zeros in layers with sinks or a soft cap, which see it.

    Models with a bias of keys, such as Qwen2, have a few channels far larger than the others, which would get all of a
    byte's range."""
    value_channels: ChannelScales | None = None
    """An output has the offset of the values, since the weights of the softmax add up to 1. Offsets are zeros in layers
    with sinks, where they add up to less."""

    def of_layer(self, layer: int | Int[Array, ""]) -> LayerScales:
        """Return the scales of the keys and of the values of one layer, [K] each."""
        return self.k[layer], self.v[layer]

    def to_pages(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"] | None, Float[Array, "T K H"] | None]:
        """Return queries, keys and values of a layer without the factors and offsets of their channels.

        Pages of one byte hold such keys and values: less the offsets, and divided by the factors. Queries are
        multiplied by the factors of their KV head's keys: query head n of N belongs to KV head n // (N ÷ K).
        """
        if self.key_channels is not None:
            q = q * _by_query_head(self.key_channels.factors[layer], q).astype(q.dtype)
            k = None if k is None else self.key_channels.removed(layer, k)
        if self.value_channels is not None and v is not None:
            v = self.value_channels.removed(layer, v)
        return q, k, v

    def from_pages(self, layer: int | Int[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Return a layer's outputs, means of values as pages have them, with factors and offsets of the values."""
        if self.value_channels is None:
            return out
        factors, offsets = (_by_query_head(x[layer], out) for x in self.value_channels)
        return (out.astype(jnp.float32) * factors + offsets).astype(out.dtype)


LayerScales = tuple[Float[Array, " K"], Float[Array, " K"]]


def is_quantized(dtype: DTypeLike) -> bool:
    """Return whether pages of this dtype need scales."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def kv_cache_dtype(dtype: DTypeLike) -> str:
    """Return the value of the option kv_cache_dtype for pages of this dtype: fp8 for float8_e4m3fn, else its name."""
    name = jnp.dtype(dtype).name
    return "fp8" if name == "float8_e4m3fn" else name


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
    factors, offsets = (jax.ShapeDtypeStruct((*by_head, head_size), jnp.float32, sharding=sharding) for _ in range(2))
    return kv_scales(k, v, (factors, offsets), (factors, offsets))


def kv_scales(k: Any, v: Any, key_channels: Iterable[Any], value_channels: Iterable[Any]) -> KVScales:
    """Return scales that are numpy arrays or abstract shapes, which become arrays of JAX later.

    Channels are given as (factors, offsets).
    """
    return KVScales(k, v, ChannelScales(*key_channels), ChannelScales(*value_channels))


def scaled_by_head(x: Float[Array, "T K *G H"], scales: Float[Array, " K"]) -> Float[Array, "T K *G H"]:
    """Return x with each KV head's numbers times its scale."""
    return x * scales.astype(jnp.float32).reshape(1, -1, *[1] * (x.ndim - 2))
