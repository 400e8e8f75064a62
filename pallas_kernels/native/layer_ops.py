"""The operations of a model's layers in native code, for one CPU device. Matrices are stored in panels (`matmul`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..layer_ops import Bounds, LayerOps, RowWriter
from .matmul import columns_of, empty_panels, fill_panels, in_panels, panels_shape, product
from .norms import layer_norm, rms_norm
from .xla_call import uninitialized


@dataclass(frozen=True)
class NativeOps(LayerOps):
    """Products and norms whose bits, for one row, do not depend on the other rows. See `LayerOps` for the methods."""

    stores_tied_table_as_matrix = True

    def stream_dtype(self, dtype: DTypeLike) -> np.dtype[Any]:
        """Return float32: products and norms return it, and XLA:CPU computes bfloat16 by way of float32 anyway."""
        return jnp.dtype(jnp.float32)

    def matrix_shape(self, num_in: int, num_out: int, dtype: DTypeLike) -> tuple[int, ...]:
        return panels_shape(num_in, num_out, dtype)

    def matrix_rows(
        self, out: np.ndarray, bounds: Sequence[Bounds], matrix: tuple[int, int]
    ) -> tuple[list[Bounds], RowWriter]:
        """Prepare to fill `out`, the panels of a whole matrix W [num_in, num_out], with rows from a checkpoint.

        A checkpoint stores Wᵀ [num_out, num_in]; `matrix` is (num_in, num_out). Write zeros to the padding of `out`.
        Return the bounds (start, stop) of the rows and of the columns of Wᵀ to read, which are all of them, and a
        function (first row, rows) that writes consecutive rows of Wᵀ into the panels, from `first row` on.
        """
        # Panels are for a single device, so `bounds` always covers the whole array and is not read.
        num_in, num_out = matrix
        return [(0, num_out), (0, num_in)], partial(fill_panels, empty_panels(num_in, num_out, out))

    def store(self, matrix: Float[Array, "I O"]) -> Array:
        return in_panels(matrix)

    def product(self, x: Float[Array, "R I"], weight: Array, num_out: int) -> Float[Array, "R O"]:
        return product(x.astype(weight.dtype), weight, num_out)

    def columns(self, weight: Array, ids: Int[Array, " T"], num_in: int) -> Float[Array, "T I"]:
        return columns_of(weight, ids, num_in)

    def rms_norm(self, x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
        return rms_norm(_rows(x), weight.astype(jnp.float32), eps).reshape(x.shape).astype(x.dtype)

    def layer_norm(
        self, x: Float[Array, "*T D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
    ) -> Float[Array, "*T D"]:
        vectors = weight.astype(jnp.float32), bias.astype(jnp.float32)
        return layer_norm(_rows(x), *vectors, eps).reshape(x.shape).astype(x.dtype)

    def uninitialized(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return uninitialized(shape, dtype)


NATIVE_OPS = NativeOps()


def _rows(x: Float[Array, "*T D"]) -> Float[Array, "R D"]:
    """Return x in float32 with its leading axes joined into one."""
    return x.reshape(-1, x.shape[-1]).astype(jnp.float32)
