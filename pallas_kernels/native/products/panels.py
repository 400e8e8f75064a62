"""Weights of products as native code reads them: W [K, N] in panels of 32 columns, one after the other.

float32     [N ÷ 32, K, 32]
bfloat16    [N ÷ 32, K ÷ 2, 32, 2]     pairs of values along K, as matrix units and instructions for pairs read them
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

PANEL = 32
"""Columns of a panel."""
DEPTH = 32
"""Values of K that one instruction of a matrix unit multiplies; K is padded to a multiple in bfloat16."""


def panels_shape(depth: int, num_out: int, dtype: DTypeLike) -> tuple[int, ...]:
    """Return the shape of a weight W [K, N] in panels of 32 columns; `depth` is K and `num_out` is N.

    Bfloat16 has the shape [panels, pairs, 32, 2]. A pair is two values of one column that follow each other along K,
    as a matrix unit (AMX) reads them; K is padded to a multiple of the `DEPTH` = 32 values that one AMX instruction
    multiplies. Any other dtype, such as float32, has the shape [panels, K, 32]. N is padded to whole panels. W [100,
    70] has the shape [3, 64, 32, 2] in bfloat16, and [3, 100, 32] in float32.
    """
    panels = -(-num_out // PANEL)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return panels, -(-depth // DEPTH) * DEPTH // 2, PANEL, 2
    return panels, depth, PANEL


def empty_panels(depth: int, num_out: int, buffer: np.ndarray) -> np.ndarray:
    """Write zeros to the padding of `buffer`, an uninitialised array for W [K, N] in panels, and return `buffer`.

    `depth` is K, `num_out` is N, and `buffer` has the shape `panels_shape(depth, num_out, dtype)`. `fill_panels` later
    writes all elements of W but no padding. So zeros may also be written to elements of W here: the last panel is
    cleared whole if it has padding columns, and the pair that holds the last value of an odd K is cleared whole.
    """
    if num_out % PANEL:
        buffer[-1] = 0
    if buffer.ndim == 4:  # [panels, pairs of K, 32, 2]: bfloat16, with K padded.
        buffer[:, depth // 2 :] = 0
    return buffer


def fill_panels(panels: np.ndarray, first_column: int, columns: np.ndarray) -> None:
    """Write W[:, first_column + i] = columns[i] into the panels of W [K, N]; `columns` are n rows of Wᵀ, [n, K].

    `panels` is [panels, K, 32], or [panels, pairs of K, 32, 2] in bfloat16. Column 70 of W is column 6 of panel 2; in
    bfloat16 its values 2p and 2p + 1 are pair p. If K is odd, the last pair holds one value, and `empty_panels` has set
    the second to zero. All whole panels are written by one assignment. The columns before and after them, which fill
    a panel only in part, take one assignment each: columns 20 … 99 are written as 20 … 31, 32 … 95 and 96 … 99.
    """
    depth = columns.shape[1]
    # A view with the axis of columns before that of K, as in `columns`: [panel, column, K] or [panel, column, pair, 2].
    panels_by_column = panels.transpose(0, 2, 1) if panels.ndim == 3 else panels.transpose(0, 2, 1, 3)
    num_written = 0
    while num_written < len(columns):
        panel, column = divmod(first_column + num_written, PANEL)
        num_whole_panels = (len(columns) - num_written) // PANEL
        if column == 0 and num_whole_panels > 0:
            end = num_written + num_whole_panels * PANEL
            new_columns = columns[num_written:end].reshape(num_whole_panels, PANEL, depth)
            target = panels_by_column[panel : panel + num_whole_panels]
        else:  # Columns up to the panel's end, or fewer if fewer are left.
            new_columns = columns[None, num_written : num_written + PANEL - column]
            target = panels_by_column[panel : panel + 1, column : column + new_columns.shape[1]]
        if panels.ndim == 3:
            target[...] = new_columns
        else:
            target[:, :, : depth // 2] = new_columns[..., : depth // 2 * 2].reshape(*new_columns.shape[:2], -1, 2)
            if depth % 2:
                target[:, :, depth // 2, 0] = new_columns[..., -1]
        num_written += new_columns.shape[0] * new_columns.shape[1]


def in_panels(matrix: Float[Array, "K N"]) -> Array:
    """Return a weight W [K, N] in panels of 32 columns, padded with zeros; XLA computes it, also when traced.

    The result is [panels, K, 32], or [panels, pairs of K, 32, 2] in bfloat16, as `panels_shape` says: element (k, n) of
    W is element (n // 32, k, n % 32), or (n // 32, k // 2, n % 32, k % 2).
    """
    depth, num_out = matrix.shape
    shape = panels_shape(depth, num_out, matrix.dtype)
    padded_depth = 2 * shape[1] if len(shape) == 4 else depth
    padded = jnp.pad(matrix, ((0, padded_depth - depth), (0, shape[0] * PANEL - num_out)))
    if len(shape) == 3:
        return padded.reshape(depth, shape[0], PANEL).transpose(1, 0, 2)
    return padded.reshape(shape[1], 2, shape[0], PANEL).transpose(2, 0, 3, 1)


def columns_of(panels: Float[Array, ...], ids: Int[Array, " T"], depth: int) -> Float[Array, "T K"]:
    """Return the columns `ids` of W [K, N] as rows [T, K]; `depth` is K.

    `panels` hold W in panels of 32 columns: [panels, K, 32] in float32, [panels, pairs of K, 32, 2] in bfloat16, where
    K is padded. This looks up tied embeddings: W is one matrix for the embedding, by columns, and for the logits.
    """
    is_bf16 = panels.dtype == jnp.bfloat16
    if is_bf16:
        # XLA would convert all of W to float32 to gather from it, so its bits are gathered. The barrier keeps XLA from
        # moving the conversion to bits out of a loop that decodes tokens, since there it would copy all of W.
        panels, ids = jax.lax.optimization_barrier((panels, ids))
        panels = jax.lax.bitcast_convert_type(panels, jnp.uint16)
    # A slice between two index arrays moves their axis T to the front: [T, K], or [T, pairs, 2].
    gathered = panels[ids // PANEL, :, ids % PANEL].reshape(ids.shape[0], -1)[:, :depth]
    return jax.lax.bitcast_convert_type(gathered, jnp.bfloat16) if is_bf16 else gathered
