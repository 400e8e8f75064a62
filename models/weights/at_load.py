"""Quantizes the matrices of a checkpoint of floats as they are read: embeddings and heads too, norms and biases not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...pallas_kernels.code_formats import (
    CODE_FORMATS,
    CodeFormat,
    Codes,
    are_finite,
    float8_format,
    int8_format,
    quantize,
)
from ..errors import ModelLoadError
from ..formats.checkpoint import Checkpoint, CheckpointView, read_finite
from .coded import FLOAT32_MAX, StoredFormats

AT_LOAD: Mapping[str, Callable[[int], CodeFormat]] = {
    "int8": int8_format,
    "fp8": float8_format,
    "int4": lambda num_in: CODE_FORMATS["Q4_0"],
}
"""Ways to quantize → the format of a matrix with so many inputs: int8 and fp8 have a scale for each output."""


def format_at_load(quantization: str, shape: tuple[int, ...]) -> CodeFormat | None:
    """Return the format that a tensor of this shape gets; None for one that is no matrix of whole groups.

    The matrices of a tensor [E, out, in] get one format.
    """
    if len(shape) not in (2, 3):
        return None
    code_format = AT_LOAD[quantization](shape[-1])
    return code_format if shape[-1] % code_format.block == 0 and shape[-1] > 0 else None


def formats_at_load(quantization: str, shapes: Mapping[str, tuple[int, ...]]) -> StoredFormats:
    """Return the formats of all tensors with these shapes."""
    return tuple((name, format_at_load(quantization, shape)) for name, shape in shapes.items())


class QuantizedCheckpoint(CheckpointView):
    """A checkpoint of floats whose matrices are quantized as they are read; norms and biases stay floats.

    `read` gives the floats, `read_codes` and `read_quantized` the codes.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: str) -> None:
        """Quantize to one of AT_LOAD."""
        super().__init__(checkpoint)
        self._quantization = quantization

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a matrix whose rows are whole groups; None for other tensors."""
        return format_at_load(self._quantization, self._checkpoint.shape(name))

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a matrix, quantized to its `code_format`; see `read_quantized` for errors."""
        code_format = self.code_format(name)
        assert code_format is not None
        return self.read_quantized(name, rows, code_format)

    def read_quantized(self, name: str, rows: slice, code_format: CodeFormat) -> Codes:
        """Return rows of a matrix, quantized. Raises ModelLoadError for a NaN, an infinity, or too large a number."""
        codes = quantize(read_finite(self._checkpoint, name, rows), code_format)
        # Codes of finite numbers are finite, unless a scale is too large.
        if code_format.largest_number < FLOAT32_MAX and not are_finite(codes, code_format):
            limit = f"±{code_format.largest_number:.3g}, the largest that {self._quantization} has a scale for"
            raise ModelLoadError(f"{self.path}: tensor {name} holds a number beyond {limit}: choose int8 or fp8")
        return codes
