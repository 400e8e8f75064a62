"""How tensors on a device become one weight: pieces of them, fused, and stored as layer operations want it.

The weights of experts are one array, in which those of an expert are a part of the first axis, however they are stored.
Each is made by itself, of its own tensors, so that all experts share a small program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...pallas_kernels.code_formats import CodeFormat, CodeParts
from ...pallas_kernels.layer_ops import LayerOps
from ..recipe import Bounds, Piece
from .code_arrays import Blocks, HeldCodes, quantized_blocks


@dataclass(frozen=True)
class WeightRecipe:
    """How tensors become one weight: their shapes, the pieces they are cut into, and how the weight is stored.

    Weights with equal recipes share a program. With `num_experts` all but its arrays are those of one expert's weight.
    """

    tensors: tuple[tuple[int, ...], ...]
    """Shapes of the tensors."""
    pieces: tuple[Piece, ...]
    """The name of a piece's tensor is its index among `tensors`."""
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    matrix: tuple[int, int] | None = None
    """(inputs, outputs) of a matrix W, whose pieces are counted in Wᵀ; None for a table or a vector."""
    ops: LayerOps | None = None
    """How a matrix is stored."""
    codes: tuple[CodeParts, str] | None = None
    """The formats of a matrix that is stored as bytes of codes, and the dtype that these are decoded to."""
    held: HeldCodes | None = None
    """How a matrix or table is kept as arrays of codes and scales; None for other weights."""
    scales: jax.ShapeDtypeStruct | None = None
    """Shape, dtype and sharding of the scales of such a matrix; `shape`, `dtype` and `sharding` are those of its codes.
    """
    num_experts: int | None = None
    """Number of experts whose weights make up the first axis of the arrays; None for other weights."""

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes, dtypes and shardings of the arrays that `make_weight` returns."""
        first = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
        return (first,) if self.scales is None else (first, self.scales)

    @property
    def of_expert(self) -> WeightRecipe:
        """Return the recipe of one expert's weight, a part of the arrays."""
        assert self.num_experts is not None, "a weight of experts"
        shape = self.shape[0] // self.num_experts, *self.shape[1:]
        scales = None if self.scales is None else self.scales.update(shape=(1, *self.scales.shape[1:]))
        return replace(self, shape=shape, scales=scales, num_experts=None)

    @property
    def is_copy(self) -> bool:
        """Return whether the weight is one whole tensor, unchanged but for its dtype."""
        whole = tuple((0, size) for size in self.shape)
        is_plain = self.matrix is None and self.held is None and self.num_experts is None
        return is_plain and self.pieces == (Piece("0", whole, whole),)


def recipe_of(
    leaf: Any, scales: Any, shapes: tuple[tuple[int, ...], ...], pieces: tuple[Piece, ...], *, first_piece: int = 0
) -> WeightRecipe:
    """Return the recipe of the weight `leaf`, made of `pieces` of tensors that have these shapes.

    `leaf` has the shape, dtype and sharding of the weight as it is stored, and the metadata of its layer. `scales` has
    those of the scales that are made with it; it is None for a weight without any. For a weight of experts `pieces` are
    those of one of them, which begin with number `first_piece` among all of the weight.
    """
    metadata = leaf.get_metadata()
    recipe = WeightRecipe(
        shapes, pieces, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding,
        matrix=metadata.get("matrix"),
        ops=metadata["ops"] if "matrix" in metadata else None,
        held=metadata.get("held"),
        scales=scales.get_value() if "held" in metadata else None,
    )  # fmt: skip
    if "code_parts" in metadata and "held" not in metadata:
        recipe = replace(recipe, codes=(metadata["code_parts"], metadata["decoded_dtype"]))
    if "num_experts" in metadata:
        recipe = _with_one_expert(recipe, metadata["num_experts"], first_piece)
    return recipe


def _with_one_expert(recipe: WeightRecipe, num_experts: int, first_piece: int) -> WeightRecipe:
    """Return the recipe of a weight of experts with the outputs and the formats of one expert.

    `recipe` has those of all experts, but only the pieces of one of them, from number `first_piece` on.
    """
    matrix, codes, held = recipe.matrix, recipe.codes, recipe.held
    if matrix is not None:
        matrix = matrix[0], matrix[1] // num_experts
    if codes is not None:
        assert matrix is not None, "codes are those of a matrix"
        codes = parts_of_expert(codes[0], matrix[1]), codes[1]
    if held is not None:
        formats = held.formats[first_piece : first_piece + len(recipe.pieces)]
        held = replace(held, arrays=replace(held.arrays, num_experts=1), formats=formats)
    return replace(recipe, matrix=matrix, codes=codes, held=held, num_experts=num_experts)


