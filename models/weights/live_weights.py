"""Turns checked trees into the weights of a running engine, on its devices, one weight after the other.

Recipes say which blocks of tensors make a weight (`models/recipe.py`). Here each distinct recipe is a program: it takes
the tensors of one weight and returns the weight as it is stored: fused, in the backend's layout, and sharded. A weight
of experts is made one expert after the other, by a program that puts an expert into the array of all. Layers of a model
and experts share programs, so there are few, and all are known before the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from ...sharding import replicated, reshard
from ..errors import ModelLoadError
from ..families.table import family_class
from ..formats.checkpoint import DTYPES
from ..formats.tree_checkpoint import named_leaves
from ..recipe import Path
from .coded import check_given_codes, check_sizes, formats_of, refuse_floats
from .live_origins import Origin, Origins, Place, names_of_forms, origins_of, own_origin, scales_path
from .live_tree import CheckedTree, TreeLayout, Twin, WantedTree, check_tree
from .subtree import model_arrays, statistics_elsewhere
from .weight_recipe import WeightRecipe, make_weight, put_expert
from .weight_state import with_value
from .weights import Weights

Key = Hashable
"""What finds a program."""
Program = Callable[..., tuple[jax.Array, ...]]
"""A compiled program that returns the array of a weight, or those of its codes and its scales."""
CODE_DTYPES = "uint8", "int8", "int4", "float8_e4m3fn", "float4_e2m1fn"
"""The dtypes of matrices that are codes: bytes that native code reads, and arrays that XLA converts."""
MAX_EXPERTS_PENDING = 8
"""Experts of a weight whose tensors may take memory beside it at the same time, on their way to the devices."""


class CheckedWeights(NamedTuple):
    """A tree without faults, and where each weight is in it."""

    tree: CheckedTree
    origins: Origins


@dataclass(frozen=True)
class NewWeight:
    """A weight that was made of a tree."""

    path: Path
    array: jax.Array
    is_borrowed: bool
    """Whether it is an array of the tree itself: its owner must not donate or delete it."""


class LiveWeights:
    """Makes the weights of one engine from trees of arrays."""

    def __init__(self, abstract: Weights, mesh: Mesh):
        """Prepare the recipes of all weights for each layout of a tree.

        `abstract` has the shapes, dtypes and shardings of the weights on `mesh`. If it has no config, only trees under
        the weights' own paths are accepted, since names of checkpoints are known by the model's family. Equal recipes
        get one number, a part of the keys by which programs are found: layers that differ in nothing share a program.
        """
        self.abstract, self._whole = abstract, replicated(mesh)
        self._leaves = dict(nnx.to_flat_state(abstract.state))
        stats = (path for path, leaf in self._leaves.items() if isinstance(leaf, nnx.BatchStat))
        self._statistics = {".".join(map(str, path)) for path in stats}  # Names: a trainer may keep these apart.
        own_origins = {path: own_origin(path, leaf) for path, leaf in self._leaves.items()}
        # Recipes depend on which form of several the tensors of experts have, and not on the names of other tensors.
        self._own_origins = own_origins
        forms = [self.checkpoint_origins(names) for names in names_of_forms(abstract)]
        of_checkpoints = [origin for form in forms for origins in form.values() for origin in origins.values()]
        # Whether an origin is under the engine's own paths, a recipe, and what its tensors are stacked in.
        self._variants = dict.fromkeys(
            (is_own, recipe, origin.stack_shape)
            for is_own, origins in ((False, of_checkpoints), (True, own_origins.values()))
            for origin in origins
            for recipe in origin.recipes
        )
        recipes = dict.fromkeys(recipe for _, recipe, _ in self._variants)
        self._recipe_ids = {recipe: recipe_id for recipe_id, recipe in enumerate(recipes)}

    def check(self, tree: Any, present: Mapping[str, Any] = MappingProxyType({})) -> CheckedWeights:
        """Return the checked arrays of `tree` that become the weights, and the origin of each weight among them.

        `tree` is a nested or flat mapping of names to arrays, or a whole training state that holds one. There are three
        layouts: a checkpoint's names with one array per layer, such names with one array [L, …] for all layers, and the
        engine's own paths. The tree is checked against the layout that has the most names in common with it. An origin
        has the weight's recipe and the names of its arrays. Running statistics of a caller's own module may be in a
        subtree of their own; those that the tree lacks stay as in `present`, the weights so far by their names. Raises
        ModelLoadError, which lists every fault.
        """
        arrays = self._arrays_of_model(named_leaves(tree), present)
        wanted_tree, origins = self._likeliest_layout(arrays)
        places = [place for origin in origins.values() for place in origin.places]
        self._refuse_mixed_forms(places)
        if wanted_tree.layout is not TreeLayout.OWN:
            refuse_floats(self._leaves.values())
        checked_tree = check_tree(arrays, wanted_tree, [place.names for place in places])
        self._check_numbers(checked_tree, origins)
        return CheckedWeights(checked_tree, origins)

    def _arrays_of_model(self, leaves: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
        """Return the leaves of a tree that are the model's, without their common prefix, and all running statistics.

        Statistics that the weights' subtree lacks come from another subtree, or else from `present`: see `check`.
        """
        own_names = {name for origin in self._own_origins.values() for name in origin.names}
        # The weights' subtree is known by its weights. Only a model without any is known by its statistics.
        arrays = model_arrays(leaves, own_names - self._statistics or own_names, self.abstract.config)
        missing = self._statistics - arrays.keys()
        unchanged = {name: present[name] for name in missing if name in present}
        return arrays | unchanged | statistics_elsewhere(missing, leaves)

    def _likeliest_layout(self, arrays: Mapping[str, Any]) -> tuple[WantedTree, Origins]:
        """Return what the layout with the most names of `arrays` wants, and where each weight is in such a tree.

        A checkpoint's layouts come first, and the first of equals is taken, so that errors name a checkpoint's tensors
        if a tree fits no layout.
        """
        origins_of = {**self.checkpoint_origins(arrays), TreeLayout.OWN: self._own_origins}
        unread, twin = self._unread(arrays), self._twin(arrays)
        wanted_trees = [self._wanted(layout, origins, unread, twin) for layout, origins in origins_of.items()]
        wanted = max(wanted_trees, key=lambda candidate: sum(name in arrays for name in candidate.shapes))
        return wanted, origins_of[wanted.layout]

    def _refuse_mixed_forms(self, places: Iterable[Place]) -> None:
        """Raise ModelLoadError for tensors of two forms that make one weight, for which there is no program."""
        for place in places:
            if place.recipe not in self._recipe_ids:
                got = f"got {' and '.join(place.names)} for one weight of experts"
                raise ModelLoadError(f"params: {got}, wanted tensors of one form for it")

    def _check_numbers(self, checked: CheckedTree, origins: Origins) -> None:
        """Raise ModelLoadError for codes of numbers that are not finite, and for numbers too large to become codes."""
        if checked.layout is TreeLayout.OWN:
            for path, origin in origins.items():
                check_given_codes(self._leaves[path], {name: checked.arrays[name] for name in origin.names})
            return
        formats = {
            name: code_format
            for path, origin in origins.items()
            for code_format in formats_of([self._leaves[path]])
            for name in origin.names
        }
        check_sizes(checked.arrays, formats)

    def make(
        self,
        checked: CheckedWeights,
        program: Callable[[Key], Program],
        *,
        take: Callable[[Path], jax.Array | None],
        copy: bool,
    ) -> Iterator[NewWeight]:
        """Yield every weight, made of the tensors of a checked tree, without waiting for the devices.

        `program(key)` returns the compiled program for a key of `programs`. `take(path)` returns the old array of a
        weight, or None. The memory of an old array becomes that of the new one or is freed, so the caller must not use
        it again. If `copy` is false, an array of the tree that already has the weight's shape, dtype and sharding
        becomes the weight itself and is marked as borrowed. Arrays [L, …] of L layers that do not lie whole on each
        device of the mesh are moved one layer at a time, which takes less memory.
        """
        for path, origin in checked.origins.items():
            paths = (path,) if origin.recipes[0].scales is None else (path, scales_path(path))
            old_arrays = _all_or_none([take(each_path) for each_path in paths])
            if not copy and (borrowed := self._array_to_borrow(checked.tree, path, origin)) is not None:
                for old in old_arrays:
                    old.delete()  # No program takes the old array's memory, so it is freed here.
                yield NewWeight(path, borrowed, is_borrowed=True)
                continue
            make_arrays = self._made_by_expert if origin.is_by_expert else self._made_at_once
            new_arrays = make_arrays(checked.tree, origin, program, old_arrays)
            for new_path, array in zip(paths, new_arrays, strict=True):
                yield NewWeight(new_path, array, is_borrowed=False)

    def _array_to_borrow(self, tree: CheckedTree, path: Path, origin: Origin) -> jax.Array | None:
        """Return the array of the tree that can be the weight at `path` as it is; None if there is no such array."""
        place, *_ = origin.places
        array = tree.arrays[place.names[0]]
        is_whole = place.recipe.is_copy and not place.numbers
        return array if is_whole and isinstance(array, jax.Array) and _fits(array, self._leaves[path]) else None

    def _made_at_once(
        self, tree: CheckedTree, origin: Origin, program: Callable[[Key], Program], old_arrays: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return the arrays of a weight that is not of experts, in the memory of the old ones if there are any."""
        (place,) = origin.places
        is_own = tree.layout is TreeLayout.OWN
        # A piece of a checkpoint's tensor may belong to any device, so such tensors lie whole on each device. Own
        # arrays have the shape of their weight, and so its sharding.
        tensors, index = self._tensors(tree, place, place.recipe.sharding if is_own else self._whole)
        # All tensors of one weight have the same dtype, as `check` has seen.
        dtype, stack_shape = tensors[0].dtype.name, origin.stack_shape if index else ()
        key = self._key(place.recipe, dtype, stack_shape, is_own=is_own, is_in_place=bool(old_arrays))
        # A program takes old arrays first, if it reuses their memory, and then tensors and where these lie.
        return program(key)(*old_arrays, tensors, *index)

    def _made_by_expert(
        self, tree: CheckedTree, origin: Origin, program: Callable[[Key], Program], old_arrays: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return the arrays of all experts, in the memory of the old ones if there are any.

        An expert's tensors may be on their way to the devices while the one before is put into its place; only some
        experts are on their way at the same time.
        """
        arrays = old_arrays or program(self._zeros_key(origin.recipes[0]))()
        for expert, place in enumerate(origin.places):
            tensors, index = self._tensors(tree, place, self._whole)
            dtype, stack_shape = tensors[0].dtype.name, origin.stack_shape if index else ()
            key = self._key(place.recipe, dtype, stack_shape, is_own=False, is_in_place=True)
            arrays = program(key)(arrays, np.int32(expert), tensors, *index)
            if expert % MAX_EXPERTS_PENDING == MAX_EXPERTS_PENDING - 1:
                jax.block_until_ready(arrays)
        return arrays

    def _tensors(
        self, tree: CheckedTree, place: Place, sharding: jax.sharding.NamedSharding
    ) -> tuple[list[jax.Array], tuple[np.int32, ...]]:
        """Return the arrays of a place as programs take them, and where the tensors lie along their first axes.

        Stacked arrays that do not lie whole on each device are cut first, and there is nothing left to take then.
        """
        arrays, index = [tree.arrays[name] for name in place.names], place.numbers
        if index and not all(map(self._is_in_place, arrays)):
            arrays, index = [_part_of(array, index) for array in arrays], ()
        return [reshard(_narrowed(array), sharding) for array in arrays], tuple(map(np.int32, index))

    def weights(self, checked: CheckedWeights, program: Callable[[Key], Program]) -> Weights:
        """Return all weights, made of a checked tree whose arrays are copied, so that the tree stays usable."""
        made = {new.path: new.array for new in self.make(checked, program, take=lambda path: None, copy=True)}
        state = {path: with_value(leaf, made[path]) for path, leaf in self._leaves.items()}
        return replace(self.abstract, state=nnx.from_flat_state(state))

    def programs(self) -> dict[Key, Callable[[], jax.stages.Lowered]]:
        """Return, for each key of a program that makes a weight, a function that lowers the program.

        There are two programs for each recipe, each dtype of its tensors, and each layout of a tree: one allocates the
        weight, and the other reuses the memory of the old weight. Experts are put into an array that is there, and one
        program makes it. All layers with equal recipes have the same keys, so a model of 32 equal layers has as many
        programs as a model of one. Nothing is lowered or compiled here: the caller calls a function when the program is
        needed, and compiles what it returns.
        """
        lower_by_key: dict[Key, Callable[[], jax.stages.Lowered]] = {}
        for is_own, recipe, stack_shape in self._variants:
            if recipe.num_experts is not None:
                lower_by_key[self._zeros_key(recipe)] = partial(_lower_zeros, recipe)
            # Stacks that lie elsewhere are cut before a program takes them.
            shapes = dict.fromkeys([(), stack_shape])
            in_place = (True,) if recipe.num_experts is not None else (False, True)
            for shape, dtype, is_in_place in product(shapes, (*DTYPES, *CODE_DTYPES), in_place):
                given = recipe.dtype.name if is_own and recipe.dtype.name in CODE_DTYPES else None
                if dtype != given if given else dtype in CODE_DTYPES:
                    continue  # Codes are given as they are stored, and floats are not.
                key = self._key(recipe, dtype, shape, is_own=is_own, is_in_place=is_in_place)
                tensor_sharding = recipe.sharding if is_own else self._whole
                lower_by_key[key] = partial(self._lower, recipe, dtype, tensor_sharding, shape, is_in_place=is_in_place)
        return lower_by_key

    def _key(
        self, recipe: WeightRecipe, dtype: str, stack_shape: tuple[int, ...], *, is_own: bool, is_in_place: bool
    ) -> Key:
        """Return the key of a program. `is_own` is part of it since tensors under the engine's own paths are sharded
        like their weights, and all other tensors lie whole on each device."""
        return "update", self._recipe_ids[recipe], dtype, is_own, stack_shape, is_in_place

    def _zeros_key(self, recipe: WeightRecipe) -> Key:
        """Return the key of the program that makes the array into which experts are put."""
        return "update", self._recipe_ids[recipe], "zeros"

    def _lower(
        self,
        recipe: WeightRecipe,
        dtype: str,
        tensor_sharding: jax.sharding.Sharding,
        stack_shape: tuple[int, ...],
        *,
        is_in_place: bool,
    ) -> jax.stages.Lowered:
        """Return the lowered program, not compiled yet, that makes a weight of tensors with this dtype and sharding.

        The program takes the list of the tensors in `recipe`, and returns the tuple of the weight's arrays. With a
        `stack_shape`, of [L], [E] or [L, E], the tensors are arrays of so many, and the program also takes the numbers
        of the layer and of the expert, as the last arguments. With `is_in_place` it also takes the old arrays, as the
        first arguments, and returns the new ones in their memory. So with both the arguments are (old arrays …,
        tensors, layer). A program that puts an expert into the arrays of all takes these as a tuple, and then its
        number.
        """
        shapes = [
            jax.ShapeDtypeStruct((*stack_shape, *shape), dtype, sharding=tensor_sharding) for shape in recipe.tensors
        ]
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)
        index = [number] * len(stack_shape)
        shardings, num_arrays = tuple(array.sharding for array in recipe.arrays), len(recipe.arrays)
        if recipe.num_experts is not None:
            put = jax.jit(partial(put_expert, recipe), out_shardings=shardings, donate_argnums=0)
            return put.lower(recipe.arrays, number, shapes, *index)
        if not is_in_place:
            return jax.jit(partial(make_weight, recipe), out_shardings=shardings).lower(shapes, *index)
        # The old arrays are never read. They are arguments so that their memory can be donated to the results.
        run = jax.jit(
            lambda *arguments: make_weight(recipe, *arguments[num_arrays:]),
            out_shardings=shardings,
            donate_argnums=tuple(range(num_arrays)),
            keep_unused=True,
        )
        return run.lower(*recipe.arrays, shapes, *index)

    def _is_in_place(self, array: Any) -> bool:
        """Return whether an array already lies whole on each device of the mesh, as programs expect."""
        return isinstance(array, jax.Array) and array.sharding.is_equivalent_to(self._whole, array.ndim)

    def _unread(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of leaves that a tree may hold and that are no weights, such as rotary frequencies.

        All `names` may be in the tree of a caller's own module: value heads, random streams.
        """
        config = self.abstract.config
        if config is None:
            return frozenset(names)
        ignored = family_class(config.architecture).ignored_tensors
        return frozenset(name for name in names if ignored.search(name))

    def _twin(self, names: Collection[str]) -> Twin | None:
        """Return the head that a tree for a tied model holds beside the embedding, as its twin; None if it has none.

        `names` are the names in the tree. A tied model has one matrix for embedding and head, so a tree may hold it
        under both names, and then both must be equal. The result is None for a model that is not tied, and for trees
        under the engine's own paths, which have no name for such a head.
        """
        config = self.abstract.config
        if config is None or not config.tie_word_embeddings:
            return None
        model = family_class(config.architecture)
        embedding, head = model.embedding_and_head(model.naming(names, is_tied=True))
        if head == embedding or head not in names:
            return None
        weight = next(leaf for path, leaf in self._leaves.items() if path[0] == "embed")
        dtype = weight.get_metadata().get("decoded_dtype", weight.dtype)
        return Twin(head, embedding, dtype)

    def _wanted(self, layout: TreeLayout, origins: Origins, unread: frozenset[str], twin: Twin | None) -> WantedTree:
        """Return the names and shapes of the arrays that a tree of this layout must have, and the allowed dtypes.

        `origins` maps the path of each weight of the engine to the names of its arrays in the tree. `unread` are names
        that the tree may have and that are ignored. `twin` names a second copy of a tied matrix; the engine's own
        layout never has this copy.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for origin in origins.values():
            # In stacked trees, all layers share one array [layers, …], and each layer gives the same entry.
            for place in origin.places:
                for name, shape in zip(place.names, place.recipe.tensors, strict=True):
                    shapes[name] = (*origin.stack_shape, *shape)
        is_own = layout is TreeLayout.OWN
        # Without a config the model is a caller's own module. Its tree may hold float64, numpy's default and JAX's with
        # x64; the method `make` converts it to float32.
        dtypes = DTYPES if self.abstract.config is not None else (*DTYPES, "float64")
        codes = {
            name: origin.recipes[0].dtype.name
            for origin in origins.values()
            for name in origin.names
            if is_own and origin.recipes[0].dtype.name in CODE_DTYPES
        }
        return WantedTree(layout, shapes, unread, None if is_own else twin, dtypes, codes)

    def checkpoint_origins(self, names_in_tree: Collection[str]) -> dict[TreeLayout, Origins]:
        """Return where each weight is in trees under checkpoint names, for TENSORS and STACKED; {} without a config.

        In TENSORS each name is one tensor of one layer, such as "model.layers.3.mlp.down_proj.weight". In STACKED a
        name without the layer's number is an array [L, …] of all layers, of which the weight takes its layer. Both have
        the same recipes. Families have alternative names for some tensors, and forms for those of experts: those in
        `names_in_tree` are used.
        """
        config = self.abstract.config
        if config is None:
            return {}
        return dict(
            zip((TreeLayout.TENSORS, TreeLayout.STACKED), origins_of(self.abstract, names_in_tree), strict=True)
        )


def _lower_zeros(recipe: WeightRecipe) -> jax.stages.Lowered:
    """Return the lowered program that makes arrays of zeros for the weights of all experts."""
    arrays = recipe.arrays
    make = jax.jit(
        lambda: tuple(jnp.zeros(array.shape, array.dtype) for array in arrays),
        out_shardings=tuple(array.sharding for array in arrays),
    )
    return make.lower()


def _all_or_none(old_arrays: list[jax.Array | None]) -> tuple[jax.Array, ...]:
    """Return the old arrays of a weight, or () if some are missing; the others are freed then."""
    present = tuple(array for array in old_arrays if array is not None)
    if len(present) == len(old_arrays):
        return present
    for array in present:
        array.delete()
    return ()


def _narrowed(array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Return a float64 array as float32, and any other as it is, since programs take numbers of at most 32 bits."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _part_of(stack: np.ndarray | jax.Array, index: tuple[int, ...]) -> np.ndarray | jax.Array:
    """Return one layer, expert, or both, of an array [L, …], [E, …] or [L, E, …], where the array lies."""
    return stack[index] if isinstance(stack, np.ndarray) else _part_on_device(stack, tuple(map(np.int32, index)))


@jax.jit
def _part_on_device(stack: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    """Return one layer or expert; all of them share a program."""
    for number in index:
        stack = lax.dynamic_index_in_dim(stack, number, keepdims=False)
    return stack


def _fits(array: jax.Array, leaf: Any) -> bool:
    """Return whether an array can be a weight as it is."""
    is_same = array.dtype == leaf.dtype and array.shape == leaf.shape
    return is_same and array.sharding.is_equivalent_to(leaf.sharding, array.ndim)
