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

from ..errors import ModelLoadError
from ..families.table import model_class
from ..recipe import Path, Piece, StackedName
from .loading import Weights, recipes_for
from .weight_recipe import WeightRecipe, make_weight, recipe_of


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
    layers that each array holds, in order. A weight that belongs to no layer is where it was, under the array's name.
    """
    array, layer = stacked_names[origin.names[0]]  # All tensors of a weight belong to its layer.
    layers = [] if layer is None else sorted(layers_of[array])
    numbers = () if layer is None else (layers.index(layer),)
    places = tuple(
        Place(place.recipe, tuple(stacked_names[name].name for name in place.names), (*numbers, *place.numbers))
        for place in origin.places
    )
    num_layers = () if layer is None else (len(layers),)
    return Origin(places, (*num_layers, *origin.stack_shape))


def names_of_forms(abstract: Weights) -> list[list[str]]:
    """Return the names of tensors that a tree must have to be read in each form of the model's family.

    The first form is the family's own, which needs no names; the others are those of `Source.others`, in order. Names
    are those of expert 0, and lack the layer's number.
    """
    config = abstract.config
    if config is None:
        return []
    sources = model_class(config.architecture).sources(config).values()
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


def _origin_of(leaf: Any, scales: Any, pieces: tuple[Piece, ...], shapes: Mapping[str, tuple[int, ...]]) -> Origin:
    """Return where a weight is in a tree of a checkpoint's tensors, which have these shapes.

    `leaf` is the weight, `scales` has the shape of the scales that are made with it, and is None without any. Recipes
    name tensors by their index and count an expert's pieces from its first row, so that the layers of a model, and its
    experts, have equal recipes. Raises ModelLoadError for a weight of an expert that is made of tensors of two forms.
    """
    metadata, places, recipes = leaf.get_metadata(), list[Place](), dict[Any, WeightRecipe]()
    for group in _by_expert(pieces, metadata.get("rows_of_expert")):
        names = tuple(dict.fromkeys(piece.tensor for piece in group.pieces))
        numbers = _numbers_in_tensors(group.pieces, names)
        tensor_shapes = tuple(shapes[name][len(numbers) :] for name in names)
        own_pieces = tuple(_in_own_rows(piece, names.index(piece.tensor), group.first_row) for piece in group.pieces)
        # Experts whose codes have other formats have other recipes.
        formats = metadata["held"].formats[group.first_piece :][: len(own_pieces)] if "held" in metadata else ()
        key = own_pieces, tensor_shapes, formats
        if key not in recipes:
            recipes[key] = recipe_of(leaf, scales, tensor_shapes, own_pieces, first_piece=group.first_piece)
        places.append(Place(recipes[key], names, numbers))
    return Origin(tuple(places), shapes[pieces[0].tensor][: len(places[0].numbers)])


class _ExpertPieces(NamedTuple):
    """The pieces of one expert's part of a weight, or all pieces of a weight that is not of experts."""

    pieces: tuple[Piece, ...]
    first_piece: int
    """The number of the first one among all pieces of the weight."""
    first_row: int
    """The first row of the part among all rows of the weight."""


def _by_expert(pieces: Sequence[Piece], rows_of_expert: int | None) -> Iterator[_ExpertPieces]:
    """Yield the pieces of each expert, which follow each other; all pieces at once if `rows_of_expert` is None."""
    if rows_of_expert is None:
        yield _ExpertPieces(tuple(pieces), 0, 0)
        return
    first_piece = 0
    for expert, of_expert in groupby(pieces, lambda piece: piece.target[0][0] // rows_of_expert):
        own_pieces = tuple(of_expert)
        yield _ExpertPieces(own_pieces, first_piece, expert * rows_of_expert)
        first_piece += len(own_pieces)


def _numbers_in_tensors(pieces: Iterable[Piece], names: Sequence[str]) -> tuple[int, ...]:
    """Return (expert,) for the pieces of one expert in tensors of all experts; () for tensors of their own.

    Raises ModelLoadError, with the `names` of the tensors, if there are some of each form.
    """
    first, *others = dict.fromkeys(piece.expert for piece in pieces)
    if others:
        both = " and ".join(names)
        raise ModelLoadError(f"params: got {both}, one of an expert and one of all, wanted one form for both")
    return () if first is None else (first,)


def _in_own_rows(piece: Piece, tensor: int, first_row: int) -> Piece:
    """Return a piece of an expert's part, which begins at `first_row`, in the part's own rows; its tensor is a number.

    The piece then names no expert, since its tensor is that of one expert where a program reads it.
    """
    bounds = piece.target
    if bounds:  # A scalar has none.
        (start, stop), *columns = bounds
        bounds = (start - first_row, stop - first_row), *columns
    return replace(piece, tensor=str(tensor), target=bounds, expert=None)


def scales_path(path: Path) -> Path:
    """Return where the scales of the codes at `path` are."""
    return (*path[:-1], "scales")


def own_origin(path: Path, leaf: Any) -> Origin:
    """Return where a weight is in a tree under the engine's own paths: one array of the weight's own shape.

    It is copied as it is stored, so the recipe has no `matrix` and no `ops`.
    """
    whole = tuple((0, size) for size in leaf.shape)
    shape = tuple(leaf.shape)
    recipe = WeightRecipe((shape,), (Piece("0", whole, whole),), shape, np.dtype(leaf.dtype), leaf.sharding)
    return Origin((Place(recipe, (".".join(map(str, path)),)),))


def weight_of(origin: Origin, tensors: Mapping[str, jax.Array]) -> jax.Array:
    """Return the array of a weight of floats, on one device, made of tensors by their names, which may be traced."""
    first, *others = origin.places
    if not origin.is_by_expert:
        return make_weight(first.recipe, [tensors[name] for name in first.names], *first.numbers)[0]
    (recipe,) = origin.recipes  # Those of experts differ in the formats of their codes alone.
    if first.numbers:  # Each array is that of all experts.
        of_all = [tensors[name] for name in first.names]
    else:
        # One array of all experts' tensors, since programs that make one expert after the other take long to compile.
        of_all = [
            jnp.concatenate([tensors[name] for name in names]).reshape(len(names), *tensors[names[0]].shape)
            for names in zip(first.names, *(place.names for place in others), strict=True)
        ]
    of_each = jax.vmap(lambda of_one: make_weight(recipe.of_expert, of_one)[0])(of_all)
    return of_each.reshape(recipe.shape)
