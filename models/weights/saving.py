"""Saves weights as a checkpoint under Hugging Face names: recipes read backwards, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from ...pallas_kernels.layer_ops import XLA_OPS, LayerOps, StoredMatrix
from ...pallas_kernels.scaled_matrix import ScaledMatrix, scaled_columns
from ..config.decoder import DecoderConfig
from ..families.table import BY_ARCHITECTURE, family_class
from ..formats.checkpoint import UnsavedTensor
from ..formats.files import CONFIG_FILE, TREE_FILE, write_manifest
from ..formats.orbax_checkpoint import write_orbax
from ..formats.quantization import CONFIG_KEYS
from ..formats.safetensors_writing import write_safetensors
from ..layers import has_expert_axis, stored_matrix
from ..recipe import Piece, make_recipes
from .loading import CHUNK_BYTES
from .weights import Weights

Writer = Callable[[Path, Mapping[str, UnsavedTensor]], None]
WRITERS: dict[str, Writer] = {
    "orbax": write_orbax,
    "safetensors": write_safetensors,
}


def save_checkpoint(
    weights: Weights, directory: str | Path, *, format: str = "orbax", manifest: bool = False, overwrite: bool = False
) -> None:
    """Save `weights` and their config.json to `directory`, which must not exist yet, or be empty.

    `format` is "orbax" or "safetensors". Tensors have their Hugging Face names, and the dtype of the weights. With
    `manifest` a file SHA256SUMS lists every file. The tokenizer is not saved: copy its files to the directory.

    The directory appears whole or not at all; `overwrite` replaces a checkpoint that is there. One tensor at a time is
    held in host memory beside the weights. Raises ValueError for an unknown format, for a directory that is not empty,
    for weights without a config, and for a rotary embedding that config.json cannot express; raises OSError if the
    files cannot be written.
    """
    if format not in WRITERS:
        raise ValueError(f"format: got {format!r}, allowed: {', '.join(WRITERS)}")
    if weights.config is None or not weights.config.source:
        raise ValueError("weights: got some without the config.json of their model, wanted those of a loaded model")
    check_expressible(weights.config)
    with new_directory(Path(directory), overwrite=overwrite) as unfinished:
        write_model(unfinished, weights.config, _tensors(weights, weights.config), WRITERS[format])
        if manifest:
            write_manifest(unfinished)


def check_expressible(config: DecoderConfig) -> None:
    """Raise ValueError for a config that config.json has no form for."""
    if any(rope is not None and rope.freq_factors is not None for rope in config.ropes):
        fault = "got a rotary embedding with a divisor for each frequency, read from a GGUF file"
        raise ValueError(f"weights: {fault}, which config.json has no form for: keep the GGUF file")


@contextmanager
def new_directory(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to write to, which becomes `directory` once the block has ended and its files are on disk.

    If the block raises, or this process is killed, no `directory` appears, and one that was there stays as it was. A
    folder of another name may be left by a process that was killed: it begins with a dot. One that is killed between
    the two renames that replace a checkpoint leaves the old and the new one under such names. Raises ValueError for a
    directory that is neither new nor empty, unless `overwrite` is true and it holds a checkpoint, which is then
    replaced as a whole, with everything else in it.
    """
    directory = directory.resolve()
    is_used = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    if is_used and not overwrite:
        fault = f"got {directory}, which is there already, wanted a new or an empty one"
        raise ValueError(f"directory: {fault}: give another one, or overwrite=True to replace a checkpoint")
    if is_used and not any((directory / name).is_file() for name in (CONFIG_FILE, TREE_FILE)):
        fault = f"got {directory}, which holds no checkpoint, wanted one to overwrite"
        raise ValueError(f"directory: {fault}: give another directory, or empty this one")
    suffix = secrets.token_hex(4)
    unfinished, replaced = (directory.with_name(f".{directory.name}.{word}-{suffix}") for word in ("unfinished", "old"))
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _sync(unfinished)
        if not is_used:
            unfinished.rename(directory)
            return
        directory.rename(replaced)  # No system call of Python's swaps two directories.
        try:
            unfinished.rename(directory)
        except BaseException:
            replaced.rename(directory)
            raise
        shutil.rmtree(replaced)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_model(directory: Path, config: DecoderConfig, tensors: Mapping[str, UnsavedTensor], write: Writer) -> None:
    """Write the tensors of a model to an empty directory by `write`, one of WRITERS, and then its config.json."""
    write(directory, tensors)
    content = _config(config, {tensor.dtype.name for tensor in tensors.values()})
    (directory / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _config(config: DecoderConfig, dtypes: set[str]) -> dict[str, Any]:
    """Return the content of config.json for saved weights: the source's, updated to what is saved.

    Keys of quantization are left out, since the weights are saved unquantized. `dtypes` are the names of the saved
    dtypes, at least one. config.json names one dtype only: if there are several, it is the first in the alphabet, so
    bfloat16 rather than float32. `torch_dtype` is the name that transformers 4 had for the key `dtype`, so it is left
    out. The class, the model type and tied embeddings are those of `config`, which overrides may have changed.
    """
    dropped = (*CONFIG_KEYS, "torch_dtype")
    kept = {key: value for key, value in config.source.items() if key not in dropped}
    return {
        **kept,
        "architectures": [config.architecture],
        "dtype": min(dtypes),
        "model_type": BY_ARCHITECTURE[config.architecture].model_type,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _tensors(weights: Weights, config: DecoderConfig) -> dict[str, UnsavedTensor]:
    """Return the tensors to save, by their Hugging Face names; each is read from the weights only when it is made.

    One weight may be saved as several tensors, such as the fused queries, keys and values, and one tensor may be put
    together from several pieces. So recipes, which say which blocks of tensors make a weight, are read backwards here.
    A tensor has the dtype of the weight that its first piece is in.
    """
    recipes = make_recipes(weights.state, family_class(config.architecture).sources(config))
    leaves = dict(nnx.to_flat_state(weights.state))
    parts: defaultdict[str, list[tuple[_Stored, Piece]]] = defaultdict(list)  # Tensor → what is in it.
    for path, pieces in recipes.pieces.items():
        metadata = leaves[path].get_metadata()
        if "is_scales" in metadata:
            continue
        stored = _Stored(leaves[path], leaves[*path[:-1], "scales"] if "held" in metadata else None)
        for piece in pieces:
            parts[piece.tensor].append((stored, piece))
    tensors = {}
    for name, shape in recipes.shapes.items():
        first_weight = parts[name][0][0].weight
        dtype = np.dtype(first_weight.get_metadata().get("decoded_dtype", first_weight.dtype))
        tensors[name] = UnsavedTensor(shape, dtype, partial(_tensor, shape, dtype, parts[name]))
    return tensors


class _Stored(NamedTuple):
    """A weight, and the scales of one that is kept as arrays of codes and of scales."""

    weight: nnx.Variable[Any]
    scales: nnx.Variable[Any] | None


def _tensor(shape: tuple[int, ...], dtype: np.dtype[Any], parts: list[tuple[_Stored, Piece]]) -> np.ndarray:
    """Return a tensor of a checkpoint in host memory, copied from the weights that hold its values.

    `parts` are (weight, piece). A piece was made for loading, where `source` is a block of the tensor and `target` the
    block of the weight that gets its values; here values go the other way. A block is (start, stop) of its rows and,
    for a matrix, of its columns. Rows and columns of a matrix W [in, out] are those of Wᵀ [out, in], since checkpoints
    usually store Wᵀ; if `is_transposed`, the checkpoint stores W. Example: a piece with `target` rows (4, 6) and
    `source` rows (2, 4) copies rows 4 and 5 of the weight to rows 2 and 3 of the tensor.
    """
    tensor = np.zeros(shape, dtype)
    for weight, piece in parts:
        block = piece.block_of(tensor)  # Writing to this view writes to `tensor`.
        (weight_start, weight_stop), *weight_columns = piece.target
        weight_slices = [slice(*columns) for columns in weight_columns]  # Empty for a vector, which has rows only.
        # Rows are read from the device whole, in chunks of about CHUNK_BYTES but at least one row, and the piece's
        # columns are cut out of them here. Sizes are counted as float32, 4 bytes, and up to the piece's last column.
        row_bytes = 4 * (weight_columns[0][1] if weight_columns else 1)
        num_rows = min(weight_stop - weight_start, max(1, CHUNK_BYTES // row_bytes))
        for chunk_start in range(weight_start, weight_stop, num_rows):
            # Every chunk has `num_rows` rows, so that JAX compiles one shape. The last one begins earlier and copies
            # some rows again: 10 rows in chunks of 4 are the rows 0 to 3, 4 to 7 and 6 to 9.
            chunk_start = min(chunk_start, weight_stop - num_rows)
            rows = np.arange(chunk_start, chunk_start + num_rows, dtype=np.int32)
            values = np.asarray(_rows_of(weight, rows))
            first_row = chunk_start - weight_start
            block[first_row : first_row + num_rows] = values[(slice(None), *weight_slices)]
    return tensor


def _rows_of(stored: _Stored, rows: np.ndarray) -> jax.Array:
    """Return the given rows of a weight: of Wᵀ for a matrix W, of a table, or of a vector."""
    metadata = stored.weight.get_metadata()
    if has_expert_axis(metadata):
        return _take_of_experts(stored_matrix(*stored), *np.divmod(rows, metadata["rows_of_expert"]))
    if "matrix" not in metadata and stored.scales is None:
        return _take(stored.weight[...], rows, None, 0)
    num_in, _ = metadata["matrix"] if "matrix" in metadata else metadata["table"][::-1]
    return _take(stored_matrix(*stored), rows, metadata.get("ops", XLA_OPS), num_in)


@jax.jit
def _take_of_experts(weight: StoredMatrix, experts: jax.Array, columns: jax.Array) -> jax.Array:
    """Return columns of experts' matrices [E, in, out] as rows, or values of their biases [E, out]."""
    if isinstance(weight, ScaledMatrix):
        return scaled_columns(weight, columns, experts)
    assert isinstance(weight, jax.Array), "bytes of codes are those of one matrix"
    return weight[experts, :, columns] if weight.ndim == 3 else weight[experts, columns]


@partial(jax.jit, static_argnums=(2, 3))
def _take(weight: StoredMatrix, rows: jax.Array, ops: LayerOps | None, num_in: int) -> jax.Array:
    if ops is not None:
        return ops.columns(weight, rows, num_in)
    assert isinstance(weight, jax.Array), "only matrices are stored as codes"
    return weight[rows]


def _sync(directory: Path) -> None:
    """Wait until all files below a directory are on the disk, so that it may be renamed to its final name."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
