"""Turns checked trees into the weights of a running engine, on its devices, one weight after the other.

Recipes say which blocks of tensors make a weight (`models/recipe.py`). Here each distinct recipe is a program: it takes
the tensors of one weight and returns the weight as it is stored: fused, in the backend's layout, and sharded. Layers of
a model share programs, so there are few, and all are known before the first update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from ...pallas_kernels.code_formats import CodeFormat
from ...sharding import replicated, reshard
from ..errors import ModelLoadError
from ..families.table import model_class
from ..formats.checkpoint import DTYPES
from ..formats.tree_checkpoint import named_leaves
from ..recipe import Path, Piece
from .coded import check_given_codes, check_sizes, formats_of, refuse_floats
from .live_tree import CheckedTree, TreeLayout, Twin, WantedTree, check_tree
from .loading import Weights, recipes_for, with_value
from .subtree import ambiguity_message, likeliest_prefixes, model_prefixes, refuse_lacking_prefix, starts_of_parts
from .subtree import statistics_elsewhere as elsewhere
from .weight_recipe import WeightRecipe, make_weight, recipe_of

Key = Hashable
CODE_DTYPES = "uint8", "int8", "int4", "float8_e4m3fn"
"""The dtypes of matrices that are codes: bytes that native code reads, and arrays that XLA converts."""


@dataclass(frozen=True)
class _Origin:
    """Where the tensors of a weight are in a tree."""

    recipe: WeightRecipe
    names: tuple[str, ...]
    layer: int | None = None
    """The layer to take from arrays [L, …] of these names; None if each name is one layer's tensor."""


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
        own_origins = {path: _own_origin(path, leaf) for path, leaf in self._leaves.items()}
        # Recipes do not depend on the names that a tree has, so the usual names serve here.
        self._origins = {**self.checkpoint_origins(()), TreeLayout.OWN: own_origins}
        recipes = dict.fromkeys(origin.recipe for origins in self._origins.values() for origin in origins.values())
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
        leaves = named_leaves(tree)
        arrays = self._own_part(leaves)
        if missing := self._statistics - arrays.keys():
            arrays |= {name: present[name] for name in missing if name in present} | elsewhere(missing, leaves)
        # `max` takes the first of equals. Checkpoint layouts come first, so that errors name a checkpoint's tensors if
        # the tree fits no layout.
        origins_of = {**self.checkpoint_origins(arrays), TreeLayout.OWN: self._origins[TreeLayout.OWN]}
        unread, twin = self._unread(arrays), self._twin(arrays)
        wanted_trees = [self._wanted(layout, origins, unread, twin) for layout, origins in origins_of.items()]
        wanted = max(wanted_trees, key=lambda candidate: sum(name in arrays for name in candidate.shapes))
        origins = origins_of[wanted.layout]
        if wanted.layout is not TreeLayout.OWN:
            refuse_floats(self._leaves.values())
        checked = check_tree(arrays, wanted, [origin.names for origin in origins.values()])
        largest = dict[str, CodeFormat]()
        for path, origin in origins.items():
            if wanted.layout is TreeLayout.OWN:
                check_given_codes(self._leaves[path], {name: checked.arrays[name] for name in origin.names})
            for code_format in formats_of([self._leaves[path]]):
                largest |= {name: code_format for name in origin.names}
        if wanted.layout is not TreeLayout.OWN:
            check_sizes(checked.arrays, largest)
        return checked, origins

    def _own_part(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of the model in a tree, which may be a whole training state, without their common prefix.

        For example "params.layers.0.weight" becomes "layers.0.weight", and "opt_state.count" is left out. Arrays are
        named by the engine's own paths or by the names of checkpoints. A prefix counts if more than half of the
        engine's paths follow it; of several, `likeliest_prefixes` leaves out those of an optimizer, such as "mu.". If
        no prefix counts, `model_prefixes` looks for a prefix of checkpoint names. Raises ModelLoadError if several
        prefixes remain. A tree without a prefix is returned as it is.
        """
        own_names = {name for origin in self._origins[TreeLayout.OWN].values() for name in origin.names}
        own_names = own_names - self._statistics or own_names  # A tree may lack these, or have them elsewhere.
        prefixes_seen = (
            name[:start] for name in arrays for start in starts_of_parts(name) if name[start:] in own_names
        )
        own_prefixes = [
            prefix for prefix, num_names in Counter(prefixes_seen).items() if 2 * num_names > len(own_names)
        ]
        config = self.abstract.config
        # The empty prefix fits if the tree's names are the engine's paths already; then nothing is removed.
        if own_prefixes:
            prefixes = [] if "" in own_prefixes else likeliest_prefixes(own_prefixes)
        else:
            prefixes = [] if config is None else model_prefixes(arrays, config)
        if len(prefixes) > 1:
            raise ModelLoadError(f"params: {ambiguity_message(prefixes)}")
        prefix = prefixes[0] if prefixes else ""
        if config is None and not own_prefixes:
            refuse_lacking_prefix(arrays, own_names)
        return {name.removeprefix(prefix): leaf for name, leaf in arrays.items() if name.startswith(prefix)}

    def make(
        self,
        checked: CheckedWeights,
        program: Callable[[Key], Callable[..., tuple[jax.Array, ...]]],
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
        tree, origins = checked
        is_own = tree.layout is TreeLayout.OWN
        for path, origin in origins.items():
            leaf, recipe, layer = self._leaves[path], origin.recipe, origin.layer
            paths = (path,) if recipe.scales is None else (path, _scales_path(path))
            old_arrays = [old for old in map(take, paths) if old is not None]
            is_in_place = len(old_arrays) == len(paths)
            sources = [_narrowed(tree.arrays[name]) for name in origin.names]
            first = sources[0]  # All tensors of one weight have the same dtype; `check` has seen to that.
            if not copy and recipe.is_copy and layer is None and isinstance(first, jax.Array) and _fits(first, leaf):
                for old in old_arrays:
                    old.delete()  # No program takes the old array's memory, so it is freed here.
                yield NewWeight(path, first, is_borrowed=True)
                continue
            if layer is not None and not all(map(self._is_in_place, sources)):
                sources, layer = [_layer_of(source, layer) for source in sources], None
            # A piece of a checkpoint's tensor may belong to any device, so such tensors lie whole on each device. Own
            # arrays have the shape of their weight, and so its sharding.
            tensors = [reshard(source, leaf.sharding if is_own else self._whole) for source in sources]
            key = self._key(recipe, first.dtype.name, is_own, is_stacked=layer is not None, is_in_place=is_in_place)
            # A program takes old arrays first, if it reuses their memory, and the layer last, if tensors are stacked.
            if not is_in_place:
                for old in old_arrays:
                    old.delete()
                old_arrays = []
            layer_argument = [] if layer is None else [np.int32(layer)]
            made = program(key)(*old_arrays, tensors, *layer_argument)
            for new_path, array in zip(paths, made, strict=True):
                yield NewWeight(new_path, array, is_borrowed=False)

    def weights(
        self, checked: CheckedWeights, program: Callable[[Key], Callable[..., tuple[jax.Array, ...]]]
    ) -> Weights:
        """Return all weights, made of a checked tree whose arrays are copied, so that the tree stays usable."""
        made = {new.path: new.array for new in self.make(checked, program, take=lambda path: None, copy=True)}
        state = {path: with_value(leaf, made[path]) for path, leaf in self._leaves.items()}
        return replace(self.abstract, state=nnx.from_flat_state(state))

    def programs(self) -> dict[Key, Callable[[], jax.stages.Lowered]]:
        """Return, for each key of a program that makes a weight, a function that lowers the program.

        There are two programs for each recipe, each dtype of its tensors, and each layout of a tree: one allocates the
        weight, and the other reuses the memory of the old weight. All layers with equal recipes have the same keys, so
        a model of 32 equal layers has as many programs as a model of one. Nothing is lowered or compiled here: the
        caller calls a function when the program is needed, and compiles what it returns.
        """
        lower_by_key: dict[Key, Callable[[], jax.stages.Lowered]] = {}
        for layout, origins in self._origins.items():
            for origin, dtype, is_in_place in product(origins.values(), (*DTYPES, *CODE_DTYPES), (False, True)):
                recipe, is_stacked = origin.recipe, origin.layer is not None
                is_own = layout is TreeLayout.OWN
                given = recipe.dtype.name if is_own and recipe.dtype.name in CODE_DTYPES else None
                if dtype != given if given else dtype in CODE_DTYPES:
                    continue  # Codes are given as they are stored, and floats are not.
                key = self._key(recipe, dtype, is_own, is_stacked=is_stacked, is_in_place=is_in_place)
                tensor_sharding = recipe.sharding if is_own else self._whole
                num_stacked = self._num_layers if is_stacked else None
                lower_by_key[key] = partial(
                    self._lower, recipe, dtype, tensor_sharding, num_stacked, is_in_place=is_in_place
                )
        return lower_by_key

    def _key(self, recipe: WeightRecipe, dtype: str, is_own: bool, *, is_stacked: bool, is_in_place: bool) -> Key:
        """Return the key of a program. `is_own` is part of it since tensors under the engine's own paths are sharded
        like their weights, and all other tensors lie whole on each device."""
        return "update", self._recipe_ids[recipe], dtype, is_own, is_stacked, is_in_place

    @property
    def _num_layers(self) -> int:
        """Return the L of arrays [L, …]; only a model with a config may be given in such arrays."""
        assert self.abstract.config is not None
        return self.abstract.config.num_layers

    def _lower(
        self,
        recipe: WeightRecipe,
        dtype: str,
        tensor_sharding: jax.sharding.Sharding,
        num_stacked: int | None,
        *,
        is_in_place: bool,
    ) -> jax.stages.Lowered:
        """Return the lowered program, not compiled yet, that makes a weight of tensors with this dtype and sharding.

        The program takes the list of the tensors in `recipe`, and returns the tuple of the weight's arrays. If
        `num_stacked` is not None, the tensors are arrays [L, …] of that many layers, and the program also takes the
        layer's index, as the last argument. With `is_in_place` it also takes the old arrays, as the first arguments,
        and returns the new ones in their memory. So with both the arguments are (old arrays …, tensors, layer).
        """
        stack_shape = () if num_stacked is None else (num_stacked,)
        shapes = [
            jax.ShapeDtypeStruct((*stack_shape, *shape), dtype, sharding=tensor_sharding) for shape in recipe.tensors
        ]
        layer = [] if num_stacked is None else [jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)]
        shardings, num_arrays = tuple(array.sharding for array in recipe.arrays), len(recipe.arrays)
        if not is_in_place:
            return jax.jit(partial(make_weight, recipe), out_shardings=shardings).lower(shapes, *layer)
        # The old arrays are never read. They are arguments so that their memory can be donated to the results.
        run = jax.jit(
            lambda *arguments: make_weight(recipe, *arguments[num_arrays:]),
            out_shardings=shardings,
            donate_argnums=tuple(range(num_arrays)),
            keep_unused=True,
        )
        return run.lower(*recipe.arrays, shapes, *layer)

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
        ignored = model_class(config.architecture).ignored_tensors
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
        model = model_class(config.architecture)
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
            stack_shape = () if origin.layer is None else (self._num_layers,)
            for name, shape in zip(origin.names, origin.recipe.tensors, strict=True):
                shapes[name] = (*stack_shape, *shape)
        is_own = layout is TreeLayout.OWN
        # Without a config the model is a caller's own module. Its tree may hold float64, numpy's default and JAX's with
        # x64; the method `make` converts it to float32.
        dtypes = DTYPES if self.abstract.config is not None else (*DTYPES, "float64")
        codes = {
            name: origin.recipe.dtype.name
            for origin in origins.values()
            for name in origin.names
            if is_own and origin.recipe.dtype.name in CODE_DTYPES
        }
        return WantedTree(layout, shapes, unread, None if is_own else twin, dtypes, codes)

    def checkpoint_origins(self, names_in_tree: Collection[str]) -> dict[TreeLayout, Origins]:
        """Return where each weight is in trees under checkpoint names, for TENSORS and STACKED; {} without a config.

        In TENSORS each name is one tensor of one layer, such as "model.layers.3.mlp.down_proj.weight". In STACKED a
        name without the layer's number is an array [L, …] of all layers, of which the weight takes its layer. Both have
        the same recipe. Scales that are made with their codes have no origin of their own. Families have alternative
        names for some tensors: those in `names_in_tree` are used.
        """
        config = self.abstract.config
        if config is None:
            return {}
        recipes = recipes_for(self.abstract, config, names_in_tree)
        tensors, stacked = dict[Path, _Origin](), dict[Path, _Origin]()
        for path, pieces in recipes.pieces.items():
            if "is_scales" in self._leaves[path].get_metadata():
                continue  # They are made with the codes, of the same tensors.
            names = tuple(dict.fromkeys(piece.tensor for piece in pieces))
            # Recipes name tensors by index and not by name, so that the layers of a model have equal recipes.
            numbered = tuple(replace(piece, tensor=str(names.index(piece.tensor))) for piece in pieces)
            shapes = tuple(recipes.shapes[name] for name in names)
            recipe = recipe_of(self._leaves[path], self._leaves.get(_scales_path(path)), shapes, numbered)
            layer = recipes.stacked[names[0]].layer  # All tensors of a weight belong to its layer.
            tensors[path] = _Origin(recipe, names)
            stacked[path] = _Origin(recipe, tuple(recipes.stacked[name].name for name in names), layer)
        return {TreeLayout.TENSORS: tensors, TreeLayout.STACKED: stacked}


def _scales_path(path: Path) -> Path:
    """Return where the scales of the codes at `path` are."""
    return (*path[:-1], "scales")


def _own_origin(path: Path, leaf: Any) -> _Origin:
    """Return where a weight is in a tree under the engine's own paths: one array of the weight's own shape.

    It is copied as it is stored, so the recipe has no `matrix` and no `ops`.
    """
    whole = tuple((0, size) for size in leaf.shape)
    shape = tuple(leaf.shape)
    recipe = WeightRecipe((shape,), (Piece("0", whole, whole),), shape, np.dtype(leaf.dtype), leaf.sharding)
    return _Origin(recipe, (".".join(map(str, path)),))


def _narrowed(array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Return a float64 array as float32, and any other as it is, since programs take numbers of at most 32 bits."""
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
