"""Puts a checkpoint's tensors into a model's weights, slice by slice, straight into their sharded place.

Anonymous memory never holds more than the weights themselves and a few row chunks: every tensor is read in
chunks of rows into the buffer that JAX then owns (on a CPU it aliases that buffer).
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

from ..pallas_kernels.cpu_products import empty_panels, fill_panels
from ..sharding import TENSOR_AXIS, sharding_of
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ModelLoadError
from .layers import Axes, WeightMaker
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
PIECE_BYTES = 64 << 20
"""Of memory, in which weights lie one after the other."""
INIT_STD = 0.02
IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")


@dataclass(frozen=True)
class Weights:
    """A model split in two: `graph` says how to put it together, `state` holds its arrays (or their shapes)."""

    graph: Any
    state: Any
    stream_dtype: Any
    """Of the hidden states."""
    of_logits: tuple[str, ...]
    """The modules that turn hidden states into scores."""

    def split_logits(self) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """(leaves that scores need, how to put a state together of those alone): for a call that hands over no more."""
        flat = nnx.to_flat_state(self.state)
        leaves, tree = jax.tree.flatten(self.state)
        places = [place for place, (path, _) in enumerate(flat) if path[0] in self.of_logits]

        def whole(some: Sequence[Any]) -> Any:
            found: list[Any] = [jnp.zeros(())] * len(leaves)
            for place, leaf in zip(places, some, strict=True):
                found[place] = leaf
            return jax.tree.unflatten(tree, found)

        return [leaves[place] for place in places], whole

    @property
    def size_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))


@lru_cache(maxsize=4)
def abstract_weights(config: ModelConfig, dtype: Any, mesh: Mesh) -> Weights:
    """Shapes, dtypes and placement of a model's weights; nothing is allocated or traced."""

    def new(shape: tuple[int, ...], axes: Axes, fill: float | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(mesh, axes))

    make = WeightMaker(new, mesh.shape[TENSOR_AXIS], mesh.devices.flat[0].platform, dtype)
    model = ARCHITECTURES[config.architecture]
    graph, state = nnx.split(model(config, make=make))
    return Weights(graph, state, make.stream_dtype, model.of_logits)


