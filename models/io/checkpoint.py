"""Reads tensors of a checkpoint by their Hugging Face names, a range of rows at a time.

Files are memory-mapped, so that only the returned rows take memory. All files of a safetensors directory are checked
when it is opened. A GGUF file is presented under Hugging Face names, with its rows in Hugging Face's order. This module
knows which tensors exist and where; `loading.py` checks whether they are what a model needs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from ..config import ModelConfig, config_from_gguf, config_from_hf
from ..errors import ModelLoadError
from .fields import Fields, read_json_object
from .gguf import GGUFFile, read_gguf

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)")
# Tensors that config_from_gguf reads: they are parts of the rotary embedding and not weights.
_GGUF_CONFIG_TENSORS = ("rope_freqs.weight",)


class Checkpoint(Protocol):
    """The tensors of one checkpoint, with the names and shapes that the model's Hugging Face class gives them."""

    path: Path
    """The directory or the file, which errors name."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors, including those that no model uses."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        ...

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return `rows` (without a step) of the first axis: safetensors in their own dtype, GGUF as float32.

        The array may be a read-only view of the file.
        """
        ...


def open_checkpoint(path: Path) -> tuple[ModelConfig, Checkpoint]:
    """Open a directory of safetensors with its config.json, or a GGUF file; only headers are read.

    If config.json names no dtype, the embedding's dtype is used, as in transformers. Raises ModelLoadError.
    """
    if not path.is_dir():
        file = read_gguf(path)
        config = config_from_gguf(file)
        return config, GGUFCheckpoint(file, config)
    data = read_json_object(path / "config.json")
    config = config_from_hf(data, path / "config.json")
    checkpoint = SafetensorsCheckpoint(path)
    embedding = "model.embed_tokens.weight"
    if not (data.get("dtype") or data.get("torch_dtype")) and embedding in checkpoint.names():
        config = dataclasses.replace(config, dtype=checkpoint.dtype(embedding))
    return config, checkpoint


def read_config(path: Path) -> ModelConfig:
    """Read the config of a directory or of a GGUF file, without its weights. Raises ModelLoadError."""
    if not path.is_dir():
        return config_from_gguf(read_gguf(path))
    return config_from_hf(read_json_object(path / "config.json"), path / "config.json")


