"""A checkpoint as a module that trains: its parameters are the checkpoint's tensors, under their Hugging Face names.

parameters ─▶ recipes ─▶ Decoder ─▶ dense logits

A served model stores its weights fused, padded, and in the layout of a backend. A trainer's parameters should depend on
none of that, so the family's weights are made of the tensors within each call, by the recipes that an engine's live
weights are made by, and gradients reach the tensors themselves.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ...sharding import device_mesh, sharding_of
from ..config.decoder import DecoderConfig
from ..decoder import Decoder
from ..dense import dense_logits
from ..errors import ModelLoadError
from ..families.table import family_class
from ..formats.checkpoint import Checkpoint
from ..layers import Axes
from ..recipe import Piece, Recipes
from .live_origins import Origins, Place, weight_of
from .live_tree import TreeLayout
from .live_weights import LiveWeights
from .loading import abstract_weights, check_tensors, load_arrays, recipes_for


@dataclass(frozen=True)
class ModuleOrigin:
    """What a module was loaded from. All of it is compared, since nnx shares structures that are equal."""

    model: str
    """The model's name or path, as an engine takes it."""
    config: DecoderConfig
    """Without its `source`, which comparisons leave out."""
    config_json: str
    """The content of config.json that `config` was read from."""
    compute_dtype: str
    directory: str | None = None
    """The directory of its config.json and tokenizer; None for a GGUF file."""

    @property
    def full_config(self) -> DecoderConfig:
        """Return the config with the content of config.json that it was read from."""
        return replace(self.config, source=json.loads(self.config_json))


