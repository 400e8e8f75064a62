"""Where each weight of a model is in a tree of arrays: the names of its tensors, and its place in arrays of several.

A tree has one array for each tensor of a checkpoint, or one for the tensors of all layers, of all experts, or of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...pallas_kernels.code_formats import CodeFormat
from ..errors import ModelLoadError
from ..families.table import family_class
from ..recipe import Path, Piece, StackedName
from .loading import recipes_for
from .weight_recipe import RecipeInputs, WeightRecipe, make_weight, recipe_of
from .weights import Weights


class Place(NamedTuple):
    """Where the tensors of a weight, or of one of its experts, are in a tree."""

    recipe: WeightRecipe
    names: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    """Where they lie along the first axes of the arrays of these names: a layer, an expert, or both; () if each array
    is a tensor."""


@dataclass(frozen=True)
class Origin:
    """Where the tensors of a weight are in a tree."""

    places: tuple[Place, ...]
    """One place, or one for each expert of the model."""
    stack_shape: tuple[int, ...] = ()
    """Sizes of the first axes of the arrays, before those of the recipe's tensors: layers, experts, or both."""

    @property
    def recipes(self) -> list[WeightRecipe]:
        """Return the distinct recipes of the places; those of the experts of a weight are nearly always one."""
        return list({id(place.recipe): place.recipe for place in self.places}.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all its arrays."""
        return tuple(dict.fromkeys(name for place in self.places for name in place.names))

    @property
    def is_by_expert(self) -> bool:
        """Return whether the weight is made one expert after the other."""
        return self.places[0].recipe.num_experts is not None


Origins = dict[Path, Origin]


def origins_of(abstract: Weights, names_in_tree: Collection[str]) -> tuple[Origins, Origins]:
    """Return where each weight is in trees of a checkpoint's tensors, and in such trees with the layers stacked.

    In the latter a name without the layer's number is an array [L, …] of all layers that have such a tensor, in order,
    of which the weight takes its layer. Scales that are made with their codes have no origin of their own. Families
    have alternative names for some tensors, and forms for those of experts: those in `names_in_tree` are used.
    """
    leaves, config = dict(nnx.to_flat_state(abstract.state)), abstract.config
    assert config is not None, "names of checkpoints are known by the model's family"
    recipes = recipes_for(abstract, config, names_in_tree)
    layers_of = defaultdict[str, set[int]](set)
    for stack in recipes.stacked.values():
        if stack.layer is not None:
            layers_of[stack.name].add(stack.layer)
    tensors, stacked = dict[Path, Origin](), dict[Path, Origin]()
    for path, pieces in recipes.pieces.items():
        if "is_scales" in leaves[path].get_metadata():
            continue  # They are made with the codes, of the same tensors.
        tensors[path] = _origin_of(leaves[path], leaves.get(scales_path(path)), pieces, recipes.shapes)
        stacked[path] = _stacked_origin(tensors[path], recipes.stacked, layers_of)
    return tensors, stacked


def _stacked_origin(
    origin: Origin, stacked_names: Mapping[str, StackedName], layers_of: Mapping[str, Collection[int]]
) -> Origin:
    """Return where a weight is in a tree whose arrays hold the layers of one kind, such as those with experts.

    `origin` is where it is in a tree of tensors, `stacked_names` has the array of each tensor, and `layers_of` the
    numbers of the layers that each array holds, in rising order. A weight that belongs to no layer is where it was,
    under the array's name.

    Example: only the layers 1 and 3 have a tensor "layers.{i}.up", so "layers.up" is an array [2, …], and the weight of
    layer 3 is at number 1 along its first axis. If these tensors hold E experts each, the array is [2, E, …], and
    expert e of layer 3 is at (1, e).
    """
    array_name, layer = stacked_names[origin.names[0]]  # All tensors of a weight belong to its layer.
    layer_index, layer_axis = tuple[int, ...](), tuple[int, ...]()  # Without a layer there is no such axis.
    if layer is not None:
        layers = sorted(layers_of[array_name])
        layer_index, layer_axis = (layers.index(layer),), (len(layers),)
    places = tuple(
        Place(
            place.recipe,
            names=tuple(stacked_names[name].name for name in place.names),
            numbers=(*layer_index, *place.numbers),
        )
        for place in origin.places
    )
    return Origin(places, stack_shape=(*layer_axis, *origin.stack_shape))


def names_of_forms(abstract: Weights) -> list[list[str]]:
    """Return the names of tensors that a tree must have to be read in each form of the model's family.

    The first form is the family's own, which needs no names; the others are those of `Source.others`, in order. Names
    are those of expert 0, and lack the layer's number.
    """
    config = abstract.config
    if config is None:
        return []
    sources = family_class(config.architecture).sources(config).values()
    num_forms = 1 + max(len(source.others) for source in sources)
    own_form = list[str]()
    other_forms = [
        [
            source.others[number].tensor(variable, {"e": 0}, has_layer=False)
            for source in sources
            for variable in ("weight", "bias")
            if number < len(source.others)
        ]
        for number in range(num_forms - 1)
    ]
    return [own_form, *other_forms]


def _origin_of(
    weight: nnx.Variable[Any],
    scales: nnx.Variable[Any] | None,
    pieces: tuple[Piece, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Origin:
    """Return where a weight, which consists of these `pieces`, is in a tree of a checkpoint's tensors.

    `weight` and `scales` are as in `recipe_of`; `shapes` are those of the tensors, by name. A weight of experts has a
    place for each expert. Raises ModelLoadError if tensors of two forms make up the weight of one expert.

    Example: two experts of 4 rows. If each has a tensor of its own, [4, in], their places have the names
    ("experts.0.up",) and ("experts.1.up",), and no numbers. If one tensor has both, [2, 4, in], both places have the
    name ("experts.up",), and the numbers (0,) and (1,). Either way the recipe of both is to copy rows 0 to 3 of tensor
    "0" to rows 0 to 3.
    """
    metadata = weight.get_metadata()
    formats = metadata["held"].formats if "held" in metadata else ()
    places, recipes = list[Place](), dict[RecipeInputs, WeightRecipe]()
    for part in _expert_parts(pieces, formats, metadata.get("rows_of_expert")):
        names = tuple(dict.fromkeys(piece.tensor for piece in part.pieces))
        numbers = _numbers_in_tensors(part.pieces, names)
        inputs = RecipeInputs(
            tensors=tuple(shapes[name][len(numbers) :] for name in names),
            pieces=tuple(_own_piece(piece, names.index(piece.tensor), part.first_row) for piece in part.pieces),
            formats=part.formats,
        )
        if inputs not in recipes:
            recipes[inputs] = recipe_of(weight, scales, inputs)
        places.append(Place(recipes[inputs], names, numbers))
    num_stacked_axes = len(places[0].numbers)
    return Origin(tuple(places), stack_shape=shapes[pieces[0].tensor][:num_stacked_axes])


class _ExpertPart(NamedTuple):
    """The part of a weight that belongs to one expert; all of it for a weight that is not of experts."""

    pieces: tuple[Piece, ...]
    formats: tuple[CodeFormat, ...]
    """As in `RecipeInputs`."""
    first_row: int
    """The first row of the part among all rows of the weight."""


def _expert_parts(
    pieces: tuple[Piece, ...], formats: tuple[CodeFormat, ...], rows_of_expert: int | None
) -> Iterator[_ExpertPart]:
    """Yield the part of each expert, in order; one part if `rows_of_expert` is None, for a weight not of experts.

    The pieces of an expert follow each other among all `pieces` of the weight, and so do their formats in `formats`.
    """
    if rows_of_expert is None:
        yield _ExpertPart(pieces, formats, first_row=0)
        return
    first_piece = 0
    for expert, expert_pieces in groupby(pieces, lambda piece: piece.target[0][0] // rows_of_expert):
        own_pieces = tuple(expert_pieces)
        end_piece = first_piece + len(own_pieces)
        yield _ExpertPart(own_pieces, formats[first_piece:end_piece], first_row=expert * rows_of_expert)
        first_piece = end_piece


def _numbers_in_tensors(pieces: Iterable[Piece], names: Sequence[str]) -> tuple[int, ...]:
    """Return (expert,) for the pieces of one expert in tensors of all experts; () for tensors of their own.

    Raises ModelLoadError, with the `names` of the tensors, if there are some of each form.
    """
    expert, *other_experts = dict.fromkeys(piece.expert for piece in pieces)
    if other_experts:
        both = " and ".join(names)
        raise ModelLoadError(f"params: got {both}, one of an expert and one of all, wanted one form for both")
    return () if expert is None else (expert,)


def _own_piece(piece: Piece, tensor_index: int, first_row: int) -> Piece:
    """Return a piece as recipes have it, so that the layers of a model, and its experts, have equal recipes.

    Its tensor is a number. Its target counts from `first_row`, the first row of its expert's part. It names no expert,
    since a program reads the tensor of one expert only. Example: the piece of the tensor "experts.up" at rows 4 to 7 of
    a weight, for expert 1 of 4 rows, becomes that of the tensor "0" at rows 0 to 3.
    """
    target = piece.target
    if target:  # A scalar has no bounds.
        (start, stop), *columns = target
        target = (start - first_row, stop - first_row), *columns
    return replace(piece, tensor=str(tensor_index), target=target, expert=None)


def scales_path(path: Path) -> Path:
    """Return where the scales of the codes at `path` are."""
    return (*path[:-1], "scales")


def own_origin(path: Path, weight: nnx.Variable[Any]) -> Origin:
    """Return where a weight is in a tree under the engine's own paths: one array of the weight's own shape.

    It is copied as it is stored, so the recipe has no `matrix` and no `ops`.
    """
    shape = tuple(weight.shape)
    all_of_it = tuple((0, size) for size in shape)
    recipe = WeightRecipe(
        tensors=(shape,),
        pieces=(Piece("0", all_of_it, all_of_it),),
        shape=shape,
        dtype=np.dtype(weight.dtype),
        sharding=weight.sharding,
    )
    name = ".".join(map(str, path))
    return Origin((Place(recipe, (name,)),))


def weight_of(origin: Origin, tensors: Mapping[str, jax.Array]) -> jax.Array:
    """Return the array of a weight of floats, on one device, made of tensors by their names, which may be traced."""
    first, *others = origin.places
    if not origin.is_by_expert:
        return make_weight(first.recipe, [tensors[name] for name in first.names], *first.numbers)[0]
    (recipe,) = origin.recipes  # Those of experts differ in the formats of their codes alone.
    if first.numbers:  # Each tensor is that of all experts already.
        stacked_tensors = [tensors[name] for name in first.names]
    else:
        # One array of all experts' tensors, since programs that make one expert after the other take long to compile.
        stacked_tensors = [
            jnp.concatenate([tensors[name] for name in names]).reshape(len(names), *tensors[names[0]].shape)
            for names in zip(first.names, *(place.names for place in others), strict=True)
        ]
    expert_weights = jax.vmap(lambda expert_tensors: make_weight(recipe.of_expert, expert_tensors)[0])(stacked_tensors)
    return expert_weights.reshape(recipe.shape)
