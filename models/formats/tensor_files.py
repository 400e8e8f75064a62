"""The tensors in the safetensors of a directory, as they are stored: names, shapes, dtypes, and blocks of values.

This module knows the files, and neither which tensors belong together nor what their values mean.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import ml_dtypes
import numpy as np

from ..errors import ModelLoadError
from ..fields import Fields, read_json_object
from .files import INDEX_FILE, SINGLE_FILE

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "F8_E4M3": "u1", "BOOL": "?",
    "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1",
}  # fmt: skip
"""Dtypes, as headers name them → numpy's, of those that are read; 8-bit floats are read as bytes."""


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor lies in its file, and what the header says about it."""

    file_name: str
    data: mmap.mmap
    """The memory map of the file."""
    offset: int
    """The tensor's first byte in the file."""
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def values(self) -> np.ndarray:
        """Return the whole tensor as a view of the file."""
        # Files are little-endian, and so is every platform of JAX.
        return np.ndarray(self.shape, DTYPES[self.dtype], self.data, self.offset)

    def release(self, rows: slice) -> None:
        """Let the system take back the memory of rows which have been read; it reads them anew when asked."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start, stop, _ = rows.indices(self.shape[0])
        begin, end = (self.offset + row * self.values.strides[0] for row in (start, stop))
        first_page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self.data.madvise(mmap.MADV_DONTNEED, first_page, end - first_page)


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
        self._tensors: dict[str, _StoredTensor] = {}
        # The index maps each tensor to its file. A single file has none, so there is nothing to compare below.
        index = None if (directory / SINGLE_FILE).is_file() else _read_index(directory)
        for file_name in [SINGLE_FILE] if index is None else sorted(set(index.values())):
            self._add(file_name)
        for name, file_name in (index or {}).items():
            found = self._tensors[name].file_name if name in self._tensors else "no shard"
            if found != file_name:
                fault = f"places tensor {name!r} in {file_name}, it is in {found}"
                reason = "index and shards belong to different checkpoints"
                raise ModelLoadError(f"{directory / INDEX_FILE}: {fault}; {reason}: fetch them again")

    def names(self) -> Collection[str]:
        """Return the names of all tensors in all files."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the tensor's dtype as headers name it, such as F32 or I32."""
        return self._tensors[name].dtype

    def file(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self.path / self._tensors[name].file_name

    def read(self, name: str, *axes: slice) -> np.ndarray:
        """Return a copy of a block of a tensor: the slices, without steps, of its first axes. 8-bit floats give uint8.

        The system may take back the pages of the file that lie in memory then, so that only the copy stays. Blocks of
        columns share these pages: they are given back with the block that has the last column.
        """
        tensor = self._tensors[name]
        values: np.ndarray = tensor.values[axes].copy()
        width = tensor.shape[len(axes) - 1] if axes else 0
        has_last_column = len(axes) < 2 or axes[-1].indices(width)[1] == width
        if tensor.shape and has_last_column:
            tensor.release(axes[0] if axes else slice(None))
        return values

    def files(self) -> list[Path]:
        """Return the files that hold tensors, and the index that names them if it is read."""
        names = sorted({tensor.file_name for tensor in self._tensors.values()})
        return [self.path / name for name in (names if SINGLE_FILE in names else [INDEX_FILE, *names])]

    def fault(self, name: str, clause: str) -> ModelLoadError:
        """Return (do not raise) an error about a tensor, which names its file."""
        return ModelLoadError(f"{self.file(name)}: tensor {name!r} {clause}")

    def _add(self, file_name: str) -> None:
        """Open a file of the directory and note its tensors. Raises ModelLoadError if it cannot be read, or if it has a
        tensor that another file has, too."""
        from safetensors import SafetensorError, safe_open

        path = self.path / file_name
        try:
            with safe_open(path, "numpy"):
                pass  # It has compared the header with the size of the file.
            tensors = _map_tensors(path)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: {_file_fault(path, error)}") from error
        for name in tensors:
            if name in self._tensors:
                fault = f"tensor {name!r} is in {self._tensors[name].file_name} too"
                raise ModelLoadError(f"{path}: {fault}; wanted each tensor in one shard")
        self._tensors |= tensors


def _map_tensors(path: Path) -> dict[str, _StoredTensor]:
    """Return the tensors of a safetensors file by name, with a memory map of the file.

    The safetensors package must have opened the file before: it has checked the header, so it is not checked here.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # A file begins with the length of its header in 8 bytes, then the JSON header; offsets count from its end.
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: _StoredTensor(path.name, data, start + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_index(directory: Path) -> dict[str, str]:
    """Return tensor → file name from the index of a checkpoint in several files.

    The index is a JSON object whose `weight_map` has this mapping. File names come from a download, so each must be the
    plain name of a .safetensors file in `directory`, without a folder. Raises ModelLoadError for any other name, for a
    file that is missing, and if there is no index or it is empty.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        raise ModelLoadError(f"{directory}: {_missing_weights(directory)}")
    weight_map = Fields(read_json_object(path), path, way_out="fetch it again").mapping("weight_map").data
    if not weight_map:
        raise ModelLoadError(f"{path}: weight_map is empty or missing, wanted the file of each tensor: fetch it again")
    for name, file_name in weight_map.items():
        is_plain = isinstance(file_name, str) and PurePosixPath(file_name).name == file_name and "\\" not in file_name
        if not is_plain or not file_name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: places tensor {name!r} in {file_name!r}, wanted the name of a .safetensors file beside it: "
                "fetch it again"
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
