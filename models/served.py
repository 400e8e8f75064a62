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
from .weights.loading import with_value

NOT_WEIGHTS = (nnx.RngState, nnx.Cache, nnx.Intermediate)
"""Types of variables that no trainer trains: random streams and their counts, caches, and values that calls leave."""
DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""JAX's primitives that draw random numbers."""


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
    def spec(self) -> Any:
        """Return the module's spec."""
        return self.module.spec


@dataclass(frozen=True)
class Constant:
    """A variable of a module that is no weight, with its value in the host's memory."""

    variable: Any
    value: np.ndarray
    key_impl: Any = None
    """The implementation of random keys whose bits `value` holds; None for other values."""

    def fresh(self) -> Any:
        """Return a new variable with the value; a trace may change it without a trace of that elsewhere."""
        value = jnp.asarray(self.value)
        return with_value(
            self.variable, value if self.key_impl is None else jax.random.wrap_key_data(value, impl=self.key_impl)
        )


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
    nnx.Module.eval(served)  # A module may have a method of that name for something else.
    graph, weights, others = nnx.split(served, lambda path, leaf: _is_weight(leaf), ...)
    flat = {path: _constant(path, leaf, type(module).__name__) for path, leaf in nnx.to_flat_state(others)}
    return ModuleGraph(graph, flat, call, head), weights


def _is_weight(leaf: Any) -> bool:
    if isinstance(leaf, NOT_WEIGHTS):
        return False
    value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    # A parameter of integers is left among the weights, where it is refused by name.
    return isinstance(leaf, nnx.Param) or not hasattr(value, "dtype") or jnp.issubdtype(value.dtype, jnp.floating)


def _constant(path: Path, leaf: Any, name: str) -> Constant:
    """Return a leaf of the module `name` as a constant. Raises ModelLoadError if it needs a value and has none."""
    value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if isinstance(value, jax.ShapeDtypeStruct):
        if not isinstance(leaf, nnx.RngState):
            fault = f"{name}.{'.'.join(map(str, path))} is abstract, wanted a value: only weights are given later"
            raise ModelLoadError(f"model: {fault}")
        # The numbers of a random stream are not used: a module that draws some is refused.
        bits = jax.eval_shape(jax.random.key_data, value) if is_key else value
        value_on_host = np.zeros(bits.shape, bits.dtype)
        return Constant(leaf, value_on_host, jax.random.key_impl(jax.random.key(0)) if is_key else None)
    if is_key:
        return Constant(leaf, np.asarray(jax.random.key_data(value)), jax.random.key_impl(value))
    return Constant(leaf, np.asarray(value))


def draws_random_numbers(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or one nested in it, draws random numbers."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in DRAWS:
            return True
        values = (value if isinstance(value, tuple) else (value,) for value in equation.params.values())
        inner = (getattr(part, "jaxpr", part) for parts in values for part in parts)
        if any(draws_random_numbers(part) for part in inner if hasattr(part, "eqns")):
            return True
    return False
