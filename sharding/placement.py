"""Maps the logical axes of arrays, such as "heads", to mesh axes, and so decides where each array lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
"""The axes of a mesh: over the second one tensors are split. The first has one place, since replicas are engines of
their own."""
LOGICAL_TO_MESH: Mapping[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "expert": TENSOR_AXIS,
    "embed": None,
}
"""Logical axis → the mesh axis that it is split over; None for an axis of which every device has the whole."""


def device_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh of all `devices` along the tensor axis."""
    return Mesh(np.array(devices)[None], (DATA_AXIS, TENSOR_AXIS))


def sharding_of(mesh: Mesh, logical_axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array whose axes have these logical names, such as ("embed", "heads").

    None stands for an axis without a name, of which every device has the whole. ("embed", "heads") on 4 devices gives
    each the whole first axis and a quarter of the second. Raises KeyError for an unknown name, and ValueError if two
    axes of the array would be split over the same axis of the mesh, which JAX cannot do.
    """
    mesh_axes = [None if axis is None else LOGICAL_TO_MESH[axis] for axis in logical_axes]
    repeated = [axis for axis, count in Counter(mesh_axes).items() if axis is not None and count > 1]
    if repeated:
        wanted = f"at most one that is split over {repeated[0]!r}"
        raise ValueError(f"logical axes: got {tuple(logical_axes)}, wanted {wanted}")
    return NamedSharding(mesh, PartitionSpec(*mesh_axes))


def split_at(mesh: Mesh, axis: int | None) -> NamedSharding:
    """Return the sharding of an array that is split at this axis over the tensor axis; None leaves it whole."""
    return replicated(mesh) if axis is None else NamedSharding(mesh, PartitionSpec(*[None] * axis, TENSOR_AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that gives every device a whole copy."""
    return NamedSharding(mesh, PartitionSpec())
