"""Opens a model's config and checkpoint, of any format; only headers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.decoder import DecoderConfig
from ..config.gguf import config_from_gguf
from ..config.quantization import read_quantization
from ..config.reading import config_from_hf
from ..families.table import model_class
from .checkpoint import Checkpoint
from .fields import Fields, read_json_object
from .files import CONFIG_FILE
from .gguf import read_gguf
from .gguf_checkpoint import GGUFCheckpoint
from .orbax_checkpoint import OrbaxCheckpoint
from .safetensors_checkpoint import SafetensorsCheckpoint
from .tree_checkpoint import TreeCheckpoint


def open_checkpoint(
    path: Path,
    *,
    orbax: Path | None = None,
    params: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[DecoderConfig, Checkpoint]:
    """Open a directory with config.json and safetensors, or a GGUF file; only headers are read.

    With `orbax` the weights are in that folder of orbax, with `params` in that tree of arrays; the config is that of
    `path` all the same, with `overrides` as in `config_from_hf`. If config.json names no dtype, the embedding's dtype
    is used, as in transformers. Raises ModelLoadError.
    """
    if not path.is_dir() and params is None:
        file = read_gguf(path)
        config = config_from_gguf(file, overrides)
        return config, GGUFCheckpoint(file, config)
    config = read_config(path, overrides)
    checkpoint: SafetensorsCheckpoint | OrbaxCheckpoint | TreeCheckpoint
    if params is not None:
        checkpoint = TreeCheckpoint(params)
    elif orbax is not None:
        checkpoint = OrbaxCheckpoint(orbax)
    else:
        checkpoint = SafetensorsCheckpoint(path, read_quantization(Fields(config.source, path / CONFIG_FILE)))
    embedding = f"{model_class(config.architecture).tensor_names['embed']}.weight"
    if not (config.source.get("dtype") or config.source.get("torch_dtype")) and embedding in checkpoint.names():
        config = replace(config, dtype=checkpoint.dtype(embedding))
    return config, checkpoint


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path), overrides)
    return config_from_hf(read_json_object(path / CONFIG_FILE), path / CONFIG_FILE, overrides=overrides)
