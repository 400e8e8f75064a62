"""A caller's own model: an nnx module that attends through the paged cache, with the spec that an engine sizes it by.

Like `Decoder`, the module has `__call__(inputs, cache)`, which takes `ModelInputs` and returns hidden states and the
cache, and `logits`, which returns the scores of chosen rows of them. Its `spec` is a `ModelSpec`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..pallas_kernels.layer_ops import XLA_OPS, LayerOps
from ..sharding import AxisTable, split_at
from .config.shares import Shares
from .config.spec import AttentionLayer, ModelSpec
from .errors import ModelLoadError
from .formats.checkpoint import DTYPES
from .inputs import call_fault
from .recipe import Path
from .weights.weight_state import flat_state, state_of, with_value
from .weights.weights import Weights

if TYPE_CHECKING:
    from flax import nnx

    from .served import ModuleGraph

AXES_KEYS = ("logical_axes", "out_sharding", "sharding_names")
"""Metadata of a variable that may name its logical axes, as flax does in one version or another."""


@dataclass(frozen=True, eq=False)
class OwnModel:
    """The structure and the abstract state of a caller's module, with the methods that engines call of
    `DecoderConfig`."""

    name: str
    spec: ModelSpec
    graph: ModuleGraph
    state: Any
    """The weights, as abstract shapes."""
    statistics: Mapping[str, Any]
    """The running statistics by their dotted paths, as the module has them; none if it is abstract."""
    axes: AxisTable
    """Which of the axes that variables name are split over devices."""
    longrope: None = None

    def shares(self, num_shards: int) -> Shares:
        """Return the stored sizes on `num_shards` devices, with the heads of the first layer.

        Nothing is padded, since heads and vocabulary must be multiples of `num_shards`. An own MLP's width is unknown;
        `num_shards` stands for it, a width that needs no padding either.
        """
        layer = self.spec.layers[0]
        return Shares(num_shards, layer.num_heads, layer.num_kv_heads, num_shards, self.spec.vocab_size)

    def spec_on_chip(self, num_shards: int, ops: LayerOps = XLA_OPS, itemsize: int = 2) -> ModelSpec:
        """Return the spec with the number of heads that one of `num_shards` devices has in each layer.

        `ops` and `itemsize` change nothing of it: how many values a program holds is what the module's spec says.
        Raises ModelLoadError if the KV heads of a layer, or the vocabulary, are not a multiple of `num_shards`. Query
        heads are a multiple of the KV heads, so they need no check.
        """
        counts = {"KV heads": [layer.num_kv_heads for layer in self.spec.layers], "logits": [self.spec.vocab_size]}
        for what, numbers in counts.items():
            if odd := [number for number in numbers if number % num_shards]:
                fault = f"{odd[0]} {what} cannot be spread over {num_shards} devices"
                raise ModelLoadError(f"model: {fault}: the weights of an own model are not padded; take a divisor")
        layers = (
            replace(layer, num_heads=layer.num_heads // num_shards, num_kv_heads=layer.num_kv_heads // num_shards)
            for layer in self.spec.layers
        )
        return replace(self.spec, layers=tuple(layers))

    def for_context(self, max_model_len: int) -> Self:
        """Return the model itself, whatever the longest sequence."""
        return self

    def without_idle_windows(self, max_model_len: int) -> Self:
        """Return the model itself: its code names its windows."""
        return self

    @property
    def axis_names(self) -> set[str]:
        """Return all names that the module's variables give to axes."""
        leaves = (leaf for _, leaf in flat_state(self.state))
        return {name for leaf in leaves for names in _names_of_axes(leaf) for name in names}

    @property
    def unnamed_bytes(self) -> int:
        """Return the bytes of the weights whose axes have no names, which lie whole on every device.

        The result is 0 if all of these are vectors and scalars: those of the hidden size are whole with names too.
        """
        unnamed = [leaf for _, leaf in flat_state(self.state) if not _names_of_axes(leaf)]
        if all(len(leaf.shape) < 2 for leaf in unnamed):
            return 0
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in unnamed)

    def weights(self, mesh: Mesh) -> Weights:
        """Return the abstract weights with their shardings on `mesh`, an engine's own.

        A variable is split at the first axis that `axes` split by its name in the metadata, such as ("embed", "heads").
        A variable whose metadata name none, and a leaf that is a plain array, lie whole on every device. On a mesh of
        several devices, raises ModelLoadError for a name that `axes` do not know, and for an axis that the number of
        devices does not divide. The result has no config, since none describes the module.
        """

        def placed(path: Path, leaf: Any) -> Any:
            """Return the leaf at `path` of the state, with its shape, dtype and sharding in place of its value."""
            # Every array lies whole on a single device, so axes need not be known.
            names = () if mesh.size == 1 else _names_of_axes(leaf)
            key, known = f"{self.name}.{'.'.join(map(str, path))}", self.axes.names
            if unknown := [name for each in names for name in each if name not in known]:
                fault = f"{key} has the logical axis {unknown[0]!r}, wanted {', '.join(known)}"
                raise ModelLoadError(
                    f"model: {fault}; or give mesh and sharding_rules with that name, None to leave it whole"
                )
            axis = next((axis for axis, each in enumerate(names) if any(map(self.axes.is_split, each))), None)
            if axis is not None and leaf.shape[axis] % mesh.size:
                fault = f"{key} has {leaf.shape[axis]} places along {names[axis][0]!r}"
                raise ModelLoadError(f"model: {fault}, wanted a multiple of the {mesh.size} devices: nothing is padded")
            return with_value(leaf, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split_at(mesh, axis)))

        state = state_of({path: placed(path, leaf) for path, leaf in flat_state(self.state)})
        top_modules = tuple(dict.fromkeys(path[0] for path, _ in flat_state(self.state)))
        return Weights(self.graph, state, None, top_modules)


