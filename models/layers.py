"""Layers that models are made of. Every weight declares its logical axes, which `sharding` maps to the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from ..pallas_kernels.code_formats import CodedMatrix
from ..pallas_kernels.layer_ops import XLA_OPS, Heads, LayerOps, Product, RowNorm, StoredMatrix
from ..pallas_kernels.scaled_matrix import ScaledMatrix, scaled_columns, scaled_product
from ..sharding import TENSOR_AXIS
from .config.shares import Run

Axes = tuple[str | None, ...]
"""Logical axes of a weight's dimensions; None for one that is never spread."""


@dataclass(frozen=True)
class WeightMaker:
    """Makes the variables that hold a model's weights, each with the metadata that loading and sharding read."""

    new: Callable[[tuple[int, ...], Axes, float | None], Any]
    """(shape, logical axes, fill) → a weight: an array, or its abstract shape where it is loaded later. All elements
    equal `fill`; None draws them at random."""
    num_shards: int
    """Number of devices that the weights are spread over."""
    dtype: Any
    ops: LayerOps = XLA_OPS
    keeps_codes: bool = False
    """Whether matrices may stay the codes of a quantized checkpoint, an embedding table among them."""
    stays_floats: bool = False
    """Whether no matrix is quantized or stays codes."""
    mesh: Mesh | None = None
    """The mesh of the devices; None for one."""

    def vector(self, size: int, axis: str | None, *, fill: float, **metadata: Any) -> nnx.Param[Any]:
        """Return a weight [size] whose elements are `fill` until it is loaded."""
        return nnx.Param(self.new((size,), (axis,), fill), logical_axes=(axis,), fill=fill, **metadata)

    def matrix(self, num_in: int, num_out: int, axes: Axes, **metadata: Any) -> nnx.Param[Any]:
        """Return a matrix W [in, out], stored as `ops` wants it; a checkpoint stores Wᵀ."""
        weight = self.new(self.ops.matrix_shape(num_in, num_out, self.dtype), axes, None)
        metadata |= {"matrix": (num_in, num_out), "ops": self.ops, "stays_floats": self.stays_floats}
        return nnx.Param(weight, logical_axes=axes, **metadata)

    def experts(self, num_experts: int, num_in: int, num_out: int, axes: Axes, **metadata: Any) -> nnx.Param[Any]:
        """Return the matrices W [in, out] of experts, stored as `ops` wants them; `axes` are those of [E, in, out].

        They count as one matrix [in, E × columns], of which the outputs of an expert are the first of its columns.
        """
        weight = self.new(self.ops.experts_shape(num_experts, num_in, num_out, self.dtype), axes, None)
        columns = self.ops.expert_columns(num_out)
        metadata |= {"matrix": (num_in, num_experts * columns), "num_experts": num_experts, "rows_of_expert": columns}
        return nnx.Param(weight, logical_axes=axes, ops=self.ops, **metadata)

    def expert_biases(self, num_experts: int, num_out: int, axes: Axes, **metadata: Any) -> nnx.Param[Any]:
        """Return the biases [E, out] of experts, zeros until they are loaded; `axes` are those of [E, in, out]."""
        axes = axes[0], axes[2]
        metadata |= {"num_experts": num_experts, "rows_of_expert": num_out}
        return nnx.Param(self.new((num_experts, num_out), axes, 0.0), logical_axes=axes, fill=0.0, **metadata)

    def in_float32(self) -> WeightMaker:
        """Return a maker of float32 weights, whatever the dtype of the others, and codes or not."""

        def new(shape: tuple[int, ...], axes: Axes, fill: float | None) -> Any:
            weight = self.new(shape, axes, fill)
            if isinstance(weight, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight.sharding)
            return weight.astype(jnp.float32)

        return replace(self, new=new, dtype="float32", stays_floats=True)


