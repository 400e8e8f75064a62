"""Loads a checkpoint's tensors into a model's weights, slice by slice, directly into their sharded arrays.

Every tensor is read in chunks of rows into a buffer that JAX then owns (on a CPU JAX aliases the buffer). So anonymous
memory holds the weights themselves and a few such chunks, and no second copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ...pallas_kernels.layer_ops import XLA_OPS, LayerOps, write_rows
from ...sharding import TENSOR_AXIS, sharding_of
from ..config import ModelConfig
from ..errors import ModelLoadError
from ..families.llama import Llama
from ..layers import Axes, WeightMaker
from .checkpoint import Checkpoint

ARCHITECTURES: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
}
CHUNK_BYTES = 4 << 20
"""Bytes, as float32, of the rows that are read from a tensor in one piece."""
NUM_READERS = 2
"""Threads that read weights."""
ALIGNMENT = 64
"""Bytes. On a CPU JAX aliases host memory that is aligned so, and copies any other."""
BLOCK_BYTES = 64 << 20
"""Bytes of one allocation, in which small weights lie one after the other."""
IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")


@dataclass(frozen=True)
class Weights:
    """A model as `nnx.split` gives it: `graph` is its structure, `state` holds its arrays or their abstract shapes."""

    graph: Any
    state: Any
    stream_dtype: Any
    """The dtype of the hidden states."""
    logits_modules: tuple[str, ...]
    """Names of the top-level modules that turn hidden states into logits."""

    def split_logits(self) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """Return the leaves of `state` that logits need, and a function that makes a state of such leaves.

        A program that samples takes only these leaves. In the state that the function makes, a scalar zero stands for
        every other leaf.
        """
        flat = nnx.to_flat_state(self.state)
        leaves, tree = jax.tree.flatten(self.state)
        indices = [index for index, (path, _) in enumerate(flat) if path[0] in self.logits_modules]

        def to_state(logits_leaves: Sequence[Any]) -> Any:
            filled: list[Any] = [jnp.zeros(())] * len(leaves)
            for index, leaf in zip(indices, logits_leaves, strict=True):
                filled[index] = leaf
            return jax.tree.unflatten(tree, filled)

        return [leaves[index] for index in indices], to_state

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all weights on all devices together."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))


@lru_cache(maxsize=4)
def abstract_weights(config: ModelConfig, dtype: Any, mesh: Mesh, ops: LayerOps = XLA_OPS) -> Weights:
    """Return the shapes, dtypes and shardings of a model's weights; nothing is allocated or traced."""

    def new(shape: tuple[int, ...], axes: Axes, fill: float | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(mesh, axes))

    model = ARCHITECTURES[config.architecture]
    graph, state = nnx.split(model(config, make=WeightMaker(new, mesh.shape[TENSOR_AXIS], dtype, ops)))
    return Weights(graph, state, ops.stream_dtype(dtype), model.logits_modules)