class CheckpointModule(nnx.Module):
    """A model of a family that jpaged serves, as a trainer differentiates it; `jpaged.load_module` makes it.

    `params` holds an `nnx.Param` for each tensor of the checkpoint: `model.layers.3.mlp.up_proj.weight` is
    `module.params["model"]["layers"]["3"]["mlp"]["up_proj"]["weight"]`, [out, in] as the checkpoint stores it. So
    `nnx.state(module)`, gradients and the state of an optimizer have Hugging Face names, behind `params`.
    """

    def __init__(self, params: Mapping[str, nnx.Param[Any]], origin: ModuleOrigin) -> None:
        """Hold these parameters, by the names of their tensors."""
        self.params, self.origin = nnx.Dict(), origin
        for name, param in params.items():
            level, keys = self.params, name.split(".")
            for key in keys[:-1]:
                if key not in level:
                    level[key] = nnx.Dict()
                level = level[key]
            level[keys[-1]] = param

    def __call__(self, ids: Int[Array, "B N"], mask: Bool[Array, "B N"] | None = None) -> Float[Array, "B N V"]:
        """Return the logits that follow each token of B sequences: float32, whatever dtype computes them.

        `mask` says which tokens count. It is needed for padding in front, and makes no difference to the logits of
        tokens before padding at the ends. The logits of padding are finite and mean nothing. Weights are converted to
        `origin.compute_dtype`. Raises ValueError for ids or a mask of another shape, and for more tokens than the
        model's context has.
        """
        ids, context_len = jnp.asarray(ids), self.origin.config.max_context_len
        mask = None if mask is None else jnp.asarray(mask, bool)
        if ids.ndim != 2 or (mask is not None and mask.shape != ids.shape):
            shapes = f"{ids.shape}{'' if mask is None else f' with a mask {mask.shape}'}"
            raise ValueError(f"ids: got the shape {shapes}, wanted [B, N], and the same of a mask")
        if ids.shape[1] > context_len:  # JAX would take the embedding of the last position without an error.
            raise ValueError(f"ids: got {ids.shape[1]} tokens, wanted at most {context_len}, the model's context")
        tensors = self.hf_state()
        mesh = jax.typeof(next(iter(tensors.values()))).sharding.mesh
        if AxisType.Explicit not in mesh.axis_types:
            return self._logits(tensors, ids, mask)
        # On a mesh of explicit axes each operation would have to name its result's axes; here XLA chooses them.
        batch_axis, *_ = jax.typeof(ids).sharding.spec
        logits_sharding = NamedSharding(mesh, PartitionSpec(batch_axis))
        return jax.sharding.auto_axes(self._logits, out_sharding=logits_sharding)(tensors, ids, mask)

    def _logits(
        self, tensors: Mapping[str, Array], ids: Int[Array, "B N"], mask: Bool[Array, "B N"] | None
    ) -> Float[Array, "B N V"]:
        return dense_logits(_decoder(self.origin, tensors), ids, mask_BN=mask)

    def decoder(self) -> Decoder:
        """Return the family's own module, with weights made of the parameters, as `jpaged.models.dense` takes it."""
        return _decoder(self.origin, self.hf_state())

    def hf_state(self, *, stacked: bool = False) -> dict[str, Array]:
        """Return the parameters by their Hugging Face names. The arrays are the module's own, and no copies.

        A matrix that is tied is there once, as the embedding. With `stacked` the tensors of all layers are one new
        array [L, …], under the name without the layer's number: `model.layers.mlp.up_proj.weight`.
        """
        recipes, tensors = _plan(self.origin).recipes, dict[str, Array]()
        for name in recipes.shapes:
            tensors[name] = self._param(name)[...]
        if not stacked:
            return tensors
        by_layer: defaultdict[str, dict[int, Array]] = defaultdict(dict)
        whole = dict[str, Array]()
        for name, tensor in tensors.items():
            stack = recipes.stacked[name]
            if stack.layer is None:
                whole[stack.name] = tensor
            else:
                by_layer[stack.name][stack.layer] = tensor
        return whole | {name: jnp.stack([layers[i] for i in sorted(layers)]) for name, layers in by_layer.items()}

    def load_hf_state(self, tree: Mapping[str, Any]) -> None:
        """Replace all parameters by copies of the arrays in `tree`, in the dtypes and shardings of the parameters.

        `tree` is flat or nested, of numpy or JAX arrays, under Hugging Face names: what `hf_state` returns, stacked or
        not, or a state of nnx, or whatever else `Engine.update_params` takes under such names. Raises ModelLoadError,
        which lists every fault, before anything is changed.
        """
        plan = _plan(self.origin)
        checked, origins = plan.live.check(tree)
        if checked.layout is TreeLayout.OWN:
            name = next(iter(checked.arrays))
            raise ModelLoadError(f"params: {name} is the path of an engine's weight, wanted Hugging Face names")
        sources = [
            source
            for path, origin in plan.origins.items()
            for place, place_in_tree in zip(origin.places, origins[path].places, strict=True)
            for source in _param_sources(place, place_in_tree)
        ]
        for source in sources:  # All of them are known by now, so nothing below refuses the tree.
            param = self._param(source.param)
            param.set_value(_copied(source.values_in(checked.arrays[source.array]), param.get_value()))

    def _param(self, name: str) -> Any:
        """Return the parameter of a tensor."""
        level: Any = self.params
        for key in name.split("."):
            level = level[key]
        return level


@dataclass(frozen=True, eq=False)
class _Plan:
    """How the weights of a family are made of a checkpoint's tensors."""

    live: LiveWeights
    recipes: Recipes
    origins: Origins
    """Path of each weight → its recipe, and the names of its tensors."""


@lru_cache(maxsize=4)
def _plan(origin: ModuleOrigin) -> _Plan:
    """Return the plan for the modules of an origin; those of the latest 4 are kept, since a plan takes time."""
    mesh = device_mesh(jax.local_devices()[:1])
    abstract = abstract_weights(origin.config, origin.compute_dtype, mesh)
    live = LiveWeights(abstract, mesh)
    return _Plan(live, recipes_for(abstract, origin.config, ()), live.checkpoint_origins(())[TreeLayout.TENSORS])