def check_tensors(abstract: Weights, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Hold the checkpoint's names and shapes against the model's, before anything is allocated.

    Raises ModelLoadError naming the checkpoint and the tensor that is missing, left over or of another shape.
    """
    tensors = _tensors(abstract, config)
    names = {tensor.name for of_leaf in tensors.values() for tensor in of_leaf}
    _check_names(names, checkpoint, tied=config.tie_word_embeddings)
    for tensor in (tensor for of_leaf in tensors.values() for tensor in of_leaf):
        if checkpoint.shape(tensor.name) != tensor.shape:
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {tensor.name} has shape {checkpoint.shape(tensor.name)}, the config asks "
                f"for {tensor.shape}; config and weights are of different models"
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
    tensors, memory = _tensors(abstract, config), _Memory()
    leaves = dict(nnx.to_flat_state(abstract.state))

    def load(path: tuple[Any, ...]) -> jax.Array:
        leaf = leaves[path]

        def read(index: Any) -> np.ndarray:
            bounds = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
            out = memory.take(tuple(stop - start for start, stop in bounds), np.dtype(leaf.dtype))
            _read(checkpoint, tensors[path], bounds, out, leaf.get_metadata())
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
class _Tensor:
    """A tensor of the checkpoint and where its rows go in a weight: run by run, each as many in one piece."""

    name: str
    shape: tuple[int, ...]
    """In the checkpoint."""
    run: int
    """Rows of one run."""
    first: int
    """Where the first run begins."""
    stride: int
    """From the beginning of one run to that of the next."""


def _tensors(abstract: Weights, config: ModelConfig) -> dict[tuple[Any, ...], list[_Tensor]]:
    """What is read for each weight, by its path."""
    table = ARCHITECTURES[config.architecture].tensor_names
    found = {}
    for path, leaf in nnx.to_flat_state(abstract.state):
        metadata = leaf.get_metadata()
        num_rows, *rest = metadata["matrix"][::-1] if "matrix" in metadata else leaf.shape
        if "parts" not in metadata:
            found[path] = [_Tensor(checkpoint_name(path, table), (num_rows, *rest), num_rows, 0, num_rows)]
            continue
        num_shards, first = metadata["num_shards"], 0
        found[path] = []
        for part, size in metadata["parts"]:
            name, run = checkpoint_name((*path[:-2], part, path[-1]), table), size // num_shards
            found[path].append(_Tensor(name, (size, *rest), run, first, num_rows // num_shards))
            first += run
    return found


def checkpoint_name(path: tuple[Any, ...], names: dict[str, str]) -> str:
    """What checkpoints call the weight at `path`, such as ("layers", 3, "mlp", "up_proj", "weight")."""
    *module, kind = path
    layer = next((part for part in module if isinstance(part, int)), None)
    pattern = ".".join("{i}" if isinstance(part, int) else part for part in module)
    return f"{names[pattern].format(i=layer)}.{kind}"


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
    tensors: list[_Tensor],
    bounds: list[tuple[int, int]],
    out: np.ndarray,
    metadata: dict[str, Any],
) -> None:
    """The slice `bounds` of one weight, from the tensor or the tensors that it is made of."""
    (first, last), *rest = bounds
    write = partial(_write_rows, out)
    if metadata.get("in_panels"):
        # Of one device, so there is no slicing.
        num_in, num_out = metadata["matrix"]
        (first, last), rest = (0, num_out), [(0, num_in)]
        write = partial(fill_panels, empty_panels(num_in, num_out, out))
    elif "matrix" in metadata:
        (first, last), *rest = bounds[::-1]
        write = partial(_write_rows, out.T)
    for tensor in tensors:
        for index_of_run in range(tensor.shape[0] // tensor.run):
            begin = tensor.first + index_of_run * tensor.stride
            start, stop = max(begin, first), min(begin + tensor.run, last)
            if start < stop:
                of_tensor = index_of_run * tensor.run - begin
                for row, chunk in _chunks(checkpoint, tensor, (start + of_tensor, stop + of_tensor), rest):
                    write(row - of_tensor - first, chunk)


def _write_rows(target: np.ndarray, first: int, rows: np.ndarray) -> None:
    target[first : first + len(rows)] = rows.astype(target.dtype, copy=False)


def _chunks(
    checkpoint: Checkpoint, tensor: _Tensor, rows: tuple[int, int], rest: list[tuple[int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """`rows` of a tensor, and the columns in `rest` of each, some at once, each with the number of its first."""
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


class _Memory:
    """Memory for weights, in large pieces of which the system may make large pages: a processor finds those sooner."""

    def __init__(self) -> None:
        self._lock, self._piece, self._used = Lock(), np.empty(0, np.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array that begins where JAX aliases it. It keeps its piece alive."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            piece, start = self._piece, self._used
            if start + num_bytes > len(piece):
                # What is large by itself has a piece of its own, and the smaller ones go on where they were.
                piece, start = _large_pages(num_bytes if num_bytes > PIECE_BYTES // 4 else PIECE_BYTES), 0
            if piece is self._piece or len(piece) == PIECE_BYTES:
                self._piece, self._used = piece, start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece[start : start + num_bytes].view(dtype).reshape(shape)


def _large_pages(num_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without them says so, and nothing is lost.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def random_weights(config: ModelConfig, *, dtype: Any, seed: int) -> Weights:
    """Weights for one device drawn from `seed`, for tests and for timing without a checkpoint."""
    rng = np.random.default_rng(seed)

    def new(shape: tuple[int, ...], axes: Axes, fill: float | None) -> jax.Array:
        values = rng.normal(0.0, INIT_STD, shape) if fill is None else np.full(shape, fill)
        return jnp.asarray(values.astype(dtype))

    make = WeightMaker(new, 1, jax.default_backend(), dtype)
    model = ARCHITECTURES[config.architecture]
    graph, state = nnx.split(model(config, make=make))
    return Weights(graph, state, make.stream_dtype, model.of_logits)
