"""The share of a GPU's memory that JAX takes. Imports no JAX: commands set the share before JAX starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...checks import refusal
from ...errors import ConfigError

if TYPE_CHECKING:
    import jax

FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
"""Environment variables with the share that JAX reserves."""
SETTINGS = (*FRACTIONS, "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""Environment variables of JAX that say how much memory it takes: where one is set, its user has decided."""
MEMORY_SHARE = 0.95
"""Share that JAX reserves for a command. The rest is for the CUDA context and libraries that allocate by themselves."""
DEFAULT_SHARE, LARGE_SHARE = 0.75, 0.9
"""Share that JAX reserves by default, and the one from which on nothing is said of the rest."""


def reserve_device_memory() -> None:
    """Let JAX take nearly all of a GPU's memory, unless the user has decided. Call it before JAX opens a device."""
    if not any(name in os.environ for name in SETTINGS):
        os.environ[FRACTIONS[0]] = str(MEMORY_SHARE)


def unreserved_memory_note(device: jax.Device) -> str:
    """Return a note for the end of the memory plan's text: how much of a GPU's memory JAX leaves unused.

    The share of the memory that JAX takes is the value of the first of FRACTIONS that is set, or else DEFAULT_SHARE.
    The note begins with "; ". It is empty for other devices than GPUs, for a GPU that reports no memory, and if the
    share is LARGE_SHARE or more (little is unused), or not above 0. Raises ConfigError if the variable is not a number.
    """
    stats = device.memory_stats() if device.platform == "gpu" else None
    if stats is None:
        return ""
    name = next((name for name in FRACTIONS if os.environ.get(name)), FRACTIONS[0])
    share_text = os.environ.get(name) or str(DEFAULT_SHARE)  # An empty variable counts as not set.
    try:
        share = float(share_text)
    except ValueError:
        raise refusal(name, share_text, "a number from 0 to 1", "correct it or unset it", error=ConfigError) from None
    if not 0 < share < LARGE_SHARE:
        return ""
    # `bytes_limit` is JAX's share of the GPU's memory: with 60 GB for a share of 0.75, 20 GB are unused.
    unused_bytes = stats["bytes_limit"] / share * (1 - share)
    return (
        f"; JAX leaves {unused_bytes / 1e9:.3g} GB of the GPU unused: set {FRACTIONS[0]}={MEMORY_SHARE} before JAX "
        "starts to use them"
    )
