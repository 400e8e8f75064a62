"""Matrices that plain XLA multiplies by codes: which are kept so, in which arrays, and how these are filled.

A matrix is then two weights, beside each other in its module: `weight` has the codes, and `scales` the scales. Both
have the recipe of the matrix, and are made of the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ...pallas_kernels.code_formats import CodeFormat, Codes, are_finite, joined_parts, quantize
from ...pallas_kernels.scaled_matrix import CodeArrays, code_numbers, group_scales
from ...sharding import sharding_of
from ..config.shares import true_size
from ..errors import ModelLoadError
from ..formats.checkpoint import rows_among_experts
from ..recipe import Path, Piece, Recipes
from ..sources import Bounds
from .weight_state import flat_state

FOUR_BITS = "int4" if jax.__version_info__ >= (0, 11) else "int8"
"""The dtype of codes of 4 bits: compiled programs of older versions of JAX refuse arrays of int4."""
EXPERTS_WANTED = "the same formats for all experts, by rows of Wᵀ whose number and length are multiples of 32"
"""What codes of experts are kept for by every backend, as a clause for the log."""
FLOAT8_CAPABILITY = 8, 9
"""Compute capability of the first GPUs whose code converts float8."""


def num_bytes(shape: Iterable[int], dtype: Any) -> int:
    """Return the bytes that an array takes on a device, where two numbers of 4 bits are a byte."""
    return math.prod(shape) * (4 if dtype in (jnp.int4, jnp.float4_e2m1fn) else 8 * dtype.itemsize) // 8


@dataclass(frozen=True)
class HeldCodes:
    """How a matrix is kept as codes."""

    arrays: CodeArrays
    formats: tuple[CodeFormat, ...]
    """The format of the tensor of each piece of the matrix's recipe, in order, as `with_held_scales` returns it."""

    @property
    def of_expert(self) -> HeldCodes:
        """Return how the matrix of one expert is kept, in arrays of so many; the formats are the same."""
        return replace(self, arrays=replace(self.arrays, num_experts=1))


@dataclass(frozen=True)
class Target:
    """What codes are kept for."""

    mesh: Mesh
    dtype: str
    """float32 or bfloat16: the dtype of other weights."""
    is_tied: bool
    """Whether the embedding table also makes the logits."""

    @property
    def platform(self) -> str:
        """Return the kind of the devices."""
        return str(self.mesh.devices.flat[0].platform)


def hold_codes(model: Any, recipes: Recipes, formats: Mapping[str, CodeFormat | None], target: Target) -> None:
    """Replace each matrix of a model of abstract shapes that can stay codes by the shapes of its codes and scales.

    The metadata of both then have `held`, how the matrix is kept, and `code_parts` and `decoded_dtype` as matrices of
    native code have; those of scales have `is_scales` and the name `tensor` of what they are made of, those of a table
    its shape `table`.
    """
    from flax import nnx

    for path, module in nnx.iter_modules(model):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nnx.Variable) or (matrix := _matrix_of(weight)) is None:
            continue
        metadata, pieces = weight.get_metadata(), recipes.pieces[*path, "weight"]
        held = held_codes(
            pieces, recipes.shapes, formats, matrix.inputs_per_device, target,
            is_table=matrix.is_table, num_experts=matrix.num_experts,
        )  # fmt: skip
        if held is None:
            reason_for_floats = experts_as_floats((*path, "weight"), pieces, formats, metadata)
        else:
            reason_for_floats = _not_fused(held, target, is_table=matrix.is_table)
        if reason_for_floats is not None:
            module.weight = nnx.Param(weight.get_value(), **metadata, becomes_floats=reason_for_floats)
        elif held is not None:
            _replace_by_codes(module, weight, matrix, pieces, held, target)


class _Matrix(NamedTuple):
    """A weight that may be kept as codes: a matrix W [in, out], one for each expert, or a table, which is Wᵀ."""

    is_table: bool
    num_experts: int | None
    num_in: int
    num_out: int
    """The inputs and outputs of one matrix."""
    axes: tuple[str | None, ...]
    """The logical axes of inputs and outputs, behind that of experts if there is one."""
    inputs_per_device: int


