"""Operations of a model's layers beside attention: matrix products, norms, and how their weights are stored.

Products come in chains: each reads what the one before gives, through a norm or not, and may add its results to the
residual stream. `LayerOps` computes all of them by plain XLA, on any devices. An attention backend names the operations
that go with it (`Backend.layer_ops`); models call them without knowing how a matrix is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .activations import ACTIVATIONS, GATES
from .code_formats import CodedMatrix, CodeFormat, CodeParts, Codes
from .grouped import Routing, expert_of_rows, grouped_product, sorted_choices, weighted_sum
from .rotation import Rotation
from .scaled_matrix import ScaledMatrix, scaled_columns, scaled_product

Bounds = tuple[int, int]
"""Start and stop of a slice."""
StoredMatrix = Array | CodedMatrix | ScaledMatrix
"""A matrix as layer operations store it."""
RowWriter = Callable[[int, np.ndarray], None]
"""Called with the index of the first row, and with consecutive rows from that one on."""


@dataclass(frozen=True)
class RowNorm:
    """A norm of rows of D numbers: an RMS norm, or with a `bias` a layer norm."""

    weight: Float[Array, " D"]
    eps: float
    bias: Float[Array, " D"] | None = None
    in_float32: bool = False
    """Whether an RMS norm multiplies by its weight in float32 too, and not in the dtype of the rows."""


@dataclass(frozen=True)
class Heads:
    """What becomes of the heads in the first parts of a product: a norm of each head, then a rotation."""

    head_size: int
    rotation: Rotation | None
    norms: tuple[RowNorm | None, ...]
    """The norm of the heads of each of the first parts, [head size]; None for a part without one."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of a chain: the stored matrix W, the norm of the rows that it reads, and what becomes of x · W."""

    weight: StoredMatrix
    num_out: int
    """Columns of W."""
    bias: Float[Array, " O"] | None = None
    parts: tuple[int, ...] = ()
    """Columns of W of each of several projections side by side; empty for a single one."""
    num_shards: int = 1
    """Devices of a mesh that the columns are spread over: those of the first device hold its share of every part."""
    norm: RowNorm | None = None
    """The norm of the rows before they are multiplied."""
    activation: str | None = None
    """Name of the activation of the results; of the gates alone if `is_gated`."""
    is_gated: bool = False
    """The two `parts` are gates and what they gate: the results are activation(gate) × other, or those of one of
    `activations.GATES`."""
    heads: Heads | None = None
    """What becomes of heads in the results, which are not added to the stream."""
    adds_to_stream: bool = False
    """The results are added to the residual stream, and the new stream is what the next product reads."""
    norm_behind: RowNorm | None = None
    """The norm of results that are added to the stream."""
    scale: float = 1.0
    """Factor of results that are added to the stream."""


@dataclass(frozen=True, kw_only=True)
class SharedProducts:
    """The MLP that all rows take beside their experts. On a mesh it is spread over devices along its inner width."""

    first: Product
    """Reads the rows that the experts read, and has no norm of its own."""
    down: Product
    """Its results, times their factors, are added to the experts' sum."""
    weights: Float[Array, "T 1"] | None
    """Factors of the results, float32; None for 1."""


@dataclass(frozen=True, kw_only=True)
class ExpertProducts:
    """The MLPs of E experts as two products, whose weights and biases hold all experts; `num_out` is that of one."""

    gate_up: Product
    """Reads rows that are normed already, since a router has read them: it has no norm. Weight [E, D, 2 F], bias
    [E, 2 F]."""
    down: Product
    """The weighted sum of its results is added to the stream, normed and scaled as `down` says. Weight [E, F, D], bias
    [E, D]."""
    num_experts: int
    """E, with experts that pad it to a multiple of the devices, which are never chosen."""
    mesh: Mesh | None = None
    """The mesh that weights are spread over; None on one device."""
    mesh_axis: str = ""
    """The axis of the mesh along which they are spread."""
    is_spread_by_expert: bool = False
    """Whether each device has whole experts; else it has its share of F of each."""
    shared: SharedProducts | None = None
    """The MLP that all rows take too; its results and the experts' are added to the stream as one sum."""

    def __post_init__(self) -> None:
        assert self.gate_up.norm is None, "rows are normed before they are routed"


