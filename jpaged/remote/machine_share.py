"""What one core process uses of the machine, beside others: devices, processors, memory of the host.

Knows no engine, and loads no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
