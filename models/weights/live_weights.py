"""Turns checked trees into the weights of a running engine, on its devices, one weight after the other.

Recipes say which blocks of tensors make a weight (`models/recipe.py`). Here each kind of recipe is a program: it takes
the tensors of one weight and returns the weight as products want it, fused, in panels, and in shards. The layers of a
model share programs, so there are few, and all are known before the first update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from ...pallas_kernels.layer_ops import LayerOps
from ...sharding import replicated
from ..errors import ModelLoadError
from ..families.table import model_class
from ..formats.checkpoint import DTYPES
from ..recipe import Path, Piece, make_recipes
from .live_tree import CheckedTree, TreeLayout, Twin, WantedTree, check_tree, named_arrays
from .loading import Weights, with_value
from .subtree import ambiguity_message, likeliest_prefixes, model_prefixes

Key = Hashable


@dataclass(frozen=True)
class WeightRecipe:
    """How tensors become one weight: their shapes, the pieces they are cut into, and how the weight is stored.

    Weights of one recipe share a program.
    """

    tensors: tuple[tuple[int, ...], ...]
    """Shapes of the tensors."""
    pieces: tuple[Piece, ...]
    """The name of a piece's tensor is its index among `tensors`."""
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    matrix: tuple[int, int] | None = None
    """(inputs, outputs) of a matrix W, whose pieces are counted in Wᵀ; None for a table or a vector."""
    ops: LayerOps | None = None
    """How a matrix is stored."""

    @property
    def is_copy(self) -> bool:
        """Return whether the weight is one tensor as it is."""
        whole = tuple((0, size) for size in self.shape)
        pieces = [(piece.source, piece.target, piece.is_transposed) for piece in self.pieces]
        return self.matrix is None and pieces == [(whole, whole, False)]


@dataclass(frozen=True)
class _Origin:
    """Where the tensors of a weight are in a tree."""

    recipe: WeightRecipe
    names: tuple[str, ...]
    layer: int | None = None
    """The layer to take from arrays [L, …] of these names; None for tensors that lie apart."""


Origins = dict[Path, _Origin]
CheckedWeights = tuple[CheckedTree, Origins]
"""A tree without faults, and where each weight is in it."""


@dataclass(frozen=True)
class NewWeight:
    """A weight that was made of a tree."""

    path: Path
    array: jax.Array
    is_borrowed: bool
    """Whether it is an array of the tree itself: its owner must not donate or delete it."""


