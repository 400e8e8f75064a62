"""The devices that an engine runs on, and what the start says of them."""

from __future__ import annotations

import logging
import os

import jax

from ..checks import one_line, refusal
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..models.config.decoder import DecoderConfig
from ..models.own_model import OwnModel
from ..sharding import devices_of_a_chip, select_devices
from .sizing.host_memory import num_host_cores

logger = logging.getLogger("jpaged")


def serving_devices(config: EngineConfig) -> list[jax.Device]:
    """Return the devices to run on: those of `config.mesh` that serve, or else the first `config.num_devices` of
    `config.device`.

    If no number is given, all devices of the first chip are taken. Raises ConfigError if this process has too few
    devices, if the mesh has devices of another process, or if XLA has too few threads for a mesh of CPU devices.
    """
    mesh_devices = [] if config.mesh is None else list(config.mesh.devices.flat)
    try:
        devices = select_devices(mesh_devices[0].platform if mesh_devices else config.device)
    except RuntimeError as error:
        raise ConfigError(one_line(error)) from error
    if foreign_devices := [device for device in mesh_devices if device not in devices]:
        raise refusal("mesh", f"{foreign_devices[0]} among its devices", "devices of this process", error=ConfigError)
    # All devices of the mesh take part where a trainer's arrays are gathered.
    num_devices = len(mesh_devices) or config.num_devices or devices_of_a_chip(devices)
    if num_devices > len(devices):
        allowed = f"1 to {len(devices)}, as many as this process has of {devices[0].device_kind}"
        raise refusal("tensor_parallel_size", num_devices, allowed, error=ConfigError)
    # A CPU device blocks a thread of XLA's pool while it waits in a collective: fewer than 2 per device may deadlock.
    if num_devices > 1 and devices[0].platform == "cpu" and (num_threads := _num_xla_threads()) < 2 * num_devices:
        allowed = f"at most half of XLA's {num_threads} threads on a CPU, since devices that wait for a sum keep theirs"
        way_out = f"set NPROC={2 * num_devices} in the environment before JAX starts"
        name = "mesh" if mesh_devices else "tensor_parallel_size"
        raise refusal(name, num_devices, allowed, way_out, error=ConfigError)
    return devices[:num_devices] if config.mesh is None else config.axis_table.devices(config.mesh)


def log_devices(config: EngineConfig, model: DecoderConfig | OwnModel, devices: list[jax.Device]) -> None:
    """Log how the model is spread over these devices, which of a trainer's mesh they are, and what is not spread."""
    if config.mesh is not None and config.mesh.size > len(devices):
        tensor_axes = config.axis_table.tensor_axes
        others = ", ".join(axis for axis in config.mesh.axis_names if axis not in tensor_axes)
        served_by, names = f"{len(devices)} of {config.mesh.size} devices", ", ".join(map(str, devices))
        reason = "" if tensor_axes else "; sharding_rules give no axis for tensors, such as one for heads"
        logger.info("mesh: served by %s, index 0 of %s: %s%s", served_by, others, names, reason)
    if len(devices) == 1:
        return
    by_default = "" if config.num_devices else ", the halves of one chip"
    logger.info("mesh: %s%s", model.shares(len(devices)), by_default)
    if isinstance(model, OwnModel) and (num_bytes := model.unnamed_bytes):
        way_out = 'name their axes, for example nnx.Param(array, logical_axes=("embed", "mlp"))'
        fault = f"weights without names of axes are replicated, {num_bytes:,} bytes on each of {len(devices)} devices"
        logger.warning("model: %s; %s", fault, way_out)


def _num_xla_threads() -> int:
    """Return the number of threads in XLA's pool on a CPU: the environment variable NPROC, else the host's cores."""
    asked = os.environ.get("NPROC", "")
    return int(asked) if asked.isdecimal() else num_host_cores()
