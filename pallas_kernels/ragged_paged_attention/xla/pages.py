"""The pages of one layer as the loops of the XLA path see them: where they are, and how queries meet keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..layer_pages import LayerPages


@dataclass(frozen=True)
class XlaPages(LayerPages):
    """Keys and values [C, K, Z, H]."""

    @property
    def page_size(self) -> int:
        return self.values.shape[2]

    def scores(self, q: Float[Array, "*rows K M H"], keys: Float[Array, "*rows K S H"]) -> Array:
        """Products [*rows, K, M, S] of queries and keys, one of which the caller has scaled; capped if the layer is."""
        scores = jnp.einsum("...mh,...sh->...ms", q, keys, preferred_element_type=jnp.float32)
        soft_cap = self.options.soft_cap
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
