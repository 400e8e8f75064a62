"""Loads a checkpoint's tensors into a model's weights, slice by slice, directly into their sharded arrays.

Every tensor is read in chunks of rows into a buffer that JAX then owns (on a CPU JAX aliases the buffer). So the host
holds the weights themselves and a few chunks, and no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ...pallas_kernels.layer_ops import XLA_OPS, LayerOps, write_rows
from ...sharding import TENSOR_AXIS, sharding_of
from ..config.decoder import DecoderConfig
from ..errors import ModelLoadError
from ..families.table import family_class
from ..formats.checkpoint import Checkpoint
from ..formats.safetensors_checkpoint import SafetensorsCheckpoint
from ..layers import Axes, WeightMaker, has_expert_axis
from ..recipe import Path, Piece, Recipes, make_recipes
from ..sources import Bounds
from .code_arrays import Target, hold_codes, read_held
from .coded import StoredFormats, check_codes, read_coded, with_codes
from .live_tree import joined_names
from .subtree import ambiguity_message, model_prefixes
from .weight_memory import NUM_READERS, WeightMemory
from .weight_rows import OrderedPieces, read_rows
from .weights import Weights

CHUNK_BYTES = 4 << 20
"""Bytes, as float32, of the rows that are read from a tensor at once."""
LARGE_SHARE = 16
"""A weight of more than 1 / LARGE_SHARE of all bytes is read alone, before the others: orbax decodes whole tensors, so
that memory would hold two large ones, or a large one beside all other weights."""


@lru_cache(maxsize=4)
def abstract_weights(
    config: DecoderConfig, dtype: Any, mesh: Mesh, ops: LayerOps = XLA_OPS, formats: StoredFormats = ()
) -> Weights:
    """Return the shapes, dtypes and shardings of a model's weights on a mesh; nothing is allocated or traced.

    `dtype` is the dtype of all weights, and `ops` says how matrices are stored, and which dtype hidden states have.
    Matrices stay codes where a checkpoint stores them in one of `formats` that `ops` take: as bytes that native code
    reads, on one device, or as arrays of codes and of scales. The results for the latest 4 sets of arguments are
    cached, since building a model of many layers takes time.
    """

    # The model's constructor calls this for each weight. `fill` is the value of its elements, which a shape has not.
    def new(shape: tuple[int, ...], axes: Axes, fill: float | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(mesh, axes))

    family = family_class(config.architecture)
    keeps_bytes = bool(formats) and ops.columns_of_codes is not None and mesh.size == 1
    num_shards = mesh.shape[TENSOR_AXIS]
    spread_over = mesh if num_shards > 1 else None
    make = WeightMaker(new, num_shards, dtype, ops, keeps_codes=keeps_bytes, mesh=spread_over)
    model = family.decoder_class()(config, make=make)
    graph, state = nnx.split(model)
    weights = Weights(graph, state, ops.stream_dtype(dtype), family.logits_modules, config)
    if not formats:
        return weights
    recipes = recipes_for(weights, config, [name for name, _ in formats])
    if keeps_bytes:
        return replace(weights, state=with_codes(state, recipes, dict(formats)))
    if ops.columns_of_codes is None:
        hold_codes(model, recipes, dict(formats), Target(mesh, np.dtype(dtype).name, config.tie_word_embeddings))
        graph, state = nnx.split(model)
    return replace(weights, graph=graph, state=state)


def tensor_shapes(config: DecoderConfig, mesh: Mesh) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model's checkpoint, under its usual name."""
    return recipes_for(abstract_weights(config, "float32", mesh), config, ()).shapes


