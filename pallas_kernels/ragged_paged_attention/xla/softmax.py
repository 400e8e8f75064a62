"""Online softmax: attention over keys that come a few at a time, in any order, from any loop.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

INITIAL_MAX = -1e30
"""Start of the running maximum: finite, so that masked scores, −inf, give weight 0 and not NaN."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Softmax:
    """Running softmax state of M queries per KV head in each of r rows."""

    max: Float[Array, "r K M"]
    total: Float[Array, "r K M"]
    """Sum of the weights, relative to exp(max)."""
    values: Float[Array, "r K M H"]

    @classmethod
    def start(cls, queries: Float[Array, "r K M H"], sinks: Float[Array, "K M"] | None) -> Softmax:
        """Return the state before any key, for queries [r, K, M, H]; only the shape of `queries` is used.

        There are M queries per KV head in each of r rows. `sinks` are the logits of one attention sink per query, the
        same in all rows; it counts as a first key with value 0. The running maximum starts at its logit, so that its
        weight is 1. Without sinks the sum of weights is 0, and the maximum is finite, so that no difference is NaN.
        """
        shape = queries.shape[:3]
        values = jnp.zeros(queries.shape, jnp.float32)
        if sinks is None:
            return cls(jnp.full(shape, INITIAL_MAX, jnp.float32), jnp.zeros(shape, jnp.float32), values)
        return cls(jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32), values)

    def merge(self, other: Softmax) -> Softmax:
        """Return the state of the same queries over the keys of both states, which have no key in common.

        A state holds, for each query, the maximum of its scores, `total`, the sum of the weights exp(score − maximum),
        and `values`, the sum of the values times these weights. So both states are rescaled to the larger maximum and
        added up. A state without keys has the total 0 and changes nothing.
        """
        new_max = jnp.maximum(self.max, other.max)
        decay, other_decay = jnp.exp(self.max - new_max), jnp.exp(other.max - new_max)
        return Softmax(
            new_max,
            self.total * decay + other.total * other_decay,
            self.values * decay[..., None] + other.values * other_decay[..., None],
        )

    @classmethod
    def merge_all(cls, states: Softmax) -> Softmax:
        """Return the state of the same queries over the keys of all states, which are stacked along a first axis."""
        new_max = jnp.max(states.max, axis=0)
        decay = jnp.exp(states.max - new_max[None])
        return cls(new_max, jnp.sum(states.total * decay, axis=0), jnp.sum(states.values * decay[..., None], axis=0))

    def add(
        self, scores: Float[Array, "r K M S"], weigh: Callable[[Float[Array, "r K M S"]], Float[Array, "r K M H"]]
    ) -> Softmax:
        """Return the state after S more keys of each row, a step of the online softmax.

        `scores` are the logits of M queries per KV head in r rows; −inf masks a key. `weigh(weights)` returns, for each
        query, the sum of the keys' values times these weights. Weights are relative to the running maximum; if it
        grows, the sums so far are rescaled by `decay`. If all keys are masked, the state stays as it is, since the
        maximum is finite from the start.
        """
        new_max = jnp.maximum(self.max, jnp.max(scores, axis=3))
        weights = jnp.exp(scores - new_max[..., None])
        decay = jnp.exp(self.max - new_max)
        total = self.total * decay + jnp.sum(weights, axis=3)
        return Softmax(new_max, total, self.values * decay[..., None] + weigh(weights))

    def result(self) -> Float[Array, "r K M H"]:
        """Return the weighted mean of the values; zeros where there was no key."""
        return self.values / jnp.where(self.total == 0.0, 1.0, self.total)[..., None]
