"""The operations of a model's layers in native code, for one CPU device. Matrices are stored in `products.panels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..activations import GATES
from ..code_formats import CodedMatrix, CodeFormat, CodeParts, Codes, quantize
from ..grouped import Routing, expert_of_rows
from ..layer_ops import (
    Bounds,
    ExpertProducts,
    Heads,
    LayerOps,
    Product,
    RowNorm,
    RowWriter,
    SharedProducts,
    StoredMatrix,
    rounded_product,
    split_parts,
)
from ..scaled_matrix import ScaledMatrix
from .norms import NormKind, layer_norm, rms_norm
from .products.activations import NATIVE_ACTIVATIONS, NATIVE_GATES
from .products.chain import check_panels, code_order, multiplier_for, multiplier_of, product, run_chain, stored_array
from .products.codes.integer_rows import row_slots
from .products.codes.panels import are_panels_finite, decoded_columns, pack_codes, stored_bytes
from .products.panels import PANEL, columns_of, empty_panels, fill_panels, in_panels, panels_shape
from .products.stages import HeadShape, Stage
from .xla_call import uninitialized

PANELS_TOGETHER = 16
"""Panels that are quantized at once, on the device."""


@dataclass(frozen=True)
class NativeOps(LayerOps):
    """Products and norms whose bits, for one row, do not depend on the other rows. See `LayerOps` for the methods."""

    columns_of_codes: ClassVar[int | None] = PANEL
    stores_experts_apart: ClassVar[bool] = False
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

    def expert_share(self, num_experts: int, width: int, num_devices: int, *, is_by_expert: bool) -> tuple[int, int]:
        """Return both, with an inner width of whole panels."""
        return num_experts, self.expert_columns(width)

    def coded_shape(self, num_in: int, parts: CodeParts) -> tuple[int]:
        return (stored_bytes(num_in, parts),)

    def packed_codes(self, codes: Codes, code_format: CodeFormat, parts: CodeParts, dtype: str) -> np.ndarray:
        return pack_codes(codes, code_format, code_order(parts, dtype))

    def store_codes(self, rows: Float[Array, "N K"], parts: CodeParts, dtype: str) -> Array:
        packed, first_row = list[Array](), 0
        for code_format, size in parts:
            padding = ((0, -size % PANEL), (0, 0))
            columns = jnp.pad(rows[first_row : first_row + size], padding).reshape(-1, PANEL, rows.shape[1])

            def packed_panel(panel: Float[Array, "32 K"], code_format: CodeFormat = code_format) -> Array:
                codes = quantize(panel, code_format, jnp)
                return pack_codes(codes, code_format, code_order(parts, dtype), xp=jnp)[0]

            # Some panels at a time: a whole matrix of codes, one a byte, and its float32 would take memory.
            packed.append(jax.lax.map(packed_panel, columns, batch_size=PANELS_TOGETHER).reshape(-1))
            first_row += size
        return jnp.concatenate(packed)

    def are_codes_finite(self, data: np.ndarray, num_in: int, parts: CodeParts) -> bool:
        return are_panels_finite(data, num_in, parts)

    def store(self, matrix: Float[Array, "I O"]) -> Array:
        return in_panels(matrix)

    def product(self, x: Float[Array, "R I"], weight: StoredMatrix, num_out: int) -> Float[Array, "R O"]:
        return product(x, _panels(weight), num_out)

    def chain(
        self, rows: Float[Array, "R K"], products: Sequence[Product], stream: Float[Array, "R D"] | None = None
    ) -> list[Float[Array, "R O"]]:
        """See `LayerOps.chain`. Products that native code takes together are one custom call.

        A product whose activation or whose number of gates native code does not take is computed by `LayerOps.chain`,
        apart from those before and after it.
        """
        results = [rows]
        for group in _groups(products):
            (rows,) = results
            if _is_native(group[0]):
                results, stream = self._native_chain(rows, group, stream)
            else:
                results = super().chain(rows, group, stream)
                stream = results[0] if group[-1].adds_to_stream else stream
        return results

    def _native_chain(
        self, rows: Float[Array, "R K"], products: Sequence[Product], stream: Float[Array, "R D"] | None
    ) -> tuple[list[Float[Array, "R O"]], Float[Array, "R D"] | None]:
        """Return what `LayerOps.chain` returns, and the new stream, by one custom call."""
        stages, weights, depth, last = list[Stage](), list[Array](), rows.shape[1], products[-1]
        for each in products:
            stage, arrays = _stage(each, depth, rows.shape[0], has_outputs=each is last and not each.adds_to_stream)
            stages.append(stage)
            weights += arrays
            depth = stage.num_results
        old_stream = None if stream is None else stream.astype(jnp.float32)
        outputs = run_chain(stages, rows.astype(jnp.float32), old_stream, weights)
        if stream is not None and any(each.adds_to_stream for each in products):
            stream = outputs[0].astype(stream.dtype)
        if last.adds_to_stream and stream is not None:
            return [stream], stream
        results = [x.astype(rows.dtype) for x in outputs[-len(stages[-1].parts) :]]
        # Parts that are not whole panels are cut from one result.
        if len(last.parts) > len(results) and not last.is_gated:
            results = split_parts(results[0], last.parts, 1)
        if last.heads is not None and stages[-1].heads is None:
            results = self.finish_heads(results, last.heads)
        return results, stream

    def grouped_product(
        self, rows: Float[Array, "C K"], weight: StoredMatrix, sizes: Int[Array, " E"], num_out: int
    ) -> Float[Array, "C N"]:
        (num_rows, depth), num_experts = rows.shape, sizes.shape[0]
        is_there = jnp.arange(num_rows) < jnp.sum(sizes)
        experts = jnp.where(is_there, expert_of_rows(sizes, num_rows), num_experts)[:, None]
        choices = Routing(experts, jnp.ones(experts.shape, jnp.float32))
        product = Product(weight=weight, num_out=num_out)
        stage, arrays = _stage(product, depth, None, has_outputs=True, num_experts=num_experts)
        return run_chain([stage], rows.astype(jnp.float32), None, arrays, choices)[0]

    def expert_columns(self, num_out: int) -> int:
        return -(-num_out // PANEL) * PANEL

    def experts_shape(self, num_experts: int, num_in: int, num_out: int, dtype: DTypeLike) -> tuple[int, ...]:
        """See `LayerOps.experts_shape`. The matrices lie side by side as one, each padded to whole panels by zeros."""
        return self.matrix_shape(num_in, num_experts * self.expert_columns(num_out), dtype)

    def choice_values(self, hidden: int, inner: int, itemsize: int, *, has_bias: bool = False) -> int:
        """See `LayerOps.choice_values`: packed rows of both products, and results until those of a row are added up.

        They are those of codes or of float32 weights, whose packed rows are the largest, and values have 4 bytes.
        """
        return _packed_values(hidden) + _packed_values(inner) + hidden

    def expert_values(self, num_experts: int, hidden: int, inner: int) -> int:
        """See `LayerOps.expert_values`: in front of each expert's packed rows some may be left out."""
        num_left_out = multiplier_of(None, hidden, jnp.dtype(jnp.float32)).row_alignment - 1
        return num_experts * num_left_out * self.choice_values(hidden, inner, 4)

    def add_experts(
        self,
        rows: Float[Array, "T D"],
        routing: Routing,
        experts: ExpertProducts,
        stream: Float[Array, "T D"],
    ) -> Float[Array, "T D"]:
        """See `LayerOps.add_experts`. All of it but the shared MLP is one custom call, which also sorts the choices.

        If native code does not take the activation or the gates, they are computed by XLA, between two products.
        """
        assert experts.mesh is None, "native code is for one device"
        gate_up, down = experts.gate_up, experts.down
        if experts.shared is not None:
            # The custom call adds to the shared MLP's results as it does to a stream; norm and scale are for both.
            alone = replace(experts, shared=None, down=replace(down, norm_behind=None, scale=1.0))
            total = self.add_experts(rows, routing, alone, self.shared_results(rows, experts.shared))
            return self.add_sum(total, down, stream)
        num_inner = gate_up.num_out // 2 if gate_up.is_gated else gate_up.num_out
        if not _is_native(gate_up) or num_inner % PANEL:
            return super().add_experts(rows, routing, experts, stream)
        first_stage, first_arrays = _stage(gate_up, rows.shape[1], None, num_experts=experts.num_experts)
        second_stage, second_arrays = _stage(
            replace(down, adds_to_stream=True), num_inner, None, num_experts=experts.num_experts
        )
        weights = [*first_arrays, *second_arrays]
        stages = [first_stage, second_stage]
        outputs = run_chain(stages, rows.astype(jnp.float32), stream.astype(jnp.float32), weights, routing)
        return outputs[0].astype(stream.dtype)

    def shared_results(self, rows: Float[Array, "T D"], shared: SharedProducts) -> Float[Array, "T D"]:
        """See `LayerOps.shared_results`. Chains of native code give float32."""
        (out,) = self.chain(rows.astype(jnp.float32), [shared.first, shared.down])
        return out if shared.weights is None else rounded_product(out, shared.weights)

    def columns(self, weight: StoredMatrix, ids: Int[Array, " T"], num_in: int) -> Float[Array, "T I"]:
        panels = _panels(weight)
        if isinstance(panels, CodedMatrix):
            return decoded_columns(panels, code_order(panels.parts, panels.dtype), ids)
        return columns_of(panels, ids, num_in)

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