def open_own_model(
    module: nnx.Module, *, axes: AxisTable, call: str = "__call__", head: str = "logits"
) -> tuple[OwnModel, Mapping[str, Any]]:
    """Return a caller's module as a model, and its arrays by their dotted paths, such as "layers.0.mlp.weight".

    `call` and `head` are the names of its methods that take (inputs, cache) and hidden states. `axes` say which axes
    of weights are split over devices.
    Weights of the module that are abstract shapes have no array there; they are given later. A spec without an
    `activation_width` gets 16 × the hidden size. Raises ModelLoadError for a module without a valid spec or without a
    method, for a `__call__` that does not take (inputs, cache), and for a state that holds anything but arrays of
    floats.
    """
    name, spec = type(module).__name__, getattr(module, "spec", None)
    if not isinstance(spec, ModelSpec):
        raise ModelLoadError(f"model: {name}.spec is a {type(spec).__name__}, wanted a jpaged.ModelSpec")
    if fault := _spec_fault(spec):
        raise ModelLoadError(f"model: {name}.spec: {fault}")
    for option, method in (("call", call), ("logits", head)):
        if not isinstance(method, str) or not callable(getattr(module, method, None)):
            raise ModelLoadError(
                f"model: {name} has no method {reprlib.repr(method)}, wanted the name of one for {option}"
            )
    if fault := call_fault(module, call):
        raise ModelLoadError(f"model: {fault}")
    # Windows may be integers of numpy. An `activation_width` of 0 stands for an estimate of values per token.
    layers = (replace(layer, window=layer.window and int(layer.window)) for layer in spec.layers)
    spec = replace(spec, layers=tuple(layers), activation_width=spec.activation_width or 16 * spec.hidden_size)
    from flax import nnx

    from .served import split_module

    graph, state = split_module(module, call, head)
    arrays: dict[str, Any] = {}
    abstract: dict[Any, Any] = {}
    for path, leaf in nnx.to_flat_state(state):
        value, key = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf, ".".join(map(str, path))
        if not isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
            raise ModelLoadError(f"model: {name}.{key} is a {type(value).__name__}, wanted an array")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ModelLoadError(f"model: {name}.{key} is a parameter of {value.dtype}, wanted floats")
        if not isinstance(value, jax.ShapeDtypeStruct):
            arrays[key] = value
        # JAX has no 64-bit floats unless x64 is on, so the engine's weight is float32. The array is
        # converted when the weight is made of it.
        dtype = jnp.float32 if value.dtype == np.float64 else value.dtype
        abstract[path] = with_value(leaf, jax.ShapeDtypeStruct(value.shape, dtype))
    stats = {".".join(map(str, path)) for path, leaf in abstract.items() if isinstance(leaf, nnx.BatchStat)}
    statistics = {key: value for key, value in arrays.items() if key in stats}
    return OwnModel(name, spec, graph, nnx.from_flat_state(abstract), statistics, axes), arrays