class LiveWeights:
    """The weights of one engine, as what trees of arrays become."""

    def __init__(self, abstract: Weights, mesh: Mesh):
        """`abstract` has the shapes, dtypes and shardings of the weights. Without a config, only trees of the weights'
        own paths are taken."""
        self.abstract, self._whole = abstract, replicated(mesh)
        self._leaves = dict(nnx.to_flat_state(abstract.state))
        own = {path: _own_origin(path, leaf) for path, leaf in self._leaves.items()}
        self._origins = {**self._checkpoint_origins(()), TreeLayout.OWN: own}
        recipes = dict.fromkeys(one.recipe for origins in self._origins.values() for one in origins.values())
        self._numbers = {recipe: number for number, recipe in enumerate(recipes)}

    def check(self, tree: Any) -> CheckedWeights:
        """Return a tree whose arrays can become the weights, and where each weight is in it.

        Raises ModelLoadError, which lists every fault.
        """
        arrays = self._own_part(named_arrays(tree))
        # Of two layouts that a tree fits equally, or not at all, the names of checkpoints are those that errors tell.
        layouts = {**self._checkpoint_origins(arrays), TreeLayout.OWN: self._origins[TreeLayout.OWN]}
        unread, twin = self._unread(arrays), self._twin(arrays)
        wanted = [self._wanted(layout, origins, unread, twin) for layout, origins in layouts.items()]
        best = max(wanted, key=lambda one: sum(name in arrays for name in one.shapes))
        origins = layouts[best.layout]
        return check_tree(arrays, best, [origin.names for origin in origins.values()]), origins

    def _own_part(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of the model, of a tree that may be a whole training state.

        A tree has the engine's own paths or the names of checkpoints. A prefix is one of the first kind if more than
        half of the engine's paths stand under it; otherwise `model_prefixes` looks for the second. Raise ModelLoadError
        if several prefixes fit.
        """
        own = {name for origin in self._origins[TreeLayout.OWN].values() for name in origin.names}
        starts = (name[:start] for name in arrays for start in _starts_of_parts(name) if name[start:] in own)
        found = [start for start, count in Counter(starts).items() if 2 * count > len(own)]
        config = self.abstract.config
        if found:
            prefixes = [] if "" in found else likeliest_prefixes(found)
        else:
            prefixes = [] if config is None else model_prefixes(arrays, config)
        if len(prefixes) > 1:
            raise ModelLoadError(f"params: {ambiguity_message(prefixes)}")
        prefix = prefixes[0] if prefixes else ""
        return {name.removeprefix(prefix): leaf for name, leaf in arrays.items() if name.startswith(prefix)}

    def make(
        self,
        checked: CheckedWeights,
        program: Callable[[Key], Callable[..., jax.Array]],
        *,
        take: Callable[[Path], jax.Array | None],
        copy: bool,
    ) -> Iterator[NewWeight]:
        """Yield every weight. `program` gives those of `programs` by key; `take` gives up the old array of a weight, in
        whose memory the new one is made, or None.

        Nothing waits for the devices. Of arrays [L, …] that lie elsewhere, one layer after the other is moved. With
        `copy` false, arrays of the tree that fit are taken as they are.
        """
        tree, origins = checked
        is_own = tree.layout is TreeLayout.OWN
        for path, origin in origins.items():
            leaf, recipe, layer = self._leaves[path], origin.recipe, origin.layer
            old = take(path)
            sources = [_narrowed(tree.arrays[name]) for name in origin.names]
            first = sources[0]
            if not copy and recipe.is_copy and layer is None and isinstance(first, jax.Array) and _fits(first, leaf):
                if old is not None:
                    old.delete()
                yield NewWeight(path, first, is_borrowed=True)
                continue
            if layer is not None and not all(map(self._is_in_place, sources)):
                sources, layer = [_layer_of(source, layer) for source in sources], None
            placed = [jax.device_put(source, leaf.sharding if is_own else self._whole) for source in sources]
            key = self._key(recipe, first.dtype.name, is_own, is_stacked=layer is not None, is_in_place=old is not None)
            given = [placed, *([] if layer is None else [np.int32(layer)])]
            yield NewWeight(path, program(key)(*([] if old is None else [old]), *given), is_borrowed=False)

    def weights(self, checked: CheckedWeights, program: Callable[[Key], Callable[..., jax.Array]]) -> Weights:
        """Return all weights, made of copies of a checked tree."""
        made = {new.path: new.array for new in self.make(checked, program, take=lambda path: None, copy=True)}
        state = {path: with_value(leaf, made[path]) for path, leaf in self._leaves.items()}
        return replace(self.abstract, state=nnx.from_flat_state(state))

    def programs(self) -> dict[Key, Callable[[], jax.stages.Lowered]]:
        """Return the programs that make weights, by key, as functions that lower them: one for each kind of weight and
        dtype of its tensors, in the memory of an old weight or in new memory."""
        found: dict[Key, Callable[[], jax.stages.Lowered]] = {}
        for layout, origins in self._origins.items():
            num_layers = self._num_layers if layout is TreeLayout.STACKED else 0
            for origin, dtype, is_in_place in product(origins.values(), DTYPES, (False, True)):
                recipe, is_stacked = origin.recipe, origin.layer is not None
                is_own = layout is TreeLayout.OWN
                key = self._key(recipe, dtype, is_own, is_stacked=is_stacked, is_in_place=is_in_place)
                where = recipe.sharding if is_own else self._whole
                depth = num_layers if is_stacked else None
                found[key] = partial(self._lower, recipe, dtype, where, depth, is_in_place=is_in_place)
        return found

    def _key(self, recipe: WeightRecipe, dtype: str, is_own: bool, *, is_stacked: bool, is_in_place: bool) -> Key:
        """Return the key of a program; arrays of the engine's own layout lie where their weights do, others whole."""
        return "update", self._numbers[recipe], dtype, is_own, is_stacked, is_in_place

    @property
    def _num_layers(self) -> int:
        """Return the number of layers, whose numbers stand in the paths of their weights."""
        return 1 + max((part for path in self._leaves for part in path if isinstance(part, int)), default=-1)

    def _lower(
        self, recipe: WeightRecipe, dtype: str, where: jax.sharding.Sharding, depth: int | None, *, is_in_place: bool
    ) -> jax.stages.Lowered:
        stacks = () if depth is None else (depth,)
        shapes = [jax.ShapeDtypeStruct((*stacks, *shape), dtype, sharding=where) for shape in recipe.tensors]
        layer = [] if depth is None else [jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)]
        if not is_in_place:
            return jax.jit(partial(_make_weight, recipe), out_shardings=recipe.sharding).lower(shapes, *layer)
        old = jax.ShapeDtypeStruct(recipe.shape, recipe.dtype, sharding=recipe.sharding)
        # The old weight is no part of the result, but its memory is.
        run = jax.jit(
            lambda _, *given: _make_weight(recipe, *given),
            out_shardings=recipe.sharding,
            donate_argnums=0,
            keep_unused=True,
        )
        return run.lower(old, shapes, *layer)

    def _is_in_place(self, array: Any) -> bool:
        """Return whether an array lies where programs take it from, whole on each device."""
        return isinstance(array, jax.Array) and array.sharding.is_equivalent_to(self._whole, array.ndim)

    def _unread(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of the names that checkpoints may have and that are no weights."""
        config = self.abstract.config
        if config is None:
            return frozenset()
        ignored = model_class(config.architecture).ignored_tensors
        return frozenset(name for name in names if ignored.search(name))

    def _twin(self, names: Collection[str]) -> Twin | None:
        """Return the head of a tree for a tied model, which may be stored beside the embedding; None if there is none.

        Trees of the engine's own paths have no place for it.
        """
        config = self.abstract.config
        if config is None or not config.tie_word_embeddings:
            return None
        model = model_class(config.architecture)
        embedding, head = model.embedding_and_head(model.naming(names, is_tied=True))
        if head == embedding or head not in names:
            return None
        dtype = next(leaf.dtype for path, leaf in self._leaves.items() if path[0] == "embed")
        return Twin(head, embedding, dtype)

    def _wanted(self, layout: TreeLayout, origins: Origins, unread: frozenset[str], twin: Twin | None) -> WantedTree:
        """Return the arrays of a tree of this layout."""
        shapes: dict[str, tuple[int, ...]] = {}
        for origin in origins.values():
            depth = () if origin.layer is None else (self._num_layers,)
            shapes |= {name: (*depth, *shape) for name, shape in zip(origin.names, origin.recipe.tensors, strict=True)}
        is_own = layout is TreeLayout.OWN
        # Modules of a caller's own have arrays of numpy among their attributes, or were made with x64.
        dtypes = DTYPES if self.abstract.config is not None else (*DTYPES, "float64")
        return WantedTree(layout, shapes, unread, None if is_own else twin, dtypes)

    def _checkpoint_origins(self, held: Any) -> dict[TreeLayout, Origins]:
        """Return where each weight is in trees with the names of checkpoints, those that `held` has among them."""
        config = self.abstract.config
        if config is None:
            return {}
        model = model_class(config.architecture)
        recipes = make_recipes(
            self.abstract.state, model.sources(config), model.naming(held, is_tied=config.may_store_one_matrix)
        )
        tensors, stacked = {}, {}
        for path, pieces in recipes.pieces.items():
            names = tuple(dict.fromkeys(piece.tensor for piece in pieces))
            numbered = tuple(replace(piece, tensor=str(names.index(piece.tensor))) for piece in pieces)
            shapes = tuple(recipes.shapes[name] for name in names)
            recipe = _recipe(self._leaves[path], shapes, numbered)
            layer = recipes.stacked[names[0]][1]
            tensors[path] = _Origin(recipe, names)
            stacked[path] = _Origin(recipe, tuple(recipes.stacked[name][0] for name in names), layer)
        return {TreeLayout.TENSORS: tensors, TreeLayout.STACKED: stacked}


def _starts_of_parts(name: str) -> list[int]:
    """Return where each part of a dotted name begins."""
    return [0, *(index + 1 for index, letter in enumerate(name) if letter == ".")]


def _recipe(leaf: Any, shapes: tuple[tuple[int, ...], ...], pieces: tuple[Piece, ...]) -> WeightRecipe:
    metadata = leaf.get_metadata()
    stored = {"matrix": metadata["matrix"], "ops": metadata["ops"]} if "matrix" in metadata else {}
    return WeightRecipe(shapes, pieces, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding, **stored)


def _own_origin(path: Path, leaf: Any) -> _Origin:
    """Return where a weight is in a tree of the engine's own paths."""
    whole = tuple((0, size) for size in leaf.shape)
    shape = tuple(leaf.shape)
    recipe = WeightRecipe((shape,), (Piece("0", whole, whole),), shape, np.dtype(leaf.dtype), leaf.sharding)
    return _Origin(recipe, (".".join(map(str, path)),))


def _narrowed(array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Return an array of at most 32 bits a number: programs take no others."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _layer_of(stack: np.ndarray | jax.Array, layer: int) -> np.ndarray | jax.Array:
    """Return one layer of an array [L, …], where the array lies."""
    return stack[layer] if isinstance(stack, np.ndarray) else _layer_on_device(stack, np.int32(layer))


@jax.jit
def _layer_on_device(stack: jax.Array, layer: jax.Array) -> jax.Array:
    """Return one layer; all layers share a program."""
    return lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _fits(array: jax.Array, leaf: Any) -> bool:
    """Return whether an array can be a weight as it is."""
    is_same = array.dtype == leaf.dtype and array.shape == leaf.shape
    return is_same and array.sharding.is_equivalent_to(leaf.sharding, array.ndim)


def _make_weight(recipe: WeightRecipe, tensors: list[jax.Array], layer: jax.Array | None = None) -> jax.Array:
    """Return the weight that these tensors make, or those of one layer of arrays [L, …]."""
    if layer is not None:
        tensors = [lax.dynamic_index_in_dim(tensor, layer, keepdims=False) for tensor in tensors]
    size = recipe.shape if recipe.matrix is None else recipe.matrix[::-1]
    blocks = []
    for piece in recipe.pieces:
        block = tensors[int(piece.tensor)]
        block = (block.T if piece.is_transposed else block)[tuple(slice(*bounds) for bounds in piece.source)]
        blocks.append((piece.target, block.astype(recipe.dtype)))
    weight = _assembled(size, blocks, recipe.dtype)
    if recipe.ops is not None:
        weight = recipe.ops.store(weight.T)
    return jnp.copy(weight)  # JAX would return an argument that nothing was done to, and its owner may donate it.


def _assembled(size: tuple[int, ...], blocks: list[tuple[Any, jax.Array]], dtype: Any) -> jax.Array:
    """Return an array with these blocks at their places, and zeros elsewhere."""
    if not size:
        return blocks[0][1]
    columns = [(0, width) for width in size[1:]]
    if all(list(target[1:]) == columns for target, _ in blocks):
        parts, row = [], 0
        for target, block in sorted(blocks, key=lambda item: item[0][0]):
            start, stop = target[0]
            parts += [jnp.zeros((start - row, *size[1:]), dtype)] if start > row else []
            parts.append(block)
            row = stop
        parts += [jnp.zeros((size[0] - row, *size[1:]), dtype)] if row < size[0] else []
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    whole = jnp.zeros(size, dtype)
    for target, block in blocks:
        whole = whole.at[tuple(slice(*bounds) for bounds in target)].set(block)
    return whole
