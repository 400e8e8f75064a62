"""Memory that this process has freed, given back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def return_freed_memory() -> None:
    """Give the system back what this process has freed: once an engine is closed or sleeps, or a program is compiled.

    JAX keeps arrays of numpy that it has aliased until Python's next garbage collection, here one of the youngest
    objects alone. The C library keeps freed memory for later allocations: glibc in arenas of each thread, whose free
    pages it gives back when asked. Other libraries are not asked.
    """
    gc.collect(0)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