def _names_of_axes(leaf: Any) -> tuple[tuple[str, ...], ...]:
    """Return the names that a leaf of a state gives to each of its axes; an empty tuple if it names none.

    An axis may have several names, as in a PartitionSpec, or none. Example: ("embed", None, ("fsdp", "tp")) gives
    (("embed",), (), ("fsdp", "tp")).
    """
    metadata = leaf.get_metadata() if hasattr(leaf, "get_metadata") else {}
    for value in map(metadata.get, AXES_KEYS):
        spec = value.spec if isinstance(value, NamedSharding) else value
        if isinstance(spec, tuple | PartitionSpec):
            each = ((axis,) if isinstance(axis, str) else axis for axis in spec)
            return tuple(names if isinstance(names, tuple) else () for names in each)
    return ()


def _layer_fault(layers: tuple[AttentionLayer, ...], index: int) -> str | None:
    """Return what is wrong with the layer at `index` but for its heads; None if nothing is.

    The result is a clause for an error, such as "layers[2].window is 0, wanted an integer ≥ 1, …". A window counts
    positions, and None stands for full attention. `pages_of` is the index of the layer whose keys and values this layer
    reads; it may only name an earlier layer that writes its own, so there are no chains.
    """
    layer, name = layers[index], f"layers[{index}]"
    window, soft_cap, owner = layer.window, layer.soft_cap, layer.pages_of
    if window is not None and (not isinstance(window, Integral) or isinstance(window, bool) or window < 1):
        return f"{name}.window is {window!r}, wanted an integer ≥ 1, or None for full attention"
    if soft_cap is not None and not (isinstance(soft_cap, int | float) and 0 < soft_cap < math.inf):
        return f"{name}.soft_cap is {soft_cap!r}, wanted a number above 0, or None"
    if not isinstance(layer.has_sinks, bool):
        return f"{name}.has_sinks is {layer.has_sinks!r}, wanted True or False"
    if owner is None:
        return None
    if not isinstance(owner, int) or not 0 <= owner < index or layers[owner].pages_of is not None:
        return f"{name}.pages_of is {owner!r}, wanted the index of an earlier layer that has keys of its own, or None"
    return None


def _spec_fault(spec: ModelSpec) -> str | None:
    """Return the first thing that is wrong with a caller's spec, as a clause for an error; None if nothing is.

    A spec is a dataclass whose fields may hold any value, so types are checked before they are used: the sizes first,
    heads and head sizes of all layers among them, then each layer's window, soft cap, `has_sinks` and `pages_of`, then
    that query heads are a multiple of KV heads, then the dtype and the token ids. An object in `layers` that is no
    AttentionLayer lacks the sizes, so it is reported first. Example: "hidden_size is 0, wanted an integer ≥ 1".
    """
    sizes: dict[str, Any] = {name: getattr(spec, name) for name in ("vocab_size", "hidden_size", "max_context_len")}
    for index, layer in enumerate(spec.layers if isinstance(spec.layers, tuple) else ()):
        names = "num_heads", "num_kv_heads", "head_size"
        sizes |= {f"layers[{index}].{field}": getattr(layer, field, None) for field in names}
    for field, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            return f"{field} is {size!r}, wanted an integer ≥ 1"
    if not isinstance(spec.layers, tuple) or not spec.layers:
        return f"layers is {spec.layers!r}, wanted a tuple of AttentionLayer, one for each"
    for index in range(len(spec.layers)):
        if fault := _layer_fault(spec.layers, index):
            return fault
    if odd := [layer for layer in spec.layers if layer.num_heads % layer.num_kv_heads]:
        return f"a layer has {odd[0].num_heads} heads for {odd[0].num_kv_heads} KV heads, wanted a multiple"
    if spec.dtype not in DTYPES:
        return f"dtype is {spec.dtype!r}, wanted one of {', '.join(DTYPES)}"
    ids = spec.eos_token_ids
    if not isinstance(ids, tuple) or not all(isinstance(i, int) and 0 <= i < spec.vocab_size for i in ids):
        return f"eos_token_ids is {ids!r}, wanted a tuple of token ids below vocab_size, {spec.vocab_size}"
    return None