def _matrix_of(weight: Any) -> _Matrix | None:
    """Return the matrix that a weight is; None for a vector, and for a weight that its layer needs as floats."""
    metadata = weight.get_metadata()
    num_experts, is_table = metadata.get("num_experts"), "matrix" not in metadata
    if metadata.get("stays_floats") or len(weight.shape) != (2 if num_experts is None else 3):
        return None
    shape, shard_shape = weight.shape, weight.sharding.shard_shape(weight.shape)
    axes = tuple(metadata["logical_axes"])
    if is_table:
        shape, shard_shape, axes = shape[::-1], shard_shape[::-1], axes[::-1]
    num_in, num_out = shape[-2:]
    return _Matrix(is_table, num_experts, num_in, num_out, axes, inputs_per_device=shard_shape[-2])


def _replace_by_codes(
    module: Any, weight: Any, matrix: _Matrix, pieces: Sequence[Piece], held: HeldCodes, target: Target
) -> None:
    """Replace the weight of a module by the shapes of its codes and its scales, with the metadata of `hold_codes`."""
    from flax import nnx

    num_rows = (piece.target[0][1] - piece.target[0][0] for piece in pieces)
    parts = joined_parts(zip(held.formats, num_rows, strict=True))
    shared = {**weight.get_metadata(), "held": held, "code_parts": parts, "decoded_dtype": target.dtype}
    if matrix.is_table:
        shared["table"] = tuple(weight.shape)
    codes, scales = _abstract_arrays(held.arrays, matrix, target.mesh)
    module.weight = nnx.Param(codes, **shared)
    module.scales = nnx.Param(scales, **shared, tensor="weight", is_scales=True)


