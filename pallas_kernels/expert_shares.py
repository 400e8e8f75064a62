"""Experts over the devices of a mesh: each device computes its share for all rows, and one all-reduce adds these up.

A device has whole experts, or a share of the inner width of every one. The mesh is the one that the weights were spread
over, whatever mesh `jax.set_mesh` of a caller has set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .code_formats import CodedMatrix
from .grouped import Routing
from .layer_ops import ExpertProducts, LayerOps, Product, StoredMatrix
from .scaled_matrix import ScaledMatrix

WHOLE = PartitionSpec()


class _Arrays(NamedTuple):
    """The arrays of products, or how they are spread over devices; None for one that is missing."""

    weight: Any
    bias: Any


class _Spread(NamedTuple):
    """How a product's arrays are spread over devices, by the numbers of their axes."""

    inputs: int
    """The axis of the weight that counts inputs."""
    weight: int
    """The axis of the weight that is spread."""
    bias: int | None
    """That of the bias; None for a bias of sums over all devices, which is whole on each."""


def add_experts_over_devices(
    ops: LayerOps,
    rows: Float[Array, "T D"],
    routing: Routing,
    experts: ExpertProducts,
    stream: Float[Array, "T D"],
) -> Float[Array, "T D"]:
    """Return what `LayerOps.add_experts` returns, computed by all devices of the mesh."""
    return ops.add_sum(_sum_over_devices(ops, rows, routing, experts), experts.down, stream)


def _sum_over_devices(
    ops: LayerOps, rows: Float[Array, "T D"], routing: Routing, experts: ExpertProducts
) -> Float[Array, "T D"]:
    """Return the sums of experts and of the shared MLP, added up over all devices, in float32.

    Each device computes them for all rows with its share of the weights. A device with whole experts counts its own
    from 0, and choices of others' experts become those of none. Biases of sums over all devices are added on the first
    device alone.
    """
    mesh, axis, shared, is_by_expert = experts.mesh, experts.mesh_axis, experts.shared, experts.is_spread_by_expert
    assert mesh is not None, "one device has nothing to add up"
    num_devices = mesh.shape[axis]
    num_here = experts.num_experts // num_devices if is_by_expert else experts.num_experts
    gate_up = experts.gate_up if is_by_expert else _share_of(experts.gate_up, num_devices)
    products = [gate_up, experts.down]
    # Weights of experts, [E, D, 2 F] and [E, F, D], are spread along E or F; those of the shared MLP, [D, 2 F] and
    # [F, D], along its F.
    spreads = [_Spread(1, 0, 0), _Spread(1, 0, 0)] if is_by_expert else [_Spread(1, 2, 1), _Spread(1, 1, None)]
    if shared is not None:
        products += [_share_of(shared.first, num_devices), shared.down]
        spreads += [_Spread(0, 1, 0), _Spread(0, 0, None)]
    arrays = [_Arrays(each.weight, each.bias) for each in products]
    specs = [
        _Arrays(
            _spec_of_matrix(product.weight, spread.weight, spread.inputs, axis),
            _spec(product.bias, spread.bias, axis),
        )
        for product, spread in zip(products, spreads, strict=True)
    ]
    weights = None if shared is None else shared.weights

    def sum_here(rows: Array, routing: Routing, arrays: list[_Arrays], weights: Array | None) -> Array:
        """Return the sums of one device, given its parts of the arrays, with those of all devices added."""
        device = lax.axis_index(axis)
        here = [
            _with_arrays(product, of_device, None if spread.bias is not None else device)
            for product, of_device, spread in zip(products, arrays, spreads, strict=True)
        ]
        if is_by_expert:
            experts_here = routing.experts - device * num_here
            is_here = (experts_here >= 0) & (experts_here < num_here)
            routing = replace(routing, experts=jnp.where(is_here, experts_here, num_here))
        local = replace(experts, num_experts=num_here, gate_up=here[0], down=here[1], mesh=None)
        if shared is not None:
            local = replace(local, shared=replace(shared, first=here[2], down=here[3], weights=weights))
        return lax.psum(ops.sum_of_experts(rows, routing, local), axis)

    # JAX cannot check how the results vary over the mesh: kernels do not say it.
    summed = jax.shard_map(sum_here, mesh=mesh, in_specs=(WHOLE, WHOLE, specs, WHOLE), out_specs=WHOLE, check_vma=False)
    total: Array = summed(rows, routing, arrays, weights)
    return total


def _share_of(product: Product, num_devices: int) -> Product:
    """Return a product whose columns are spread over devices as it is on one of them."""
    parts = tuple(size // num_devices for size in product.parts)
    return replace(product, parts=parts, num_out=product.num_out // num_devices, num_shards=1)


def _with_arrays(product: Product, arrays: _Arrays, device: Int[Array, ""] | None) -> Product:
    """Return a product with a device's arrays and without a norm behind, which is for the sum over all devices.

    The bias is that of all devices if `device` is given, and then only the first one adds it.
    """
    bias = arrays.bias if device is None or arrays.bias is None else jnp.where(device == 0, arrays.bias, 0)
    return replace(product, weight=arrays.weight, bias=bias, norm_behind=None)


def _spec_of_matrix(stored: StoredMatrix, spread_axis: int | None, axis_in: int, axis: str) -> Any:
    """Return how the array of W, or its arrays of codes and of scales, are spread along a mesh's axis.

    W is [E, in, out], or [in, out] for one matrix; `spread_axis` is the axis of W that is spread, and `axis_in` that of
    its inputs.
    """
    if not isinstance(stored, ScaledMatrix):
        assert not isinstance(stored, CodedMatrix), "bytes of codes are read by native code alone"
        return _spec(stored, spread_axis, axis)
    codes_axis, scales_axis = spread_axis, spread_axis  # Experts, or none.
    if spread_axis is not None and spread_axis >= axis_in:
        codes_axis, scales_axis = stored.spread_axes(axis_in, over_inputs=spread_axis == axis_in)
    specs: dict[str, Any] = {
        "codes": _spec(stored.codes, codes_axis, axis), "scales": _spec(stored.scales, scales_axis, axis),
    }  # fmt: skip
    return replace(stored, **specs)


def _spec(array: Array | None, spread_axis: int | None, axis: str) -> PartitionSpec | None:
    """Return how an array is spread along a mesh's axis at its axis `spread_axis`; None for an array that is missing.

    With `spread_axis` None the array is whole on each device.
    """
    if array is None:
        return None
    return PartitionSpec(*(axis if index == spread_axis else None for index in range(array.ndim)))
