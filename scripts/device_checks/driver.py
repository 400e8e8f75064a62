"""Finds an NVIDIA driver that is too old for the CUDA that JAX was installed with."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

NEEDED = {"jax-cuda13-plugin": ("13", (580, 65)), "jax-cuda12-plugin": ("12", (525, 60))}
"""JAX's plugin → its CUDA, and the first driver of Linux that runs it. Source: NVIDIA's release notes of CUDA."""
VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_version(version_file: Path = VERSION_FILE) -> str | None:
    """Return the version of the NVIDIA driver, such as "550.54.15", from its file or nvidia-smi; None without one."""
    if version_file.is_file() and (found := re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", version_file.read_text())):
        return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said[0] if said and re.fullmatch(r"\d+(\.\d+)+", said[0]) else None


def installed_plugin() -> str | None:
    """Return the name of JAX's CUDA plugin that is installed, None if there is none."""
    for name in NEEDED:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def find_driver_fault(version_file: Path = VERSION_FILE) -> str | None:
    """Return in one line why JAX finds no GPU: no plugin, no driver, or one too old; None if it is none of them."""
    plugin = installed_plugin()
    if plugin is None:
        return "JAX is installed without CUDA: pip install 'jax[cuda13]'"
    cuda, needed = NEEDED[plugin]
    version = driver_version(version_file)
    wanted = ".".join(map(str, needed))
    if version is None:
        return f"there is no NVIDIA driver; CUDA {cuda} needs {wanted} or later"
    if tuple(map(int, version.split(".")[:2])) < needed:
        older = " or install 'jax[cuda12]', which needs 525.60" if cuda == "13" else ""
        return f"the NVIDIA driver is {version}, the CUDA {cuda} of {plugin} needs {wanted} or later: update it{older}"
    return None
