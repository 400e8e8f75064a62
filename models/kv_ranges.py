"""The ranges of a model's keys and values: a cache that records them as it attends, and the scales that follow.

Pages of one byte a number need a scale for each layer and KV head. A checkpoint may have some; otherwise the model is
run over a text, with a `RangeRecorder` in place of its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from ..pallas_kernels.ragged_paged_attention.kv_scales import KVScales, kv_scales, largest_number
from .config.spec import AttentionLayer
from .errors import ModelLoadError

MARGINS = {"int8": 1.75, "float8_e4m3fn": 4.0}
"""Dtype of pages → by how much more than the text's largest numbers a page can hold. Numbers beyond are clipped. A
larger range costs int8 precision, and float8_e4m3fn none. Other texts of some thousand tokens reach 1.5 × as far in a
tenth of the channels, and clipping costs more than the precision."""
LEAST_FACTOR = 2.0**-4
"""Smallest factor of a channel, beside 1 for the largest channel of the head: one that rests in the text may move."""
MEAN_POSITIONS = 2048
"""Tokens at positions below this one make up the mean of a channel. Rotary embeddings turn a slow channel of keys away
from the mean that it has near the beginning, where all contexts have tokens. A mean that includes far positions fits
these better and the near ones worse."""
WAY_OUT = "set kv_cache_dtype to auto"


class ChannelRanges(NamedTuple):
    """Smallest and largest number, mean and first number of each channel of the keys, or of the values.

    The mean is that of the tokens at positions below MEAN_POSITIONS, the range that of all tokens. Layers that read
    another layer's pages have (∞, −∞, 0, 0).
    """

    least: Float[Array, "L K H"]
    most: Float[Array, "L K H"]
    mean: Float[Array, "L K H"]
    first: Float[Array, "L K H"]
    """That of the first text's first token. Most models attend to it with a large part of all weights, so that an error
    of this token is one of all outputs, which no other error makes up for."""

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> ChannelRanges:
        """Return the ranges of no tokens."""
        return cls(jnp.full(shape, jnp.inf), jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(shape))

    def seen(
        self,
        layer: int | Int[Array, ""],
        x: Float[Array, "T K H"],
        positions: Int[Array, " T"],
        *,
        is_shiftable: bool,
    ) -> ChannelRanges:
        """Return the ranges with those of a layer's tokens, around 0 unless `is_shiftable`.

        Layers that share tokens may differ in whether these can be shifted: the range around 0 covers both.
        """
        x = x.astype(jnp.float32)
        mean = jnp.mean(x, axis=0, where=(positions < MEAN_POSITIONS)[:, None, None])
        found = jnp.stack([jnp.min(x, axis=0), jnp.max(x, axis=0), mean, x[0]])
        largest = jnp.max(jnp.abs(found[:2]), axis=0)
        symmetric = jnp.stack([-largest, largest, jnp.zeros_like(largest), jnp.zeros_like(largest)])
        before = jnp.stack([array[layer] for array in self])
        found = jnp.where(jnp.all(before == symmetric), symmetric, found) if is_shiftable else symmetric
        return ChannelRanges(*(array.at[layer].set(row) for array, row in zip(self, found, strict=True)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RangeRecorder:
    """A cache of one step without pages, whose tokens are one or more texts; it keeps what `ChannelRanges` says.

    The first text begins at position 0."""

    keys: ChannelRanges
    """Made symmetric in layers with sinks or a soft cap, whose keys must not be shifted."""
    values: ChannelRanges
    """Made symmetric in layers with sinks, whose values must not be shifted."""
    layers: tuple[AttentionLayer, ...] = field(metadata={"static": True})
    kept: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    """Keys and values of layers that later layers read, by the layer's number."""

    @classmethod
    def new(cls, layers: tuple[AttentionLayer, ...], num_kv_heads: int, head_size: int) -> RangeRecorder:
        """Return a recorder that has seen nothing, for K KV heads of all devices together and head size H."""
        empty = ChannelRanges.empty((len(layers), num_kv_heads, head_size))
        return cls(empty, empty, layers)

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
        has_sinks = sinks is not None
        keys = self.keys.seen(owner, k, step.positions, is_shiftable=soft_cap is None and not has_sinks)
        values, kept = self.values.seen(owner, v, step.positions, is_shiftable=not has_sinks), self.kept
        if any(other.pages_of == owner for other in self.layers if other.pages_of is not None):
            kept = {**kept, int(owner): (k, v)}
        visible_TS = _visible(step.positions, window)
        out = _dense_attention(q, k, v, visible_TS, scale=scale, soft_cap=soft_cap, sinks=sinks)
        return out.astype(q.dtype), replace(self, keys=keys, values=values, kept=kept)


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
    keys: ChannelRanges, values: ChannelRanges, layers: Sequence[AttentionLayer], dtype: DTypeLike
) -> KVScales:
    """Return the scales of pages of `dtype` for keys and values of these ranges, as numpy arrays.

    A channel's offset is the middle of its range in int8, and its mean in float8_e4m3fn, whose error is a part of each
    number; then it is changed by no more than a rounding, so that a page holds the first token exactly. A channel's
    factor is the power of two that takes its range around the offset to more than half of its head's largest one, and
    no further than that: with ranges of 6.0, 5.0 and 0.7 the factors are 1, 1 and ⅛. A head whose numbers are all the
    same gets the range 1. A layer that reads another one's pages gets the scales of that one. Raises ModelLoadError,
    which names layer and tensor, if a range is not finite.
    """
    owners = [index if layer.pages_of is None else layer.pages_of for index, layer in enumerate(layers)]
    k, *key_channels = _tensor_scales("keys", keys, owners, np.dtype(dtype))
    v, *value_channels = _tensor_scales("values", values, owners, np.dtype(dtype))
    return kv_scales(k, v, key_channels, value_channels)


def _tensor_scales(
    name: str, ranges: ChannelRanges, owners: Sequence[int], dtype: np.dtype[Any]
) -> tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K H"], Float[np.ndarray, "L K H"]]:
    """Return scales, factors and offsets of the keys or of the values; see `scales_of`.

    `owners` are the layers whose pages each layer reads.
    """
    least, most, mean, first = (np.asarray(array, np.float32)[owners] for array in ranges)
    with np.errstate(over="ignore", invalid="ignore"):
        offsets = most / 2 + least / 2 if dtype == np.int8 else mean
        half_ranges = np.maximum(most - offsets, offsets - least)
        largest = np.fmax(np.fmax(-least, most), half_ranges)  # Of ∞ and NaN, which is ∞ − ∞, it takes ∞.
    if (faults := np.argwhere(~np.isfinite(largest))).size:
        got = largest[tuple(faults[0])]
        fault = f"the {name} of layer {faults[0][0]} reach {got} in the text that sets the scales of their pages"
        raise ModelLoadError(f"model: {fault}, wanted finite numbers; correct the weights, or {WAY_OUT}")
    head_ranges = np.max(half_ranges, axis=-1)
    head_ranges = np.where(head_ranges > 0, head_ranges, np.float32(1))
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(half_ranges / head_ranges[..., None]))
    factors = np.maximum(np.exp2(exponents), LEAST_FACTOR).astype(np.float32)
    # No smaller than the smallest normal number, since keys and values are divided by it.
    scales = np.maximum(
        head_ranges * np.float32(MARGINS[dtype.name] / largest_number(dtype)), np.finfo(np.float32).tiny
    )
    steps = factors * scales[..., None]
    stored = (first - offsets) / steps
    stored = np.rint(stored) if dtype == np.int8 else stored.astype(dtype).astype(np.float32)
    return scales, factors, first - stored * steps
