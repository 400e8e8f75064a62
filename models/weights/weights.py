"""A model's weights: its arrays, or their abstract shapes, by path, and the structure that they are parts of.

A start whose programs are kept has shapes that an earlier start has kept, and not the model's classes. Its state is a
`KeptState`, and stands for a state of nnx until a program is traced or the weights are taken from a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ..config.decoder import DecoderConfig
from .code_arrays import num_bytes
from .weight_state import KeptState, flat_state


@dataclass(frozen=True, eq=False)
class UnbuiltGraph:
    """The structure of a model whose classes are imported when they are needed."""

    build: Callable[[], Weights]
    """Returns the model's abstract weights, whose state is one of nnx."""

    @cached_property
    def built(self) -> Weights:
        """Return the model's abstract weights."""
        return self.build()

    def state(self, kept: KeptState) -> Any:
        """Return the same weights as a state of nnx."""
        return jax.tree.unflatten(jax.tree.structure(self.built.state), jax.tree.leaves(kept))


@dataclass(frozen=True)
class Weights:
    """A model as `nnx.split` gives it: `graph` is its structure, `state` holds its arrays or their abstract shapes.

    A start that builds no model has an `UnbuiltGraph` and a `KeptState`.
    """

    graph: Any
    state: Any
    stream_dtype: Any
    """The dtype of the hidden states."""
    logits_modules: tuple[str, ...]
    """Names of the top-level modules that turn hidden states into logits."""
    config: DecoderConfig | None = None
    """The config of the model; None for weights that no config describes, which cannot be saved."""

    def split_logits(self) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """Return the leaves of `state` that logits need, and a function from such leaves to a whole state.

        The leaves are arrays, or abstract shapes if `state` is abstract, of the modules in `logits_modules`: the head,
        or the embedding where both are tied. A program that samples takes only these leaves as arguments. In the state
        that the function returns, a scalar zero takes the place of every other leaf, so that the structure is that of
        the whole model and `nnx.merge` accepts it.
        """
        flat = flat_state(self.state)  # It has the paths of the leaves, in the order of `leaves`.
        leaves, tree = jax.tree.flatten(self.state)
        indices = [index for index, (path, _) in enumerate(flat) if path[0] in self.logits_modules]

        def to_state(logits_leaves: Sequence[Any]) -> Any:
            """Return a state with these leaves, in the order in which `split_logits` returned them."""
            filled: list[Any] = [jnp.zeros(())] * len(leaves)
            for index, leaf in zip(indices, logits_leaves, strict=True):
                filled[index] = leaf
            return jax.tree.unflatten(tree, filled)

        return [leaves[index] for index in indices], to_state

    @property
    def built(self) -> Weights:
        """Return the same weights with the model's structure, and its state as one of nnx."""
        if not isinstance(self.graph, UnbuiltGraph):
            return self
        return replace(self, graph=self.graph.built.graph, state=self.graph.state(self.state))

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all weights, with padding and copies of KV heads; an array that lies whole on several
        devices counts once."""
        return sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.state))

    @property
    def chip_bytes(self) -> int:
        """Return the bytes of the weights on one device."""
        leaves = jax.tree.leaves(self.state)
        return sum(num_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves)
