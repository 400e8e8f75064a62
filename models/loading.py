"""Puts a checkpoint's tensors into a model's weights, slice by slice, straight into their sharded place.

Anonymous memory never holds more than the weights themselves and a few row chunks: every tensor is read in
chunks of rows into the buffer that JAX then owns (on a CPU it aliases that buffer).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ..sharding import sharding_of
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ModelLoadError
from .llama import Llama

ARCHITECTURES: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
}
CHUNK_BYTES = 4 << 20
NUM_READERS = 2
ALIGNMENT = 64
"""JAX aliases host memory on a CPU from this alignment on, and copies it below."""
INIT_STD = 0.02
IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")


@dataclass(frozen=True)
class Weights:
    """A model split in two: `graph` says how to put it together, `state` holds its arrays (or their shapes)."""

    graph: Any
    state: Any

    @property
    def size_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))


@lru_cache(maxsize=4)
def abstract_weights(config: ModelConfig, dtype: Any, mesh: Mesh) -> Weights:
    """Shapes, dtypes and placement of a model's weights; nothing is allocated or traced."""

    def make(shape: tuple[int, ...], axes: tuple[str, ...], *, fill: float | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(mesh, axes))

    return Weights(*nnx.split(ARCHITECTURES[config.architecture](config, make=make)))


def check_tensors(abstract: Weights, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Hold the checkpoint's names and shapes against the model's, before anything is allocated.

    Raises ModelLoadError naming the checkpoint and the tensor that is missing, left over or of another shape.
    """
    names = _names(abstract, config)
    _check_names(set(names.values()), checkpoint, tied=config.tie_word_embeddings)
    for path, leaf in nnx.to_flat_state(abstract.state):
        wanted = leaf.shape[::-1] if _is_transposed(leaf) else leaf.shape
        if checkpoint.shape(names[path]) != wanted:
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {names[path]} has shape {checkpoint.shape(names[path])}, the config asks "
                f"for {wanted}; config and weights are of different models"
            )


def load_weights(
    abstract: Weights,
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Read every weight of `abstract`, converted to its dtype, into its place; `check_tensors` comes before.

    `progress(done, total)` counts tensors. Raises ModelLoadError naming the checkpoint and a tensor that
    holds a NaN or an infinity.
    """
    names = _names(abstract, config)
    leaves = dict(nnx.to_flat_state(abstract.state))

    def load(path: tuple[Any, ...]) -> jax.Array:
        leaf = leaves[path]

        def read(index: Any) -> np.ndarray:
            return _read(checkpoint, names[path], index, leaf.shape, np.dtype(leaf.dtype), _is_transposed(leaf))

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    loaded = {}
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for path, array in zip(leaves, readers.map(load, leaves), strict=True):
            loaded[path] = leaves[path].replace(array)
            if progress is not None:
                progress(len(loaded), len(leaves))
    return Weights(abstract.graph, nnx.from_flat_state(loaded))


def _names(abstract: Weights, config: ModelConfig) -> dict[tuple[Any, ...], str]:
    table = ARCHITECTURES[config.architecture].tensor_names
    return {path: checkpoint_name(path, table) for path, _ in nnx.to_flat_state(abstract.state)}


def checkpoint_name(path: tuple[Any, ...], names: dict[str, str]) -> str:
    """What checkpoints call the weight at `path`, such as ("layers", 3, "mlp", "up_proj", "weight")."""
    *module, kind = path
    layer = next((part for part in module if isinstance(part, int)), None)
    pattern = ".".join("{i}" if isinstance(part, int) else part for part in module)
    return f"{names[pattern].format(i=layer)}.{kind}"


def _is_transposed(leaf: Any) -> bool:
    return bool(leaf.get_metadata().get("transposed", False))


def _check_names(wanted: set[str], checkpoint: Checkpoint, *, tied: bool) -> None:
    held = {name for name in checkpoint.names() if not IGNORED_TENSORS.search(name)}
    if tied:
        held.discard("lm_head.weight")  # Some checkpoints store the tied matrix twice.
    if missing := sorted(wanted - held):
        raise ModelLoadError(
            f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} of {len(wanted)} are); the checkpoint "
            "is incomplete, or its config names another architecture"
        )
    if extra := sorted(held - wanted):
        raise ModelLoadError(
            f"{checkpoint.path}: tensor {extra[0]} has no place in the model ({len(extra)} such tensors); "
            "the config leaves out a feature, or names another architecture"
        )


def _read(
    checkpoint: Checkpoint,
    name: str,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    transposed: bool,
) -> np.ndarray:
    """The slice `index` of one weight, read in row chunks and converted on the way."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    out = _aligned_empty(tuple(stop - start for start, stop, _ in bounds), dtype)
    target = out.T if transposed else out
    (first, last, _), *rest = bounds[::-1] if transposed else bounds
    columns = tuple(slice(start, stop) for start, stop, _ in rest)
    row_values = max(1, math.prod((shape[::-1] if transposed else shape)[1:]))
    num_rows = max(1, CHUNK_BYTES // (4 * row_values))
    for start in range(first, last, num_rows):
        stop = min(start + num_rows, last)
        chunk = checkpoint.read(name, slice(start, stop))[(slice(None), *columns)]
        if not np.isfinite(chunk).all():
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {name} holds a NaN or an infinity in rows {start} to {stop - 1}; "
                "fetch it again"
            )
        target[start - first : stop - first] = chunk.astype(dtype, copy=False)
    return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def random_weights(config: ModelConfig, *, dtype: Any, seed: int) -> Weights:
    """Weights drawn from `seed`, for tests and for timing without a checkpoint."""
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...], axes: tuple[str, ...], *, fill: float | None = None) -> jax.Array:
        values = rng.normal(0.0, INIT_STD, shape) if fill is None else np.full(shape, fill)
        return jnp.asarray(values.astype(dtype))

    return Weights(*nnx.split(ARCHITECTURES[config.architecture](config, make=make)))
