"""The pages of one layer as the loops of the `xla` backend see them: reads, writes, and the scores of queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..layer_pages import LayerPages
from ..page_writes import write_rows


@dataclass(frozen=True)
class XlaPages(LayerPages):
    """Keys and values [C, K, Z, H]; bfloat16 may be stored as its bits, in uint16."""

    @property
    def page_size(self) -> int:
        return self.values.shape[2]

    def write(self, k: Float[Array, "T K H"], v: Float[Array, "T K H"], slots: Int[Array, " T"]) -> XlaPages:
        """Return the pages after k and v were written to `slots` (page × page size + offset) of the layer."""
        if self.keys.dtype == jnp.uint16:
            k, v = (lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) for x in (k, v))
        keys, values = (write_rows(pages, x, self.first_page, slots) for pages, x in ((self.keys, k), (self.values, v)))
        return replace(self, keys=keys, values=values)

    def scores(self, q: Float[Array, "*rows K M H"], keys: Float[Array, "*rows K S H"]) -> Array:
        """Return q · k [*rows, K, M, S] in float32 for q that is scaled; cap × tanh(q · k ÷ cap) with a soft cap."""
        scores = jnp.einsum("...mh,...sh->...ms", q, keys, preferred_element_type=jnp.float32)
        soft_cap = self.options.soft_cap
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def as_float32(pages: Array) -> Float[Array, ...]:
    """Return gathered pages in float32; uint16 holds the bits of bfloat16 numbers."""
    if pages.dtype == jnp.uint16:
        pages = lax.bitcast_convert_type(pages, jnp.bfloat16)
    return pages.astype(jnp.float32)