class Linear(nnx.Module):
    """x · W (+ b), W [in, out]; products accumulate in float32."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        axes: Axes,
        bias: bool,
        make: WeightMaker,
        in_runs: tuple[Run, ...] | None = None,
        out_runs: tuple[Run, ...] | None = None,
    ) -> None:
        """Make the weight W [num_in, num_out] and, with `bias`, the bias [num_out]; without it `self.bias` is None.

        `axes` are the logical axes of both sizes, by which the weight is sharded. `num_in` and `num_out` include
        padding. A run (first stored, first of the model, number) says where the model's own inputs (`in_runs`) or
        outputs (`out_runs`) lie; all others are zero, and None means that nothing is padded. Example: with `num_out` 8
        and `out_runs` ((0, 0, 3), (4, 3, 3)), the model's 6 outputs are stored at 0 to 2 and at 4 to 6.

        Loaders read the runs from the weight's metadata. There inputs are `columns` and outputs are `rows`, because
        checkpoints store Wᵀ [out, in]. Rows are listed by the part of a fused weight; this weight has one part, None.
        """
        self.weight = make.matrix(num_in, num_out, axes, columns=in_runs, rows=((None, out_runs),))
        self.scales: Any = nnx.data(
            None
        )  # Those of a matrix that is kept as arrays of codes, see `weights.code_arrays`.
        self.bias = make.vector(num_out, axes[1], fill=0.0, rows=((None, out_runs),)) if bias else nnx.data(None)

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        return self.weight.ops.chain(x, [self.as_product()])[0]

    def as_product(self, **ends: Any) -> Product:
        """Return the projection as a product of a chain; `ends` are fields of `Product`, such as its norm."""
        return _as_product(self, **ends)

    def product(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """Return x · W (+ b) in float32, not rounded to x's dtype."""
        return _product(x, self)


def has_expert_axis(metadata: Mapping[str, Any]) -> bool:
    """Return whether a weight of this metadata is an array of all experts, of matrices [E, in, out] or biases [E, out].

    Other operations store the matrices of experts side by side, as one matrix.
    """
    return "num_experts" in metadata and ("matrix" not in metadata or metadata["ops"].stores_experts_apart)


def stored_matrix(weight: nnx.Variable[Any], scales: nnx.Variable[Any] | None = None) -> StoredMatrix:
    """Return a matrix as its layer operations take it: its array, or the codes that it holds.

    Codes are bytes, to which their formats belong, or numbers, to which the `scales` of the module belong.
    """
    metadata = weight.get_metadata()
    if scales is not None:
        return ScaledMatrix(weight[...], scales[...], metadata["held"].arrays.by_rows, metadata["decoded_dtype"])
    if "code_parts" not in metadata:
        return weight[...]
    return CodedMatrix(weight[...], metadata["matrix"][0], metadata["code_parts"], metadata["decoded_dtype"])


def _product(x: Float[Array, "T I"], module: Linear | Embedding) -> Float[Array, "T O"]:
    """Return x · W, plus the bias of a linear module that has one, in float32."""
    weight, bias = module.weight, module.bias if isinstance(module, Linear) else None
    matrix = stored_matrix(weight, module.scales)
    out = weight.ops.product(x, matrix, weight.matrix[1])
    if isinstance(matrix, ScaledMatrix):
        # XLA would shape the product's operands as a sampler shapes logits, and make floats of all codes for that.
        out = jax.lax.optimization_barrier(out)
    return out if bias is None else out + bias[...].astype(jnp.float32)[None, :]


def _as_product(module: Linear | FusedLinear, **ends: Any) -> Product:
    weight, bias = module.weight, None if module.bias is None else module.bias[...]
    return Product(weight=stored_matrix(weight, module.scales), num_out=weight.matrix[1], bias=bias, **ends)


class FusedLinear(nnx.Module):
    """Several projections of one input as a single product x [T, in] · W [in, out], split into their outputs.

    `parts` are (name, number of outputs) of each projection, under the name of the checkpoint's module. In a weight on
    several devices, the columns of the first device come first: its share of every part, one after the other. Then come
    the columns of the second device, and so on. So each device holds one block of columns.
    """

    def __init__(
        self,
        num_in: int,
        parts: tuple[tuple[str, int], ...],
        *,
        axes: tuple[str, str],
        bias: bool,
        make: WeightMaker,
        runs: Mapping[str, tuple[Run, ...]] | None = None,
    ) -> None:
        """Make the fused weight W [num_in, outputs of all parts] and, with `bias`, the fused bias.

        `parts` are (name, number of outputs, padding included) of each projection. Each number must be a multiple of
        the number of devices, `make.num_shards`, because every device holds an equal share of every part. Example:
        parts k and v of 4 outputs each, on 2 devices, give the columns k0 k1 v0 v1 | k2 k3 v2 v3.

        `runs` map a part's name to its runs, (first stored output, first output of the model, number), counted within
        the part; outputs in no run are zero padding, and a part without runs is not padded. `axes` are the logical axes
        of inputs and outputs. The metadata, which loaders read, call outputs `rows`: checkpoints store Wᵀ [out, in].
        """
        num_out = sum(size for _, size in parts)
        fused: dict[str, Any] = {"parts": parts, "num_shards": make.num_shards, "rows": tuple((runs or {}).items())}
        self.weight = make.matrix(num_in, num_out, axes, **fused)
        self.scales: Any = nnx.data(None)
        self.bias = make.vector(num_out, axes[1], fill=0.0, **fused) if bias else nnx.data(None)
        self.sizes, self.num_shards = tuple(size for _, size in parts), make.num_shards

    def __call__(
        self, x: Float[Array, "T I"], norm: RowNorm | None = None, heads: Heads | None = None
    ) -> list[Float[Array, "T P"]]:
        """Return the outputs of each part, [T, outputs], as separate projections would give them, in x's dtype.

        The rows of x are normed first if there is a `norm`, and heads of the first parts are normed and rotated as
        `heads` says.
        """
        return self.weight.ops.chain(x, [self.as_product(norm=norm, heads=heads)])

    def as_product(self, **ends: Any) -> Product:
        """Return the projections as a product of a chain; `ends` are fields of `Product`, such as its norm."""
        return _as_product(self, parts=self.sizes, num_shards=self.num_shards, **ends)


