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
from .layer_ops import ExpertProducts, LayerOps, Product, SharedProducts, StoredMatrix
from .scaled_matrix import ScaledMatrix

WHOLE = PartitionSpec()


class _Arrays(NamedTuple):
    """The arrays of a product, or how they are spread over devices; None for a bias that is missing.

    One class is for both, since `shard_map` wants specs in the tree that the arrays have.
    """

    weight: Any
    bias: Any


class _SpreadProduct(NamedTuple):
    """A product as it is on one device, and how its arrays are spread over devices, by the numbers of their axes."""

    product: Product
    """It still has the arrays of all devices."""
    input_axis: int
    """The axis of the weight that counts inputs: 1 of [E, in, out], 0 of [in, out]."""
    spread_axis: int
    """The axis of the weight that is spread."""
    bias_spread_axis: int | None
    """That of the bias; None for a bias of sums over all devices, which is whole on each."""

    @property
    def arrays(self) -> _Arrays:
        """Return the arrays of all devices."""
        return _Arrays(self.product.weight, self.product.bias)

    def specs(self, mesh_axis: str) -> _Arrays:
        """Return how the arrays are spread along an axis of the mesh."""
        bias = self.product.bias
        return _Arrays(
            weight=_spec_of_matrix(self.product.weight, self.spread_axis, self.input_axis, mesh_axis),
            bias=None if bias is None else _spec(bias, self.bias_spread_axis, mesh_axis),
        )

    def on_device(self, arrays: _Arrays, device: Int[Array, ""]) -> Product:
        """Return the product with a device's arrays, without a norm behind, which is for the sum over all devices.

        Of a bias that is whole on each device only the first one adds anything.
        """
        bias = arrays.bias
        if self.bias_spread_axis is None and bias is not None:
            bias = jnp.where(device == 0, arrays.bias, 0)
        return replace(self.product, weight=arrays.weight, bias=bias, norm_behind=None)


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

    Each device computes them for all rows with its share of the weights.
    """
    mesh, mesh_axis, shared = experts.mesh, experts.mesh_axis, experts.shared
    assert mesh is not None, "one device has nothing to add up"
    num_devices = mesh.shape[mesh_axis]
    num_here = experts.num_experts // num_devices if experts.is_spread_by_expert else experts.num_experts
    products = {**_spread_experts(experts, num_devices), **_spread_shared(shared, num_devices)}
    shared_weights = None if shared is None else shared.weights

    def sum_here(rows: Array, routing: Routing, arrays: dict[str, _Arrays], shared_weights: Array | None) -> Array:
        """Return the sums of one device, given its parts of the arrays, with those of all devices added."""
        device = lax.axis_index(mesh_axis)
        here = {name: product.on_device(arrays[name], device) for name, product in products.items()}
        if experts.is_spread_by_expert:
            routing = _routing_here(routing, device, num_here)
        local = replace(experts, num_experts=num_here, gate_up=here["gate_up"], down=here["down"], mesh=None)
        if shared is not None:
            first, down = here["shared_first"], here["shared_down"]
            local = replace(local, shared=replace(shared, first=first, down=down, weights=shared_weights))
        return lax.psum(ops.sum_of_experts(rows, routing, local), mesh_axis)

    specs = {name: product.specs(mesh_axis) for name, product in products.items()}
    arrays = {name: product.arrays for name, product in products.items()}
    # JAX cannot check how the results vary over the mesh: kernels do not say it.
    summed = jax.shard_map(sum_here, mesh=mesh, in_specs=(WHOLE, WHOLE, specs, WHOLE), out_specs=WHOLE, check_vma=False)
    total: Array = summed(rows, routing, arrays, shared_weights)
    return total


def _spread_experts(experts: ExpertProducts, num_devices: int) -> dict[str, _SpreadProduct]:
    """Return the products of experts by name. Weights [E, D, 2 F] and [E, F, D] are spread along E or along F."""
    gate_up, down = experts.gate_up, experts.down
    if experts.is_spread_by_expert:
        return {
            "gate_up": _SpreadProduct(gate_up, input_axis=1, spread_axis=0, bias_spread_axis=0),
            "down": _SpreadProduct(down, input_axis=1, spread_axis=0, bias_spread_axis=0),
        }
    return {
        "gate_up": _SpreadProduct(_share_of(gate_up, num_devices), input_axis=1, spread_axis=2, bias_spread_axis=1),
        "down": _SpreadProduct(down, input_axis=1, spread_axis=1, bias_spread_axis=None),
    }


def _spread_shared(shared: SharedProducts | None, num_devices: int) -> dict[str, _SpreadProduct]:
    """Return the products of the shared MLP by name. Weights [D, 2 F] and [F, D] are spread along F."""
    if shared is None:
        return {}
    return {
        "shared_first": _SpreadProduct(
            _share_of(shared.first, num_devices), input_axis=0, spread_axis=1, bias_spread_axis=0
        ),
        "shared_down": _SpreadProduct(shared.down, input_axis=0, spread_axis=0, bias_spread_axis=None),
    }


def _routing_here(routing: Routing, device: Int[Array, ""], num_here: int) -> Routing:
    """Return the choices of rows among the `num_here` whole experts of a device, which are counted from 0.

    Choices of other devices' experts become those of none.
    """
    experts_here = routing.experts - device * num_here
    is_here = (experts_here >= 0) & (experts_here < num_here)
    return replace(routing, experts=jnp.where(is_here, experts_here, num_here))


def _share_of(product: Product, num_devices: int) -> Product:
    """Return a product whose columns are spread over devices as it is on one of them."""
    parts = tuple(size // num_devices for size in product.parts)
    return replace(product, parts=parts, num_out=product.num_out // num_devices, num_shards=1)


def _spec_of_matrix(
    stored: StoredMatrix, spread_axis: int, input_axis: int, mesh_axis: str
) -> PartitionSpec | ScaledMatrix:
    """Return how the array of W, or its arrays of codes and of scales, are spread along an axis of the mesh.

    W is [E, in, out], or [in, out] for one matrix; `spread_axis` is the axis of W that is spread, and `input_axis` that
    of its inputs.
    """
    if not isinstance(stored, ScaledMatrix):
        assert not isinstance(stored, CodedMatrix), "bytes of codes are read by native code alone"
        return _spec(stored, spread_axis, mesh_axis)
    codes_axis: int = spread_axis
    scales_axis: int | None = spread_axis
    if spread_axis >= input_axis:  # Not along the experts, whose axis is the first one of codes and scales too.
        codes_axis, scales_axis = stored.spread_axes(input_axis, over_inputs=spread_axis == input_axis)
    specs: dict[str, Any] = {
        "codes": _spec(stored.codes, codes_axis, mesh_axis), "scales": _spec(stored.scales, scales_axis, mesh_axis),
    }  # fmt: skip
    return replace(stored, **specs)


def _spec(array: Array, spread_axis: int | None, mesh_axis: str) -> PartitionSpec:
    """Return how an array is spread, by its axis `spread_axis`, along an axis of the mesh.

    With `spread_axis` None the array is whole on each device. Example: an array [E, in, out] with 1 gives
    PartitionSpec(None, mesh_axis, None).
    """
    return PartitionSpec(*(mesh_axis if axis == spread_axis else None for axis in range(array.ndim)))