class SafetensorsCheckpoint:
    """The safetensors of a directory: `model.safetensors`, or else the shards that its index names.

    If both exist, the single file is read, as in transformers. The constructor opens every file and compares every name
    with the index, so that a bad download is found before memory is allocated. Each ModelLoadError names the file.
    """

    def __init__(self, directory: Path):
        self.path = directory
        self._files: dict[str, Any] = {}
        self._file_names: dict[str, str] = {}
        index = None if (directory / SINGLE_FILE).is_file() else _read_index(directory)
        for file_name in [SINGLE_FILE] if index is None else sorted(set(index.values())):
            self._add(file_name)
        for name, file_name in (index or {}).items():
            if self._file_names.get(name) != file_name:
                found = self._file_names.get(name, "no shard")
                raise ModelLoadError(
                    f"{directory / INDEX_FILE}: places tensor {name!r} in {file_name}, it is in {found}; "
                    "index and shards belong to different checkpoints: fetch them again"
                )

    def names(self) -> Collection[str]:
        """Return the names of all tensors in all files."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return float32, bfloat16 or float16; raise ModelLoadError if the tensor is stored as anything else."""
        stored = self._files[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ModelLoadError(
                f"{self.path / self._file_names[name]}: tensor {name!r} is stored as {stored}, "
                f"{', '.join(_DTYPES)} are available in this version: take the unquantized checkpoint or a .gguf file"
            )
        return _DTYPES[stored]

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return `rows` of the first axis in the stored dtype."""
        self.dtype(name)
        part = self._files[name].get_slice(name)
        start, stop = _bounds(rows, part.get_shape()[0])
        return part[start:stop]

    def _add(self, file_name: str) -> None:
        # safetensors needs the bfloat16 that ml_dtypes registers with numpy.
        import ml_dtypes  # noqa: F401
        from safetensors import SafetensorError, safe_open

        path = self.path / file_name
        try:
            handle: Any = safe_open(path, "numpy")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: {_file_fault(path, error)}") from error
        for name in handle.keys():  # noqa: SIM118  (a safetensors handle is not a dict)
            if name in self._files:
                raise ModelLoadError(
                    f"{path}: tensor {name!r} is in {self._file_names[name]} too; wanted each tensor in one shard"
                )
            self._files[name], self._file_names[name] = handle, file_name


class GGUFCheckpoint:
    """A GGUF file under Hugging Face names, de-quantized to float32 as it is read.

    Files of the architecture `llama` store the rows of q and k with each head's two halves interleaved, for a rotary
    embedding that rotates neighbouring lanes. `read` maps the wanted rows to stored rows and reads only those. A tensor
    without a Hugging Face name keeps its own name.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self.file = file
        self.path = file.path
        self._head_size = config.head_size
        self._is_permuted = file.metadata["general.architecture"] == "llama"
        self._stored = {_hf_name(name): name for name in file.tensors if name not in _GGUF_CONFIG_TENSORS}

    def names(self) -> Collection[str]:
        """Return the names of all tensors except those that belong to the config."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return self.file.tensors[self._stored[name]].shape

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return `rows` of the first axis as float32, in Hugging Face's order."""
        stored, shape = self._stored[name], self.shape(name)
        start, stop = _bounds(rows, shape[0])
        wanted: slice | np.ndarray = slice(start, stop)
        if self._is_permuted and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
            wanted = self._stored_rows(np.arange(start, stop))
        try:
            # A vector is stored as one row.
            values = self.file.read_rows(stored, slice(None))[0] if len(shape) == 1 else None
            return self.file.read_rows(stored, wanted) if values is None else values[wanted]
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {stored!r} is stored as {self.file.tensors[stored].type_name}, which the "
                "gguf package does not de-quantize: take a file of another quantization"
            ) from error

    def _stored_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return where llama.cpp's converter stored each of `rows`: row (half, i) of a head is at 2 i + half."""
        head, row = np.divmod(rows, self._head_size)
        half, i = np.divmod(row, self._head_size // 2)
        return head * self._head_size + 2 * i + half


def _hf_name(gguf_name: str) -> str:
    match = _GGUF_LAYER.fullmatch(gguf_name)
    if match and match[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{match[1]}.{_GGUF_LAYER_NAMES[match[2]]}.{match[3]}"
    return _GGUF_NAMES.get(gguf_name, gguf_name)


def _bounds(rows: slice, num_rows: int) -> tuple[int, int]:
    start, stop, step = rows.indices(num_rows)
    if step != 1:
        raise ValueError(f"rows {rows}: wanted a range without a step")
    return start, max(start, stop)


def _read_index(directory: Path) -> dict[str, str]:
    """Return the file name of each tensor.

    Raises ModelLoadError if there is no index, or if it names a file that is missing or outside of `directory`.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        raise ModelLoadError(f"{directory}: {_missing_weights(directory)}")
    weight_map = Fields(read_json_object(path), path).mapping("weight_map").data
    if not weight_map:
        raise ModelLoadError(f"{path}: weight_map is empty or missing, wanted the file of each tensor: fetch it again")
    for name, file_name in weight_map.items():
        is_plain = isinstance(file_name, str) and PurePosixPath(file_name).name == file_name and "\\" not in file_name
        if not is_plain or not file_name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: places tensor {name!r} in {file_name!r}, wanted the name of a .safetensors file beside it"
            )
    for file_name in sorted(set(weight_map.values())):
        if not (directory / file_name).is_file():
            raise ModelLoadError(f"{path}: names {file_name}, which is not in the directory: fetch it again")
    return dict(weight_map)


def _missing_weights(directory: Path) -> str:
    """Return what a directory without readable safetensors holds instead, and the way out."""
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    wanted = f"wanted {SINGLE_FILE} or {INDEX_FILE}"
    for name in names:
        if name.endswith(".gguf"):
            return f"holds no safetensors, {wanted}; there is a GGUF file, give that: {directory / name}"
    for name in names:
        if name.endswith(PICKLED_SUFFIXES):
            return f"holds pickled weights only ({name}), which may run code and are never read; {wanted}: convert it"
    for name in names:
        if name.endswith(".safetensors"):
            return f"holds {name} but {wanted}: fetch what is missing, or rename it if it is the whole model"
    return f"holds no weights, {wanted}: fetch it again"


def _file_fault(path: Path, error: Exception) -> str:
    """Return why safetensors cannot read a file, and the way out."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as os_error:
        return f"cannot be read ({os_error.strerror})"
    if not head:
        return "is empty: fetch it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a git-LFS pointer, not the weights: run `git lfs pull` in its directory"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "is an HTML page, not the weights: fetch it again"
    reason = " ".join(str(error).split())
    return f"is not a complete safetensors file ({reason}): fetch it again"
