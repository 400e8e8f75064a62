"""How a trainer's mesh maps to the devices that serve: its table of logical axes, the sub-mesh, and its arrays there.

An engine spreads tensors over the axes of the mesh that heads, the MLP or the vocabulary are split over, and has one
place along all others, such as those of data parallelism or of sharded optimizers (FSDP).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from .placement import DATA_AXIS, LOGICAL_TO_MESH, TENSOR_AXIS

MeshAxes = str | tuple[str, ...] | None
"""What a rule gives for a logical axis: axes of the mesh that it is split over, or None for an axis that is whole."""


@dataclass(frozen=True)
class AxisTable:
    """The axes of a mesh, and which logical axes are split over them."""

    mesh_axes: tuple[str, ...]
    rules: Mapping[str, MeshAxes]

    @classmethod
    def of(cls, mesh: Mesh | None, rules: Mapping[str, MeshAxes] | None) -> AxisTable:
        """Return the table of a mesh with a trainer's rules; `mesh` None is an engine's own mesh.

        Without rules those of LOGICAL_TO_MESH hold. If the mesh has one axis only, it then is the tensor axis, whatever
        its name.
        """
        mesh_axes = (DATA_AXIS, TENSOR_AXIS) if mesh is None else tuple(map(str, mesh.axis_names))
        if rules is None:
            tensor_axis = mesh_axes[0] if len(mesh_axes) == 1 else TENSOR_AXIS
            rules = {name: axis and tensor_axis for name, axis in LOGICAL_TO_MESH.items()}
        return cls(mesh_axes, rules)

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that tensors are spread over, in the mesh's order.

        They are those that the rules give for logical axes which LOGICAL_TO_MESH splits, such as heads. The tuple is
        empty if there are none: one device then has all tensors whole.
        """
        named = {axis for name, split in LOGICAL_TO_MESH.items() if split for axis in self.axes_of(name)}
        return tuple(axis for axis in self.mesh_axes if axis in named)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that the rules give for a logical axis; none if it has no rule, or the rule is None."""
        axes = self.rules.get(name) or ()
        return (axes,) if isinstance(axes, str) else axes

    @property
    def names(self) -> list[str]:
        """Return the names that an axis of an array may have: logical ones, and those of mesh axes."""
        return list(dict.fromkeys((*LOGICAL_TO_MESH, *self.rules, *self.mesh_axes)))

    def is_split(self, name: str) -> bool:
        """Return whether an engine splits an axis of an array that has this name, one of `names`.

        As in Flax, a name without a rule is that of a mesh axis, or else of an axis that is whole. Axes that
        LOGICAL_TO_MESH holds whole, such as embed, are whole also where the trainer splits them.
        """
        if name in LOGICAL_TO_MESH and LOGICAL_TO_MESH[name] is None:
            return False
        axes = self.axes_of(name) if name in self.rules else (name,)
        return not set(axes).isdisjoint(self.tensor_axes)

    def devices(self, mesh: Mesh) -> list[jax.Device]:
        """Return the devices of a trainer's mesh that serve, in its order: index 0 of all but the tensor axes."""
        index = tuple(slice(None if axis in self.tensor_axes else 1) for axis in self.mesh_axes)
        return list(mesh.devices[index].flat)


@contextmanager
def outside_mesh() -> Iterator[None]:
    """Return a context in which no mesh is set, whatever `jax.set_mesh` of a trainer the caller's code stands in.

    JAX would otherwise trace and place the arrays of an engine on the trainer's mesh.
    """
    with jax.set_mesh(None):
        yield


def with_automatic_axes(array: Any) -> Any:
    """Return an array on a mesh with explicit axes as the same array on one whose axes are automatic; else `array`.

    The result shares the memory of the array. JAX types explicit axes, so it would refuse some operations on them.
    """
    if not isinstance(array, jax.Array) or array.is_deleted() or not array.is_fully_addressable:
        return array  # An error names arrays that were deleted, or that belong to other processes too.
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) <= {AxisType.Auto}:
        return array
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(array, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))


def reshard(array: np.ndarray | jax.Array, target: NamedSharding) -> jax.Array:
    """Return an array with the sharding `target`; one on a mesh that has the target's devices stays off the host.

    `jax.device_put` goes through the host wherever a device gets a part of the array that no device has as such. So an
    array on k times as many devices as `target`, all of the target's among them, is first sharded like `target` on all
    of its devices, k times over; each device of the target then has its part. Equal shardings share a program. Any
    other array is given to `jax.device_put`, and so is one in the host's memory (JAX's memory kind "pinned_host").
    """
    source = array.sharding if isinstance(array, jax.Array) else None
    if (
        not isinstance(source, NamedSharding)
        or source.memory_kind == "pinned_host"
        or _has_parts(source, target, array.shape)
    ):
        return jax.device_put(array, target)
    devices, targets = list(source.mesh.devices.flat), list(target.mesh.devices.flat)
    if set(targets) <= set(devices) and len(devices) % len(targets) == 0:
        is_ordered = devices[: len(targets)] == targets
        ordered = devices if is_ordered else [*targets, *(device for device in devices if device not in targets)]
        shape = len(devices) // len(targets), *target.mesh.devices.shape
        spread = NamedSharding(Mesh(np.array(ordered).reshape(shape), ("copies", *target.mesh.axis_names)), target.spec)
        # JAX moves arrays between orders of the same devices on these devices.
        array = _resharding(spread)(array) if is_ordered else jax.device_put(array, spread)
    return jax.device_put(array, target)


def _has_parts(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Return whether each device of `target` has its part of an array of this shape by `source` already."""
    parts = source.devices_indices_map(shape)
    return all(parts.get(device) == part for device, part in target.devices_indices_map(shape).items())


@cache
def _resharding(sharding: NamedSharding) -> Any:
    """Return the jitted function that gives an array this sharding."""

    def to_serving_mesh(array: jax.Array) -> jax.Array:
        return array

    return jax.jit(to_serving_mesh, out_shardings=sharding)
