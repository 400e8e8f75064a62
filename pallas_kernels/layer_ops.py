"""Operations of a model's layers beside attention: matrix products, norms, and how their weights are stored.

`LayerOps` computes all of them by plain XLA, on any devices. An attention backend names the operations that go with it
(`Backend.layer_ops`); models call them without knowing how a matrix is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Bounds = tuple[int, int]
"""Start and stop of a slice."""
RowWriter = Callable[[int, np.ndarray], None]
"""Called with the index of the first row, and with consecutive rows from that one on."""


@dataclass(frozen=True)
class LayerOps:
    """Products, norms and weight storage in plain XLA. Instances compare equal by type: they are static metadata."""

    stores_tied_table_as_matrix = False
    """Whether an embedding table that also makes the logits is stored as the matrix W [hidden, vocabulary]."""

    def stream_dtype(self, dtype: DTypeLike) -> np.dtype[Any]:
        """Return the dtype of the hidden states of a model whose weights are `dtype`."""
        return jnp.dtype(dtype)

    def matrix_shape(self, num_in: int, num_out: int, dtype: DTypeLike) -> tuple[int, ...]:
        """Return the shape of the array that stores a matrix W [num_in, num_out]."""
        return num_in, num_out

    def matrix_rows(
        self, out: np.ndarray, bounds: Sequence[Bounds], matrix: tuple[int, int]
    ) -> tuple[list[Bounds], RowWriter]:
        """Prepare to fill `out`, the slice `bounds` of a stored matrix W [num_in, num_out], with rows of a checkpoint.

        `bounds` has (start, stop) for each axis of the stored array, and `matrix` is (num_in, num_out). A checkpoint
        stores Wᵀ [num_out, num_in]. Return the bounds of the rows and of the columns of Wᵀ to read, and a function
        (first row, rows) that writes rows to `out`, counted from the first row to read. For `bounds` ((0, 8), (4, 6))
        the result is [(4, 6), (0, 8)], rows 4 and 5 of Wᵀ; the function is called with (0, both rows), or with
        (0, row 4) and (1, row 5). Here W is stored as it is, so `matrix` is not used.
        """
        # Rows of Wᵀ are columns of W, so both the bounds and `out` are transposed.
        return list(bounds)[::-1], partial(write_rows, out.T)

    def store(self, matrix: Float[Array, "I O"]) -> Array:
        """Return a matrix W [num_in, num_out] as the array that stores it."""
        return matrix

    def product(self, x: Float[Array, "R I"], weight: Array, num_out: int) -> Float[Array, "R O"]:
        """Return x · W in float32, accumulated in float32, for a stored matrix W of `num_out` columns."""
        return jnp.dot(x, weight, preferred_element_type=jnp.float32)

    def columns(self, weight: Array, ids: Int[Array, " T"], num_in: int) -> Float[Array, "T I"]:
        """Return the columns `ids` of a stored matrix W [num_in, O] as rows."""
        return weight[:, ids].T

    def rms_norm(self, x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
        """Return x ÷ √(mean(x²) + eps) × weight for each row: normalised in float32, then multiplied in x's dtype."""
        x_f32 = x.astype(jnp.float32)
        mean_square = jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True)
        normed = (x_f32 * lax.rsqrt(mean_square + eps)).astype(x.dtype)
        return normed * _along_rows(weight.astype(x.dtype), x)

    def layer_norm(
        self, x: Float[Array, "*T D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
    ) -> Float[Array, "*T D"]:
        """Return (x − mean(x)) ÷ √(mean((x − mean(x))²) + eps) × weight + bias for each row of D numbers of x.

        All is computed in float32, and only the result is rounded to x's dtype. Source: Ba et al. 2016,
        arXiv:1607.06450.
        """
        centered = x.astype(jnp.float32)
        centered = centered - jnp.mean(centered, axis=-1, keepdims=True)
        normed = centered * lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
        gain, offset = (_along_rows(vector.astype(jnp.float32), x) for vector in (weight, bias))
        return (normed * gain + offset).astype(x.dtype)

    def uninitialized(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an array whose elements may hold anything. XLA fills it with zeros on a CPU."""
        return lax.empty(shape, dtype)


XLA_OPS = LayerOps()


def _along_rows(vector: Float[Array, " D"], x: Float[Array, "*T D"]) -> Float[Array, "*O D"]:
    """Return the vector with leading axes of size 1 added, so that it has as many axes as x."""
    return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))


def write_rows(target: np.ndarray, first: int, rows: np.ndarray) -> None:
    """Write `rows` to `target[first : first + len(rows)]`, in the target's dtype."""
    target[first : first + len(rows)] = rows.astype(target.dtype, copy=False)
