"""Online softmax: attention over keys that come a few at a time, in any order, from any loop.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LEAST_MAX = -1e30
"""Where the running maximum starts: finite, so that masked scores, −inf, give weight 0 and not NaN."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Softmax:
    """What some queries have seen so far: M queries a KV head in each of r rows."""

    greatest: Float[Array, "r K M"]
    total: Float[Array, "r K M"]
    """Sum of the weights, relative to the greatest score."""
    values: Float[Array, "r K M H"]

    @classmethod
    def start(cls, queries: Float[Array, "r K M H"], sinks: Float[Array, "K M"] | None) -> Softmax:
        """Nothing seen but the sinks."""
        shape = queries.shape[:3]
        values = jnp.zeros(queries.shape, jnp.float32)
        if sinks is None:
            return cls(jnp.full(shape, LEAST_MAX, jnp.float32), jnp.zeros(shape, jnp.float32), values)
        return cls(jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32), values)

    def and_also(self, other: Softmax) -> Softmax:
        """What two softmaxes of the same queries have seen together."""
        greatest = jnp.maximum(self.greatest, other.greatest)
        decay, other_decay = jnp.exp(self.greatest - greatest), jnp.exp(other.greatest - greatest)
        return Softmax(
            greatest,
            self.total * decay + other.total * other_decay,
            self.values * decay[..., None] + other.values * other_decay[..., None],
        )

    def add(
        self,
        scores: Float[Array, "r K M S"],
        weigh: Callable[[Float[Array, "r K M S"]], Float[Array, "r K M H"]],
    ) -> Softmax:
        """See S keys more of each row; `weigh` returns their values' sum under given weights."""
        greatest = jnp.maximum(self.greatest, jnp.max(scores, axis=3))
        weights = jnp.exp(scores - greatest[..., None])
        decay = jnp.exp(self.greatest - greatest)
        total = self.total * decay + jnp.sum(weights, axis=3)
        return Softmax(greatest, total, self.values * decay[..., None] + weigh(weights))

    def result(self) -> Float[Array, "r K M H"]:
        """The mean of the values; zeros where nothing was seen."""
        return self.values / jnp.where(self.total == 0.0, 1.0, self.total)[..., None]