def _packed_values(depth: int) -> int:
    """Return how many float32 a packed row of `depth` values takes at most, for float32 weights or for codes."""
    multiplier = multiplier_of(None, depth, jnp.dtype(jnp.float32))
    shape, dtype = multiplier.packed_shape(multiplier.row_alignment)
    of_floats = math.prod(shape) * jnp.dtype(dtype).itemsize // (4 * multiplier.row_alignment)
    return max(of_floats, row_slots(depth))


def _panels(weight: StoredMatrix) -> Array | CodedMatrix:
    assert not isinstance(weight, ScaledMatrix), "native code reads panels, and no arrays of codes and scales"
    return weight


def _stage(
    product: Product, depth: int, num_rows: int | None, *, has_outputs: bool = False, num_experts: int = 0
) -> tuple[Stage, list[Array]]:
    """Return the stage of a product of rows of `depth` values, and the arrays that it reads.

    `has_outputs` says whether its results are outputs of the chain; `num_rows` is None with experts.
    """
    panels = _panels(product.weight)
    num_results = product.num_out // 2 if product.is_gated else product.num_out
    num_columns = num_experts * NATIVE_OPS.expert_columns(product.num_out) if num_experts else product.num_out
    check_panels(panels, depth, num_columns)
    parts: tuple[int, ...] = ()
    if has_outputs:
        are_panels = not product.is_gated and all(size % PANEL == 0 for size in product.parts)
        parts = product.parts if are_panels and product.parts else (num_results,)
    stage = Stage(
        multiplier_for(num_rows, depth, panels),
        depth,
        num_results,
        parts,
        norm=_norm_kind(product.norm),
        has_bias=product.bias is not None,
        activation=product.activation,
        is_gated=product.is_gated,
        heads=_head_shape(product.heads, product.parts) if parts == product.parts else None,
        norm_behind=_norm_kind(product.norm_behind),
        adds=product.adds_to_stream,
        scale=product.scale,
        num_experts=num_experts,
    )
    biases = [] if product.bias is None else [product.bias.astype(jnp.float32)]
    arrays = [stored_array(panels), *biases, *_norm_vectors(product.norm), *_norm_vectors(product.norm_behind)]
    return stage, arrays + (_head_arrays(product.heads) if stage.heads else [])


