"""Weights that keep the codes of a quantized checkpoint: which do, what they take, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from ...pallas_kernels.code_formats import CodeFormat, CodeParts, Codes, joined_parts
from ...sharding import replicated
from ..errors import ModelLoadError
from ..formats.checkpoint import Checkpoint
from ..recipe import Piece, Recipes
from .code_arrays import HeldCodes, experts_as_floats, num_bytes, read_piece_codes, with_held_scales
from .weight_state import flat_state, state_of

FLOAT32_MAX = float(np.finfo(np.float32).max)


@runtime_checkable
class CodedCheckpoint(Checkpoint, Protocol):
    """A checkpoint that stores some tensors as codes."""

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a tensor's codes; None for one that is not stored as codes, or in no known format."""

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a tensor that is stored as codes."""


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
    for path, leaf in flat_state(state):
        metadata, pieces = leaf.get_metadata(), recipes.pieces[path]
        parts = _code_parts(pieces, recipes.shapes, formats, metadata)
        if parts is None and (reason := experts_as_floats(path, pieces, formats, metadata)):
            leaf = leaf.replace(leaf.get_value(), becomes_floats=reason)
        if parts is not None:
            num_in, _ = metadata["matrix"]
            shape = metadata["ops"].coded_shape(num_in, parts)
            value = jax.ShapeDtypeStruct(shape, np.uint8, sharding=replicated(leaf.sharding.mesh))
            leaf = leaf.replace(value, code_parts=parts, decoded_dtype=np.dtype(leaf.dtype).name)
        coded[path] = leaf
    return state_of(coded)


def _code_parts(
    pieces: Sequence[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, CodeFormat | None],
    metadata: Mapping[str, Any],
) -> CodeParts | None:
    """Return the formats of a matrix's columns; None if it is not stored as codes.

    It is if its pieces are whole rows of tensors that are stored as codes, one behind the other without gaps, and all
    but the last one are as many rows as layer operations store together. All experts have the formats of the first one.
    """
    if "matrix" not in metadata or metadata.get("stays_floats"):
        return None
    columns_of_codes = metadata["ops"].columns_of_codes
    num_in, num_out = metadata["matrix"]
    stored, num_experts = [formats.get(piece.tensor) for piece in pieces], metadata.get("num_experts", 1)
    if stored != stored[: len(stored) // num_experts] * num_experts:
        return None
    parts, next_row = list[tuple[CodeFormat, int]](), 0
    for piece, code_format in zip(pieces, stored, strict=True):
        start, stop = piece.target[0]
        if code_format is None or num_in % code_format.block or not _has_whole_rows(piece, shapes, num_in):
            return None
        if start != next_row or start % columns_of_codes:
            return None
        parts.append((code_format, stop - start))
        next_row = stop
    return joined_parts(parts) if next_row == num_out else None


def _has_whole_rows(piece: Piece, shapes: Mapping[str, tuple[int, ...]], num_in: int) -> bool:
    """Return whether a piece has whole rows, of `num_in` numbers, of Wᵀ, as its tensor holds it."""
    columns = [*piece.source[1:], *piece.target[1:]]
    return columns == [(0, num_in)] * 2 and piece.rows_shape(shapes[piece.tensor])[-1] == num_in


def coded_weights(state: Any) -> list[tuple[Any, ...]]:
    """Return path, formats and decoded dtype of each matrix that is kept as codes: its shape tells none of them."""
    flat = flat_state(state)
    metadata = ((path, leaf.get_metadata()) for path, leaf in flat if hasattr(leaf, "get_metadata"))
    return [(path, each["code_parts"], each["decoded_dtype"]) for path, each in metadata if "code_parts" in each]


def check_codes(leaves: Mapping[Any, Any], recipes: Recipes, checkpoint: Checkpoint) -> None:
    """Raise ModelLoadError if matrices that are kept as codes are stored in other formats by now."""
    formats = dict(stored_formats(checkpoint))
    for path, leaf in leaves.items():
        metadata, pieces = leaf.get_metadata(), recipes.pieces[path]
        held: HeldCodes | None = metadata.get("held")
        if held is not None:
            found = (formats.get(piece.tensor) for piece in pieces)
            is_same = held.formats == tuple(each and with_held_scales(each, held.arrays) for each in found)
        else:
            wanted = metadata.get("code_parts")
            is_same = wanted is None or _code_parts(pieces, recipes.shapes, formats, metadata) == wanted
        if not is_same:
            names, tensor = ", ".join(_names_of([leaf])), pieces[0].tensor
            fault = f"tensor {tensor} or one beside it is no longer stored as {names}"
            raise ModelLoadError(f"{checkpoint.path}: {fault}, as this engine keeps it: start a new engine")


def refuse_floats(leaves: Iterable[Any]) -> None:
    """Raise ModelLoadError if weights are codes of formats that floats are not quantized to.

    These are the formats whose scales are sought by many tries, as the programs that write such files do it.
    """
    formats = [code_format for code_format in formats_of(leaves) if not code_format.takes_floats]
    if formats:
        names = ", ".join(dict.fromkeys(code_format.name for code_format in formats))
        fault = f"got arrays of floats for weights that are kept as codes of {names}"
        way_out = "or make the engine with quantization='none', or int8, fp8 or int4 of a checkpoint of floats"
        raise ModelLoadError(f"params: {fault}, wanted codes under the paths of the engine's own weights: {way_out}")


def check_given_codes(leaf: Any, given: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if the codes of a weight, an array by its name, stand for a number that is not finite."""
    metadata = leaf.get_metadata() if hasattr(leaf, "get_metadata") else {}
    # Arrays of codes and of scales have been checked as other arrays are.
    is_bytes = "code_parts" in metadata and "held" not in metadata
    for name, array in given.items() if is_bytes else ():
        if not metadata["ops"].are_codes_finite(np.asarray(array), metadata["matrix"][0], metadata["code_parts"]):
            raise ModelLoadError(f"params: {name} holds a scale or a code that is not finite; nothing was changed")


