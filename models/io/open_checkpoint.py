"""Opens a model's config and checkpoint, of any format; only headers are read."""

from __future__ import annotations

import re
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
from ..errors import ModelLoadError
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
PARAMS_KEY = "params"
"""What training states call the weights themselves."""
DERIVED_TREES = frozenset({"opt", "optimizer", "mu", "nu", "momentum", "ema", "avg", "grads", "gradients"})
"""Words, in the keys of a training state, for trees that have the shape of the weights and are not the weights."""


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
    embedding, head = (stored_name(f"{model.tensor_names[module]}.weight") for module in ("embed", "head"))
    if embedding not in names:
        return config  # `check_tensors` says so.
    if not (config.source.get("dtype") or config.source.get("torch_dtype")):
        config = replace(config, dtype=checkpoint.dtype(embedding))
    is_stored_twice = config.tie_word_embeddings and head in names and head != embedding
    if is_stored_twice and not _are_equal(checkpoint, embedding, head):
        config = replace(config, tie_word_embeddings=False, has_head_though_tied=True)
    return config


def _model_tree(checkpoint: Checkpoint, config: DecoderConfig) -> Checkpoint:
    """Return the subtree that holds the model's tensors, or the checkpoint itself; see `model_prefix`."""
    prefix = model_prefix(checkpoint.names(), config, str(checkpoint.path))
    return Subtree(checkpoint, prefix) if prefix else checkpoint


def model_prefix(names: Collection[str], config: DecoderConfig, path: str) -> str:
    """Return what stands before the names of the model's tensors in a tree: `params.` in a whole training state.

    Nothing stands there in a tree that holds them without a prefix, or not at all. A subtree is known by its embedding
    and its last norm. Raises ModelLoadError, which names `path`, if several may be meant; see `the_prefix`.
    """
    model = model_class(config.architecture)
    bases = *model.other_bases, model.base
    found: dict[str, None] = {}
    # A tied model may lack its embedding, and any subtree may lack something: what is missing is said later. A norm
    # without a base may be another model's.
    for module, own_bases in ("embed", (*bases, "")), ("norm", bases), ("norm", ("",)):
        anchor = f"{model.tensor_names[module]}.weight"
        if model.naming(names)(anchor) in names:
            return ""
        if found and own_bases == ("",):
            break
        ends = [base + anchor.removeprefix(model.base) for base in own_bases]
        for name in names:
            if (end := next((end for end in ends if name.endswith(f".{end}")), None)) is not None:
                found[name.removesuffix(end)] = None
    return the_prefix(found, path) if found else ""


def the_prefix(prefixes: Collection[str], path: str) -> str:
    """Return which of these prefixes of equal subtrees is the model's, and not an average or an optimizer's.

    That is the one on the highest level, and of those on one level the one that is called `params` where they differ.
    Raises ModelLoadError if several are left.
    """
    kept = [one for one in prefixes if DERIVED_TREES.isdisjoint(re.split(r"[._]", one.lower()))] or list(prefixes)
    level = min(prefix.count(".") for prefix in kept)
    kept = [prefix for prefix in kept if prefix.count(".") == level]
    for keys in zip(*(prefix.split(".") for prefix in kept), strict=True):
        if len(set(keys)) > 1:
            named = [prefix for prefix, key in zip(kept, keys, strict=True) if key == PARAMS_KEY]
            kept = named if len(named) == 1 else kept
            break
    if len(kept) > 1:
        subtrees = ", ".join(sorted(prefix.removesuffix(".") for prefix in kept))
        raise ModelLoadError(
            f"{path}: {len(kept)} subtrees hold the tensors of the model, {subtrees}, allowed: one, or one called "
            f"{PARAMS_KEY} beside them; give that subtree alone"
        )
    return kept[0]


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return whether two tensors have the same shape and bits, as float32 if their dtypes differ.

    Values of matrices alone are compared.
    """
    shape = checkpoint.shape(first)
    if checkpoint.shape(second) != shape:
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
            if here.dtype != there.dtype:
                here, there = here.astype(np.float32), there.astype(np.float32)
            bits = f"u{here.itemsize}"  # Numbers of 16 bits are slow to compare.
            if not np.array_equal(here.view(bits), there.view(bits)):
                return False
    return True


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path), overrides)
    return config_from_hf(read_json_object(path / CONFIG_FILE), path / CONFIG_FILE, overrides=overrides)
