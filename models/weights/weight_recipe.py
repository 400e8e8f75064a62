"""How tensors on a device become one weight: pieces of them, fused, and stored as layer operations want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...pallas_kernels.code_formats import CodeParts
from ...pallas_kernels.layer_ops import LayerOps
from ..recipe import Bounds, Piece
from .code_arrays import Blocks, HeldCodes, quantized_blocks


@dataclass(frozen=True)
class WeightRecipe:
    """How tensors become one weight: their shapes, the pieces they are cut into, and how the weight is stored.

    Weights with equal recipes share a program.
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

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes, dtypes and shardings of the arrays that `make_weight` returns."""
        first = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
        return (first,) if self.scales is None else (first, self.scales)

    @property
    def is_copy(self) -> bool:
        """Return whether the weight is one whole tensor, unchanged but for its dtype."""
        whole = tuple((0, size) for size in self.shape)
        return self.matrix is None and self.held is None and self.pieces == (Piece("0", whole, whole),)


def recipe_of(leaf: Any, scales: Any, shapes: tuple[tuple[int, ...], ...], pieces: tuple[Piece, ...]) -> WeightRecipe:
    """Return the recipe of the weight `leaf`, made of `pieces` of tensors that have these shapes.

    `leaf` has the shape, dtype and sharding of the weight as it is stored, and the metadata of its layer. `scales` has
    those of the scales that are made with it; it is None for a weight without any.
    """
    metadata = leaf.get_metadata()
    stored: dict[str, Any] = {"matrix": metadata["matrix"], "ops": metadata["ops"]} if "matrix" in metadata else {}
    if "held" in metadata:
        stored |= {"held": metadata["held"], "scales": scales.get_value()}
    elif "code_parts" in metadata:
        stored["codes"] = metadata["code_parts"], metadata["decoded_dtype"]
    return WeightRecipe(shapes, pieces, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding, **stored)


def make_weight(
    recipe: WeightRecipe, tensors: list[jax.Array], layer: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Return the arrays of the weight that `tensors` make by `recipe`, as they are stored: one, or codes and scales.

    A piece names its tensor by an index into `tensors`, and copies the bounds `source` of the tensor to the bounds
    `target` of the weight. With `layer` the tensors are arrays [L, …], of which that layer is taken. A matrix W is put
    together as Wᵀ, in which pieces are counted, and then stored as `recipe.ops` wants it; if it is stored as codes, it
    is quantized. Parts that no piece covers are zero.
    """
    if layer is not None:
        tensors = [lax.dynamic_index_in_dim(tensor, layer, keepdims=False) for tensor in tensors]
    if recipe.held is not None:
        return _held_weight(recipe, recipe.held, tensors)
    shape = recipe.shape if recipe.matrix is None else recipe.matrix[::-1]
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
    return (jnp.copy(weight),)


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