def check_tensors(abstract: Weights, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare the checkpoint's names and shapes with the model's, before anything is allocated.

    Raises ModelLoadError, which names the checkpoint and the tensor that is missing, left over or of another shape.
    """
    tensors = [tensor for sources in _source_tensors(abstract, config).values() for tensor in sources]
    _check_names({tensor.name for tensor in tensors}, checkpoint, tied=config.tie_word_embeddings)
    for tensor in tensors:
        if checkpoint.shape(tensor.name) != tensor.shape:
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {tensor.name} has shape {checkpoint.shape(tensor.name)}, the config asks "
                f"for {tensor.shape}; config and weights belong to different models: fetch both again"
            )


def load_weights(
    abstract: Weights,
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Return `abstract` with its arrays loaded in their dtypes and shardings. Call `check_tensors` before.

    `progress(done, total)` is called after each tensor and counts tensors. Raises ModelLoadError, which names the
    checkpoint and the tensor, if a tensor holds a NaN or an infinity.
    """
    tensors, memory = _source_tensors(abstract, config), _WeightMemory()
    leaves = dict(nnx.to_flat_state(abstract.state))

    def load(path: tuple[Any, ...]) -> jax.Array:
        leaf = leaves[path]

        def read(index: Any) -> np.ndarray:
            bounds = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
            out = memory.allocate(tuple(stop - start for start, stop in bounds), np.dtype(leaf.dtype))
            _read_weight(checkpoint, tensors[path], bounds, out, leaf.get_metadata())
            return out

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    loaded, done, total = {}, 0, sum(map(len, tensors.values()))
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for path, array in zip(leaves, readers.map(load, leaves), strict=True):
            loaded[path] = leaves[path].replace(array)
            for _ in tensors[path]:
                done += 1
                if progress is not None:
                    progress(done, total)
    return replace(abstract, state=nnx.from_flat_state(loaded))


@dataclass(frozen=True)
class _SourceTensor:
    """One tensor of the checkpoint, and where its rows lie among the output rows of a weight.

    A weight for several devices holds each device's share of every tensor, so the rows of a tensor are cut into runs of
    `run_len` rows. Run i begins at row `first_row` + i × `run_stride` of the weight.
    """

    name: str
    shape: tuple[int, ...]
    """The shape in the checkpoint."""
    run_len: int
    first_row: int
    run_stride: int


def _source_tensors(abstract: Weights, config: ModelConfig) -> dict[tuple[Any, ...], list[_SourceTensor]]:
    """Return the tensors that each weight is made of, by the weight's path."""
    table = ARCHITECTURES[config.architecture].tensor_names
    sources = {}
    for path, leaf in nnx.to_flat_state(abstract.state):
        metadata = leaf.get_metadata()
        num_rows, *rest = metadata["matrix"][::-1] if "matrix" in metadata else leaf.shape
        if "parts" not in metadata:
            sources[path] = [_SourceTensor(checkpoint_name(path, table), (num_rows, *rest), num_rows, 0, num_rows)]
            continue
        num_shards, first_row = metadata["num_shards"], 0
        sources[path] = []
        for part, size in metadata["parts"]:
            name, run_len = checkpoint_name((*path[:-2], part, path[-1]), table), size // num_shards
            sources[path].append(_SourceTensor(name, (size, *rest), run_len, first_row, num_rows // num_shards))
            first_row += run_len
    return sources


def checkpoint_name(path: tuple[Any, ...], names: dict[str, str]) -> str:
    """Return a checkpoint's name of the weight at `path`, such as ("layers", 3, "mlp", "up_proj", "weight").

    `names` maps a module's path to its name in a checkpoint; in both, {i} stands for the layer.
    """
    *module, kind = path
    layer = next((part for part in module if isinstance(part, int)), None)
    pattern = ".".join("{i}" if isinstance(part, int) else part for part in module)
    return f"{names[pattern].format(i=layer)}.{kind}"


def _check_names(wanted: set[str], checkpoint: Checkpoint, *, tied: bool) -> None:
    held = {name for name in checkpoint.names() if not IGNORED_TENSORS.search(name)}
    if tied:
        held.discard("lm_head.weight")  # Some checkpoints store a tied matrix twice.
    if missing := sorted(wanted - held):
        raise ModelLoadError(
            f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} of {len(wanted)} are); the checkpoint "
            "is incomplete, or its config names another architecture: fetch it again"
        )
    if extra := sorted(held - wanted):
        raise ModelLoadError(
            f"{checkpoint.path}: tensor {extra[0]} has no place in the model ({len(extra)} such tensors); "
            "the config lacks a feature, or names another architecture: correct the config"
        )


def _read_weight(
    checkpoint: Checkpoint,
    tensors: list[_SourceTensor],
    bounds: list[tuple[int, int]],
    out: np.ndarray,
    metadata: dict[str, Any],
) -> None:
    """Fill `out` with the slice `bounds` of one weight, from the tensors that the weight is made of.

    `bounds` are (start, stop) for each axis of the weight, and `metadata` is the weight's.
    """
    write = partial(write_rows, out)
    if "matrix" in metadata:
        bounds, write = metadata["ops"].matrix_rows(out, bounds, metadata["matrix"])
    (first, last), *rest = bounds
    for tensor in tensors:
        for run in range(tensor.shape[0] // tensor.run_len):
            run_start = tensor.first_row + run * tensor.run_stride
            start, stop = max(run_start, first), min(run_start + tensor.run_len, last)
            if start < stop:
                offset = run * tensor.run_len - run_start  # A row's number in the tensor minus that in the weight.
                for row, chunk in _chunks(checkpoint, tensor, (start + offset, stop + offset), rest):
                    write(row - offset - first, chunk)


def _chunks(
    checkpoint: Checkpoint, tensor: _SourceTensor, rows: tuple[int, int], rest: list[tuple[int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first row, values) for the slice `rows` × `rest` of a tensor, in chunks of CHUNK_BYTES.

    Raises ModelLoadError for a NaN or an infinity.
    """
    columns = tuple(slice(*bounds) for bounds in rest)
    num_rows = max(1, CHUNK_BYTES // (4 * max(1, math.prod(tensor.shape[1:]))))
    for start in range(*rows, num_rows):
        stop = min(start + num_rows, rows[1])
        chunk = checkpoint.read(tensor.name, slice(start, stop))[(slice(None), *columns)]
        if not np.isfinite(chunk).all():
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {tensor.name} holds a NaN or an infinity in rows {start} to {stop - 1}; "
                "fetch it again"
            )
        yield start, chunk


class _WeightMemory:
    """Allocates host memory for weights, in blocks that are large enough for the system's large pages.

    Large pages cost a processor fewer address translations. Threads may share one instance.
    """

    def __init__(self) -> None:
        self._lock, self._block, self._num_used = Lock(), np.empty(0, np.uint8), 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an uninitialized array, aligned so that JAX aliases it. The array keeps its block alive."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            block, start = self._block, self._num_used
            if start + num_bytes > len(block):
                # A large array gets a block of its own; smaller ones go on in the current block.
                block, start = _allocate_block(num_bytes if num_bytes > BLOCK_BYTES // 4 else BLOCK_BYTES), 0
            if block is self._block or len(block) == BLOCK_BYTES:
                self._block, self._num_used = block, start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return block[start : start + num_bytes].view(dtype).reshape(shape)


def _allocate_block(num_bytes: int) -> np.ndarray:
    """Return `num_bytes` of anonymous memory, for which the system is asked to use large pages."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A system without large pages raises an error; the memory is usable all the same.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
