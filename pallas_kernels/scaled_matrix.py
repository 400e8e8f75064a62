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

from .code_formats import SMALL_FLOATS, CodeFormat, Codes, scale_values

FLOAT8 = SMALL_FLOATS[3]
FACTOR_OF_FLOAT4 = 2
"""What makes integers of all floats of 4 bits, which are multiples of a half up to 6."""


@dataclass(frozen=True)
class CodeArrays:
    """How the arrays of a matrix W [K, N] are laid out; axes of results are named as those of W."""

    dtype: str
    """The dtype of codes: int8, int4, float8_e4m3fn or float4_e2m1fn; uint8 for the bits of a float8_e4m3fn."""
    group: int | None
    """Inputs that share a scale, a divisor of K; None where all inputs of an output do."""
    scale_dtype: str
    by_rows: bool = False
    """Whether the arrays are those of Wᵀ [N, K], as of a table whose rows are looked up."""
    num_experts: int | None = None
    """Where there is a matrix for each of E experts, E: the first axis of both arrays counts them."""

    def codes_shape(self, num_in: int, num_out: int) -> tuple[int, ...]:
        """Return the shape of the codes: [K, N], in groups [K ÷ group, group, N], or [N, K] by rows.

        N are the outputs of one matrix, and an axis of experts comes before.
        """
        shape: tuple[int, ...] = num_out, num_in
        if not self.by_rows:
            shape = (num_in, num_out) if self.group is None else (num_in // self.group, self.group, num_out)
        return self._of_experts(shape)

    def scales_shape(self, num_in: int, num_out: int) -> tuple[int, ...]:
        """Return the shape of the scales: [N], in groups [K ÷ group, N], or [N, K ÷ group] by rows.

        N are the outputs of one matrix, and an axis of experts comes before.
        """
        if self.group is None:
            return self._of_experts((num_out,))
        shape = num_in // self.group, num_out
        return self._of_experts(shape[::-1] if self.by_rows else shape)

    def _of_experts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.num_experts is None else (self.num_experts, *shape)

    def codes_axes(self, axis_in: str | None, axis_out: str | None) -> tuple[str | None, ...]:
        """Return the logical axes of the codes of one matrix, given those of W."""
        if self.by_rows:
            return axis_out, axis_in
        return (axis_in, axis_out) if self.group is None else (axis_in, None, axis_out)

    def scales_axes(self, axis_in: str | None, axis_out: str | None) -> tuple[str | None, ...]:
        """Return the logical axes of the scales of one matrix, given those of W: groups are split as inputs are."""
        if self.group is None:
            return (axis_out,)
        return (axis_out, axis_in) if self.by_rows else (axis_in, axis_out)

    def rows_of(self, stored: Any) -> Any:
        """Return codes or scales of one matrix as rows of Wᵀ: codes [N, K], scales [N, groups]; numpy's as a view."""
        if stored.ndim == 1:
            return stored[:, None]
        return stored if self.by_rows else stored.reshape(-1, stored.shape[-1]).T

    def rows_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the rows of Wᵀ, codes or scales, that are stored in this shape.

        The rows of experts lie one after the other.
        """
        num_experts, of_one = (1, shape) if self.num_experts is None else (shape[0], shape[1:])
        if len(of_one) == 1:
            return num_experts * of_one[0], 1
        num_rows, num_columns = (of_one[0], of_one[1]) if self.by_rows else (of_one[-1], math.prod(of_one[:-1]))
        return num_experts * num_rows, num_columns

    def stored(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Return rows of Wᵀ, codes or scales, in the shape that stores them. Experts' lie one after the other."""
        if self.by_rows or len(shape) == (1 if self.num_experts is None else 2):
            return rows.reshape(shape)
        if self.num_experts is None:
            return rows.T.reshape(shape)
        return rows.reshape(shape[0], -1, rows.shape[1]).swapaxes(1, 2).reshape(shape)


def code_numbers(codes: Codes, code_format: CodeFormat, dtype: str) -> Any:
    """Return the codes [N, K] as numbers of a dtype that holds them all, zeros subtracted; numpy's or JAX's.

    Floats of 4 bits are doubled where they become int8, and `group_scales` halves their scales.
    """
    if code_format.mantissa_bits is not None:
        floats = codes.codes.view(code_format.small_float)
        if dtype == "int8":
            return (floats.astype(np.float32) * np.float32(FACTOR_OF_FLOAT4)).astype(dtype)
        return floats.astype(np.float32).astype(FLOAT8).view(dtype) if dtype == "uint8" else floats.astype(dtype)
    zeros: Any = code_format.zero
    if codes.zeros is not None:
        zeros = codes.zeros.repeat(code_format.group, axis=1).astype(np.int16)
    return (codes.codes.astype(np.int16) - zeros).astype(np.int8).astype(dtype)


def group_scales(codes: Codes, code_format: CodeFormat, arrays: CodeArrays, num_in: int, xp: Any) -> Any:
    """Return the scales of rows [N, `num_in`] for the groups of `arrays`, of its dtype: [N, groups], [N, 1] for one.

    The groups of `arrays` are parts of those of the format.
    """
    (scales,) = (scale_values(each, code_format, xp) for each in codes.scales)
    if code_format.mantissa_bits is not None and arrays.dtype == "int8":
        scales = scales * xp.float32(1 / FACTOR_OF_FLOAT4)
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
        codes = _numbers(jax.lax.dynamic_index_in_dim(self.codes, expert, keepdims=False))
        return replace(self, codes=codes, scales=jax.lax.dynamic_index_in_dim(self.scales, expert, keepdims=False))

    def spread_axes(self, first_axis: int, *, over_inputs: bool) -> tuple[int, int | None]:
        """Return the axes of the inputs of W, or else of its outputs, in the codes and in the scales.

        Those of one matrix begin with `first_axis`, 1 behind an axis of experts. Groups of inputs are spread as inputs
        are; scales of all inputs of an output have no axis for inputs: None.
        """
        has_groups = self.scales.ndim == first_axis + 2
        if over_inputs:
            axis_in = first_axis + self.by_rows
            return axis_in, axis_in if has_groups else None
        return (first_axis, first_axis) if self.by_rows else (self.codes.ndim - 1, self.scales.ndim - 1)


def _numbers(codes: Num[Array, ...]) -> Num[Array, ...]:
    """Return bytes that are the bits of floats as those, and all other codes as they are."""
    return jax.lax.bitcast_convert_type(codes, FLOAT8) if codes.dtype == jnp.uint8 else codes


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


def scaled_columns(
    matrix: ScaledMatrix, ids: Int[Array, " T"], experts: Int[Array, " T"] | None = None
) -> Float[Array, "T K"]:
    """Return the columns `ids` of W as rows, in the matrix's dtype. Only these are decoded.

    With `experts` each column is one of the W of such an expert.
    """
    if experts is not None:
        column = (experts, ids) if matrix.by_rows else (experts, ..., ids)
        codes, scales = matrix.codes[column].reshape(ids.shape[0], -1), matrix.scales[column]
        codes = _numbers(codes)
    elif matrix.by_rows:
        codes, scales = matrix.codes[ids], matrix.scales[ids]
    else:
        codes = matrix.codes[..., ids].reshape(-1, ids.shape[0]).T
        scales = matrix.scales[..., ids].T
    scales = scales.reshape(ids.shape[0], -1, 1).astype(jnp.float32)
    numbers = codes.astype(jnp.float32).reshape(ids.shape[0], scales.shape[1], -1) * scales
    return numbers.reshape(codes.shape).astype(matrix.dtype)
