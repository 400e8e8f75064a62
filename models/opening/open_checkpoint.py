"""Opens a model's config and checkpoint, of any format; only headers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config.decoder import DecoderConfig
from ..families.table import model_class
from ..fields import Fields, read_json_object
from ..formats.checkpoint import Checkpoint, Subtree, are_equal
from ..formats.files import CONFIG_FILE
from ..formats.gguf import read_gguf
from ..formats.orbax_checkpoint import OrbaxCheckpoint
from ..formats.quantization import read_quantization
from ..formats.safetensors_checkpoint import SafetensorsCheckpoint
from ..formats.tree_checkpoint import TreeCheckpoint
from ..weights.subtree import model_prefixes
from .gguf_checkpoint import GGUFCheckpoint
from .gguf_config import config_from_gguf
from .reading import config_from_hf


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
    read, and either of them may be stored alone. Raises ModelLoadError.
    """
    checkpoint: Checkpoint
    if not path.is_dir() and params is None:
        file = read_gguf(path)
        config = config_from_gguf(file, overrides)
        checkpoint = GGUFCheckpoint(file, config)
    else:
        config = read_config(path, overrides)
        if params is not None:
            checkpoint = _model_tree(TreeCheckpoint(params), config)
        elif orbax is not None:
            checkpoint = _model_tree(OrbaxCheckpoint(orbax), config)
        else:
            checkpoint = SafetensorsCheckpoint(path, read_quantization(Fields(config.source, path / CONFIG_FILE)))
    return _as_stored(config, checkpoint), checkpoint


def _as_stored(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """Return the config with the dtype of the checkpoint where it names none, and untied where two matrices differ."""
    model, names = model_class(config.architecture), checkpoint.names()
    stored_name = model.naming(names, is_tied=config.tie_word_embeddings)
    embedding, head = model.embedding_and_head(stored_name)
    if embedding not in names:
        return config  # `check_tensors` says so.
    if not (config.source.get("dtype") or config.source.get("torch_dtype")):
        config = replace(config, dtype=checkpoint.dtype(embedding))
    is_stored_twice = config.tie_word_embeddings and head in names and head != embedding
    if is_stored_twice and not _have_equal_bits(checkpoint, embedding, head):
        config = replace(config, tie_word_embeddings=False, has_head_though_tied=True)
    return config


def _model_tree(checkpoint: Checkpoint, config: DecoderConfig) -> Checkpoint:
    """Return the subtree that holds the model's tensors; the checkpoint itself if there is none, or several.

    `check_tensors` then says so.
    """
    prefixes = model_prefixes(checkpoint.names(), config)
    return Subtree(checkpoint, prefixes[0]) if len(prefixes) == 1 else checkpoint


def _have_equal_bits(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return whether two tensors have the same shape and bits, as float32 if their dtypes differ.

    Values of matrices alone are compared.
    """
    shape = checkpoint.shape(first)
    if checkpoint.shape(second) != shape:
        return False
    return len(shape) != 2 or are_equal(checkpoint, first, second, _bits)  # `check_tensors` refuses another shape.


def _bits(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers as integers of their bits; those of 16 bits are slow to compare as they are."""
    if first.dtype != second.dtype:
        first, second = first.astype(np.float32), second.astype(np.float32)
    return first.view(f"u{first.itemsize}"), second.view(f"u{second.itemsize}")


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path), overrides)
    return config_from_hf(read_json_object(path / CONFIG_FILE), path / CONFIG_FILE, overrides=overrides)
