"""Opens a model's config and checkpoint, of any format; only headers are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config.decoder import DecoderConfig
from ..config.gguf import config_from_gguf
from ..config.reading import config_from_hf
from .checkpoint import Checkpoint
from .fields import read_json_object
from .gguf import read_gguf
from .gguf_checkpoint import GGUFCheckpoint
from .safetensors_checkpoint import SafetensorsCheckpoint

CONFIG_FILE = "config.json"
EMBEDDING = "model.embed_tokens.weight"


def open_checkpoint(path: Path) -> tuple[DecoderConfig, Checkpoint]:
    """Open a directory of safetensors with its config.json, or a GGUF file; only headers are read.

    If config.json names no dtype, the embedding's dtype is used, as in transformers. Raises ModelLoadError.
    """
    if not path.is_dir():
        file = read_gguf(path)
        config = config_from_gguf(file)
        return config, GGUFCheckpoint(file, config)
    config, checkpoint = read_config(path), SafetensorsCheckpoint(path)
    if not (config.source.get("dtype") or config.source.get("torch_dtype")) and EMBEDDING in checkpoint.names():
        config = replace(config, dtype=checkpoint.dtype(EMBEDDING))
    return config, checkpoint


def read_config(path: Path) -> DecoderConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path))
    return config_from_hf(read_json_object(path / CONFIG_FILE), path / CONFIG_FILE)