def check_tensors(abstract: Weights, config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Check the names, shapes and dtypes of a checkpoint's tensors against the model, before anything is allocated.

    `abstract` has the shapes of the model's weights; the shapes that tensors must have follow from these. Raises
    ModelLoadError, which names the checkpoint and all tensors that are missing and that are unknown to the model, or
    else all that have another shape, or else the first that is stored in a type that is not supported. Values are not
    read.
    """
    recipes = recipes_for(abstract, config, checkpoint.names())
    shapes = recipes.shapes
    _check_names(set(shapes), config, checkpoint)
    if misshapen := [name for name, shape in shapes.items() if checkpoint.shape(name) != shape]:
        name, others = misshapen[0], misshapen[1:]
        fault = f"tensor {name} has shape {checkpoint.shape(name)}, the config asks for {shapes[name]}"
        fault += f"; {len(others)} more have another shape: {joined_names(others)}" if others else ""
        reason = "config and weights belong to different models"
        raise ModelLoadError(f"{checkpoint.path}: {fault}; {reason}: take both of one model")
    for name in shapes:
        checkpoint.read(name, slice(0, 0))  # No row is read, but a stored type that is not supported raises here.
    check_codes(dict(nnx.to_flat_state(abstract.state)), recipes, checkpoint)


def load_weights(
    abstract: Weights,
    config: DecoderConfig,
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Return `abstract` with its arrays loaded in their dtypes and shardings. `check_tensors` must have passed.

    JAX asks for the shard of each device, and only the rows and columns of that shard are read from the tensors. So the
    host holds the shards and a few chunks of rows. `progress(done, total)`, if given, is called once per tensor, after
    the weight that it is a part of: three times for fused queries, keys and values. Raises ModelLoadError, which names
    the checkpoint and the tensor, if a tensor holds a NaN or an infinity.
    """
    leaves = dict(nnx.to_flat_state(abstract.state))
    pieces = recipes_for(abstract, config, checkpoint.names()).pieces
    loaded = load_arrays(leaves, pieces, checkpoint, progress=progress)
    # `abstract_weights` caches its result for equal configs, which may have been read from different files: comparison
    # leaves out `source`. So the config of this checkpoint replaces the cached one.
    state = nnx.from_flat_state({path: leaf.replace(loaded[path]) for path, leaf in leaves.items()})
    return replace(abstract, state=state, config=config)


def load_arrays(
    leaves: Mapping[Path, nnx.Variable[Any]],
    pieces: Mapping[Path, tuple[Piece, ...]],
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Path, jax.Array]:
    """Return the array of each variable in `leaves`, which holds an abstract shape, by its recipe in `pieces`.

    Both have the same keys. An array without a sharding lies on JAX's default device, uncommitted, so that a jitted
    function may move it. See `load_weights` for how the arrays are read, for `progress`, and for errors.
    """
    memory = WeightMemory()

    def load(path: Path) -> list[tuple[Path, jax.Array]]:
        """Return the weight at `path` as an array, and the scales of one that is codes by their path.

        JAX calls `read_shard` for the shard of each device. Codes and scales are read once for all devices.
        """
        leaf = leaves[path]
        if "held" in leaf.get_metadata():
            paths = path, (*path[:-1], "scales")
            return list(zip(paths, read_pair(pieces[path], *(leaves[each] for each in paths)), strict=True))

        def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            """Return the slice `index` of the weight, in host memory that JAX can alias."""
            assert index is not None, "a shard of an array has bounds"
            bounds = [axis.indices(size)[:2] for axis, size in zip(index, leaf.shape, strict=True)]
            shard = memory.allocate(tuple(stop - start for start, stop in bounds), np.dtype(leaf.dtype))
            _read_weight(checkpoint, pieces[path], bounds, shard, leaf.get_metadata())
            return shard

        if leaf.sharding is None:
            return [(path, jnp.asarray(read_shard((slice(None),) * leaf.ndim)))]
        return [(path, jax.make_array_from_callback(leaf.shape, leaf.sharding, read_shard))]

    def read_pair(of_matrix: tuple[Piece, ...], codes: Any, scales: Any) -> list[jax.Array]:
        """Return the arrays of a matrix's codes and of its scales."""
        codes_host, scales_host = (memory.allocate(leaf.shape, np.dtype(leaf.dtype)) for leaf in (codes, scales))
        held = codes.get_metadata()["held"]
        read_held(checkpoint, of_matrix, held, (codes_host, scales_host), CHUNK_BYTES // 4)
        return [
            jax.make_array_from_callback(leaf.shape, leaf.sharding, host.__getitem__)
            for leaf, host in ((codes, codes_host), (scales, scales_host))
        ]

    first_leaves = {path: leaf for path, leaf in leaves.items() if "is_scales" not in leaf.get_metadata()}
    num_tensors = {path: len({piece.tensor for piece in pieces[path]}) for path in first_leaves}
    loaded, num_loaded, total = dict[Path, jax.Array](), 0, sum(num_tensors.values())
    for arrays in _load_all(first_leaves, load):
        loaded |= arrays
        for _ in range(num_tensors[arrays[0][0]]):
            num_loaded += 1
            if progress is not None:
                progress(num_loaded, total)
    return loaded


def _load_all(
    leaves: Mapping[Path, Any], load: Callable[[Path], list[tuple[Path, jax.Array]]]
) -> Iterator[list[tuple[Path, jax.Array]]]:
    """Yield what `load` returns for each path: large weights first and one by one, then others in NUM_READERS threads.

    `load` returns the weight at a path, first, and others that are read with it. A weight is large if it has more than
    1 / LARGE_SHARE of all bytes: a format that decodes whole tensors then never holds two large ones at once. Within
    both groups weights come in the order of `leaves`. An error of `load` is raised here when its weight is due.
    """
    sizes = {path: leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items()}
    max_small_bytes = sum(sizes.values()) // LARGE_SHARE
    for path in leaves:
        if sizes[path] > max_small_bytes:
            yield load(path)
    small_paths = [path for path in leaves if sizes[path] <= max_small_bytes]
    with ThreadPoolExecutor(NUM_READERS) as readers:
        yield from readers.map(load, small_paths)


def recipes_for(abstract: Weights, config: DecoderConfig, stored_names: Collection[str]) -> Recipes:
    """Return how the weights are made of the tensors of a checkpoint, which has `stored_names`."""
    model = family_class(config.architecture)
    stored_name = model.naming(stored_names, is_tied=config.may_store_one_matrix)
    return make_recipes(abstract.state, model.sources(config), stored_name, stored_names)


def _check_names(needed_names: set[str], config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Raise ModelLoadError unless a checkpoint has all tensors that the model needs, and no unknown ones.

    Tensors that the family ignores may be there as well, zeros as biases of quantized matrices, and the head of a tied
    model that stores it twice. The message has the names of all missing and all unknown tensors. If several subtrees of
    a training state might be the model, the error asks for one of them.
    """
    model = family_class(config.architecture)
    stored_names = {name for name in checkpoint.names() if not model.ignored_tensors.search(name)}
    if config.tie_word_embeddings:
        # If a checkpoint stores a tied matrix twice, `open_checkpoint` has found both equal; the head is not needed. If
        # the matrix is stored only as the head, `needed_names` has the head.
        head_name = model.naming(stored_names)(f"{model.tensor_names['head']}.weight")
        stored_names -= {head_name} - needed_names
    extra = sorted(stored_names - needed_names)
    if isinstance(checkpoint, SafetensorsCheckpoint):
        extra = [name for name in extra if not checkpoint.is_idle_bias(name)]
    if missing := sorted(needed_names - stored_names):
        if len(prefixes := model_prefixes(checkpoint.names(), config)) > 1:
            raise ModelLoadError(f"{checkpoint.path}: {ambiguity_message(prefixes)}")
        reason = "the checkpoint is incomplete, or its config names another architecture: complete it"
        if stored_names.isdisjoint(needed_names):
            stored_name = repr(min(stored_names)) if stored_names else "no tensor"
            reason = f"the checkpoint holds {stored_name}: give the tensors their Hugging Face names"
        elif extra:
            reason = f"without a place in the model: {joined_names(extra)}; {reason}"
        others = f": {joined_names(missing)}" if 1 < len(missing) < len(needed_names) else ""
        num_missing = f"({len(missing)} of {len(needed_names)} are{others})"
        raise ModelLoadError(f"{checkpoint.path}: tensor {missing[0]} is missing {num_missing}; {reason}")
    if extra:
        checkpoint.shape(extra[0])  # Raises for what is no array, which is the better reason.
        others = f": {joined_names(extra)}" if len(extra) > 1 else ""
        fault = f"tensor {extra[0]} has no place in the model ({len(extra)} such tensors{others})"
        reason = "the config lacks a feature, or names another architecture"
        raise ModelLoadError(f"{checkpoint.path}: {fault}; {reason}: correct the config")


def _read_weight(
    checkpoint: Checkpoint, pieces: tuple[Piece, ...], bounds: list[Bounds], out: np.ndarray, metadata: dict[str, Any]
) -> None:
    """Fill `out` with the slice `bounds` of one weight, from the pieces that the weight is made of.

    `bounds` are (start, stop) for each axis of the stored weight, and `metadata` is the weight's. Pieces are counted in
    rows and columns of Wᵀ. So for a matrix, the layer operations `ops` turn `bounds` into the rows and columns of Wᵀ
    that the slice holds, and give the function that writes rows of Wᵀ to `out` in the stored layout: for a W that is
    stored as it is, rows 4 to 5 of Wᵀ go to columns 4 to 5 of W. A table or a vector is written as it is read. At most
    CHUNK_BYTES are read at once, counted as float32 of 4 bytes; a single row may be larger.
    """
    if "code_parts" in metadata:
        read_coded(checkpoint, pieces, out, metadata, CHUNK_BYTES // 4)
        return
    ordered = OrderedPieces(pieces)
    if has_expert_axis(metadata):
        *inputs, (start, stop) = bounds[1:]
        for expert, of_expert in enumerate(out, start=bounds[0][0]):
            # The rows of Wᵀ [experts × out, in], or the values of biases [experts × out], that are those of one expert.
            first_row = expert * metadata["rows_of_expert"]
            _read_matrix(checkpoint, ordered, [*inputs, (first_row + start, first_row + stop)], of_expert, metadata)
        return
    _read_matrix(checkpoint, ordered, bounds, out, metadata)


def _read_matrix(
    checkpoint: Checkpoint, pieces: OrderedPieces, bounds: list[Bounds], out: np.ndarray, metadata: dict[str, Any]
) -> None:
    """Fill `out` as `_read_weight` does, for a weight that is no array of experts' matrices or biases."""
    write = partial(write_rows, out)
    if "matrix" in metadata:
        bounds, write = metadata["ops"].matrix_rows(out, bounds, metadata["matrix"])
    first_row = bounds[0][0]
    for row, values in read_rows(checkpoint, pieces, tuple(bounds), CHUNK_BYTES // 4):
        write(row - first_row, values)
