"""Weights that keep the codes of a quantized checkpoint: which do, what they take, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from ...pallas_kernels.code_formats import CODE_FORMATS, CodeFormat, CodeParts, Codes
from ...sharding import replicated
from ..errors import ModelLoadError
from ..formats.checkpoint import WHOLE, Checkpoint
from ..formats.gguf_codes import codes_of
from ..recipe import Piece, Recipes, read_finite


@runtime_checkable
class CodedCheckpoint(Checkpoint, Protocol):
    """A checkpoint that stores some tensors as codes."""

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a tensor's codes; None for one that is not stored as codes, or in no known format."""

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a tensor that is stored as codes."""


AT_LOAD = {"int8": "Q8_0", "int4": "Q4_0"}
"""Ways to quantize a checkpoint of floats as it is read → type of GGUF that its matrices then have."""


class QuantizedCheckpoint:
    """A checkpoint of floats whose matrices are quantized as they are read; norms and biases stay floats."""

    def __init__(self, checkpoint: Checkpoint, quantization: str) -> None:
        """Quantize to one of AT_LOAD."""
        self.path = checkpoint.path
        self._checkpoint, self._format = checkpoint, CODE_FORMATS[AT_LOAD[quantization]]

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> str:
        """Return the tensor's dtype before it is quantized, as in `Checkpoint`."""
        return self._checkpoint.dtype(name)

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return a block of the tensor that is not quantized."""
        return self._checkpoint.read(name, rows, columns)

    def files(self) -> list[Path]:
        """Return the files of the checkpoint."""
        return self._checkpoint.files()

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a matrix whose rows are whole groups; None for other tensors."""
        shape = self._checkpoint.shape(name)
        return self._format if len(shape) == 2 and shape[1] % self._format.group == 0 else None

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a matrix, quantized by the gguf package. Raises ModelLoadError for a NaN or an infinity."""
        from gguf import GGMLQuantizationType, quantize

        values = read_finite(self._checkpoint, name, rows).astype(np.float32)
        return codes_of(quantize(values, GGMLQuantizationType[self._format.name]), self._format)


StoredFormats = tuple[tuple[str, CodeFormat | None], ...]
"""Each tensor of a checkpoint, with the format of its codes."""


def stored_formats(checkpoint: Checkpoint | None) -> StoredFormats:
    """Return the formats of all tensors of a checkpoint; nothing for one that stores no codes."""
    if not isinstance(checkpoint, CodedCheckpoint):
        return ()
    formats = tuple((name, checkpoint.code_format(name)) for name in checkpoint.names())
    return formats if any(code_format for _, code_format in formats) else ()


def with_codes(state: Any, recipes: Recipes, formats: Mapping[str, CodeFormat | None]) -> Any:
    """Return an abstract state in which each matrix that can be stored as codes is.

    Its metadata then have `code_parts`, the formats of its columns, and `decoded_dtype`, the dtype that it had.
    """
    coded = {}
    for path, leaf in nnx.to_flat_state(state):
        metadata = leaf.get_metadata()
        parts = _code_parts(recipes.pieces[path], recipes.shapes, formats, metadata)
        if parts is not None:
            num_in, _ = metadata["matrix"]
            shape = metadata["ops"].coded_shape(num_in, parts)
            value = jax.ShapeDtypeStruct(shape, np.uint8, sharding=replicated(leaf.sharding.mesh))
            leaf = leaf.replace(value, code_parts=parts, decoded_dtype=np.dtype(leaf.dtype).name)
        coded[path] = leaf
    return nnx.from_flat_state(coded)


def _code_parts(
    pieces: Sequence[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, CodeFormat | None],
    metadata: Mapping[str, Any],
) -> CodeParts | None:
    """Return the formats of a matrix's columns; None if it is not stored as codes.

    It is if its pieces are whole rows of tensors that are stored as codes, one behind the other without gaps, and all
    but the last one are as many rows as layer operations store together.
    """
    if "matrix" not in metadata:
        return None
    columns_of_codes = metadata["ops"].columns_of_codes
    num_in, num_out = metadata["matrix"]
    parts, next_row = list[tuple[CodeFormat, int]](), 0
    for piece in pieces:
        code_format, whole = formats.get(piece.tensor), (0, num_in)
        (start, stop), *columns = piece.target
        has_whole_rows = columns == [whole] and list(piece.source[1:]) == [whole] and not piece.is_transposed
        if code_format is None or not has_whole_rows or start != next_row or start % columns_of_codes:
            return None
        if shapes[piece.tensor][1] != num_in or num_in % code_format.block:
            return None
        if parts and parts[-1][0] == code_format:
            parts[-1] = code_format, parts[-1][1] + stop - start
        else:
            parts.append((code_format, stop - start))
        next_row = stop
    return tuple(parts) if next_row == num_out else None


def coded_weights(state: Any) -> list[tuple[Any, ...]]:
    """Return path, formats and decoded dtype of each matrix that is kept as codes: its shape tells none of them."""
    flat = nnx.to_flat_state(state)
    metadata = ((path, leaf.get_metadata()) for path, leaf in flat if isinstance(leaf, nnx.Variable))
    return [(path, each["code_parts"], each["decoded_dtype"]) for path, each in metadata if "code_parts" in each]


def check_codes(leaves: Mapping[Any, Any], recipes: Recipes, checkpoint: Checkpoint) -> None:
    """Raise ModelLoadError if matrices that are kept as codes are stored in other formats by now."""
    formats = dict(stored_formats(checkpoint))
    for path, leaf in leaves.items():
        metadata = leaf.get_metadata()
        wanted = metadata.get("code_parts")
        if wanted is not None and _code_parts(recipes.pieces[path], recipes.shapes, formats, metadata) != wanted:
            names, tensor = ", ".join(_formats_of([leaf])), recipes.pieces[path][0].tensor
            fault = f"tensor {tensor} or one beside it is no longer stored as {names}"
            raise ModelLoadError(f"{checkpoint.path}: {fault}, as this engine keeps it: start a new engine")


def refuse_codes(leaves: Iterable[Any]) -> None:
    """Raise ModelLoadError if weights are codes of a quantized file, which no array of floats can replace."""
    if formats := _formats_of(leaves):
        fault = f"got arrays for weights that are kept as codes of {', '.join(formats)}"
        raise ModelLoadError(f"params: {fault}, wanted an engine of floats: make it with quantization='none'")


def codes_note(state: nnx.State, formats: StoredFormats) -> str | None:
    """Return a clause for the log that says what becomes of the tensors that a checkpoint stores as codes.

    `formats` are those of the checkpoint, and `state` has the weights. The result is None if no tensor is stored so.
    """
    stored_names = dict.fromkeys(code_format.name for _, code_format in formats if code_format is not None)
    if not stored_names:
        return None
    leaves = [leaf for _, leaf in nnx.to_flat_state(state)]
    if not (kept_names := _formats_of(leaves)):
        return f"stored as {', '.join(stored_names)}, which become floats"
    total_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    coded_leaves = [leaf for leaf in leaves if "code_parts" in leaf.get_metadata()]
    coded_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in coded_leaves)
    as_floats = f"{(total_bytes - coded_bytes) / 1e6:.3g} MB as floats"
    return f"{coded_bytes / 1e6:.3g} MB are kept as codes of {', '.join(kept_names)}, {as_floats}"


def _formats_of(leaves: Iterable[Any]) -> list[str]:
    """Return the names of the formats of codes among some weights."""
    # A caller's own module may hold plain arrays, which have no metadata.
    variables = (leaf for leaf in leaves if isinstance(leaf, nnx.Variable))
    codes = (variable.get_metadata().get("code_parts", ()) for variable in variables)
    return list(dict.fromkeys(code_format.name for parts in codes for code_format, _ in parts))


def read_coded(
    checkpoint: Checkpoint, pieces: Sequence[Piece], out: np.ndarray, metadata: Mapping[str, Any], max_values: int
) -> None:
    """Fill `out` with the codes of a matrix, some rows of Wᵀ at a time: about `max_values` values.

    Raises ModelLoadError for a scale that is not finite.
    """
    assert isinstance(checkpoint, CodedCheckpoint)
    num_in, _ = metadata["matrix"]
    columns_of_codes, num_written = metadata["ops"].columns_of_codes, 0
    rows_at_once = max(1, max_values // (num_in * columns_of_codes)) * columns_of_codes
    for piece in pieces:
        start, stop = piece.source[0]
        code_format = checkpoint.code_format(piece.tensor)
        assert code_format is not None
        for row in range(start, stop, rows_at_once):
            rows = slice(row, min(row + rows_at_once, stop))
            codes = checkpoint.read_codes(piece.tensor, rows)
            # Scales under a super-scale are integers.
            floats = codes.super_scales or codes.scales
            if not all(np.isfinite(each).all() for each in floats):
                where = f"rows {rows.start} to {rows.stop - 1}"
                fault = f"tensor {piece.tensor} holds a scale that is NaN or infinite in {where}"
                raise ModelLoadError(f"{checkpoint.path}: {fault}; fetch it again")
            packed = metadata["ops"].packed_codes(codes, code_format, metadata["decoded_dtype"]).reshape(-1)
            out[num_written : num_written + len(packed)] = packed
            num_written += len(packed)
    assert num_written == len(out)
