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
from flax import nnx
from jax import lax

from ...pallas_kernels.code_formats import CodeFormat, CodeParts
from ...pallas_kernels.layer_ops import LayerOps
from ..recipe import Piece
from ..sources import Bounds
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
    sharding: jax.sharding.NamedSharding
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


class RecipeInputs(NamedTuple):
    """What the recipe of a weight, or of one expert's part of it, says about tensors.

    Within one weight, the parts of two experts with equal inputs have equal recipes.
    """

    tensors: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]
    """Both as in `WeightRecipe`."""
    formats: tuple[CodeFormat, ...]
    """The format of each piece's tensor, for a weight that is kept as codes and scales; () for another."""


def recipe_of(weight: nnx.Variable[Any], scales: nnx.Variable[Any] | None, inputs: RecipeInputs) -> WeightRecipe:
    """Return the recipe by which `inputs` become a weight, or one expert's part of a weight of experts.

    `weight` has the shape, dtype and sharding of the whole weight as it is stored, and the metadata of its layer.
    `scales` has those of the scales that are made with it; it is None for a weight without any.
    """
    metadata = weight.get_metadata()
    recipe = WeightRecipe(
        tensors=inputs.tensors,
        pieces=inputs.pieces,
        shape=tuple(weight.shape),
        dtype=np.dtype(weight.dtype),
        sharding=weight.sharding,
    )
    if "matrix" in metadata:
        recipe = replace(recipe, matrix=metadata["matrix"], ops=metadata["ops"])
    if "held" in metadata:
        assert scales is not None, "codes are kept with their scales"
        held = replace(metadata["held"], formats=inputs.formats)
        recipe = replace(recipe, held=held, scales=scales.get_value())
    elif "code_parts" in metadata:
        recipe = replace(recipe, codes=(metadata["code_parts"], metadata["decoded_dtype"]))
    return _with_one_expert(recipe, metadata["num_experts"]) if "num_experts" in metadata else recipe


def _with_one_expert(recipe: WeightRecipe, num_experts: int) -> WeightRecipe:
    """Return a recipe whose pieces are those of one of `num_experts`, and whose matrix is still that of all of them,
    with the matrix of one. Example: the matrix (D, 8 F) of 8 experts becomes (D, F)."""
    recipe = replace(recipe, num_experts=num_experts)
    if recipe.matrix is not None:
        num_in, num_out = recipe.matrix
        recipe = replace(recipe, matrix=(num_in, num_out // num_experts))
    if recipe.codes is not None:
        assert recipe.matrix is not None, "codes are those of a matrix"
        code_parts, decoded_dtype = recipe.codes
        recipe = replace(recipe, codes=(parts_of_expert(code_parts, recipe.matrix[1]), decoded_dtype))
    if recipe.held is not None:
        recipe = replace(recipe, held=recipe.held.of_expert)
    return recipe


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
