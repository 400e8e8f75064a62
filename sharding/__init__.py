"""Devices, mesh axes and the placement of arrays. Imports nothing else of this project."""

if __name__ != "jpaged.sharding":
    raise ImportError("import jpaged.sharding: a bare `sharding` would be a second copy")

from .devices import devices_of_a_chip, select_devices, visible_accelerators
from .placement import DATA_AXIS, LOGICAL_TO_MESH, TENSOR_AXIS, device_mesh, replicated, sharding_of, split_at
from .trainer_mesh import AxisTable, MeshAxes, outside_mesh, reshard, with_automatic_axes

__all__ = [
    "DATA_AXIS",
    "LOGICAL_TO_MESH",
    "TENSOR_AXIS",
    "AxisTable",
    "MeshAxes",
    "device_mesh",
    "devices_of_a_chip",
    "outside_mesh",
    "replicated",
    "reshard",
    "select_devices",
    "sharding_of",
    "split_at",
    "visible_accelerators",
    "with_automatic_axes",
]