def _decoder(origin: ModuleOrigin, tensors: Mapping[str, Array]) -> Decoder:
    """Return the family's module, with weights made of `tensors`, which may be traced."""
    plan = _plan(origin)
    leaves = dict(nnx.to_flat_state(plan.live.abstract.state))
    made = {path: leaves[path].replace(weight_of(weight, tensors)) for path, weight in plan.origins.items()}
    decoder: Decoder = nnx.merge(plan.live.abstract.graph, nnx.from_flat_state(made))
    return decoder


@dataclass(frozen=True)
class _ParamSource:
    """Where a tree holds the values of a parameter: in one of its arrays, as a whole or as a part of it."""

    param: str
    """The name of the parameter's tensor."""
    array: str
    """The name of the array in the tree."""
    numbers: tuple[int, ...]
    """Where the values lie along the first axes of the array: a layer, an expert, or both."""
    block: Piece | None = None
    """The block of what lies there that has the values; None for all of it."""
    is_transposed: bool = False
    """Whether the parameter is W, where a block is one of Wᵀ."""

    def values_in(self, array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Return the parameter's values in the array of the tree."""
        part: np.ndarray | jax.Array = array[self.numbers]
        if self.block is None:
            return part
        values: np.ndarray | jax.Array = self.block.block_of(part)
        return values.T if self.is_transposed else values


def _param_sources(place: Place, place_in_tree: Place) -> list[_ParamSource]:
    """Return where a tree has the values of the parameters that make up one weight, or one expert's part of it.

    `place` has the names of the parameters, `place_in_tree` those of the arrays that the tree has in their stead.
    Raises ModelLoadError for a tree in which a parameter is not one block of an array.

    Example: the parameters "layers.3.gate" [F, D] and "layers.3.up" [F, D] make up one weight. A stacked tree has the
    arrays "layers.gate" and "layers.up" [L, F, D], so both parameters are at number 3 of their array. Modules of
    transformers 5 have one array for the gates and ups of all experts [E, 2 F, D]: the gate of expert 1 is the block of
    rows 0 to F − 1 at number 1, and its up the block behind that.
    """
    if _has_same_tensors(place, place_in_tree):
        # The array may have one axis more, of layers. A parameter that holds all experts is all that lies there.
        num_extra_axes = len(place_in_tree.numbers) - len(place.numbers)
        numbers = place_in_tree.numbers[:num_extra_axes]
        names = zip(place.names, place_in_tree.names, strict=True)
        return [_ParamSource(param, array, numbers) for param, array in names]
    if not _is_each_one_block(place, place_in_tree):
        names_in_tree, wanted = " and ".join(place_in_tree.names), " and ".join(place.names)
        raise ModelLoadError(f"params: got {names_in_tree}, wanted {wanted}, in the module's own form")
    return [
        _ParamSource(
            param=place.names[int(piece.tensor)],
            array=place_in_tree.names[int(block.tensor)],
            numbers=place_in_tree.numbers,
            block=block,
            is_transposed=piece.is_transposed,
        )
        for piece, block in zip(place.recipe.pieces, place_in_tree.recipe.pieces, strict=True)
    ]


def _has_same_tensors(place: Place, place_in_tree: Place) -> bool:
    """Return whether a tree has a parameter's tensor, or a stack of such tensors, for each parameter of a place."""
    params, arrays = (
        [(piece.is_transposed, piece.step) for piece in pieces]
        for pieces in (place.recipe.pieces, place_in_tree.recipe.pieces)
    )
    return len(place.names) == len(place_in_tree.names) and params == arrays


def _is_each_one_block(place: Place, place_in_tree: Place) -> bool:
    """Return whether each parameter of a place is one block of an array of the tree, and is no stack of experts."""
    recipe, recipe_in_tree = place.recipe, place_in_tree.recipe
    have_equal_targets = [piece.target for piece in recipe.pieces] == [block.target for block in recipe_in_tree.pieces]
    are_whole = all(_is_whole(piece, recipe.tensors[int(piece.tensor)]) for piece in recipe.pieces)
    return have_equal_targets and are_whole and not place.numbers


def _is_whole(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Return whether a piece is all of its tensor, which has this shape: W [in, out] if the piece is transposed."""
    all_of_it = tuple((0, size) for size in shape)
    return piece.source == (all_of_it[::-1] if piece.is_transposed else all_of_it)


def _copied(array: Any, like: jax.Array) -> jax.Array:
    """Return a copy of an array of numpy or JAX in the dtype and the sharding of another one."""
    if isinstance(array, np.ndarray):
        copy = np.array(array, like.dtype)
        return jax.device_put(copy, like.sharding) if like.committed else jnp.asarray(copy)
    copied = jnp.array(array, like.dtype, copy=True)
    return copied if copied.sharding == like.sharding else jax.device_put(copied, like.sharding)


def load_checkpoint_module(
    model: str,
    config: DecoderConfig,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    compute_dtype: str,
    directory: str | None,
    mesh: Mesh | None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointModule:
    """Return a module whose parameters, of `dtype`, are the tensors of a checkpoint.

    Parameters lie on JAX's default device, uncommitted, or on a `mesh` by the logical axes of the weights that are made
    of them; the mesh has all axes that these are mapped to. `model` is what an engine is made of, and `directory` has
    its files, if it is one. `progress(done, total)`, if given, is called after each tensor. Raises ModelLoadError if
    the checkpoint does not fit the config, or holds a NaN.
    """
    bare = replace(config, source={})
    origin = ModuleOrigin(model, bare, json.dumps(config.source, sort_keys=True), compute_dtype, directory)
    plan = _plan(origin)
    check_tensors(plan.live.abstract, config, checkpoint)
    stored_name = family_class(config.architecture).naming(checkpoint.names(), is_tied=config.may_store_one_matrix)
    stored = set(checkpoint.names())
    if absent := [name for name in plan.recipes.shapes if stored_name(name) not in stored]:
        fault = f"its tensors of experts have another form than {absent[0]}, which a module's parameters have"
        way_out = "serve it by an Engine, or save it in its family's own form by save_checkpoint"
        raise ModelLoadError(f"{checkpoint.path}: {fault}: {way_out}")
    axes, leaves, pieces = _logical_axes(plan), dict[Any, nnx.Variable[Any]](), dict[Any, tuple[Piece, ...]]()
    for name, shape in plan.recipes.shapes.items():
        sharding = None if mesh is None else _sharding(mesh, axes[name], shape)
        value = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        leaves[name] = nnx.Param(value, logical_axes=axes[name])
        whole = tuple((0, size) for size in shape)
        pieces[name] = (Piece(stored_name(name), whole, whole),)
    arrays = load_arrays(leaves, pieces, checkpoint, progress=progress)
    return CheckpointModule({name: leaf.replace(arrays[name]) for name, leaf in leaves.items()}, origin)


def _logical_axes(plan: _Plan) -> dict[str, Axes]:
    """Return the logical axes of each tensor: those of the weight that it becomes, or a part of.

    Example: a weight of the axes ("embed", "mlp"), [in, out], is made of a tensor [out, in], so ("mlp", "embed").
    """
    axes = dict[str, Axes]()
    for path, leaf in nnx.to_flat_state(plan.live.abstract.state):
        metadata = leaf.get_metadata()
        for piece in plan.recipes.pieces[path]:
            # The tensor of a matrix W is Wᵀ, unless it is stored transposed; other tensors are their weights.
            is_reversed = ("matrix" in metadata) is not piece.is_transposed
            of_experts, own = (), metadata["logical_axes"]
            if "num_experts" in metadata:
                of_experts, own = own[:1] if piece.expert is not None else (), own[1:]
            axes[piece.tensor] = (*of_experts, *(reversed(own) if is_reversed else own))
    return axes


def _sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Return where a tensor lies on a mesh. An axis of a size that the devices do not divide is whole on each."""
    spec = sharding_of(mesh, axes).spec
    divided = [
        name if name is None or size % mesh.shape[name] == 0 else None for name, size in zip(spec, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*divided))
