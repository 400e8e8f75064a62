"""The weights of a model by path: a state of nnx, or one that stands for it where the model's classes are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..recipe import Path


@dataclass(frozen=True)
class KeptLeaf:
    """A weight: its array or abstract shape, and those of its metadata that say how it is stored."""

    value: Any
    metadata: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def size(self) -> int:
        return int(self.value.size)

    @property
    def sharding(self) -> Any:
        return self.value.sharding

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata, as a variable of nnx does."""
        return dict(self.metadata)

    def get_value(self) -> Any:
        """Return the array or the abstract shape, as a variable of nnx does."""
        return self.value

    def replace(self, value: Any) -> KeptLeaf:
        """Return the leaf with another value."""
        return KeptLeaf(value, self.metadata)


@jax.tree_util.register_pytree_node_class
class KeptState:
    """Weights by their paths, in the order in which JAX flattens the model's state; a tree of their values."""

    def __init__(self, leaves: Mapping[Path, KeptLeaf]):
        self.leaves = dict(leaves)

    def tree_flatten(self) -> tuple[list[Any], _Names]:
        """Return the values, and what tells states of one model from those of another."""
        return [leaf.value for leaf in self.leaves.values()], _Names(self.leaves)

    @classmethod
    def tree_unflatten(cls, names: _Names, values: Sequence[Any]) -> KeptState:
        """Return a state of other values."""
        return cls(
            {path: leaf.replace(value) for (path, leaf), value in zip(names.leaves.items(), values, strict=True)}
        )


class _Names:
    """The paths and metadata of a state. Equal paths are equal names, as a tree's structure must be hashable."""

    def __init__(self, leaves: Mapping[Path, KeptLeaf]):
        self.leaves, self._paths = leaves, tuple(leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Names) and self._paths == other._paths

    def __hash__(self) -> int:
        return hash(self._paths)


def flat_state(state: Any) -> list[tuple[Path, Any]]:
    """Return the weights of a state with their paths, in the order in which JAX flattens the state."""
    if isinstance(state, KeptState):
        return list(state.leaves.items())
    from flax import nnx

    return list(nnx.to_flat_state(state))


def state_of(leaves: Mapping[Path, Any]) -> Any:
    """Return the state of weights by their paths."""
    if all(isinstance(leaf, KeptLeaf) for leaf in leaves.values()):
        return KeptState(leaves)
    from flax import nnx

    return nnx.from_flat_state(leaves)


def with_value(leaf: Any, value: Any) -> Any:
    """Return a leaf of a state with another value: a variable, or the value itself for a plain array."""
    return leaf.replace(value) if hasattr(leaf, "get_metadata") else value
