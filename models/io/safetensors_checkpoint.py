"""Reads the safetensors of a directory by the names of their tensors, a block of rows and columns at a time.

Files are memory-mapped, so that only what is returned takes memory. All files are checked when the directory is opened.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import ModelLoadError
from .checkpoint import WHOLE, bounds_of
from .fields import Fields, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


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

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis, and `columns` of the second of a matrix, in the stored dtype."""
        self.dtype(name)
        part = self._files[name].get_slice(name)
        shape = part.get_shape()
        axes = tuple(slice(*bounds_of(*pair)) for pair in zip((rows, columns), shape, strict=False))
        values: np.ndarray = part[axes]
        return values

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
