"""Layers that models are made of. Every weight declares its logical axes, which `sharding` maps to the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ..pallas_kernels.native.matmul import columns_of, panels_shape, product
from ..pallas_kernels.native.rms_norm import rms_norm

Axes = tuple[str | None, ...]
"""Logical axes of a weight's dimensions; None for one that is never spread."""


@dataclass(frozen=True)
class WeightMaker:
    """Makes the weights of a model, and knows where they are going to be: on how many devices, of which platform."""

    new: Callable[[tuple[int, ...], Axes, float | None], Any]
    """A weight of that shape and those logical axes, all of one value or (None) drawn at random: an array for a model
    of its own, its abstract shape for one to be loaded."""
    num_shards: int
    platform: str
    dtype: Any

    def __call__(self, shape: tuple[int, ...], axes: Axes, *, fill: float | None = None) -> Any:
        return self.new(shape, axes, fill)

    @property
    def in_panels(self) -> bool:
        """Whether native code multiplies. For one CPU: it is not cut for several."""
        return self.platform == "cpu" and self.num_shards == 1

    @property
    def stream_dtype(self) -> Any:
        """Of what runs through the layers. XLA:CPU computes in bfloat16 by way of float32, and rounds each time."""
        return jnp.dtype(jnp.float32) if self.in_panels else jnp.dtype(self.dtype)

    def matrix(self, num_in: int, num_out: int, axes: tuple[str, str], **metadata: Any) -> nnx.Param[Any]:
        """To multiply with: W [in, out], a checkpoint's turned round; in panels where native code multiplies."""
        shape = panels_shape(num_in, num_out, self.dtype) if self.in_panels else (num_in, num_out)
        of_matrix = {"matrix": (num_in, num_out), "in_panels": self.in_panels}
        return nnx.Param(self(shape, axes), logical_axes=axes, **of_matrix, **metadata)


class Linear(nnx.Module):
    """x · W (+ b), W [in, out]; products accumulate in float32."""

    def __init__(self, num_in: int, num_out: int, *, axes: tuple[str, str], bias: bool, make: WeightMaker) -> None:
        self.weight = make.matrix(num_in, num_out, axes)
        self.bias = nnx.Param(make((num_out,), axes[1:], fill=0.0), logical_axes=axes[1:]) if bias else nnx.data(None)

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        return self.product(x).astype(x.dtype)

    def product(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """The same before it is rounded to x's dtype: float32."""
        return _product(x, self.weight, self.bias)


def _product(x: Float[Array, "T I"], weight: nnx.Param[Any], bias: nnx.Param[Any] | None) -> Float[Array, "T O"]:
    """x · W (+ b) in float32."""
    if weight.in_panels:
        out = product(x.astype(weight[...].dtype), weight[...], weight.matrix[1])
    else:
        out = jnp.dot(x, weight[...], preferred_element_type=jnp.float32)
    return out if bias is None else out + bias[...].astype(jnp.float32)[None, :]


class FusedLinear(nnx.Module):
    """Several projections of the same input as one product: x [T, in] · W [in, out], and what each of them makes.

    `parts` are the projections as a checkpoint knows them, with the outputs of each. A weight that is spread over
    several devices holds an equal share of every part for the first, then for the second, and so on: all that
    makes up a device's share lies in one block of columns, in the layout that a compiler gives any matrix.
    """

    def __init__(
        self,
        num_in: int,
        parts: tuple[tuple[str, int], ...],
        *,
        axes: tuple[str, str],
        bias: bool,
        make: WeightMaker,
    ) -> None:
        num_out = sum(size for _, size in parts)
        fused: dict[str, Any] = {"parts": parts, "num_shards": make.num_shards}
        self.weight = make.matrix(num_in, num_out, axes, **fused)
        self.bias = (
            nnx.Param(make((num_out,), axes[1:], fill=0.0), logical_axes=axes[1:], **fused) if bias else nnx.data(None)
        )
        self.num_shards = make.num_shards
        # Where one part ends and the next begins, in the block of a device.
        self.ends = tuple(accumulate(size // make.num_shards for _, size in parts))[:-1]

    def __call__(self, x: Float[Array, "T I"]) -> list[Float[Array, "T P"]]:
        """Each part's outputs, in the order that it would make them in by itself."""
        out = _product(x, self.weight, self.bias).astype(x.dtype)
        if self.num_shards == 1:
            return jnp.split(out, self.ends, axis=-1)
        blocks = out.reshape(x.shape[0], self.num_shards, -1)
        return [part.reshape(x.shape[0], -1) for part in jnp.split(blocks, self.ends, axis=-1)]


class Embedding(nnx.Module):
    """Rows of [V, D], looked up by token id, and multiplied with for logits if input and output are tied."""

    def __init__(self, vocab_size: int, hidden_size: int, *, is_tied: bool, make: WeightMaker) -> None:
        axes = ("vocab", "embed")
        if is_tied and make.in_panels:
            self.weight = make.matrix(hidden_size, vocab_size, axes)
        else:
            self.weight = nnx.Param(make((vocab_size, hidden_size), axes), logical_axes=axes, in_panels=False)
        self.stream_dtype = make.stream_dtype

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Ids must lie in the table: JAX would clamp them without a word, so the host checks them."""
        if self.weight.in_panels:
            rows = columns_of(self.weight[...], token_ids, self.weight.matrix[0])
        else:
            rows = jax.lax.platform_dependent(self.weight[...], token_ids, cpu=_rows_by_bits, default=_rows)
        return rows.astype(self.stream_dtype)

    def logits(self, x_RD: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Scores of the whole table, in float32."""
        if self.weight.in_panels:
            return _product(x_RD, self.weight, None)
        return jnp.einsum("rd,vd->rv", x_RD, self.weight[...], preferred_element_type=jnp.float32)


def _rows(table: Float[Array, "V D"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    return table[ids]


def _rows_by_bits(table: Float[Array, "V D"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """The same where XLA would make float32 of a whole table to look up some rows of bfloat16."""
    if table.dtype != jnp.bfloat16:
        return _rows(table, ids)
    # With the ids behind a barrier, a loop that decodes cannot make the bits of all of the table ahead of itself.
    table, ids = jax.lax.optimization_barrier((table, ids))
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[ids], jnp.bfloat16)


class RMSNorm(nnx.Module):
    """x / rms(x) × w, normalised in float32. Source: Zhang & Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, size: int, *, eps: float, make: WeightMaker) -> None:
        self.weight = nnx.Param(make((size,), ("embed",), fill=1.0), logical_axes=("embed",))
        self.eps = eps
        self.is_native = make.in_panels

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        x_f32 = x_TD.astype(jnp.float32)
        if self.is_native:
            return rms_norm(x_f32, self.weight[...].astype(jnp.float32), self.eps).astype(x_TD.dtype)
        mean_square = jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True)
        normed = (x_f32 * jax.lax.rsqrt(mean_square + self.eps)).astype(x_TD.dtype)
        return normed * self.weight[...].astype(x_TD.dtype)[None, :]