def _abstract_arrays(
    arrays: CodeArrays, matrix: _Matrix, mesh: Mesh
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of the codes and of the scales of a matrix, placed on a mesh.

    Example: with groups of 32 inputs, W [512, 64] of the logical axes ("embed", "mlp") has codes [16, 32, 64] of the
    axes ("embed", None, "mlp"), and scales [16, 64] of the axes ("embed", "mlp").
    """
    *expert_axis, axis_in, axis_out = matrix.axes

    def placed(shape: tuple[int, ...], dtype: str, logical_axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, (*expert_axis, *logical_axes))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    codes_shape = arrays.codes_shape(matrix.num_in, matrix.num_out)
    scales_shape = arrays.scales_shape(matrix.num_in, matrix.num_out)
    codes = placed(codes_shape, arrays.dtype, arrays.codes_axes(axis_in, axis_out))
    scales = placed(scales_shape, arrays.scale_dtype, arrays.scales_axes(axis_in, axis_out))
    return codes, scales


def experts_as_floats(
    path: Path, pieces: Sequence[Piece], formats: Mapping[str, CodeFormat | None], metadata: Mapping[str, Any]
) -> str | None:
    """Return why a matrix whose codes cannot be kept becomes floats, as a clause for the log that names its module.

    The result is None unless it is a matrix of experts, and some of its tensors are stored as codes. Layers whose
    experts are stored alike have the same reason.
    """
    stored = dict.fromkeys(formats.get(piece.tensor) for piece in pieces)
    # Biases of experts have an axis of experts too, and a tensor of all of them may have a matrix's shape.
    if "num_experts" not in metadata or "matrix" not in metadata or not any(stored):
        return None
    names = " and ".join("floats" if code_format is None else code_format.name for code_format in stored)
    num_out = sum(true_size(runs) for _, runs in metadata["rows"])
    sizes = f"{true_size(metadata['columns'])} inputs and {num_out} outputs of an expert"
    got = f"{path[-2]} of experts becomes floats: got {names} for {sizes}"
    return f"{got}, wanted {EXPERTS_WANTED}; a file that stores them so keeps its codes"


def converted_bytes(state: Any) -> int:
    """Return the bytes of the largest matrix of codes on a device once it is float32, as XLA makes it on a CPU."""
    leaves = (leaf for _, leaf in flat_state(state) if hasattr(leaf, "get_metadata"))
    held = ((leaf, leaf.get_metadata()["held"].arrays) for leaf in leaves if "held" in leaf.get_metadata())
    # Of experts, one after the other is made float32.
    shards = ((leaf.sharding.shard_shape(leaf.shape), arrays.num_experts) for leaf, arrays in held)
    return max((4 * math.prod(shard if of_all is None else shard[1:]) for shard, of_all in shards), default=0)


def has_group_scales(state: Any) -> bool:
    """Return whether some matrix is kept as codes whose groups of inputs have scales."""
    variables = (leaf.get_metadata() for _, leaf in flat_state(state) if hasattr(leaf, "get_metadata"))
    return any("held" in metadata and metadata["held"].arrays.group is not None for metadata in variables)


def held_codes(
    pieces: Sequence[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, CodeFormat | None],
    inputs_per_device: int,
    target: Target,
    *,
    is_table: bool,
    num_experts: int | None = None,
) -> HeldCodes | None:
    """Return how a matrix of these pieces is kept as codes; None if it becomes floats.

    With `num_experts` the pieces are those of so many matrices, whose rows of Wᵀ lie one after the other.
    `inputs_per_device` is how many inputs a device has.
    """
    stored = _stored_formats(pieces, shapes, formats)
    dtype = _shared_dtype(stored, target, has_experts=num_experts is not None)
    if dtype is None:
        return None
    group = _shared_group(pieces, stored, shapes, inputs_per_device)
    scale_dtype = "float32" if group is None else _scale_dtype(stored, target)
    # A GPU's compiler reads codes of 4 bits along the inputs: in a loop it would copy a matrix of another layout.
    by_rows = is_table or (dtype in ("int4", "float4_e2m1fn") and target.platform == "gpu")
    arrays = CodeArrays(dtype, group, scale_dtype, by_rows, num_experts)
    return HeldCodes(arrays, tuple(with_held_scales(code_format, arrays) for code_format in stored))


def _stored_formats(
    pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, CodeFormat | None]
) -> list[CodeFormat]:
    """Return the format of each piece's tensor; nothing unless all tensors are codes of whole groups of inputs."""
    stored = list[CodeFormat]()
    for piece in pieces:
        code_format = formats.get(piece.tensor)
        if code_format is None or piece.rows_shape(shapes[piece.tensor])[-1] % code_format.group:
            return []
        stored.append(code_format)
    return stored


def _shared_dtype(formats: Iterable[CodeFormat], target: Target, *, has_experts: bool) -> str | None:
    """Return the dtype of one array that holds codes of all these formats; None if there is none."""
    dtypes = {_dtype_of(code_format, target, has_experts=has_experts) for code_format in formats}
    if dtypes == {"int4", "int8"}:
        return "int8"
    return dtypes.pop() if len(dtypes) == 1 else None


def _shared_group(
    pieces: Sequence[Piece],
    stored: Sequence[CodeFormat],
    shapes: Mapping[str, tuple[int, ...]],
    inputs_per_device: int,
) -> int | None:
    """Return how many inputs share a scale in all of a matrix; None if all inputs of a row do in each of its tensors.

    `stored` are the formats of the pieces. Their groups are cut so that each lies on one device, in one piece and in
    one group of its tensor: 32 inputs that begin at a multiple of 72 share their scales in groups of 8.
    """
    row_sizes = (piece.rows_shape(shapes[piece.tensor])[-1] for piece in pieces)
    groups = [each.group for each, row_size in zip(stored, row_sizes, strict=True) if each.group < row_size]
    if not groups:
        return None
    edges = [edge for piece in pieces for edge in (*piece.source[1], *piece.target[1])]
    return math.gcd(inputs_per_device, *groups, *edges)


def with_held_scales(code_format: CodeFormat, arrays: CodeArrays) -> CodeFormat:
    """Return the format of a tensor, with scales of bfloat16 if `arrays` hold them so and floats are quantized to it.

    Codes of floats are then the nearest ones for the scales that are held.
    """
    is_rounded = arrays.scale_dtype == "bfloat16" and code_format.takes_floats
    return replace(code_format, scale="bfloat16") if is_rounded else code_format


def _not_fused(held: HeldCodes, target: Target, *, is_table: bool) -> str | None:
    """Return why codes would cost more than floats on these devices, as a clause; None where XLA fuses their product.

    Found by compiling products for each platform: tests/compile_step.py shows what is converted in front of them.
    """
    device = target.mesh.devices.flat[0]
    if target.platform == "tpu" and is_table and target.is_tied and held.arrays.group is not None:
        return "a TPU's compiler makes a tied table with scales of groups floats before each product"
    if target.platform == "gpu" and held.arrays.dtype == "float8_e4m3fn":
        capability = tuple(map(int, str(getattr(device, "compute_capability", "9.0")).split(".")))
        if capability < FLOAT8_CAPABILITY:
            return f"a GPU of compute capability {device.compute_capability} has no float8"
    return None


def _dtype_of(code_format: CodeFormat, target: Target, *, has_experts: bool) -> str | None:
    """Return the dtype of arrays that hold the codes of a format; None if none does.

    On a CPU XLA converts all codes of 4 bits and all small floats of an array before it takes an expert's from it, and
    leaves whole bytes as they are.
    """
    if code_format.has_minima or code_format.super_group is not None or code_format.is_in_quads:
        return None
    needs_bytes = has_experts and target.platform == "cpu"
    if code_format.mantissa_bits is not None:
        is_float4 = code_format.mantissa_bits == 1 and has_experts
        if needs_bytes:
            return "int8" if is_float4 else "uint8"
        return "float4_e2m1fn" if is_float4 and FOUR_BITS == "int4" else "float8_e4m3fn"
    largest_code = 2**code_format.bits - 1
    # Codes are held with their zero subtracted; zeros of groups may be any code.
    lowest, highest = -code_format.zero, largest_code - code_format.zero
    if code_format.has_zeros:
        lowest, highest = -largest_code, largest_code
    if lowest >= -8 and highest <= 7:
        return "int8" if needs_bytes else FOUR_BITS
    return "int8" if lowest >= -128 and highest <= 127 else None


def _scale_dtype(formats: Iterable[CodeFormat], target: Target) -> str:
    """Return the dtype of the scales of groups: that of the formats where they agree, else float32.

    On a GPU that computes in bfloat16 they are rounded to it, since XLA fuses no other into a product.
    """
    if target.platform == "gpu" and target.dtype == "bfloat16":
        return "bfloat16"
    # bfloat16 has the exponents of float32, and so all powers of two.
    kinds = {"bfloat16" if code_format.scale == "power" else code_format.scale for code_format in formats}
    return kinds.pop() if len(kinds) == 1 and kinds <= {"float16", "bfloat16"} else "float32"


def read_held(
    checkpoint: Any, pieces: Sequence[Piece], held: HeldCodes, out: tuple[np.ndarray, np.ndarray], max_values: int
) -> None:
    """Fill arrays of codes and scales, some rows of Wᵀ at a time: about `max_values` values.

    Rows and columns that no piece covers are zero. Raises ModelLoadError for numbers or scales that are not finite.
    """
    num_experts = held.arrays.num_experts
    matrices = [out] if num_experts is None else list(zip(*out, strict=True))
    rows_of_matrix = [[held.arrays.rows_of(stored) for stored in matrix] for matrix in matrices]
    rows_per_matrix = len(rows_of_matrix[0][0])
    for stored in out:
        stored[...] = 0
    for piece, code_format in zip(pieces, held.formats, strict=True):
        start, stop = piece.target[0]
        code_rows, scale_rows = rows_of_matrix[start // rows_per_matrix]
        first_row = start - start % rows_per_matrix
        columns, groups = (slice(*bounds) for bounds in _target_columns(piece, held.arrays))
        rows_at_once = max(1, max_values // piece.rows_shape(checkpoint.shape(piece.tensor))[-1])
        for row in range(start, stop, rows_at_once):
            end = min(row + rows_at_once, stop)
            codes = read_piece_codes(checkpoint, piece, (row, end), code_format)
            target = slice(row - first_row, end - first_row)
            code_rows[target, columns] = _codes(codes, code_format, piece, held.arrays)
            scale_rows[target, groups] = _scales(codes, code_format, piece, held.arrays, np)


@runtime_checkable
class QuantizingCheckpoint(Protocol):
    """A checkpoint of floats that are quantized as they are read."""

    def read_quantized(self, name: str, rows: slice, code_format: CodeFormat) -> Codes:
        """Return rows of a matrix, quantized; raise ModelLoadError for numbers that the format cannot hold."""


def read_piece_codes(checkpoint: Any, piece: Piece, bounds: Bounds, code_format: CodeFormat) -> Codes:
    """Return the codes of some rows of a weight, which a piece has: whole rows of its tensor, where they lie in it.

    Codes are as a checkpoint stores them, or quantized to `code_format`. `bounds` are (start, stop) among the weight's
    rows. Raises ModelLoadError, which names the tensor and its rows, if numbers or scales are not finite.
    """
    rows = piece.rows(*bounds)
    if piece.expert is not None:
        rows = rows_among_experts(rows, piece.expert, piece.rows_shape(checkpoint.shape(piece.tensor)))
    is_quantizing, whole_rows = isinstance(checkpoint, QuantizingCheckpoint), slice(rows.start, rows.stop)
    codes: Codes
    if is_quantizing:
        codes = checkpoint.read_quantized(piece.tensor, whole_rows, code_format)
    else:
        codes = checkpoint.read_codes(piece.tensor, whole_rows)
    if piece.step > 1:
        codes = codes.every(piece.step)
    if is_quantizing:  # It has refused what is not finite.
        return codes
    if not are_finite(codes, code_format):
        where = f"rows {rows.start} to {rows.stop - 1}"
        fault = f"tensor {piece.tensor} holds a NaN or an infinity, or a scale that is one, in {where}"
        raise ModelLoadError(f"{checkpoint.path}: {fault}; fetch it again")
    return codes


Blocks = Mapping[tuple[tuple[int, int], ...], jax.Array]
"""Parts of an array by their bounds: (start, stop) of each axis."""


def quantized_blocks(pieces: Sequence[Piece], tensors: Sequence[jax.Array], held: HeldCodes) -> tuple[Blocks, Blocks]:
    """Return the codes and the scales of all pieces, by their rows and columns among those of Wᵀ.

    A piece names its tensor, of floats, by an index into `tensors`; whole rows of it are quantized. Where all inputs of
    a row share a scale, pieces of the same rows give the same one, and it is returned once.
    """
    codes_blocks, scales_blocks = dict[Any, jax.Array](), dict[Any, jax.Array]()
    for piece, code_format in zip(pieces, held.formats, strict=True):
        tensor = tensors[int(piece.tensor)]
        rows = (tensor.T if piece.is_transposed else tensor)[slice(*piece.source[0], piece.step)]
        codes = quantize(rows.astype(jnp.float32), code_format, jnp)
        columns, groups = _target_columns(piece, held.arrays)
        codes_blocks[piece.target[0], columns] = _codes(codes, code_format, piece, held.arrays)
        scales_blocks[piece.target[0], groups] = _scales(codes, code_format, piece, held.arrays, jnp)
    return codes_blocks, scales_blocks


def quantized_rows(rows: jax.Array, held: HeldCodes) -> tuple[jax.Array, jax.Array]:
    """Return float32 rows of Wᵀ, all of them and with any padding, as rows of codes and rows of scales."""
    _, num_in = rows.shape
    code_format = replace(held.formats[0], group=held.arrays.group or num_in)
    codes = quantize(rows, code_format, jnp)
    scales = group_scales(codes, code_format, held.arrays, num_in, jnp)
    return code_numbers(codes, code_format, held.arrays.dtype), scales


def _target_columns(piece: Piece, arrays: CodeArrays) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bounds of a piece's columns among those of codes [N, K], and of scales [N, groups]."""
    start, stop = piece.target[1]
    return (start, stop), (0, 1) if arrays.group is None else (start // arrays.group, stop // arrays.group)


def _codes(codes: Codes, code_format: CodeFormat, piece: Piece, arrays: CodeArrays) -> Any:
    """Return the codes of a piece, given those of its rows."""
    return code_numbers(codes, code_format, arrays.dtype)[:, slice(*piece.source[1])]


def _scales(codes: Codes, code_format: CodeFormat, piece: Piece, arrays: CodeArrays, xp: Any) -> Any:
    """Return the scales of a piece, given the codes of its rows."""
    scales = group_scales(codes, code_format, arrays, codes.codes.shape[1], xp)
    if arrays.group is None:
        return scales
    start, stop = piece.source[1]
    return scales[:, start // arrays.group : stop // arrays.group]