class Embedding(nnx.Module):
    """Vectors of token ids. Where input and output are tied, the same weight also makes the logits.

    The weight is a table [V, D], or the matrix W [D, V] where `ops` want it so.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        is_tied: bool,
        make: WeightMaker,
        axis: str | None = "vocab",
        runs: tuple[Run, ...] | None = None,
        stays_floats: bool = False,
    ) -> None:
        """Make the weight. `axis` is the logical axis of the vocabulary; None keeps the table whole on every device.

        `is_tied` says whether the table also makes the logits. If so, and if the layer operations `make.ops` store such
        a table as the matrix of that product, the weight is W [hidden_size, vocab_size], and so it is wherever
        `make.keeps_codes`; else it is a table [vocab_size, hidden_size]. `runs`, (first stored row, first row of the
        model, number of rows), say which of the `vocab_size` rows the model has; the others are zero padding. None
        means that nothing is padded. A table may have further columns, of zeros, as `make.ops` wants it. `stays_floats`
        says that the table is never quantized.
        """
        axes, self.scales = (axis, "embed"), nnx.data(None)
        self.is_matrix = make.keeps_codes or (is_tied and make.ops.stores_tied_table_as_matrix)
        if self.is_matrix:
            self.weight = make.matrix(hidden_size, vocab_size, axes, rows=((None, runs),))
        else:
            table = make.new((vocab_size, make.ops.table_columns(hidden_size)), axes, None)
            layout: dict[str, Any] = {"rows": ((None, runs),), "columns": ((0, 0, hidden_size),)}
            self.weight = nnx.Param(table, logical_axes=axes, stays_floats=stays_floats, **layout)
        self.hidden_size, self.num_columns = hidden_size, make.ops.table_columns(hidden_size)
        # The mesh whose devices cut the rows of a padded table before these are added up; None if none has to.
        self.cut_on = make.mesh if axis is not None and self.num_columns > hidden_size else None
        self.stream_dtype = make.ops.stream_dtype(make.dtype)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Return the vectors of `token_ids` in the dtype of hidden states.

        The caller has checked the ids against the vocabulary: JAX would clamp an id beyond the table without an error.
        On a CPU, rows are looked up as integers, because XLA would convert a whole bfloat16 table to float32 first.
        """
        if self.is_matrix:
            # The weight is W [D, V], perhaps in a layout that only its layer operations `ops` can read: column v is the
            # vector of token v. `columns` returns them as rows [T, D], whatever that layout is.
            rows = self.weight.ops.columns(stored_matrix(self.weight), token_ids, self.hidden_size)
        elif isinstance(matrix := stored_matrix(self.weight, self.scales), ScaledMatrix):
            rows = scaled_columns(matrix, token_ids)[:, : self.hidden_size]
        elif self.cut_on is not None:
            rows = _rows_over_devices(self.weight[...], token_ids, self.hidden_size, self.cut_on)
        else:
            rows = _rows(self.weight[...], token_ids)[:, : self.hidden_size]
        return rows.astype(self.stream_dtype)

    def logits(self, x_RD: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return the scores of all rows of the table, padding included, in float32."""
        if self.is_matrix:
            return _product(x_RD, self)
        x_RD = jnp.pad(x_RD, ((0, 0), (0, self.num_columns - self.hidden_size)))
        if isinstance(matrix := stored_matrix(self.weight, self.scales), ScaledMatrix):
            return scaled_product(x_RD, matrix)
        return jnp.einsum("rd,vd->rv", x_RD, self.weight[...], preferred_element_type=jnp.float32)


def _rows_over_devices(
    table: Float[Array, "V C"], ids: Int[Array, " T"], num_columns: int, mesh: Mesh
) -> Float[Array, "T D"]:
    """Return the first columns of the rows `ids` of a table whose rows are spread over the devices of a mesh.

    Each device looks up the ids that it has, and the others are zeros in its share of the sum. XLA would add up whole
    rows, and cut them then. A lookup of a part of each row would be a loop over ids on a TPU.
    """

    def rows_here(table: Float[Array, "W C"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        ids_here = ids - jax.lax.axis_index(TENSOR_AXIS) * table.shape[0]
        is_here = (ids_here >= 0) & (ids_here < table.shape[0])
        rows = _rows(table, jnp.where(is_here, ids_here, 0))[:, :num_columns]
        return jax.lax.psum(jnp.where(is_here[:, None], rows, 0), TENSOR_AXIS)

    specs = PartitionSpec(TENSOR_AXIS), PartitionSpec()
    summed = jax.shard_map(rows_here, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    rows: Array = summed(table, ids)
    return rows


def _rows(table: Float[Array, "V D"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Return the rows `ids` of the table."""
    return jax.lax.platform_dependent(table, ids, cpu=_rows_by_bits, default=_rows_as_stored)


def _rows_as_stored(table: Float[Array, "V D"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    return table[ids]


def _rows_by_bits(table: Float[Array, "V D"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Return the rows `ids` of the table, as `_rows` does; rows of bfloat16 are looked up as 16-bit integers.

    XLA on a CPU converts a whole bfloat16 table to float32 before it looks up a row, and does not convert integers.
    """
    if table.dtype != jnp.bfloat16:
        return _rows_as_stored(table, ids)
    # The barrier keeps XLA from moving a conversion of the whole table in front of the loop that decodes tokens.
    table, ids = jax.lax.optimization_barrier((table, ids))
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[ids], jnp.bfloat16)


class RMSNorm(nnx.Module):
    """x / rms(x) × w over the last axis, normalised in float32. Source: Zhang & Sennrich 2019, arXiv:1910.07467."""

    fill: ClassVar[float] = 1.0
    """The weight that changes nothing."""
    in_float32: ClassVar[bool] = False
    """Whether the normalised rows are multiplied by the weight in float32, and not in the dtype of the rows."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        make: WeightMaker,
        axis: str | None = "embed",
        runs: tuple[Run, ...] | None = None,
        num_values: int | None = None,
    ) -> None:
        """Make the weight [size]. `axis` is its logical axis; None keeps it whole on every device.

        `runs`, (first stored value, first value of the model, number), say where the model's own values lie; the others
        are zero padding, and None means that there is none. `num_values` is the divisor of the mean of squares; None
        for `size`. For example, an input of 12 heads of 64 values, of which 3 heads are zero padding, has a `size` of
        768 and a `num_values` of 576.
        """
        self.weight = make.vector(size, axis, fill=self.fill, ops=make.ops, rows=((None, runs),))
        # `rms_norm` divides the sum of squares by `size`. The mean of squares over `num_values` is that ÷ share. So eps
        # is scaled here, and the gain in `normed`: x ÷ √(sum ÷ size ÷ share + eps), which is the norm that is wanted,
        # equals √share × x ÷ √(sum ÷ size + eps × share).
        self.share = 1.0 if num_values is None else num_values / size
        self.eps = eps * self.share

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        return self.weight.ops.norm(x, self.as_row_norm())

    def as_row_norm(self) -> RowNorm:
        """Return the norm as layer operations take it; `__init__` says why the gain is scaled by √share."""
        gain = self.gain()
        if self.share != 1.0:
            gain = gain * jnp.asarray(self.share**0.5, gain.dtype)
        return RowNorm(gain, self.eps, in_float32=self.in_float32)

    def gain(self) -> Float[Array, " D"]:
        """Return what the normalised rows are multiplied by."""
        return self.weight[...]


class RMSNormFloat32(RMSNorm):
    """RMSNorm that multiplies by its weight in float32 too, before it rounds."""

    in_float32 = True

    def gain(self) -> Float[Array, " D"]:
        return self.weight[...].astype(jnp.float32)


class RMSNormPlusOne(RMSNormFloat32):
    """RMSNorm whose weight is stored as the gain minus 1."""

    fill = 0.0

    def gain(self) -> Float[Array, " D"]:
        return 1.0 + super().gain()


class LayerNorm(nnx.Module):
    """(x − mean(x)) / σ(x) × w + b over the last axis, in float32. Source: Ba et al. 2016, arXiv:1607.06450."""

    def __init__(self, size: int, *, eps: float, make: WeightMaker, axis: str | None = "embed") -> None:
        """Make weight and bias, [size]. `axis` is their logical axis; None keeps them whole on every device."""
        self.weight = make.vector(size, axis, fill=1.0, ops=make.ops)
        self.bias = make.vector(size, axis, fill=0.0)
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        return self.weight.ops.norm(x, self.as_row_norm())

    def as_row_norm(self) -> RowNorm:
        """Return the norm as layer operations take it."""
        return RowNorm(self.weight[...], self.eps, bias=self.bias[...])