def check_sizes(arrays: Mapping[str, Any], formats: Mapping[str, CodeFormat]) -> None:
    """Raise ModelLoadError if a number of a tensor that becomes codes is too large for a scale of its format."""
    for name, code_format in formats.items():
        if code_format.largest_number >= FLOAT32_MAX:
            continue
        array = arrays[name]
        largest = float(max(array.max(), -array.min()) if isinstance(array, np.ndarray) else _largest(array))
        if largest > code_format.largest_number:
            fault = f"{name} holds {largest:.3g}, wanted at most {code_format.largest_number:.3g}"
            reason = f"the largest number that {code_format.name} has a scale for"
            raise ModelLoadError(f"params: {fault}, {reason}; nothing was changed: choose int8 or fp8")


@jax.jit
def _largest(array: jax.Array) -> jax.Array:
    """Return the largest magnitude, without an array of magnitudes."""
    return jnp.maximum(jnp.max(array), -jnp.min(array)).astype(jnp.float32)


def are_mostly_floats(state: Any) -> bool:
    """Return whether more bytes of the weights are floats than codes."""
    leaves = [leaf for _, leaf in flat_state(state)]
    coded = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in leaves if "code_parts" in leaf.get_metadata())
    return 2 * coded < sum(num_bytes(leaf.shape, leaf.dtype) for leaf in leaves)


def reasons_for_floats(state: Any) -> list[str]:
    """Return why matrices that could stay codes become floats on these devices, each reason once."""
    variables = (leaf for _, leaf in flat_state(state) if hasattr(leaf, "get_metadata"))
    reasons = (variable.get_metadata().get("becomes_floats") for variable in variables)
    return list(dict.fromkeys(filter(None, reasons)))


def codes_note(state: Any, formats: StoredFormats) -> str | None:
    """Return a clause for the log that says what becomes of the tensors that a checkpoint stores as codes.

    `formats` are those of the checkpoint, and `state` has the weights. The result is None if no tensor is stored so.
    """
    stored_names = dict.fromkeys(code_format.name for _, code_format in formats if code_format is not None)
    if not stored_names:
        return None
    leaves = [leaf for _, leaf in flat_state(state)]
    if not (kept_names := _names_of(leaves)):
        return "; ".join([f"stored as {', '.join(stored_names)}, which become floats", *reasons_for_floats(state)])
    total_bytes = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    coded_leaves = [leaf for leaf in leaves if "code_parts" in leaf.get_metadata()]
    coded_bytes = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in coded_leaves)
    as_floats = f"{(total_bytes - coded_bytes) / 1e6:.3g} MB as floats"
    as_floats = "; ".join([as_floats, *_widened(leaves), *reasons_for_floats(state)])
    return f"{coded_bytes / 1e6:.3g} MB are kept as codes of {', '.join(kept_names)}, {as_floats}"


def _widened(leaves: Iterable[Any]) -> list[str]:
    """Return a clause for each dtype in whose arrays codes take more bits than they are stored in."""
    names = dict[tuple[str, int], dict[str, None]]()
    for leaf in leaves:
        held: HeldCodes | None = leaf.get_metadata().get("held")
        if held is None:
            continue
        dtype = held.arrays.dtype
        for code_format in held.formats:
            if num_bytes((2,), jnp.dtype(dtype)) * 4 > code_format.bits:
                names.setdefault((dtype, code_format.bits), {})[code_format.name] = None
    return [
        f"codes of {', '.join(each)} are held as {dtype}, 8 bits each and not {bits}"
        for (dtype, bits), each in names.items()
    ]


def formats_of(leaves: Iterable[Any]) -> list[CodeFormat]:
    """Return the formats of codes among some weights."""
    # A caller's own module may hold plain arrays, which have no metadata.
    variables = (leaf for leaf in leaves if hasattr(leaf, "get_metadata"))
    codes = (variable.get_metadata().get("code_parts", ()) for variable in variables)
    return list(dict.fromkeys(code_format for parts in codes for code_format, _ in parts))


def _names_of(leaves: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(code_format.name for code_format in formats_of(leaves)))


def read_coded(
    checkpoint: Checkpoint, pieces: Sequence[Piece], out: np.ndarray, metadata: Mapping[str, Any], max_values: int
) -> None:
    """Fill `out` with the codes of a matrix, some rows of Wᵀ at a time: about `max_values` values.

    Raises ModelLoadError for numbers or scales that are not finite.
    """
    assert isinstance(checkpoint, CodedCheckpoint)
    num_in, _ = metadata["matrix"]
    columns_of_codes, num_written = metadata["ops"].columns_of_codes, 0
    codes_of_matrix = metadata["code_parts"], metadata["decoded_dtype"]
    rows_at_once = max(1, max_values // (num_in * columns_of_codes)) * columns_of_codes
    for piece in pieces:
        start, stop = piece.target[0]
        code_format = checkpoint.code_format(piece.tensor)
        assert code_format is not None
        for row in range(start, stop, rows_at_once):
            codes = read_piece_codes(checkpoint, piece, (row, min(row + rows_at_once, stop)), code_format)
            packed = metadata["ops"].packed_codes(codes, code_format, *codes_of_matrix).reshape(-1)
            out[num_written : num_written + len(packed)] = packed
            num_written += len(packed)
    assert num_written == len(out)
