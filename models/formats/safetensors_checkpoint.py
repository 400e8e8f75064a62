"""Reads the safetensors of a directory by the names of their tensors, a block of rows and columns at a time.

Files are memory-mapped, so that only what is returned takes memory. All files are checked when the directory is opened.
Matrices in 8-bit floats are returned as float32 (`float8.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import ModelLoadError
from ..fields import Fields, read_json_object
from .checkpoint import WHOLE, UnsavedTensor, block_of
from .files import INDEX_FILE, SINGLE_FILE
from .float8 import STORED_DTYPE, dequantize, is_scale, map_matrices, scale_of, shared_block
from .quantization import WAY_OUT, Float8Scheme

FOR_TRANSFORMERS = {"format": "pt"}
"""Metadata without which transformers reads no file."""
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
SHARD_BYTES = 5 * 10**9
"""Bytes of the tensors in one file that is written, at most; more are spread over several files."""

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()} | {"int32": "I32", "int64": "I64"}
"""Dtype → what the header of a file that is written calls it."""


class SafetensorsCheckpoint:
    """The safetensors of a directory: `model.safetensors`, or else the shards that its index names.

    If both exist, the single file is read, as in transformers. The constructor opens every file and compares every name
    with the index, so that a bad download is found before memory is allocated. Each ModelLoadError names the file.
    """

    def __init__(self, directory: Path, scheme: Float8Scheme | None = None):
        """Open all files of the directory and check them; no values are read.

        `scheme` says which scales the matrices in 8-bit floats have; None for a checkpoint without such matrices.
        Raises ModelLoadError if a file is missing or damaged, if the index places a tensor in another file than the one
        that has it, or if 8-bit floats and scales do not fit the scheme.
        """
        self.path = directory
        self._scheme = scheme
        self._matrices: dict[str, np.ndarray] = {}
        """The bytes of each matrix in 8-bit floats."""
        self._scales: dict[str, tuple[str, tuple[int, int]]] = {}
        """Name of such a matrix → name of its scale, and how many rows and columns share one value of it."""
        self._files: dict[str, Any] = {}
        """Tensor → the open file that holds it."""
        self._file_names: dict[str, str] = {}
        """Tensor → the name of its file."""
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
        if scheme is None:
            self._refuse_float8()
        else:
            self._find_scales(scheme)

    def names(self) -> Collection[str]:
        """Return the names of all tensors in all files, without the scales of quantized ones."""
        return self._files.keys() if self._scheme is None else [name for name in self._files if not is_scale(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return float32, bfloat16 or float16, the dtype that `read` gives; for 8-bit floats with a scale, float32.

        Raises ModelLoadError if the tensor is stored as anything else.
        """
        if name in self._scales:
            return "float32"
        stored = self._files[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            fault = f"is stored as {stored}, {', '.join(_DTYPES)} are available in this version"
            raise ModelLoadError(f"{self.path / self._file_names[name]}: tensor {name!r} {fault}: {WAY_OUT}")
        return _DTYPES[stored]

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis, and `columns` of the second of a matrix, in the stored dtype.

        Matrices in 8-bit floats are returned as float32, times their scales. Raises ModelLoadError for other dtypes.
        """
        self.dtype(name)  # Raises for an unsupported dtype.
        part = self._files[name].get_slice(name)
        axes = block_of(part.get_shape(), rows, columns)
        if name in self._scales:
            return self._read_float8(name, axes)
        values: np.ndarray = part[axes]
        return values

    def files(self) -> list[Path]:
        """Return the files that hold tensors, and the index that names them if it is read."""
        names = sorted(set(self._file_names.values()))
        return [self.path / name for name in (names if SINGLE_FILE in names else [INDEX_FILE, *names])]

    def _read_float8(self, name: str, axes: tuple[slice, ...]) -> np.ndarray:
        """Return the slice `axes` (rows and columns, with start and stop) of a matrix in 8-bit floats as float32.

        The values are multiplied by their scales, one for each block of rows and columns of the whole matrix. The scale
        tensor, which may be a scalar or a vector, is read whole and reshaped to [row blocks, column blocks]: a matrix
        (512, 256) with blocks of (128, 128) has scales [4, 2], and one scale for all of it becomes [1, 1].
        """
        stored, (scale_name, block) = self._matrices[name], self._scales[name]
        num_scales = [-(-size // step) for size, step in zip(stored.shape, block, strict=True)]
        scale = self.read(scale_name, WHOLE).astype(np.float32).reshape(num_scales)
        return dequantize(stored[axes], scale, block, (axes[0].start, axes[1].start))

    def _refuse_float8(self) -> None:
        """Raise ModelLoadError if a tensor is stored in 8-bit floats, for a config that does not say how they scale."""
        for name, file_name in self._file_names.items():
            stored = self._files[name].get_slice(name).get_dtype()
            if stored.startswith("F8_"):
                fault = "config.json has no quantization_config, which says how they are scaled"
                tensor = f"{self.path / file_name}: tensor {name!r} holds 8-bit floats ({stored})"
                raise ModelLoadError(f"{tensor}, and {fault}: add it, or {WAY_OUT}")

    def _find_scales(self, scheme: Float8Scheme) -> None:
        """Find the bytes and the scale of each matrix in 8-bit floats, and fill `_matrices` and `_scales`.

        `_matrices` maps a name to the matrix's bytes, and `_scales` to the name of its scale and to how many rows and
        columns share one value of it. A scale is a tensor of its own, whose name is that of the matrix with another
        end, such as "q_proj.weight_scale" for "q_proj.weight". Raises ModelLoadError for such a matrix without a scale,
        for a scale of a tensor in another dtype, and for a scale whose shape does not fit the scheme.
        """
        for file_name in sorted(set(self._file_names.values())):
            self._matrices |= map_matrices(self.path / file_name)
        for name in self._files:
            scale = scale_of(name, self._files) if name.endswith(".weight") else None

            def fault(clause: str, name: str = name) -> ModelLoadError:
                """Return an error about this tensor; the default binds the name that the loop has now."""
                file = self.path / self._file_names[name]
                return ModelLoadError(f"{file}: tensor {name!r} {clause}: fetch it again, or {WAY_OUT}")

            if name in self._matrices:
                if scale is None:
                    raise fault(f"is stored as {STORED_DTYPE} without a scale")
                self._scales[name] = scale, shared_block(scheme, self.shape(name), self.shape(scale), fault)
            elif scale is not None:
                raise fault(f"has a scale, {scale!r}, and is stored as {self._files[name].get_slice(name).get_dtype()}")

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
        for name in handle.keys():  # noqa: SIM118  (a safetensors handle is not a dict)
            if name in self._files:
                fault = f"tensor {name!r} is in {self._file_names[name]} too"
                raise ModelLoadError(f"{path}: {fault}; wanted each tensor in one shard")
            self._files[name], self._file_names[name] = handle, file_name


def write_safetensors(directory: Path, tensors: Mapping[str, UnsavedTensor], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors` to the directory, making one tensor after the other.

    If the tensors have more than `shard_bytes` bytes, they are written as shards of at most so many, or of one larger
    tensor, with an index. Tensors must be float32, bfloat16 or float16.
    """
    shards: list[dict[str, UnsavedTensor]] = [{}]
    total = num_bytes = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and num_bytes + size > shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes, total = num_bytes + size, total + size
    if len(shards) == 1:
        write_tensors(directory / SINGLE_FILE, tensors, FOR_TRANSFORMERS)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(directory / file_name, shard, FOR_TRANSFORMERS)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, UnsavedTensor], metadata: Mapping[str, str]) -> None:
    """Write one file of safetensors. Dtypes are float32, bfloat16, float16, int32 and int64.

    The file has the length of the header in 8 bytes, the header, which is a JSON object with `metadata` and each
    tensor's dtype, shape and place, and then the tensors' bytes one after the other. It is written here because the
    safetensors package would need all tensors in memory at once. Source:
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    # Offsets, which count from the end of the header, follow from shapes and dtypes. So the header is complete before
    # the first tensor is made.
    offset = 0
    for name, tensor in tensors.items():
        start, offset = offset, offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        entry = {"dtype": _CODES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, offset]}
        header[name] = entry
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # Tensor data begin at a multiple of 8 bytes, as the format asks.
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            # numpy gives no buffer of bfloat16 values, so their bytes are written.
            file.write(np.ascontiguousarray(tensor.make()).reshape(-1).view(np.uint8).data)


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
