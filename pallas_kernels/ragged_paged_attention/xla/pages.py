"""The pages of one layer as the loops of the `xla` backend see them: reads, writes, and the scores of queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..interface import LayerInputs
from ..kv_scales import quantize
from ..layer_pages import LayerPages
from ..page_writes import write_rows

NUMBERS_OF_BITS: dict[Any, DTypeLike] = {
    jnp.dtype(jnp.uint16): jnp.bfloat16,
    jnp.dtype(jnp.uint8): jnp.float8_e4m3fn,
}
"""Dtype of arrays that hold the bits of numbers → dtype of these numbers."""


@dataclass(frozen=True)
class XlaPages(LayerPages):
    """Keys and values [C, K, Z, H]; uint16 holds the bits of bfloat16 numbers, and uint8 those of float8_e4m3fn."""

    @property
    def page_size(self) -> int:
        return self.values.shape[2]

    def write(self, k: Float[Array, "T K H"], v: Float[Array, "T K H"], inputs: LayerInputs) -> XlaPages:
        """Return the pages after k and v were written to the layer's slots, in one byte a number divided by scales."""
        k_scale, v_scale = inputs.kv_scales or (None, None)
        keys, values = (
            write_rows(pages, _as_stored(x, scale, pages.dtype), self.first_page, inputs.slots)
            for pages, x, scale in ((self.keys, k, k_scale), (self.values, v, v_scale))
        )
        return replace(self, keys=keys, values=values)

    def scores(self, q: Float[Array, "*rows K M H"], keys: Float[Array, "*rows K S H"]) -> Array:
        """Return q · k [*rows, K, M, S] in float32 for q that is scaled; cap × tanh(q · k ÷ cap) with a soft cap."""
        scores = jnp.einsum("...mh,...sh->...ms", q, keys, preferred_element_type=jnp.float32)
        soft_cap = self.options.soft_cap
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _as_stored(x: Float[Array, "T K H"], scale: Float[Array, " K"] | None, dtype: Any) -> Array:
    """Return keys or values as numbers of arrays of `dtype`, or as their bits; with scales they are quantized."""
    if scale is not None:
        x = quantize(x, scale, NUMBERS_OF_BITS.get(dtype, dtype))
    if dtype in NUMBERS_OF_BITS:
        x = lax.bitcast_convert_type(x.astype(NUMBERS_OF_BITS[dtype]), dtype)
    return x


def as_float32(pages: Array) -> Float[Array, ...]:
    """Return gathered pages in float32: numbers, the bits of numbers, or int8, of which the scales are left out."""
    if pages.dtype in NUMBERS_OF_BITS:
        pages = lax.bitcast_convert_type(pages, NUMBERS_OF_BITS[pages.dtype])
    return pages.astype(jnp.float32)
