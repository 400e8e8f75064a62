"""Opens a model's config and checkpoint, of any format; only headers are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config.decoder import DecoderConfig
from ..config.gguf import config_from_gguf
from ..config.quantization import read_quantization
from ..config.reading import config_from_hf
from ..decoder import Decoder
from ..families.table import model_class
from .checkpoint import Checkpoint, Subtree
from .fields import Fields, read_json_object
from .files import CONFIG_FILE
from .gguf import read_gguf
from .gguf_checkpoint import GGUFCheckpoint
from .orbax_checkpoint import OrbaxCheckpoint
from .safetensors_checkpoint import SafetensorsCheckpoint
from .tree_checkpoint import TreeCheckpoint

COMPARED_VALUES = 1 << 20
"""Values of each of two matrices that are compared at once."""


def open_checkpoint(
    path: Path,
    *,
    orbax: Path | None = None,
    params: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[DecoderConfig, Checkpoint]:
    """Open a directory with config.json and safetensors, or a GGUF file; only headers are read.

    With `orbax` the weights are in that folder of orbax, with `params` in that tree of arrays, or in a subtree of it,
    such as `params` of a whole training state; the config is that of `path` all the same, with `overrides` as in
    `config_from_hf`. If config.json names no dtype, the embedding's dtype is used, as in transformers. And as there,
    input and output matrices that it calls tied are not tied if both are stored and differ, for which their values are
    read. Raises ModelLoadError.
    """
    if not path.is_dir() and params is None:
        file = read_gguf(path)
        config = config_from_gguf(file, overrides)
        return config, GGUFCheckpoint(file, config)
    config = read_config(path, overrides)
    model = model_class(config.architecture)
    checkpoint: Checkpoint
    if params is not None:
        checkpoint = _model_tree(TreeCheckpoint(params), model)
    elif orbax is not None:
        checkpoint = _model_tree(OrbaxCheckpoint(orbax), model)
    else:
        checkpoint = SafetensorsCheckpoint(path, read_quantization(Fields(config.source, path / CONFIG_FILE)))
    stored_name = model.naming(checkpoint.names())
    embedding, head = (stored_name(f"{model.tensor_names[module]}.weight") for module in ("embed", "head"))
    if embedding not in checkpoint.names():
        return config, checkpoint  # `check_tensors` says so.
    if not (config.source.get("dtype") or config.source.get("torch_dtype")):
        config = replace(config, dtype=checkpoint.dtype(embedding))
    if config.tie_word_embeddings and head in checkpoint.names() and not _are_equal(checkpoint, embedding, head):
        config = replace(config, tie_word_embeddings=False)
    return config, checkpoint


def _model_tree(checkpoint: Checkpoint, model: type[Decoder]) -> Checkpoint:
    """Return the subtree that holds the model's tensors, or the checkpoint itself; see `model_prefix`."""
    prefix = model_prefix(checkpoint.names(), model)
    return Subtree(checkpoint, prefix) if prefix else checkpoint


def model_prefix(names: Collection[str], model: type[Decoder]) -> str:
    """Return what stands before the names of the model's tensors in a tree: `params.` in a whole training state.

    An optimizer may hold subtrees of the same names, so the highest one is taken. Nothing stands there in a tree
    without one, or with two on one level.
    """
    embedding = f"{model.tensor_names['embed']}.weight"
    if model.naming(names)(embedding) in names:
        return ""
    ends = [base + embedding.removeprefix(model.base) for base in (*model.other_bases, model.base)]
    prefixes = [
        name.removesuffix(end)
        for name in names
        if (end := next((end for end in ends if name.endswith(f".{end}")), None)) is not None
    ]
    level = min((prefix.count(".") for prefix in prefixes), default=0)
    match [prefix for prefix in prefixes if prefix.count(".") == level]:
        case [prefix]:
            return prefix
    return ""


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; values of matrices alone are compared."""
    shape = checkpoint.shape(first)
    if checkpoint.shape(second) != shape or checkpoint.dtype(second) != checkpoint.dtype(first):
        return False
    if len(shape) != 2:
        return True  # `check_tensors` refuses the shape.
    num_rows = max(1, COMPARED_VALUES // max(1, shape[1]))
    # Each thread reads one matrix: orbax keeps for a thread what it has decoded of one.
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for row in range(0, shape[0], num_rows):
            rows = slice(row, row + num_rows)
            found = one.submit(checkpoint.read, first, rows), other.submit(checkpoint.read, second, rows)
            here, there = (future.result() for future in found)
            bits = f"u{here.itemsize}"  # Numbers of 16 bits are slow to compare.
            if not np.array_equal(here.view(bits), there.view(bits)):
                return False
    return True


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path), overrides)
    return config_from_hf(read_json_object(path / CONFIG_FILE), path / CONFIG_FILE, overrides=overrides)
