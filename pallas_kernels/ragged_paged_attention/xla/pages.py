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
        new, dtype = (k, v), self.keys.dtype
        if inputs.kv_scales is not None:
            stored = jnp.float8_e4m3fn if dtype == jnp.uint8 else dtype
            new = tuple(quantize(x, scale, stored) for x, scale in zip(new, inputs.kv_scales, strict=True))
        if dtype in NUMBERS_OF_BITS:
            new = tuple(lax.bitcast_convert_type(x.astype(NUMBERS_OF_BITS[dtype]), dtype) for x in new)
        keys, values = (
            write_rows(pages, x, self.first_page, inputs.slots)
            for pages, x in zip((self.keys, self.values), new, strict=True)
        )
        return replace(self, keys=keys, values=values)

    def scores(self, q: Float[Array, "*rows K M H"], keys: Float[Array, "*rows K S H"]) -> Array:
        """Return q · k [*rows, K, M, S] in float32 for q that is scaled; cap × tanh(q · k ÷ cap) with a soft cap."""
        scores = jnp.einsum("...mh,...sh->...ms", q, keys, preferred_element_type=jnp.float32)
        soft_cap = self.options.soft_cap
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def as_float32(pages: Array) -> Float[Array, ...]:
    """Return gathered pages in float32: numbers, the bits of numbers, or int8, of which the scales are left out."""
    if pages.dtype in NUMBERS_OF_BITS:
        pages = lax.bitcast_convert_type(pages, NUMBERS_OF_BITS[pages.dtype])
    return pages.astype(jnp.float32)
