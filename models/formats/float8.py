"""Matrices that safetensors hold in float8_e4m3fn, with scales that multiply them.

`quantization.py` says which scales there may be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from ...pallas_kernels.code_formats import float8_format
from ..errors import ModelLoadError
from .packed_matrix import QuantizedMatrix
from .quantization import Float8Scheme
from .tensor_files import TensorFiles

STORED_DTYPE = "F8_E4M3"
"""The name of float8_e4m3fn in headers of safetensors."""
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
"""Ends of the names of scales that multiply a matrix, in spite of the first one's name."""
SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Dtypes of scales as headers name them → as formats of codes do."""
ZERO_POINT = "weight_zero_point"
"""End of the name of the zero points of a matrix."""
_SCALE = re.compile(
    r"\.(weight_scale|weight_scale_inv|input_scale_ub|(input|output|activation|q|k|v|kv)_(scale|zero_point|global_scale))$"
)
"""Scales of matrices, and of activations, which are not quantized here."""


@dataclass(frozen=True)
class Float8Matrix(QuantizedMatrix):
    """A matrix in 8-bit floats, with a scale for each block of rows and columns."""

    scale: str = ""
    """The name of the tensor of its scales."""
    block_rows: int = 1
    """Rows that share a scale."""

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        return self.files.read(self.module + "weight", rows, columns)

    def scales(self, rows: slice) -> np.ndarray:
        # The tensor may be a scalar, a vector of one number or of one per row, or have a row for each block of rows.
        stored = self.files.read(self.scale)
        by_block = stored if stored.ndim == 2 else stored.reshape(-1, 1)
        return by_block[np.arange(rows.start, rows.stop) // self.block_rows]


def is_scale(name: str) -> bool:
    """Return whether a tensor of a quantized checkpoint is a scale and no weight."""
    return _SCALE.search(name) is not None


def scale_of(weight: str, names: Collection[str]) -> str | None:
    """Return the name of the scale of a quantized matrix; None if there is none."""
    module = weight.removesuffix("weight")
    return next((module + end for end in WEIGHT_SCALES if module + end in names), None)


def float8_matrix(
    files: TensorFiles, name: str, scheme: Float8Scheme, fault: Callable[[str], ModelLoadError]
) -> Float8Matrix:
    """Return a matrix in 8-bit floats. Raises the error that `fault` makes of a clause if its scale does not fit."""
    module = name.removesuffix("weight")
    scale = scale_of(name, files.names())
    if scale is None:
        raise fault(f"is stored as {STORED_DTYPE} without a scale")
    rows, columns = shared_block(scheme, files.shape(name), files.shape(scale), fault)
    if (dtype := files.dtype(scale)) not in SCALE_DTYPES:
        raise fault(f"has a scale, {scale!r}, that is stored as {dtype}, wanted {' or '.join(SCALE_DTYPES)}")
    if (zero_point := module + ZERO_POINT) in files.names() and not is_zero(files, zero_point):
        raise fault(f"has zero points, {zero_point!r}, that are not 0")
    height, width = files.shape(name)
    group = max(1, min(columns, width))
    stored_format = replace(float8_format(group), scale=SCALE_DTYPES[dtype])
    if group < width:
        stored_format = replace(stored_format, name=f"{stored_format.name}/{group}")
    return Float8Matrix(files, module, (height, width), stored_format, scale=scale, block_rows=max(1, rows))


def is_zero(files: TensorFiles, name: str) -> bool:
    """Return whether all values of a tensor are 0; those of 8-bit floats may be −0, too."""
    values = files.read(name)
    return not (values & 127 if files.dtype(name) == STORED_DTYPE else values).any()


def shared_block(
    scheme: Float8Scheme, matrix: tuple[int, ...], scale: tuple[int, ...], fault: Callable[[str], ModelLoadError]
) -> tuple[int, int]:
    """Return how many rows and columns of a matrix share one value of its scale.

    `matrix` and `scale` are the shapes of both tensors, and the shape of the scale says which case it is. A matrix
    (512, 256) has a scale (), (1,) or (1, 1) for the whole of it, (512,) or (512, 1) for each row, or (4, 2) for blocks
    of (128, 128), where the scheme has these; the results are (512, 256), (1, 256) and (128, 128). Shapes that are
    equal mean the same. Raises the error that `fault` makes of a clause, for shapes that do not fit each other.
    """
    if len(matrix) != 2:
        raise fault(f"has the shape {matrix} and 8-bit floats, wanted a matrix")
    # Allowed shape of the scale → rows and columns that share a value.
    height, width = matrix
    blocks: dict[tuple[int, ...], tuple[int, int]] = {
        (height,): (1, width),
        (height, 1): (1, width),
        (): (height, width),
        (1,): (height, width),
        (1, 1): (height, width),
    }
    if scheme.block is not None:
        # The last block of a row or column may be cut off by the matrix's end, so numbers of blocks are rounded up.
        by_block = tuple(-(-size // step) for size, step in zip(matrix, scheme.block, strict=True))
        blocks = {by_block: scheme.block} | blocks
    if scale not in blocks:
        shapes = " or ".join(map(str, blocks))
        raise fault(f"has the shape {matrix} and a scale of the shape {scale}, wanted {shapes}")
    return blocks[scale]
