"""Reads the safetensors of a directory by the names of their tensors, a block of rows and columns at a time.

Only what is returned takes memory. All files are checked when the directory is opened. Quantized matrices have the
names and shapes that they would have as floats, and are returned as float32, or as the codes that are stored.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from ...pallas_kernels.code_formats import CodeFormat, Codes
from .checkpoint import WHOLE, as_matrix, block_of
from .packed import find_matrices, refuse_quantized
from .packed_matrix import QuantizedMatrix
from .quantization import WAY_OUT, Quantization
from .tensor_files import TensorFiles

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtype as headers name it → name."""


class SafetensorsCheckpoint:
    """The tensors in the safetensors of a directory, under their Hugging Face names."""

    def __init__(self, directory: Path, quantization: Quantization | None = None):
        """Open all files of the directory and check them; of weights no values are read.

        `quantization` says which quantized matrices there may be; None for a checkpoint without any. Raises
        ModelLoadError if a file is missing or damaged, if the index places a tensor in another file than the one that
        has it, and if the tensors of a quantized matrix do not fit each other or the quantization.
        """
        self.path = directory
        self.quantization = quantization
        self._files = TensorFiles(directory)
        self._matrices: dict[str, QuantizedMatrix] = {}
        self._names = self._files.names()
        if quantization is None or not quantization.has_matrices:
            refuse_quantized(self._files, quantization)
        if quantization is not None:
            self._matrices, others = find_matrices(self._files, quantization)
            self._names = [*others, *self._matrices]

    @property
    def is_quantized(self) -> bool:
        """Return whether a matrix is quantized, also one whose codes cannot be kept."""
        return bool(self._matrices)

    def names(self) -> Collection[str]:
        """Return the names of all tensors in all files; the several of a quantized matrix have one name."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return self._matrices[name].tensor_shape if name in self._matrices else self._files.shape(name)

    def dtype(self, name: str) -> str:
        """Return float32, bfloat16 or float16, the dtype that `read` gives; for a quantized matrix, float32.

        Raises ModelLoadError if the tensor is stored as anything else.
        """
        if name in self._matrices:
            return "float32"
        stored = self._files.dtype(name)
        if stored not in _DTYPES:
            fault = f"is stored as {stored}, {', '.join(_DTYPES)} are available in this version"
            raise self._files.fault(name, f"{fault}: {WAY_OUT}")
        return _DTYPES[stored]

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis, and `columns` of the second of a matrix, in the stored dtype.

        Quantized matrices are returned as float32. Raises ModelLoadError for other dtypes.
        """
        if name in self._matrices:
            return self._matrices[name].read(rows, columns)
        self.dtype(name)  # Raises for an unsupported dtype.
        return as_matrix(self._files.read(name, *block_of(self._files.shape(name), rows, columns)))

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a quantized matrix whose codes can be kept; None for other tensors."""
        return self._matrices[name].code_format if name in self._matrices else None

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a quantized matrix as codes."""
        return self._matrices[name].read_codes(rows)

    def files(self) -> list[Path]:
        """Return the files that hold tensors, and the index that names them if it is read."""
        return self._files.files()

    def is_idle_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros of a quantized matrix.

        AutoGPTQ and AutoAWQ write one for modules that have no bias, too.
        """
        module = name.removesuffix("bias")
        is_bias = module != name and module + "weight" in self._matrices and len(self.shape(name)) == 1
        return is_bias and not self.read(name, WHOLE).any()

    def notes(self) -> list[str]:
        """Return clauses for the log about what is not as the quantization says."""
        clauses = []
        if self.quantization is not None and self.quantization.has_matrices and not self._matrices:
            clauses.append(f"no tensor is quantized, although quantization_config names {self.quantization.method}")
        elif self.quantization is not None and self.quantization.has_activation_scheme:
            scheme = f"the scheme that {self.quantization.method} has for activations is not used"
            clauses.append(f"{scheme}, they stay floats")
        if num_ordered := sum(matrix.order is not None for matrix in self._matrices.values()):
            names = f"{num_ordered} of {len(self._matrices)} quantized matrices"
            clauses.append(f"{names} have columns in an order of their own (act order), and become floats")
        return clauses
