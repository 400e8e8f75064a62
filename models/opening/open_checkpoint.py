"""Opens a model's config and checkpoint, of any format; only headers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config.decoder import DecoderConfig
from ..errors import ModelLoadError
from ..families.table import family_class
from ..fields import Fields, read_json_object
from ..formats.checkpoint import Checkpoint, Subtree, are_equal
from ..formats.files import CONFIG_FILE, TREE_FILE
from ..formats.gguf import read_gguf
from ..formats.orbax_checkpoint import OrbaxCheckpoint
from ..formats.quantization import read_quantization
from ..formats.safetensors_checkpoint import SafetensorsCheckpoint
from ..formats.tree_checkpoint import TreeCheckpoint
from ..weights.subtree import ambiguity_message, model_prefixes
from .gguf_checkpoint import GGUFCheckpoint
from .gguf_config import config_from_gguf
from .page_scales import WithoutPageScales, is_page_scale
from .reading import config_from_hf


def open_checkpoint(
    path: Path,
    *,
    orbax: Path | None = None,
    params: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[DecoderConfig, Checkpoint]:
    """Open a directory with config.json and safetensors, or a GGUF file, and return its config and its tensors.

    With `orbax` the weights come from that folder of orbax, and with `params` from that tree of arrays; they may be in
    a subtree, such as `params` of a whole training state, or in one of several folders within that of orbax. The config
    is still that of `path`. `overrides` replace values of config.json. Only headers are read, except where tied
    matrices are compared.

    A GGUF file with `params` gives only the config, and the tree the weights. As in transformers, the embedding's dtype
    counts if config.json names none. An output matrix that config.json ties to the embedding is not tied if both are
    stored and differ; either of the two may be stored alone. Raises ModelLoadError for files that are missing, damaged
    or not supported; names and shapes of tensors are checked later, by `check_tensors`.
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
            checkpoint = _model_in_orbax(orbax, config)
        else:
            checkpoint = SafetensorsCheckpoint(path, read_quantization(Fields(config.source, path / CONFIG_FILE)))
            if any(map(is_page_scale, checkpoint.names())):
                checkpoint = WithoutPageScales(checkpoint)
    return _as_stored(config, checkpoint), checkpoint


def _as_stored(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """Return the config, corrected by what the checkpoint stores.

    The embedding's dtype becomes the config's if config.json names none. A model that config.json ties becomes untied
    if the checkpoint stores both the embedding and the head, and they differ; their values are read to compare them.
    Nothing changes if the embedding is missing.
    """
    model, names = family_class(config.architecture), checkpoint.names()
    stored_name = model.naming(names, is_tied=config.tie_word_embeddings)
    embedding, head = model.embedding_and_head(stored_name)
    if embedding not in names:
        return config  # `check_tensors` reports the missing embedding later.
    if not (config.source.get("dtype") or config.source.get("torch_dtype")):
        config = replace(config, dtype=checkpoint.dtype(embedding))
    is_stored_twice = config.tie_word_embeddings and head in names and head != embedding
    if is_stored_twice and not _have_equal_bits(checkpoint, embedding, head):
        config = replace(config, tie_word_embeddings=False, has_head_though_tied=True)
    return config


def _model_in_orbax(folder: Path, config: DecoderConfig) -> Checkpoint:
    """Return the tensors of the model in an orbax folder, or in the one of several orbax folders in it that has them.

    A checkpoint manager may save each part of a training state in a folder of its own: "params", "opt_state". These
    count as subtrees of one tree, whose first keys are the names of the folders. Raises ModelLoadError if not exactly
    one subtree may be the model's.
    """
    if (folder / TREE_FILE).is_file():
        return _model_tree(OrbaxCheckpoint(folder), config)
    items = {path.parent.name: OrbaxCheckpoint(path.parent) for path in sorted(folder.glob(f"*/{TREE_FILE}"))}
    prefixes = model_prefixes([f"{item}.{name}" for item, tree in items.items() for name in tree.names()], config)
    if len(prefixes) != 1:
        wanted = ambiguity_message(prefixes) if prefixes else f"none of {', '.join(items)} holds tensors of the model"
        raise ModelLoadError(f"{folder}: {wanted}: give one of the folders")
    (prefix,) = prefixes
    item = max((item for item in items if prefix.startswith(f"{item}.")), key=len)
    inner = prefix.removeprefix(f"{item}.")
    return Subtree(items[item], inner) if inner else items[item]


def _model_tree(checkpoint: Checkpoint, config: DecoderConfig) -> Checkpoint:
    """Return the subtree of a checkpoint that holds the model's tensors.

    A training state may hold them under a prefix, such as "params.", and the result has names without it. Returns the
    checkpoint itself if its tensors have no prefix. It also does so if no subtree or several fit; `check_tensors`
    reports that later.
    """
    prefixes = model_prefixes(checkpoint.names(), config)
    return Subtree(checkpoint, prefixes[0]) if len(prefixes) == 1 else checkpoint


def _have_equal_bits(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return whether the tensors named `first` and `second` have the same shape and the same bits.

    They are the embedding and the head of a model that config.json ties: if they differ, the model is not tied. If
    their dtypes differ, both are compared as float32. Only values of matrices [V, D] are read. Tensors of equal shapes
    that are no matrices count as equal, since no model takes them: `check_tensors` reports them later.
    """
    shape = checkpoint.shape(first)
    if checkpoint.shape(second) != shape:
        return False
    # Two axes make a matrix; `are_equal` compares nothing else.
    return len(shape) != 2 or are_equal(checkpoint, first, second, _bits)


def _bits(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of two arrays as unsigned integers; both become float32 first if their dtypes differ.

    numpy compares 16-bit integers faster than 16-bit floats. Compared by bits, a NaN equals the same NaN, and 0 differs
    from −0. Example: bfloat16 arrays are viewed as uint16, and float32 arrays as uint32.
    """
    if first.dtype != second.dtype:
        first, second = first.astype(np.float32), second.astype(np.float32)
    return first.view(f"u{first.itemsize}"), second.view(f"u{second.itemsize}")


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path), overrides)
    return config_from_hf(read_json_object(path / CONFIG_FILE), path / CONFIG_FILE, overrides=overrides)
