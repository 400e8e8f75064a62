"""Reads GGUF files: the header with numpy and `struct`, tensor data by memory map and the `gguf` package.

The header is parsed here rather than by `gguf.GGUFReader`, which takes 2.2 s for the 98,000 strings of
a 49k vocabulary (0.1 s here) and does not hold a declared offset against the size of the file.
Knows the file format and tensor bytes; not what any tensor means.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
VALUES_AT_ONCE = 1 << 17
"""That are de-quantized together: they stay in a cache."""
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` is slowest axis first, as numpy has it; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file: its metadata, and tensors whose rows are read on demand from a memory map."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def read_rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """De-quantize `rows` of a tensor seen as [num_rows, last axis] to float32."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, tensor.size_bytes, tensor.offset)
        picked = raw.reshape(tensor.num_rows, tensor.row_bytes)[rows]
        kind = GGMLQuantizationType[tensor.type_name]
        if kind == GGMLQuantizationType.F32:
            return picked.view(np.float32)
        if kind == GGMLQuantizationType.F16:
            return picked.view(np.float16).astype(np.float32)
        num_values = tensor.shape[-1]
        found = np.empty((len(picked), num_values), np.float32)
        # As one row each: gguf takes sixteen rows at once, and most of its time to take them.
        at_once = max(1, VALUES_AT_ONCE // num_values)
        for start in range(0, len(picked), at_once):
            some = picked[start : start + at_once]
            found[start : start + at_once] = dequantize(some.reshape(1, -1), kind).reshape(-1, num_values)
        return found


_LENGTH = struct.Struct("<Q")


class _Cursor:
    """Walks the header; every step is held against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def take(self, num_bytes: int) -> int:
        """Advance by `num_bytes` and return where they start."""
        start, end = self.at, self.at + num_bytes
        if num_bytes < 0 or end > len(self.data):
            raise ModelLoadError(
                f"{self.path}: the header needs {num_bytes} bytes at offset {start}, the file has {len(self.data)}; "
                "it is truncated or not GGUF: fetch it again"
            )
        self.at = end
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        # A vocabulary may hold tokens that are no UTF-8 by themselves.
        return self.data[start : start + length].decode("utf-8", errors="surrogateescape")

    def strings(self, count: int) -> list[str]:
        """So many, one after the other: a vocabulary has a hundred thousand."""
        data, end, found = self.data, len(self.data), []
        for _ in range(count):
            start = self.at + 8
            self.at = start + (_LENGTH.unpack_from(data, self.at)[0] if start <= end else 0)
            if self.at > end:
                self.take(1)
            found.append(data[start : self.at].decode("utf-8", errors="surrogateescape"))
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if item_kind in _SCALARS:
                dtype = np.dtype(_SCALARS[item_kind]).newbyteorder("<")
                return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()
            if item_kind == _STRING and count * 8 <= len(self.data) - self.at:
                return self.strings(count)
            raise ModelLoadError(f"{self.path}: {count} array items of type {item_kind} in the metadata cannot be read")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise ModelLoadError(f"{self.path}: metadata value of unknown type {kind}; known are 0 to 12")


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of `path` and check that every tensor lies inside the file.

    Raises ModelLoadError, naming the file, for anything that is not a whole little-endian GGUF 2 or 3.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as GGUF ({error})") from error
    if data[:4] != MAGIC:
        raise ModelLoadError(f"{path}: starts with {data[:16]!r}, a GGUF file starts with {MAGIC!r}")
    cursor = _Cursor(data, path)
    cursor.take(4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelLoadError(f"{path}: GGUF version {version}; versions {VERSIONS} in little-endian order are read")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    declared = [_declared_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path}: general.alignment is {alignment!r}, wanted a positive integer")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in declared:
        tensor = _placed_tensor(path, name, shape, kind, start + offset)
        if name in tensors:
            raise ModelLoadError(f"{path}: tensor {name!r} is declared twice")
        if tensor.offset + tensor.size_bytes > len(data):
            raise ModelLoadError(
                f"{path}: tensor {name!r} ends at byte {tensor.offset + tensor.size_bytes}, the file has {len(data)}; "
                "it is truncated: fetch it again"
            )
        tensors[name] = tensor
    return GGUFFile(path, metadata, tensors, data)


def _declared_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.string(), cursor.scalar("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelLoadError(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions, allowed are 1 to {MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _placed_tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        quantization = GGMLQuantizationType(kind)
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    except (ValueError, KeyError) as error:
        raise ModelLoadError(f"{path}: tensor {name!r} is stored in unknown type {kind}") from error
    if shape[-1] % block_size:
        raise ModelLoadError(
            f"{path}: rows of {name!r} have {shape[-1]} values, {quantization.name} needs {block_size}s"
        )
    return GGUFTensor(name, shape, quantization.name, offset, shape[-1] // block_size * block_bytes)
