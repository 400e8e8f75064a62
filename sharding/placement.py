"""Which mesh axis each logical axis is spread over, and where an array of logical axes therefore lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"

LOGICAL_TO_MESH: Mapping[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "embed": None,
}


def device_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """All `devices` on the tensor axis."""
    return Mesh(np.array(devices), (TENSOR_AXIS,))


def sharding_of(mesh: Mesh, logical_axes: Sequence[str | None]) -> NamedSharding:
    """Placement of an array whose dimensions carry these logical axes. KeyError for an axis that nobody declared."""
    spec = [None if axis is None else LOGICAL_TO_MESH[axis] for axis in logical_axes]
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
