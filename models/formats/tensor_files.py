"""The tensors in the safetensors of a directory, as they are stored: names, shapes, dtypes, and blocks of values.

This module knows the files, and neither which tensors belong together nor what their values mean.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import ModelLoadError
from ..fields import Fields, read_json_object
from .files import INDEX_FILE, SINGLE_FILE

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
AS_BYTES = ("F8_E4M3",)
"""Dtypes, as headers name them, that the safetensors package does not give numpy: their bytes are read instead."""


class TensorFiles:
    """The safetensors of a directory: `model.safetensors`, or else the shards that its index names.

    If both exist, the single file is read, as in transformers. The constructor opens every file and compares every name
    with the index, so that a bad download is found before memory is allocated. Each ModelLoadError names the file.
    """

    def __init__(self, directory: Path):
        """Open all files of the directory; no values are read.

        Raises ModelLoadError if a file is missing or damaged, and if the index places a tensor in another file than the
        one that has it.
        """
        self.path = directory
        self._handles: dict[str, Any] = {}
        """Tensor → the open file that holds it."""
        self._file_names: dict[str, str] = {}
        """Tensor → the name of its file."""
        self._bytes: dict[str, np.ndarray] = {}
        """Tensor of a dtype in AS_BYTES → its bytes, uint8 of its shape, as a view of a memory map of its file."""
        # The index maps each tensor to its file. A single file has none, so there is nothing to compare below.
        index = None if (directory / SINGLE_FILE).is_file() else _read_index(directory)
        for file_name in [SINGLE_FILE] if index is None else sorted(set(index.values())):
            self._add(file_name)
        for name, file_name in (index or {}).items():
            if self._file_names.get(name) != file_name:
                found = self._file_names.get(name, "no shard")
                fault = f"places tensor {name!r} in {file_name}, it is in {found}"
                reason = "index and shards belong to different checkpoints"
                raise ModelLoadError(f"{directory / INDEX_FILE}: {fault}; {reason}: fetch them again")

    def names(self) -> Collection[str]:
        """Return the names of all tensors in all files."""
        return self._handles.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the tensor's dtype as headers name it, such as F32 or I32."""
        return str(self._handles[name].get_slice(name).get_dtype())

    def file(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self.path / self._file_names[name]

    def read(self, name: str, *axes: slice) -> np.ndarray:
        """Return a block of a tensor: the slices, without steps, of its first axes. Those of AS_BYTES give uint8."""
        source = self._bytes[name] if name in self._bytes else self._handles[name].get_slice(name)
        values: np.ndarray = source[axes]
        return values

    def files(self) -> list[Path]:
        """Return the files that hold tensors, and the index that names them if it is read."""
        names = sorted(set(self._file_names.values()))
        return [self.path / name for name in (names if SINGLE_FILE in names else [INDEX_FILE, *names])]

    def fault(self, name: str, clause: str) -> ModelLoadError:
        """Return (do not raise) an error about a tensor, which names its file."""
        return ModelLoadError(f"{self.file(name)}: tensor {name!r} {clause}")

    def _add(self, file_name: str) -> None:
        """Open a file of the directory and note its tensors. Raises ModelLoadError if it cannot be read, or if it has a
        tensor that another file has, too."""
        # safetensors needs the bfloat16 that ml_dtypes registers with numpy.
        import ml_dtypes  # noqa: F401
        from safetensors import SafetensorError, safe_open

        path = self.path / file_name
        try:
            handle: Any = safe_open(path, "numpy")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: {_file_fault(path, error)}") from error
        names = list(handle.keys())
        for name in names:
            if name in self._handles:
                fault = f"tensor {name!r} is in {self._file_names[name]} too"
                raise ModelLoadError(f"{path}: {fault}; wanted each tensor in one shard")
            self._handles[name], self._file_names[name] = handle, file_name
        if any(self.dtype(name) in AS_BYTES for name in names):
            self._bytes |= _map_bytes(path)


def _map_bytes(path: Path) -> dict[str, np.ndarray]:
    """Return the bytes of all tensors of a safetensors file whose dtypes are in AS_BYTES, by name.

    Each is a uint8 view of a memory map, with the tensor's shape. The safetensors package must have opened the file
    before: it has checked the offsets in the header, so they are not checked here.
    """
    # A file begins with the length of its header in 8 bytes, then the JSON header; offsets count from its end.
    data = np.memmap(path, np.uint8, "r")
    header_bytes = int(data[:8].view("<u8")[0])
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    mapped = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in AS_BYTES:
            start, stop = (8 + header_bytes + offset for offset in entry["data_offsets"])
            mapped[name] = data[start:stop].reshape(entry["shape"])
    return mapped


def _read_index(directory: Path) -> dict[str, str]:
    """Return tensor → file name from the index of a checkpoint in several files.

    The index is a JSON object whose `weight_map` has this mapping. File names come from a download, so each must be the
    plain name of a .safetensors file in `directory`, without a folder. Raises ModelLoadError for any other name, for a
    file that is missing, and if there is no index or it is empty.
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
    """Return, as a clause for an error, what a directory without safetensors holds instead, and what to do.

    The first of these that is there decides: a GGUF file, pickled weights, a safetensors file of another name.
    `directory` may also be missing, or be a file; then it holds no weights.
    """
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    wanted = f"wanted {SINGLE_FILE} or {INDEX_FILE}"
    gguf, pickled, other = (
        next((name for name in names if name.endswith(suffixes)), None)
        for suffixes in (".gguf", PICKLED_SUFFIXES, ".safetensors")
    )
    if gguf:
        return f"holds no safetensors, {wanted}; there is a GGUF file, give that: {directory / gguf}"
    if pickled:
        return f"holds pickled weights only ({pickled}), which may run code and are never read; {wanted}: convert it"
    if other:
        return f"holds {other} but {wanted}: fetch what is missing, or rename it if it is the whole model"
    return f"holds no weights, {wanted}: fetch it again"


def _file_fault(path: Path, error: Exception) -> str:
    """Return, as a clause for an error, why safetensors cannot read a file, and what to do.

    Typical bad downloads are recognised by the file's first bytes: an empty file, a pointer of git-LFS in place of the
    weights, and an HTML page, such as a login page. Otherwise `error`, the package's own, is quoted.
    """
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
