"""Quantizes the matrices of a checkpoint of floats as they are read: embeddings and heads too, norms and biases not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from ...pallas_kernels.code_formats import (
    CODE_FORMATS,
    CodeFormat,
    Codes,
    are_finite,
    float8_format,
    int8_format,
    quantize,
)
from ..config.decoder import DecoderConfig
from ..errors import ModelLoadError
from ..families.table import family_class
from ..formats.checkpoint import Checkpoint, CheckpointView, read_finite, shape_of_rows
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


def transposed_matrices(config: DecoderConfig, held: Collection[str]) -> frozenset[str]:
    """Return the names of matrices that checkpoints of a model store as W [in, out], or [E, in, out] of all experts.

    `held` are the names in the checkpoint at hand.
    """
    model = family_class(config.architecture)
    stored_name = model.naming(held, is_tied=config.may_store_one_matrix)
    sources = [source for source in model.sources(config).values() if source.is_transposed]
    layers = range(config.num_layers)
    return frozenset(stored_name(source.tensor("weight", {"i": layer})) for source in sources for layer in layers)


def formats_at_load(
    quantization: str, shapes: Mapping[str, tuple[int, ...]], transposed: Collection[str] = ()
) -> StoredFormats:
    """Return the formats of all tensors with these shapes; those that are `transposed` are stored as W."""
    return tuple(
        (name, format_at_load(quantization, shape_of_rows(shape, is_transposed=name in transposed)))
        for name, shape in shapes.items()
    )


class QuantizedCheckpoint(CheckpointView):
    """A checkpoint of floats whose matrices are quantized as they are read; norms and biases stay floats.

    `read` gives the floats as they are stored, `read_codes` and `read_quantized` the codes of rows of Wᵀ.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: str, transposed: Collection[str] = ()) -> None:
        """Quantize to one of AT_LOAD; the matrices that are `transposed` are stored as W [in, out] or [E, in, out]."""
        super().__init__(checkpoint)
        self._quantization, self._transposed = quantization, frozenset(transposed)

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a matrix whose rows are whole groups; None for other tensors."""
        shape = shape_of_rows(self._checkpoint.shape(name), is_transposed=name in self._transposed)
        return format_at_load(self._quantization, shape)

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a matrix, quantized to its `code_format`; see `read_quantized` for errors."""
        code_format = self.code_format(name)
        assert code_format is not None
        return self.read_quantized(name, rows, code_format)

    def read_quantized(self, name: str, rows: slice, code_format: CodeFormat) -> Codes:
        """Return rows of Wᵀ, quantized. Raises ModelLoadError for a NaN, an infinity, or too large a number."""
        codes = quantize(self._rows(name, rows), code_format)
        # Codes of finite numbers are finite, unless a scale is too large.
        if code_format.largest_number < FLOAT32_MAX and not are_finite(codes, code_format):
            limit = f"±{code_format.largest_number:.3g}, the largest that {self._quantization} has a scale for"
            raise ModelLoadError(f"{self.path}: tensor {name} holds a number beyond {limit}: choose int8 or fp8")
        return codes

    def _rows(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of Wᵀ; `rows` are some of one of its E matrices in a tensor of all experts, [E × out, in]."""
        if name not in self._transposed:
            return read_finite(self._checkpoint, name, rows)
        num_in, num_out = self._checkpoint.shape(name)[-2:]
        expert, first_row = divmod(rows.start, num_out)
        columns = slice(first_row, first_row + rows.stop - rows.start)
        return read_finite(self._checkpoint, name, slice(expert * num_in, (expert + 1) * num_in), columns).T
