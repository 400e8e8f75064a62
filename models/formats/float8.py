"""Matrices that safetensors hold in float8_e4m3fn, turned to float32 as blocks of them are read.

The safetensors package gives numpy no 8-bit floats, so their bytes are read from a memory map of the file, at the
offsets in its header. `quantization.py` says which scales there may be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import numpy as np

from ..errors import ModelLoadError
from .quantization import Float8Scheme

STORED_DTYPE = "F8_E4M3"
"""The name of float8_e4m3fn in headers of safetensors."""
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
"""Ends of the names of scales that multiply a matrix, in spite of the first one's name."""
_SCALE = re.compile(r"\.(weight_scale|weight_scale_inv|input_scale_ub|(input|output|activation|q|k|v|kv)_scale)$")
"""Scales of matrices, and of activations, which are not quantized here."""


def is_scale(name: str) -> bool:
    """Return whether a tensor of a quantized checkpoint is a scale and no weight."""
    return _SCALE.search(name) is not None


def scale_of(weight: str, names: Collection[str]) -> str | None:
    """Return the name of the scale of a quantized matrix; None if there is none."""
    module = weight.removesuffix("weight")
    return next((module + end for end in WEIGHT_SCALES if module + end in names), None)


def shared_block(
    scheme: Float8Scheme, matrix: tuple[int, ...], scale: tuple[int, ...], fault: Callable[[str], ModelLoadError]
) -> tuple[int, int]:
    """Return how many rows and columns of a matrix share one value of its scale.

    `matrix` and `scale` are the shapes of both tensors, and the shape of the scale says which case it is. A matrix
    (512, 256) has a scale () or (1,) for the whole of it, (512, 1) for each row, or (4, 2) for blocks of (128, 128);
    the results are (512, 256), (1, 256) and (128, 128). Which of these are allowed depends on the scheme. Raises the
    error that `fault` makes of a clause, for shapes that do not fit each other or the scheme.
    """
    if len(matrix) != 2:
        raise fault(f"has the shape {matrix} and 8-bit floats, wanted a matrix")
    # Allowed shape of the scale → rows and columns that share a value.
    blocks: dict[tuple[int, ...], tuple[int, ...]] = {(): matrix, (1,): matrix}
    if scheme.block is not None:
        # The last block of a row or column may be cut off by the matrix's end, so numbers of blocks are rounded up.
        by_block: dict[tuple[int, ...], tuple[int, ...]] = {
            tuple(-(-size // step) for size, step in zip(matrix, scheme.block, strict=True)): scheme.block
        }
        # Without row scales, as in DeepSeek's checkpoints, every matrix has a scale per block.
        blocks = blocks | by_block if scheme.has_row_scales else by_block
    if scheme.has_row_scales:
        blocks[(matrix[0], 1)] = (1, matrix[1])
    if scale not in blocks:
        shapes = " or ".join(map(str, blocks))
        raise fault(f"has the shape {matrix} and a scale of the shape {scale}, wanted {shapes}")
    rows, columns = blocks[scale]
    return rows, columns


def dequantize(stored: np.ndarray, scale: np.ndarray, block: tuple[int, int], first: tuple[int, int]) -> np.ndarray:
    """Return a slice of a matrix in float32, times its scales.

    `stored` are the bytes of the slice, and `first` is the row and the column of the matrix at which it begins. `scale`
    is two-dimensional and has one value for each `block` (rows, columns) of the whole matrix; the last block of a row
    or column may be cut off by the matrix's end. A product may be infinite or NaN, which raises nothing here. Example:
    200 rows from row 100 on, with blocks of 128 rows, lie in the rows of blocks 0, 1 and 2: 28, 128 and 44 of them are
    multiplied by `scale[0]`, `scale[1]` and `scale[2]`.
    """
    values = _values()[stored]  # A table has the value of each of the 256 bytes.
    row, column = first
    with np.errstate(invalid="ignore", over="ignore"):  # The loader refuses values that are not finite.
        if scale.shape[1] == 1:  # All columns share a scale, so one product serves all rows.
            values *= _spread(scale[:, 0], block[0], row, len(values))[:, None]
            return values
        # `block_row` counts rows of blocks from the matrix's top, and `rows` are those of the slice that lie in it.
        for block_row in range(row // block[0], -(-(row + len(values)) // block[0])):
            rows = slice(max(0, block_row * block[0] - row), (block_row + 1) * block[0] - row)
            values[rows] *= _spread(scale[block_row], block[1], column, values.shape[1])
    return values


def _spread(scales: np.ndarray, step: int, first: int, count: int) -> np.ndarray:
    """Return the scale of each of `count` rows or columns from `first` on, where `step` neighbours share a scale."""
    return scales[np.arange(first, first + count) // step]


@cache
def _values() -> np.ndarray:
    """Return the float32 value of each of the 256 bytes as float8_e4m3fn."""
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def map_matrices(path: Path) -> dict[str, np.ndarray]:
    """Return the bytes of all float8_e4m3fn tensors of a safetensors file, by name, as uint8 views of a memory map.

    The array of a tensor has the tensor's shape, with one byte for each value; tensors of other dtypes are left out.
    The safetensors package must have opened the file before: it has checked the offsets in the header, so they are not
    checked here.
    """
    # A file begins with the length of its header in 8 bytes, then the JSON header; offsets count from its end.
    data = np.memmap(path, np.uint8, "r")
    header_bytes = int(data[:8].view("<u8")[0])
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    matrices = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == STORED_DTYPE:
            start, stop = (8 + header_bytes + offset for offset in entry["data_offsets"])
            matrices[name] = data[start:stop].reshape(entry["shape"])
    return matrices
