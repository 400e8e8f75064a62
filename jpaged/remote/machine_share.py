"""What one core process uses of the machine, beside others: devices, processors, memory of the host.

Devices are found by their files and by the variables of their libraries, since a front loads no JAX. Knows no engine.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..checks import refusal
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..startup.sizing.host_memory import free_host_bytes

GPU_FILES = "/dev/nvidia[0-9]*"
TPU_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
PCI_IDS = "/sys/bus/pci/devices/*/device"
TPU_7X_PCI_ID = "0x0076"
"""Of a TPU whose chips are two devices each."""
JAX_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}
"""Words of the variable JAX_PLATFORMS → kinds of devices, as the option `device` names them."""
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1"}
"""Chips of a process → how they lie to each other, which libtpu has to be told for less than half a host."""


class MachineShare(NamedTuple):
    """The part of the machine that one core process has."""

    environment: Mapping[str, str] = {}
    """Variables by which libraries learn which devices they may open."""
    cpus: tuple[int, ...] = ()
    """The processors that it may run on; empty: all."""
    host_bytes: int | None = None
    """Bytes of the host's memory that it may count on; None: all that are free."""


WHOLE_MACHINE = MachineShare()
"""What a core process has that is the only one."""


def machine_shares(config: EngineConfig) -> list[MachineShare]:
    """Return equal parts of the machine, one for each of the `data_parallel_size` cores of a config.

    Raise ConfigError if there are too few devices, or on a CPU too few processors.
    """
    num_cores = config.data_parallel_size
    if num_cores == 1:
        return [WHOLE_MACHINE]
    kind, cpus = _device_kind(config), _processors()
    if kind == "cpu":
        _check_enough(num_cores, len(cpus), "processors", each=1)
        environments: list[dict[str, str]] = [{} for _ in range(num_cores)]
    elif kind == "gpu":
        environments = _gpu_environments(num_cores, config.tensor_parallel_size or 1)
    else:
        environments = _tpu_environments(num_cores, config.tensor_parallel_size)
    host_bytes = free_host_bytes() // num_cores
    has_cpus = hasattr(os, "sched_setaffinity") and len(cpus) >= num_cores
    parts = [_part(cpus, index, num_cores) if has_cpus else () for index in range(num_cores)]
    return [MachineShare(*share, host_bytes) for share in zip(environments, parts, strict=True)]


def _device_kind(config: EngineConfig) -> str:
    """Return "cpu", "gpu" or "tpu": what the engines of a config run on."""
    if config.device != "auto":
        return config.device
    named = os.environ.get("JAX_PLATFORMS", "").partition(",")[0].strip()
    if named in JAX_PLATFORMS:
        return JAX_PLATFORMS[named]
    if glob.glob(GPU_FILES):
        return "gpu"
    return "tpu" if any(map(glob.glob, TPU_FILES)) else "cpu"


def _processors() -> list[int]:
    """Return the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _gpu_environments(num_cores: int, num_each: int) -> list[dict[str, str]]:
    name = "CUDA_VISIBLE_DEVICES"
    gpus = _named_devices(name) or [str(index) for index in range(len(glob.glob(GPU_FILES)))]
    _check_enough(num_cores, len(gpus), "GPUs", each=num_each)
    return [{name: ",".join(gpus[core * num_each :][:num_each])} for core in range(num_cores)]


def _tpu_environments(num_cores: int, num_devices_each: int | None) -> list[dict[str, str]]:
    name = "TPU_VISIBLE_CHIPS"
    chips = _named_devices(name) or [str(index) for index in range(max(len(glob.glob(one)) for one in TPU_FILES))]
    is_7x = any(Path(path).read_text().strip() == TPU_7X_PCI_ID for path in glob.glob(PCI_IDS))
    num_each = -(-(num_devices_each or 1) // (2 if is_7x else 1))
    _check_enough(num_cores, len(chips), "TPU chips", each=num_each)
    environments = [{name: ",".join(chips[core * num_each :][:num_each])} for core in range(num_cores)]
    if num_each in TPU_BOUNDS:
        bounds = {"TPU_CHIPS_PER_HOST_BOUNDS": TPU_BOUNDS[num_each], "TPU_HOST_BOUNDS": "1,1,1"}
        environments = [environment | bounds for environment in environments]
    return environments


def _named_devices(variable: str) -> list[str]:
    """Return the devices that a variable of the environment names."""
    return [one.strip() for one in os.environ.get(variable, "").split(",") if one.strip()]


def _check_enough(num_cores: int, num_there: int, what: str, *, each: int) -> None:
    if num_cores * each > num_there:
        allowed = f"at most {num_there // each}: {num_there} {what} are there" + (f", {each} for each" * (each > 1))
        raise refusal("data_parallel_size", num_cores, allowed, error=ConfigError)


def _part(cpus: Sequence[int], index: int, num_parts: int) -> tuple[int, ...]:
    """Return one of so many parts of the processors; neighbours stay together, since they share caches."""
    return tuple(cpus[index * len(cpus) // num_parts : (index + 1) * len(cpus) // num_parts])
