"""Reads GGUF files: the header with numpy and `struct`, tensor data by memory map and the `gguf` package.

The header is parsed here rather than by `gguf.GGUFReader`, which takes 2.2 s for the 98,000 strings of a vocabulary of
49,152 tokens (0.05 s here) and does not compare declared offsets with the size of the file. This module knows the file
format and the bytes of tensors, and not what a tensor means.

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

from ..errors import ModelLoadError
from ..fields import Fields
from .gguf_types import STORED_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEQUANTIZE_CHUNK_LEN = 1 << 17
"""Values that are de-quantized in one call, few enough to stay in a processor's cache."""
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. `shape` lists the slowest axis first, as numpy does; `offset` is in bytes from the start of `data`,
    the memory map of its file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int
    data: mmap.mmap

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file: its metadata, and its tensors, whose rows are read from memory maps when needed."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    paths: tuple[Path, ...]
    """The file itself, or all parts of a split one."""

    def drop_metadata(self) -> None:
        """Free the metadata, of which a vocabulary and its merges take 10 to 50 MB, once all of it has been read."""
        self.metadata.clear()

    def read_rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Return `rows` of a tensor as float32 [rows, last axis], de-quantized.

        `rows` is a slice or an array of row numbers. All axes but the last are counted as rows, and a vector is one
        row. A tensor of float32 is returned as a read-only view of the file if `rows` is a slice. Raises
        NotImplementedError for a quantization that the gguf package cannot read, also if there are no rows.
        """
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        stored = self.stored_rows(name, rows)
        kind = GGMLQuantizationType[tensor.type_name]
        if kind == GGMLQuantizationType.F32:
            return stored.view(np.float32)
        if kind == GGMLQuantizationType.F16:
            return stored.view(np.float16).astype(np.float32)
        row_len = tensor.shape[-1]
        values = np.empty((len(stored), row_len), np.float32)
        if len(stored) == 0:
            # The loop below has nothing to do, but a type that cannot be read is to raise all the same.
            dequantize(np.zeros((1, tensor.row_bytes), np.uint8), kind)
        # The gguf package works in groups of 16 rows, with a high cost per group. So each chunk is passed as one long
        # row. Quantization blocks lie within rows, so the long row has the same blocks.
        chunk_rows = max(1, DEQUANTIZE_CHUNK_LEN // row_len)
        for start in range(0, len(stored), chunk_rows):
            chunk = stored[start : start + chunk_rows]
            with np.errstate(invalid="ignore", over="ignore"):  # The loader refuses values that are not finite.
                values[start : start + chunk_rows] = dequantize(chunk.reshape(1, -1), kind).reshape(-1, row_len)
        return values

    def stored_rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Return `rows` of a tensor as the file stores them: uint8 [rows, bytes of a row]. See `read_rows`."""
        tensor = self.tensors[name]
        raw = np.frombuffer(tensor.data, np.uint8, tensor.size_bytes, tensor.offset)
        return raw.reshape(tensor.num_rows, tensor.row_bytes)[rows]

    def release_rows(self, name: str, start: int, stop: int) -> None:
        """Let the system take back the memory that holds rows which have been read; it reads them anew when asked."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        tensor = self.tensors[name]
        begin, end = (tensor.offset + row * tensor.row_bytes for row in (start, stop))
        first_page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        tensor.data.madvise(mmap.MADV_DONTNEED, first_page, end - first_page)


_LENGTH = struct.Struct("<Q")


class _Cursor:
    """Reads the header value by value; reading past the end of the file raises ModelLoadError."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path = data, path
        self.position = 0  # In bytes from the start of the file.

    def advance(self, num_bytes: int) -> int:
        """Move forward by `num_bytes` and return the old position, both in bytes from the start of the file.

        To move exactly to the end of the file is allowed. Raises ModelLoadError past it, and for a negative number,
        which a corrupt length may give.
        """
        start, end = self.position, self.position + num_bytes
        if num_bytes < 0 or end > len(self.data):
            fault = f"the header needs {num_bytes} bytes at offset {start}, the file has {len(self.data)}"
            raise ModelLoadError(f"{self.path}: {fault}; it is truncated or not GGUF: fetch it again")
        self.position = end
        return start

    def scalar(self, code: str) -> Any:
        """Read one number of the type that `struct` names `code`."""
        return struct.unpack_from("<" + code, self.data, self.advance(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """Read one string: a length in 8 bytes, then that many bytes of UTF-8."""
        length = self.scalar("Q")
        start = self.advance(length)
        # A vocabulary may hold tokens that are not valid UTF-8.
        return self.data[start : start + length].decode("utf-8", errors="surrogateescape")

    def strings(self, count: int) -> list[str]:
        """Read `count` strings, each of which is a length in 8 bytes and then its bytes.

        It does what `count` calls of `string` would, all at once if it can, since a vocabulary may have 100,000
        strings. Bytes that are not UTF-8 become lone surrogates, from which the same bytes can be had again. Raises
        ModelLoadError past the end of the file.
        """
        texts = self._short_strings(count)
        return [self.string() for _ in range(count)] if texts is None else texts

    def _short_strings(self, count: int) -> list[str] | None:
        """Read `count` strings, at least one, at once; None, and nothing is read, if one is longer than 255 bytes.

        None too if a string holds a zero byte, or ends past the end of the file. The bytes of a short string's length
        are its value and seven zeros. The last zero is left where it is, and parts the decoded text into the strings:
        3 0 0 0 0 0 0 0 t h e 1 0 0 0 0 0 0 0 a → 0 t h e 0 a.
        """
        data, position, starts = self.data, self.position, list[int]()
        try:
            for _ in range(count):
                starts.append(position)
                position += _LENGTH.size + data[position]
        except IndexError:
            return None
        if not starts or position > len(data):
            return None
        raw = np.frombuffer(data, np.uint8, position - self.position, self.position)
        length_starts = np.array(starts) - self.position
        is_kept = np.ones(len(raw), bool)
        is_kept[length_starts] = False
        for byte in range(1, _LENGTH.size):
            if raw[length_starts + byte].any():
                return None
            is_kept[length_starts + byte] = byte == _LENGTH.size - 1
        kept = raw[is_kept].tobytes()
        if kept.count(b"\0") != count:
            return None
        self.position = position
        return kept.decode("utf-8", errors="surrogateescape").split("\0")[1:]

    def value(self, kind: int) -> Any:
        """Read one metadata value of GGUF's type number `kind`: a number, a bool, a string, or a list of these.

        The caller has read the type number, which stands in front of the value in the file. Raises ModelLoadError for
        an unknown type, for an array of arrays, and past the end of the file.
        """
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            # An array is the type number of its items, their count, and then the items.
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if item_kind in _SCALARS:
                dtype = np.dtype(_SCALARS[item_kind]).newbyteorder("<")
                return np.frombuffer(self.data, dtype, count, self.advance(count * dtype.itemsize)).tolist()
            # A string takes at least the 8 bytes of its length, so a corrupt count is refused before it is used.
            if item_kind == _STRING and count * 8 <= len(self.data) - self.position:
                return self.strings(count)
            raise ModelLoadError(f"{self.path}: {count} array items of type {item_kind} in the metadata cannot be read")
        raise ModelLoadError(f"{self.path}: metadata value of unknown type {kind}; known are 0 to 12")


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of the GGUF file `path` and check that every tensor lies inside the file.

    If the file is the first part of a split model, such as "m-00001-of-00003.gguf", the other parts are expected in the
    same directory, as "m-00002-of-00003.gguf" and "m-00003-of-00003.gguf". They are read too, and the result has the
    metadata of the first part and the tensors of all. Raises ModelLoadError, which names the file, for anything but a
    complete little-endian file of GGUF version 2 or 3, and for another part than the first.
    """
    file = _read_part(path)
    fields = Fields(file.metadata, path)
    num_parts = fields.integer("split.count", 1, min=0, max=99_999)  # 0 and 1 both stand for a file that is not split.
    if num_parts < 2:
        return file
    ending = "-{:05}-of-" + f"{num_parts:05}.gguf"
    first = ending.format(1)
    if fields.integer("split.no", 0, min=0) != 0 or not path.name.endswith(first):
        way_out = f"give the first one, whose name ends with {first}, or join them with llama-gguf-split --merge"
        raise ModelLoadError(f"{path}: is one of {num_parts} parts of a file: {way_out}")
    stem = path.name.removesuffix(first)
    paths = [path.with_name(stem + ending.format(part)) for part in range(1, num_parts + 1)]
    tensors = dict(file.tensors)
    for part in paths[1:]:
        for name, tensor in _read_part(part).tensors.items():
            if name in tensors:
                raise ModelLoadError(f"{part}: tensor {name!r} is in another part too: fetch all parts again")
            tensors[name] = tensor
    num_tensors = fields.integer("split.tensors.count", len(tensors), min=0)
    if num_tensors != len(tensors):
        fault = f"its {num_parts} parts hold {len(tensors)} tensors, wanted {num_tensors}"
        raise ModelLoadError(f"{path}: {fault}: fetch all parts again")
    return GGUFFile(path, file.metadata, tensors, tuple(paths))


def _read_part(path: Path) -> GGUFFile:
    """Parse the header of one GGUF file, without the other parts of a split model.

    The header has the magic bytes, the version, the numbers of tensors and of metadata values, then the metadata as
    pairs of key and value, then the declarations of the tensors. Tensor data follow, from the next multiple of
    `general.alignment` bytes on; they are not read. Raises ModelLoadError, which names the file, if the file cannot be
    read, is not GGUF of a known version, declares a tensor twice, or ends before its header or a tensor does.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as GGUF ({error})") from error
    if data[:4] != MAGIC:
        raise ModelLoadError(f"{path}: starts with {data[:16]!r}, wanted a GGUF file, which starts with {MAGIC!r}")
    cursor = _Cursor(data, path)
    cursor.advance(len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelLoadError(f"{path}: GGUF version is {version}, wanted one of {VERSIONS} in little-endian order")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    declared = [_declared_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path}: general.alignment is {alignment!r}, wanted a positive integer")
    data_start = -(-cursor.position // alignment) * alignment  # Rounded up to a multiple.
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in declared:
        tensor = _make_tensor(path, data, name, shape, kind, data_start + offset)
        if name in tensors:
            raise ModelLoadError(f"{path}: tensor {name!r} is declared twice; the file is corrupt, fetch it again")
        if (end := tensor.offset + tensor.size_bytes) > len(data):
            fault = f"tensor {name!r} ends at byte {end}, the file has {len(data)}"
            raise ModelLoadError(f"{path}: {fault}; it is truncated: fetch it again")
        tensors[name] = tensor
    return GGUFFile(path, metadata, tensors, (path,))


def _declared_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read one tensor's declaration: its name, shape, type number, and offset in bytes from the tensor data's start.

    The shape has the slowest axis first, as in numpy. Raises ModelLoadError past the end of the file, and for a number
    of dimensions that is not from 1 to MAX_DIMS.
    """
    name, num_dims = cursor.string(), cursor.scalar("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelLoadError(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions, allowed are 1 to {MAX_DIMS}")
    # The file lists the fastest axis first, numpy the slowest.
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _make_tensor(path: Path, data: mmap.mmap, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    """Return a tensor of the file `path`, with the bytes of its rows computed from its type number `kind`.

    `offset` is the tensor's first byte in `data`, the file's memory map. Types are stored in quantization blocks, such
    as Q8_0's 32 values in 34 bytes, so a row of 4096 values in Q8_0 has 128 × 34 = 4352 bytes. Raises ModelLoadError if
    the type is unknown, or if a row is not a multiple of the type's block.
    """
    stored = STORED_TYPES.get(kind)
    if stored is None:
        fault = f"tensor {name!r} is stored in type {kind}, which is not known"
        raise ModelLoadError(f"{path}: {fault}: take a file of another quantization, or fetch it again")
    if shape[-1] % stored.block_size:
        fault = f"rows of {name!r} have {shape[-1]} values, {stored.name} needs a multiple of {stored.block_size}"
        raise ModelLoadError(f"{path}: {fault}: fetch it again")
    return GGUFTensor(name, shape, stored.name, offset, shape[-1] // stored.block_size * stored.block_bytes, data)