def parts_of_expert(parts: CodeParts, num_columns: int) -> CodeParts:
    """Return the formats of the `num_columns` columns of one expert; in bytes of codes all experts have the same."""
    first = list[tuple[CodeFormat, int]]()
    for code_format, size in parts:
        if num_columns:
            first.append((code_format, min(size, num_columns)))
            num_columns -= first[-1][1]
    return tuple(first)


def make_weight(recipe: WeightRecipe, tensors: list[jax.Array], *index: Any) -> tuple[jax.Array, ...]:
    """Return the arrays of the weight that `tensors` make by `recipe`, as they are stored: one, or codes and scales.

    A piece names its tensor by an index into `tensors`, and copies the bounds `source` of the tensor to the bounds
    `target` of the weight. With an `index` of one or two numbers, the tensors are those at these places along the first
    axes of the arrays: arrays [L, …] and a layer, or [L, E, …] and a layer and an expert. A matrix W is put together as
    Wᵀ, in which pieces are counted, and then stored as `recipe.ops` wants it; if it is stored as codes, it is
    quantized. Parts that no piece covers are zero.
    """
    for number in index:
        tensors = [lax.dynamic_index_in_dim(tensor, number, keepdims=False) for tensor in tensors]
    if recipe.held is not None:
        return _held_weight(recipe, recipe.held, tensors)
    # The pieces of a matrix are counted in Wᵀ, and those of an expert's biases [1, out] in a vector.
    shape = recipe.matrix[::-1] if recipe.matrix is not None else recipe.shape[-len(recipe.pieces[0].target) :]
    dtype = recipe.dtype if recipe.codes is None else tensors[0].dtype
    blocks = []
    for piece in recipe.pieces:
        blocks.append(_Block(piece.target, piece.block_of(tensors[int(piece.tensor)]).astype(dtype)))
    weight = _assembled(shape, blocks, dtype)
    if recipe.codes is not None:
        assert recipe.ops is not None
        return (recipe.ops.store_codes(weight, *recipe.codes),)
    if recipe.ops is not None:
        weight = recipe.ops.store(weight.T)
    # A weight that is a tensor as it is would be the caller's own array, which the caller may donate or delete later.
    return (jnp.copy(weight.reshape(recipe.shape)),)


def put_expert(
    recipe: WeightRecipe, arrays: tuple[jax.Array, ...], expert: jax.Array, tensors: list[jax.Array], *index: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the arrays of all experts with one expert's part replaced by what `make_weight` makes of `tensors`."""
    made = make_weight(recipe.of_expert, tensors, *index)
    return tuple(
        lax.dynamic_update_slice_in_dim(array, part, expert * part.shape[0], 0)
        for array, part in zip(arrays, made, strict=True)
    )


def _held_weight(recipe: WeightRecipe, held: HeldCodes, tensors: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Return the codes and the scales of a matrix that is kept as both: rows of tensors are quantized from float32."""

    def stored(blocks: Blocks, array: jax.ShapeDtypeStruct) -> jax.Array:
        parts = [_Block(target, values) for target, values in blocks.items()]
        rows = _assembled(held.arrays.rows_shape(array.shape), parts, array.dtype)
        return held.arrays.stored(rows, array.shape)

    return tuple(map(stored, quantized_blocks(recipe.pieces, tensors, held), recipe.arrays))


class _Block(NamedTuple):
    """Values, and the slice of a weight that they fill."""

    target: tuple[Bounds, ...]
    values: jax.Array


def _assembled(shape: tuple[int, ...], blocks: list[_Block], dtype: np.dtype[Any]) -> jax.Array:
    """Return an array of this shape with the blocks at their targets, and zeros elsewhere. Blocks do not overlap.

    If all blocks are whole rows, as in nearly all weights, they are concatenated in order, with zeros in the gaps: for
    6 rows with blocks at rows 0 to 1 and 4 to 5, the parts are a block, zeros for rows 2 to 3, and the other block.
    Otherwise blocks are written into an array of zeros one by one. A scalar weight (shape ()) is its only block. Each
    block's target is the (start, stop) of every axis, and its values have `dtype` already.
    """
    if not shape:
        return blocks[0].values
    num_rows, *widths = shape
    all_columns = [(0, width) for width in widths]
    if all(list(block.target[1:]) == all_columns for block in blocks):
        parts, row = [], 0  # `row` is the first row that `parts` do not fill yet.
        for block in sorted(blocks, key=lambda block: block.target[0]):
            start, stop = block.target[0]
            parts += [jnp.zeros((start - row, *widths), dtype)] if start > row else []
            parts.append(block.values)
            row = stop
        parts += [jnp.zeros((num_rows - row, *widths), dtype)] if row < num_rows else []
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    weight = jnp.zeros(shape, dtype)
    for block in blocks:
        weight = weight.at[tuple(slice(*bounds) for bounds in block.target)].set(block.values)
    return weight
