"""Keeps an engine apart from the mesh of a trainer, and moves a trainer's arrays to the devices that serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding


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
