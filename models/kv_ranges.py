"""The ranges of a model's keys and values: a cache that records them as it attends, and the scales that follow.

Pages of one byte a number need a scale for each layer and KV head. A checkpoint may have some; otherwise the model is
run over a text, with a `RangeRecorder` in place of its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from ..pallas_kernels.ragged_paged_attention.kv_scales import KVScales, kv_scales, largest_number
from .config.spec import AttentionLayer
from .errors import ModelLoadError

MARGINS = {"int8": 1.25, "float8_e4m3fn": 4.0}
"""Dtype of pages → by how much more than the text's largest numbers a page can hold. Numbers beyond are clipped. A
larger range costs int8 precision, and float8_e4m3fn none."""
LEAST_FACTOR = 2.0**-8
"""Smallest factor of a channel of keys, beside 1 for the largest channel of the head."""
WAY_OUT = "set kv_cache_dtype to auto"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RangeRecorder:
    """A cache of one step without pages, whose tokens are one or more texts; it keeps the largest absolute numbers."""

    keys: Float[Array, "2 L K H"]
    """Smallest and largest number of each layer, KV head and channel; (∞, −∞) for layers that read another layer's. In
    layers with sinks or a soft cap the range is made symmetric: their keys must not be shifted."""
    values: Float[Array, "L K"]
    """Largest |v| of each layer and KV head."""
    layers: tuple[AttentionLayer, ...] = field(metadata={"static": True})
    kept: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    """Keys and values of layers that later layers read, by the layer's number."""

    @classmethod
    def new(cls, layers: tuple[AttentionLayer, ...], num_kv_heads: int, head_size: int) -> RangeRecorder:
        """Return a recorder that has seen nothing, for K KV heads of all devices together and head size H."""
        by_head = len(layers), num_kv_heads
        empty = jnp.stack([jnp.full((*by_head, head_size), bound) for bound in (jnp.inf, -jnp.inf)])
        return cls(empty, jnp.zeros(by_head), layers)

    def attend(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        step: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "T N H"], RangeRecorder]:
        """Record the ranges of k and v, and attend by dense products, each text by itself: see `PagedCache.attend`.

        A text ends where the next token's position is not the position after.
        """
        owner = layer
        if k is None or v is None:
            assert isinstance(layer, int)  # In a scan all layers have keys of their own.
            shared = self.layers[layer].pages_of
            owner = layer if shared is None else shared
            k, v = self.kept[owner]
        recorder = self._with_ranges(owner, k, v, is_shiftable=soft_cap is None and sinks is None)
        visible_TS = _visible(step.positions, window)
        out = _dense_attention(q, k, v, visible_TS, scale=scale, soft_cap=soft_cap, sinks=sinks)
        return out.astype(q.dtype), recorder

    def _with_ranges(self, layer: int | Int[Array, ""], k: Array, v: Array, *, is_shiftable: bool) -> RangeRecorder:
        """Return the recorder with a layer's ranges, and with its keys and values themselves if others read them."""
        k = k.astype(jnp.float32)
        key_range = jnp.stack([jnp.min(k, axis=0), jnp.max(k, axis=0)])
        if not is_shiftable:
            largest = jnp.max(jnp.abs(key_range), axis=0)
            key_range = jnp.stack([-largest, largest])
        # Layers that share keys may differ in whether they can be shifted: the wider range covers both.
        least, most = self.keys[:, layer]
        key_range = jnp.stack([jnp.minimum(least, key_range[0]), jnp.maximum(most, key_range[1])])
        value_range = jnp.max(jnp.abs(v.astype(jnp.float32)), axis=(0, 2))
        kept = self.kept
        if any(other.pages_of == layer for other in self.layers if other.pages_of is not None):
            kept = {**kept, int(layer): (k, v)}
        keys, values = self.keys.at[:, layer].set(key_range), self.values.at[layer].set(value_range)
        return replace(self, keys=keys, values=values, kept=kept)


def _visible(positions: Int[Array, " T"], window: int | None) -> Bool[Array, "T T"]:
    """Return which tokens each token attends to: those of its own text, up to itself, within the window if any."""
    num_tokens = positions.shape[0]
    starts_text = positions[1:] != positions[:-1] + 1
    text_of_token = jnp.pad(jnp.cumsum(starts_text), (1, 0))
    distances = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None]
    is_visible = (distances >= 0) & (text_of_token[:, None] == text_of_token[None])
    return is_visible if window is None else is_visible & (distances < window)


def _dense_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    visible: Bool[Array, "T T"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N H"]:
    """Return softmax(scale × q · k) · v in float32 for the visible pairs of tokens."""
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    q_TKGH = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size) * scale
    scores = jnp.einsum("tkgh,skh->kgts", q_TKGH, k.astype(jnp.float32))
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[None, None], scores, -jnp.inf)
    maximum = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks_KG11 = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
        maximum = jnp.maximum(maximum, sinks_KG11)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks_KG11 - maximum)
    return jnp.einsum("kgts,skh->tkgh", weights / total, v.astype(jnp.float32)).reshape(q.shape)


def scales_of(
    keys: Float[np.ndarray, "2 L K H"],
    values: Float[np.ndarray, "L K"],
    layers: Sequence[AttentionLayer],
    dtype: DTypeLike,
) -> KVScales:
    """Return the scales of pages of `dtype` for keys and values of these ranges, as numpy arrays.

    `keys` are the smallest and the largest number of each channel. Their middle is the channel's offset, and half of
    their distance its range. A channel's factor is the power of two that takes its range to more than half of its
    head's largest range, and no further than that: with ranges of 6.0, 5.0 and 0.7 the factors are 1, 1 and ⅛. A head
    whose numbers are all 0 gets the range 1. A layer that reads another one's pages gets the scales of that one. Raises
    ModelLoadError, which names layer and tensor, if a range is not finite.
    """
    owners = [index if layer.pages_of is None else layer.pages_of for index, layer in enumerate(layers)]
    keys, values = np.asarray(keys, np.float32)[:, owners], np.asarray(values, np.float32)[owners]
    with np.errstate(over="ignore", invalid="ignore"):
        offsets, keys = (keys[1] + keys[0]) / 2, (keys[1] - keys[0]) / 2
    for name, ranges in (("keys", keys), ("values", values)):
        if (faults := np.argwhere(~np.isfinite(ranges))).size:
            got = ranges[tuple(faults[0])]
            fault = f"the {name} of layer {faults[0][0]} reach {got} in the text that sets the scales of their pages"
            raise ModelLoadError(f"model: {fault}, wanted finite numbers; correct the weights, or {WAY_OUT}")
    most = keys.max(axis=-1)
    key_ranges, value_ranges = (np.where(ranges > 0, ranges, np.float32(1)) for ranges in (most, values))
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(keys / key_ranges[..., None]))
    factors = np.maximum(np.exp2(exponents), LEAST_FACTOR).astype(np.float32)
    to_scale = np.float32(MARGINS[np.dtype(dtype).name] / largest_number(dtype))
    return kv_scales(_positive(key_ranges * to_scale), _positive(value_ranges * to_scale), factors, offsets)


def _positive(scales: Float[np.ndarray, "L K"]) -> Float[np.ndarray, "L K"]:
    """Return scales that are no smaller than the smallest normal float32, so that numbers can be divided by them."""
    return np.maximum(scales, np.finfo(np.float32).tiny)
