"""A caller's module as an engine calls it: in evaluation mode, by the names of its methods, apart from its weights.

module ─▶ split_module ─▶ ModuleGraph (structure, constants) + weights ─▶ ModuleGraph.merge ─▶ ServedModule
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from .errors import ModelLoadError
from .inputs import ModelInputs
from .recipe import Path

NOT_WEIGHTS = (nnx.RngState, nnx.Cache)
"""Types of variables that no trainer trains: random streams and their counts, and caches."""


@dataclass(frozen=True)
class ServedModule:
    """A module whose methods have other names than an engine calls: `call` is its forward, `head` gives its logits.

    The forward takes (inputs, cache), and returns hidden states [T, D] and the cache. `jpaged.models.dense` takes a
    ServedModule as well as a module.
    """

    module: Any
    call: str = "__call__"
    head: str = "logits"

    def __call__(self, inputs: ModelInputs, cache: Any) -> tuple[Float[Array, "T D"], Any]:
        """Return the module's hidden states and the written cache."""
        return getattr(self.module, self.call)(inputs, cache)

    def logits(self, hidden_RD: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return the scores that the module gives all tokens after each of R hidden states."""
        return getattr(self.module, self.head)(hidden_RD)

    @property
    def statistics(self) -> list[Array]:
        """Return the values of the module's running statistics, such as those of batch norm."""
        return [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.state(self.module, nnx.BatchStat))]

    @property
    def spec(self) -> Any:
        """Return the module's spec."""
        return self.module.spec


@dataclass(frozen=True)
class Constant:
    """A variable of a module that is no weight."""

    variable: nnx.Variable[Any]
    """The variable without its value."""
    value: Any
    """An array in the host's memory, or what else the variable holds."""
    key_impl: Any = None
    """The implementation of random keys whose bits `value` holds; None for other values."""

    def fresh(self) -> nnx.Variable[Any]:
        """Return a new variable with the value, so that what one trace does to it is not seen in another."""
        value = jnp.asarray(self.value) if isinstance(self.value, np.ndarray) else self.value
        value = value if self.key_impl is None else jax.random.wrap_key_data(value, impl=self.key_impl)
        return self.variable.replace(value)


@dataclass(frozen=True, eq=False)
class ModuleGraph:
    """A caller's module without its weights."""

    graph: nnx.GraphDef[Any]
    constants: Mapping[Path, Constant]
    call: str
    head: str

    def merge(self, weights: nnx.State) -> ServedModule:
        """Return the module with these weights, which may be traced."""
        constants = nnx.from_flat_state({path: constant.fresh() for path, constant in self.constants.items()})
        return ServedModule(nnx.merge(self.graph, weights, constants), self.call, self.head)

    @property
    def random_streams(self) -> list[str]:
        """Return the dotted paths of the module's random streams."""
        return [".".join(map(str, path[:-1])) for path, one in self.constants.items() if one.key_impl is not None]


ModelGraph = nnx.GraphDef[Any] | ModuleGraph
"""A model without its weights: a Decoder, or a caller's module."""


def split_module(module: nnx.Module, call: str, head: str) -> tuple[ModuleGraph, nnx.State]:
    """Return a module in evaluation mode without its weights, and its weights. The module itself is not changed.

    Evaluation mode is that of `nnx.Module.eval`: no dropout, and batch norm by its running statistics. Weights are the
    parameters, and all other arrays of floats but those of NOT_WEIGHTS, such as running statistics. All else becomes
    constant: the state of random streams, caches, counters. Raises ModelLoadError for a constant without a value, in a
    module that is abstract (`nnx.eval_shape`); random streams need none.
    """
    served = nnx.merge(*nnx.split(module))
    nnx.pop(served, nnx.Intermediate)  # What earlier calls have left, such as activations that a trainer logs.
    nnx.Module.eval(served)  # A module may have a method of that name for something else.
    graph, weights, others = nnx.split(served, lambda path, leaf: _is_weight(leaf), ...)
    flat = {path: _constant(path, leaf, type(module).__name__) for path, leaf in nnx.to_flat_state(others)}
    return ModuleGraph(graph, flat, call, head), weights


def _is_weight(leaf: Any) -> bool:
    """Return whether a leaf of a module's state is a weight: a parameter, or another array of floats."""
    if isinstance(leaf, nnx.Param) or not isinstance(leaf, nnx.Variable):
        return True  # Also if it holds no floats: it is then refused by name.
    value = leaf.get_value()
    return not isinstance(leaf, NOT_WEIGHTS) and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _constant(path: Path, leaf: nnx.Variable[Any], name: str) -> Constant:
    """Return a leaf of the module `name` as a constant. Raises ModelLoadError if it needs a value and has none."""
    value, variable = leaf.get_value(), leaf.replace(None)
    is_key = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if isinstance(value, jax.ShapeDtypeStruct):
        if not isinstance(leaf, nnx.RngState):
            fault = f"{name}.{'.'.join(map(str, path))} is abstract, wanted a value: only weights are given later"
            raise ModelLoadError(f"model: {fault}")
        # The numbers of a random stream are not used, since a module that draws some is refused: any key will do.
        value = jnp.broadcast_to(jax.random.key(0), value.shape) if is_key else np.zeros(value.shape, value.dtype)
    if is_key:
        return Constant(variable, np.asarray(jax.random.key_data(value)), jax.random.key_impl(value))
    return Constant(variable, np.asarray(value) if hasattr(value, "dtype") else value)
