"""The share of a GPU's memory that JAX takes, set by commands before JAX starts."""

from __future__ import annotations

import os

MEMORY_SHARE = 0.95
"""Share of a GPU's memory that JAX reserves for a command. JAX's own default, 0.75, would leave a quarter unused; the
rest is for the CUDA context and libraries that allocate by themselves."""
SETTINGS = (
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
"""Environment variables of JAX that say how much memory it takes: where one is set, its user has decided."""


def reserve_device_memory() -> None:
    """Let JAX take nearly all of a GPU's memory, unless the user has decided. Call it before JAX opens a device."""
    if not any(name in os.environ for name in SETTINGS):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(MEMORY_SHARE)