@dataclass(frozen=True)
class LayerOps:
    """Products, norms and weight storage in plain XLA. Instances compare equal by type: they are static metadata."""

    columns_of_codes: ClassVar[int | None] = None
    """A matrix that stays codes as a `CodedMatrix` may change its format at multiples of so many columns. None if
    matrices stay codes as a `ScaledMatrix`, in arrays that XLA converts."""
    stores_experts_apart: ClassVar[bool] = True
    """Whether the matrices of experts are stored as an array [E, in, out]; else as one matrix [in, E × columns]."""
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

    def coded_shape(self, num_in: int, parts: CodeParts) -> tuple[int]:
        """Return the shape of the bytes that store a `CodedMatrix`, if there is `columns_of_codes`."""
        raise NotImplementedError

    def packed_codes(self, codes: Codes, code_format: CodeFormat, parts: CodeParts, dtype: str) -> np.ndarray:
        """Return rows of Wᵀ, of one format, as the bytes that store them, if there is `columns_of_codes`.

        `parts` are those of the matrix, and `dtype` is that of the run.
        """
        raise NotImplementedError

    def store_codes(self, rows: Float[Array, "N K"], parts: CodeParts, dtype: str) -> Array:
        """Return rows of Wᵀ, quantized from float32, as the array that stores them, if there is `columns_of_codes`.

        All formats take floats (`CodeFormat.takes_floats`). `dtype` is that of the run.
        """
        raise NotImplementedError

    def are_codes_finite(self, data: np.ndarray, num_in: int, parts: CodeParts) -> bool:
        """Return whether all numbers in the bytes of a matrix of codes are finite, if matrices can stay codes."""
        raise NotImplementedError

    def store(self, matrix: Float[Array, "I O"]) -> Array:
        """Return a matrix W [num_in, num_out] as the array that stores it."""
        return matrix

    def product(self, x: Float[Array, "R I"], weight: StoredMatrix, num_out: int) -> Float[Array, "R O"]:
        """Return x · W in float32, accumulated in float32, for a stored matrix W of `num_out` columns."""
        if isinstance(weight, ScaledMatrix):
            return scaled_product(x, weight)
        assert isinstance(weight, Array), "bytes of codes are read by native code alone"
        return jnp.dot(x, weight, preferred_element_type=jnp.float32)

    def grouped_product(
        self, rows: Float[Array, "C K"], weight: StoredMatrix, sizes: Int[Array, " E"], num_out: int
    ) -> Float[Array, "C N"]:
        """Return the product of each row with its expert's matrix, of `num_out` columns; see `grouped_product`."""
        assert not isinstance(weight, CodedMatrix), "bytes of codes are read by native code alone"
        return grouped_product(rows, weight, sizes)[:, :num_out]

    def expert_columns(self, num_out: int) -> int:
        """Return how many columns the matrices of experts with `num_out` columns are padded to."""
        return num_out

    def table_columns(self, hidden_size: int) -> int:
        """Return how many columns an embedding table, whose rows are vectors of this size, is padded to."""
        return hidden_size

    def expert_share(self, num_experts: int, width: int, num_devices: int, *, is_by_expert: bool) -> tuple[int, int]:
        """Return how many experts are stored, and their inner width, both with what pads them.

        Experts, or else their inner width, are padded to a multiple of the devices.
        """
        if is_by_expert:
            return -(-num_experts // num_devices) * num_devices, width
        return num_experts, -(-width // num_devices) * num_devices

    def experts_shape(self, num_experts: int, num_in: int, num_out: int, dtype: DTypeLike) -> tuple[int, ...]:
        """Return the shape of the array that stores the matrices W [num_in, num_out] of experts."""
        return num_experts, num_in, self.expert_columns(num_out)

    def choice_values(self, hidden: int, inner: int, itemsize: int, *, has_bias: bool = False) -> int:
        """Return an estimate of how many values of `itemsize` bytes a program holds for each choice of an expert.

        The expert's MLP has the widths `hidden` and `inner`, and `has_bias` says whether its products have biases. XLA
        holds most between the two products, the rows, the float32 results of gate and up, and what becomes of them; or
        before the first one, if `inner` is small.
        """
        values_of_float32 = 4 // itemsize
        return max(hidden + (2 * values_of_float32 + 1) * inner, 2 * hidden + 2 * inner)

    def expert_values(self, num_experts: int, hidden: int, inner: int) -> int:
        """Return an estimate of how many values a program holds for experts, whatever the number of its tokens.

        XLA copies an expert's larger matrix, [hidden, 2 × inner], in front of a product.
        """
        return 2 * hidden * inner

    def columns(self, weight: StoredMatrix, ids: Int[Array, " T"], num_in: int) -> Float[Array, "T I"]:
        """Return the columns `ids` of a stored matrix W [num_in, O] as rows."""
        if isinstance(weight, ScaledMatrix):
            return scaled_columns(weight, ids)
        assert isinstance(weight, Array), "bytes of codes are read by native code alone"
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

    def norm(self, x: Float[Array, "*T D"], norm: RowNorm) -> Float[Array, "*T D"]:
        """Return the rows of x normed, in x's dtype."""
        if norm.bias is not None:
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        if norm.in_float32:
            return self.rms_norm(x.astype(jnp.float32), norm.weight.astype(jnp.float32), norm.eps).astype(x.dtype)
        return self.rms_norm(x, norm.weight, norm.eps)

    def chain(
        self, rows: Float[Array, "R K"], products: Sequence[Product], stream: Float[Array, "R D"] | None = None
    ) -> list[Float[Array, "R O"]]:
        """Return what the last of the products gives, in the dtype of `rows`: its parts, or the one result or stream.

        The first product reads `rows`, and each other one the results of the product before it: [R, columns]. Where
        these are added to the stream, that is the new stream; the first product that adds adds to `stream`. A product
        with several parts that are not gated is the last one.
        """
        results = [rows]
        for each in products:
            (rows,) = results
            normed = rows if each.norm is None else self.norm(rows, each.norm)
            out = self.product(normed, each.weight, each.num_out)
            if each.bias is not None:
                out = out + each.bias.astype(jnp.float32)[None, :]
            results = _activated(split_parts(out.astype(rows.dtype), each.parts, each.num_shards), each)
            if each.heads is not None:
                results = self.finish_heads(results, each.heads)
            if each.adds_to_stream:
                assert stream is not None, "a chain that adds to the stream is given it"
                (added,) = results
                normed = added if each.norm_behind is None else self.norm(added, each.norm_behind)
                stream = stream + scaled(normed, each.scale)
                results = [stream]
        return results

    def add_experts(
        self,
        rows: Float[Array, "T D"],
        routing: Routing,
        experts: ExpertProducts,
        stream: Float[Array, "T D"],
    ) -> Float[Array, "T D"]:
        """Return the stream plus what each row's experts, and the shared MLP, make of the row, on one device.

        The experts of a row without any, which is padding, give a sum of zeros.
        """
        return self.add_sum(self.sum_of_experts(rows, routing, experts), experts.down, stream)

    def add_sum(self, total: Float[Array, "T D"], down: Product, stream: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the stream plus what `down` makes of a sum of its results: its norm behind, and its scale."""
        added = total.astype(stream.dtype)
        if down.norm_behind is not None:
            added = self.norm(added, down.norm_behind)
        return stream + scaled(added, down.scale)

    def sum_of_experts(
        self, rows: Float[Array, "T D"], routing: Routing, experts: ExpertProducts
    ) -> Float[Array, "T D"]:
        """Return the weighted sum of what each row's experts make of it, plus the shared MLP's results, in float32."""
        gate_up, down = experts.gate_up, experts.down
        choices = sorted_choices(routing.experts, experts.num_experts)
        out = self.grouped_product(rows[choices.rows], gate_up.weight, choices.sizes, gate_up.num_out)
        if gate_up.bias is not None:
            out = out + gate_up.bias.astype(jnp.float32)[expert_of_rows(choices.sizes, out.shape[0])]
        (inner,) = _activated(split_parts(out.astype(rows.dtype), gate_up.parts, gate_up.num_shards), gate_up)
        results = self.grouped_product(inner, down.weight, choices.sizes, down.num_out)
        total = weighted_sum(results, choices, routing)
        if down.bias is not None:
            total = total + _sum_of_biases(down.bias, routing)
        return total if experts.shared is None else total + self.shared_results(rows, experts.shared)

    def shared_results(self, rows: Float[Array, "T D"], shared: SharedProducts) -> Float[Array, "T D"]:
        """Return what a shared MLP makes of rows, times its factors, in float32."""
        (inner,) = self.chain(rows, [shared.first])
        out = self.product(inner, shared.down.weight, shared.down.num_out)
        if shared.down.bias is not None:
            out = out + shared.down.bias.astype(jnp.float32)[None, :]
        return out if shared.weights is None else rounded_product(out, shared.weights)

    def finish_heads(self, parts: Sequence[Float[Array, "R P"]], heads: Heads) -> list[Float[Array, "R P"]]:
        """Return the parts of a product, with each head of the first ones normed and rotated."""
        finished = list(parts)
        for index, norm in enumerate(heads.norms):
            by_head = finished[index].reshape(finished[index].shape[0], -1, heads.head_size)
            normed = by_head if norm is None else self.norm(by_head, norm)
            rotated = normed if heads.rotation is None else heads.rotation.apply(normed)
            finished[index] = rotated.reshape(finished[index].shape)
        return finished

    def uninitialized(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an array whose elements may hold anything. XLA fills it with zeros on a CPU."""
        return lax.empty(shape, dtype)


XLA_OPS = LayerOps()


def split_parts(out: Float[Array, "R O"], parts: Sequence[int], num_shards: int) -> list[Float[Array, "R P"]]:
    """Return the results of each of several projections, `parts` columns of a product; all of it without parts.

    On several devices the columns of the first device come first, its share of every part. With parts k and v of 4
    columns on 2 devices, the product is k0 k1 v0 v1 | k2 k3 v2 v3 for each row, and the result is [k0 k1 k2 k3, v0 v1
    v2 v3].
    """
    # Where one part ends and the next begins in one device's block: parts of 8 and 4 on 2 devices end at column 4 of 6.
    ends = tuple(accumulate(size // num_shards for size in parts))[:-1]
    if num_shards == 1:
        return list(jnp.split(out, ends, axis=-1))
    # Blocks [R, devices, columns of a device] are cut at `ends`, and the devices' shares of a part are joined.
    blocks = out.reshape(out.shape[0], num_shards, -1)
    return [part.reshape(out.shape[0], -1) for part in jnp.split(blocks, ends, axis=-1)]


def _activated(results: list[Float[Array, "R P"]], product: Product) -> list[Float[Array, "R P"]]:
    """Return the parts of a product after its activation and its gate."""
    if product.activation is not None and product.activation in GATES:
        gate, gated = results
        return [GATES[product.activation](gate, gated)]
    if product.activation is not None:
        num_activated = 1 if product.is_gated else len(results)
        results[:num_activated] = map(ACTIVATIONS[product.activation], results[:num_activated])
    if product.is_gated:
        gate, gated = results
        return [gate * gated]
    return results


def _sum_of_biases(biases: Float[Array, "E D"], routing: Routing) -> Float[Array, "T D"]:
    """Return the weighted sum of the biases of each row's experts, in float32."""
    is_there = routing.experts < biases.shape[0]
    chosen = biases.astype(jnp.float32)[jnp.minimum(routing.experts, len(biases) - 1)]
    # Biases are left out too, and not only multiplied by 0: those of experts that no row chose may be NaN.
    weights, chosen = jnp.where(is_there, routing.weights, 0), jnp.where(is_there[:, :, None], chosen, 0)
    return jnp.einsum("tk,tkd->td", weights, chosen)


def scaled(x: Float[Array, "T D"], factor: float) -> Float[Array, "T D"]:
    """Return x × factor in the dtype of x, see `rounded_product`. A factor of 1 returns x itself."""
    return x if factor == 1.0 else rounded_product(x, factor)


def rounded_product(x: Float[Array, "T D"], factor: float | Float[Array, "T 1"]) -> Float[Array, "T D"]:
    """Return x × factor in the dtype of x, multiplied in float32.

    The product is rounded to float32 before anything is added to it, so a token's result does not depend on the number
    of tokens in its step.
    """
    # XLA on a CPU may fuse this product with the sum that follows it. Fused, the result is rounded once, and otherwise
    # twice; which of the two happens depends on the number of tokens. The clip changes no finite value and prevents
    # this fusion. Infinities and NaN bypass it.
    product, largest = x.astype(jnp.float32) * factor, jnp.finfo(jnp.float32).max
    return jnp.where(jnp.isfinite(product), jnp.clip(product, -largest, largest), product).astype(x.dtype)


def _along_rows(vector: Float[Array, " D"], x: Float[Array, "*T D"]) -> Float[Array, "*O D"]:
    """Return the vector with leading axes of size 1 added, so that it has as many axes as x."""
    return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))


def write_rows(target: np.ndarray, first: int, rows: np.ndarray) -> None:
    """Write `rows` to `target[first : first + len(rows)]`, in the target's dtype."""
    target[first : first + len(rows)] = rows.astype(target.dtype, copy=False)
