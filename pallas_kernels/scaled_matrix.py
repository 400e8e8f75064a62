"""Quantized matrices for plain XLA: an array of codes and one of scales, converted within the products that read them.

Codes are int8, int4 or small floats, and stand for a number once they are multiplied by their scale. A scale of all
inputs of an output multiplies the sums of the product. Scales of groups multiply the codes before; an axis of its own
for the groups lets compilers fuse that into the product, which a reshape between the two would prevent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from .code_formats import CodeFormat, Codes, scale_values


@dataclass(frozen=True)
class CodeArrays:
    """How the arrays of a matrix W [K, N] are laid out; axes of results are named as those of W."""

    dtype: str
    """The dtype of codes: int8, int4 or float8_e4m3fn."""
    group: int | None
    """Inputs that share a scale, a divisor of K; None where all inputs of an output do."""
    scale_dtype: str
    by_rows: bool = False
    """Whether the arrays are those of Wᵀ [N, K], as of a table whose rows are looked up."""

    def codes_shape(self, num_in: int, num_out: int) -> tuple[int, ...]:
        """Return the shape of the codes: [K, N], in groups [K ÷ group, group, N], or [N, K] by rows."""
        if self.by_rows:
            return num_out, num_in
        return (num_in, num_out) if self.group is None else (num_in // self.group, self.group, num_out)

    def scales_shape(self, num_in: int, num_out: int) -> tuple[int, ...]:
        """Return the shape of the scales: [N], in groups [K ÷ group, N], or [N, K ÷ group] by rows."""
        if self.group is None:
            return (num_out,)
        shape = num_in // self.group, num_out
        return shape[::-1] if self.by_rows else shape

    def codes_axes(self, axis_in: str | None, axis_out: str | None) -> tuple[str | None, ...]:
        """Return the logical axes of the codes, given those of W."""
        if self.by_rows:
            return axis_out, axis_in
        return (axis_in, axis_out) if self.group is None else (axis_in, None, axis_out)

    def scales_axes(self, axis_in: str | None, axis_out: str | None) -> tuple[str | None, ...]:
        """Return the logical axes of the scales, given those of W: groups are split as inputs are."""
        if self.group is None:
            return (axis_out,)
        return (axis_out, axis_in) if self.by_rows else (axis_in, axis_out)

    def rows_of(self, stored: Any) -> Any:
        """Return codes or scales as rows of Wᵀ: codes [N, K], scales [N, groups]. For numpy it is a view."""
        if stored.ndim == 1:
            return stored[:, None]
        return stored if self.by_rows else stored.reshape(-1, stored.shape[-1]).T

    def rows_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the rows of Wᵀ, codes or scales, that are stored in this shape."""
        if len(shape) == 1:
            return shape[0], 1
        num_rows, num_columns = (shape[0], shape[1]) if self.by_rows else (shape[-1], math.prod(shape[:-1]))
        return num_rows, num_columns

    def stored(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Return rows of Wᵀ, codes or scales, in the shape that stores them."""
        return rows.reshape(shape) if self.by_rows or len(shape) == 1 else rows.T.reshape(shape)


def code_numbers(codes: Codes, code_format: CodeFormat, dtype: str) -> Any:
    """Return the codes [N, K] as numbers of a dtype that holds them all, zeros subtracted; numpy's or JAX's."""
    if code_format.mantissa_bits is not None:
        return codes.codes.view(code_format.small_float).astype(dtype)
    zeros: Any = code_format.zero
    if codes.zeros is not None:
        zeros = codes.zeros.repeat(code_format.group, axis=1).astype(np.int16)
    return (codes.codes.astype(np.int16) - zeros).astype(np.int8).astype(dtype)


def group_scales(codes: Codes, code_format: CodeFormat, arrays: CodeArrays, num_in: int, xp: Any) -> Any:
    """Return the scales of rows [N, `num_in`] for the groups of `arrays`, of its dtype: [N, groups], [N, 1] for one.

    The groups of `arrays` are parts of those of the format.
    """
    (scales,) = (scale_values(each, code_format, xp) for each in codes.scales)
    if arrays.group is not None:
        scales = scales.repeat(min(code_format.group, num_in) // arrays.group, axis=1)
    return scales.astype(arrays.scale_dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["by_rows", "dtype"])
@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix W [K, N] whose numbers are codes × scales, in the arrays that `CodeArrays` lays out."""

    codes: Num[Array, ...]
    scales: Float[Array, ...]
    by_rows: bool
    dtype: str
    """float32 or bfloat16: the dtype of decoded columns."""

    def of_expert(self, expert: Int[Array, ""]) -> ScaledMatrix:
        """Return the matrix of one of E experts, which the first axis of both arrays counts."""
        return replace(self, codes=self.codes[expert], scales=self.scales[expert])


def scaled_product(x: Float[Array, "R K"], matrix: ScaledMatrix) -> Float[Array, "R N"]:
    """Return x · W in float32, accumulated in float32. Codes become numbers of x's dtype, each rounded once."""
    codes, x = jax.lax.platform_dependent(matrix.codes, x, cpu=_one_after_the_other, default=_as_given)
    scales = matrix.scales
    if scales.ndim == 1:
        product = "rk,nk->rn" if matrix.by_rows else "rk,kn->rn"
        sums = jnp.einsum(product, x, codes.astype(x.dtype), preferred_element_type=jnp.float32)
        return sums * scales.astype(jnp.float32)[None, :]
    # The product of a bfloat16 scale and a code of at most 8 bits is rounded once in either dtype. XLA fuses only that
    # in bfloat16 into a GPU's product.
    in_bfloat16 = scales.dtype == jnp.bfloat16 and x.dtype == jnp.bfloat16
    factors = scales if in_bfloat16 else scales.astype(jnp.float32)
    if matrix.by_rows:
        num_out, num_groups = scales.shape
        numbers = codes.reshape(num_out, num_groups, -1).astype(factors.dtype) * factors[:, :, None]
        rows = numbers.reshape(codes.shape).astype(x.dtype)
        return jnp.einsum("rk,nk->rn", x, rows, preferred_element_type=jnp.float32)
    num_groups, group, _ = codes.shape
    numbers = (codes.astype(factors.dtype) * factors[:, None, :]).astype(x.dtype)
    in_groups = x.reshape(-1, num_groups, group)
    return jnp.einsum("rgk,gkn->rn", in_groups, numbers, preferred_element_type=jnp.float32)


def _one_after_the_other(codes: Array, x: Array) -> tuple[Array, Array]:
    """Return both, so that codes are converted once x is known.

    On a CPU XLA makes floats of a whole matrix, and would begin with all matrices of a program.
    """
    codes, x = jax.lax.optimization_barrier((codes, x))
    return codes, x


def _as_given(codes: Array, x: Array) -> tuple[Array, Array]:
    return codes, x


def scaled_columns(matrix: ScaledMatrix, ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Return the columns `ids` of W as rows, in the matrix's dtype. Only these are decoded."""
    if matrix.by_rows:
        codes, scales = matrix.codes[ids], matrix.scales[ids]
    else:
        codes = matrix.codes[..., ids].reshape(-1, ids.shape[0]).T
        scales = matrix.scales[..., ids].T
    scales = scales.reshape(ids.shape[0], -1, 1).astype(jnp.float32)
    numbers = codes.astype(jnp.float32).reshape(ids.shape[0], scales.shape[1], -1) * scales
    return numbers.reshape(codes.shape).astype(matrix.dtype)
