"""Selects the devices to run on; never a CPU by default while the machine has an accelerator."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import jax

ACCELERATOR_FILES = {"gpu": "/dev/nvidia[0-9]*", "tpu": "/dev/accel[0-9]*"}
"""Kind of accelerator → its device files."""
VFIO_FILES = "/dev/vfio/[0-9]*"
"""Device files of newer TPU hosts, whose chips are bound to vfio; other devices may be, too."""
PCI_VENDOR_FILES = "/sys/bus/pci/devices/*/vendor"
GOOGLE_PCI_VENDOR = "0x1ae0"
EXTRAS = {"gpu": "jpaged[cuda13] or jpaged[cuda12]", "tpu": "jpaged[tpu]"}
"""Kind of accelerator → the package extra that installs JAX for it."""


def select_devices(kind: str) -> list[jax.Device]:
    """Return all devices of one kind that this process may use.

    `kind` is "cpu", "gpu", "tpu" or "auto". "auto" means JAX's default: an accelerator if JAX has one, else the CPU.
    Raises RuntimeError, which says what to install, if there is no device of the kind. Raises it also if "auto" would
    choose the CPU although the machine has an accelerator that this JAX cannot use.
    """
    try:
        devices = jax.local_devices(backend=None if kind == "auto" else kind)
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform named in JAX_PLATFORMS exists.
        raise RuntimeError(
            f"device: got {kind}, which JAX {jax.__version__} does not have here ({error or type(error).__name__}); "
            f"{f'install {EXTRAS[kind]}, or ' if kind in EXTRAS else ''}check JAX_PLATFORMS, or give --device auto"
        ) from error
    chose_cpu = kind == "auto" and devices[0].platform == "cpu"
    if chose_cpu and (accelerators := visible_accelerators()):
        unusable = accelerators[0]  # The error names the first one only.
        raise RuntimeError(
            f"device: auto found a {unusable.upper()} on this machine that JAX {jax.__version__} cannot use; "
            f"install {EXTRAS[unusable]}, or give --device cpu"
        )
    return devices


def devices_of_a_chip(devices: Sequence[jax.Device]) -> int:
    """Return how many of these devices are parts of one chip, from the first on: the two halves of a TPU 7x, else 1."""
    if devices[0].platform != "tpu":
        return 1
    return sum(1 for _ in takewhile(lambda device: device.coords == devices[0].coords, devices))


def visible_accelerators() -> list[str]:
    """Return the kinds of accelerator, "gpu" and "tpu", whose device files exist, even if JAX cannot use them.

    Newer TPUs have files of vfio, a driver that may be bound to any PCI device. Such files count as a TPU only if the
    machine also has a PCI device made by Google. The list is empty on a machine with CPUs alone.
    """
    kinds = [kind for kind, pattern in ACCELERATOR_FILES.items() if glob.glob(pattern)]
    if "tpu" not in kinds and glob.glob(VFIO_FILES):
        vendors = (Path(path) for path in glob.glob(PCI_VENDOR_FILES))
        if any(vendor.read_text().strip() == GOOGLE_PCI_VENDOR for vendor in vendors):
            kinds.append("tpu")
    return kinds