def _rows(x: Float[Array, "*T D"]) -> Float[Array, "R D"]:
    """Return x in float32 with its leading axes joined into one."""
    return x.reshape(-1, x.shape[-1]).astype(jnp.float32)


def _groups(products: Sequence[Product]) -> list[list[Product]]:
    """Return the products in groups that are computed by one call each, in order.

    A native product is joined to the one before if that is native too, and if its results are added to the stream or
    can be packed for the next product: they are whole panels, and no norm comes between.
    """
    groups: list[list[Product]] = []
    for index, each in enumerate(products):
        before = products[index - 1] if index else None
        if before is not None and _is_native(before) and _is_native(each) and _are_joined(before, each):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _is_native(product: Product) -> bool:
    """Return whether native code takes the product: its activation, and gates that are whole panels."""
    num_gates_is_whole = not product.is_gated or product.num_out % (2 * PANEL) == 0
    known = NATIVE_GATES if product.activation in GATES else NATIVE_ACTIVATIONS
    return num_gates_is_whole and (product.activation is None or product.activation in known)


def _are_joined(before: Product, product: Product) -> bool:
    num_results = before.num_out // 2 if before.is_gated else before.num_out
    return before.adds_to_stream or (num_results % PANEL == 0 and product.norm is None)


def _norm_kind(norm: RowNorm | None) -> NormKind | None:
    return None if norm is None else NormKind(float(norm.eps), is_centered=norm.bias is not None)


def _norm_vectors(norm: RowNorm | None) -> list[Array]:
    if norm is None:
        return []
    return [vector.astype(jnp.float32) for vector in (norm.weight, norm.bias) if vector is not None]


def _head_shape(heads: Heads | None, parts: tuple[int, ...]) -> HeadShape | None:
    """Return what native code does with the heads in the first of these outputs; None if nothing.

    Raises ValueError if an output is not a whole number of heads.
    """
    if heads is None:
        return None
    for part, _ in zip(parts, heads.norms, strict=False):
        if part % heads.head_size:
            raise ValueError(f"products: got heads of {heads.head_size} in {part} columns, wanted a divisor of it")
    norms = tuple(map(_norm_kind, heads.norms))
    num_rotated = 2 * heads.rotation.cos.shape[-1] if heads.rotation else 0
    return HeadShape(heads.head_size, num_rotated, norms) if num_rotated or any(norms) else None


def _head_arrays(heads: Heads | None) -> list[Array]:
    """Return the arrays of heads, float32: cosines and sines [R, F], and the vectors of the norms."""
    if heads is None:
        return []
    rotation = heads.rotation
    angles = [] if rotation is None or rotation.cos.shape[-1] == 0 else [rotation.cos, rotation.sin]
    by_row = [x.astype(jnp.float32).reshape(-1, x.shape[-1]) for x in angles]
    return [*by_row, *(vector for norm in heads.norms for vector in _norm_vectors(norm))]
