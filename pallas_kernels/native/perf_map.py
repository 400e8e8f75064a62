"""Names for native code in Linux's profiler, perf: it reads them from /tmp/perf-PID.map."""

from __future__ import annotations

import os
from pathlib import Path

from .object_code import functions


def name_functions(module: str, entry_address: int, code: bytes) -> None:
    """Append the functions of a module to the map of this process; the module's entry has the module's name.

    `code` is the module's object code, an ELF file of 64 bits, and `entry_address` where its entry lies in memory.
    Functions are called as in the code, behind the module's name.
    """
    symbols = functions(code)
    entry_offset = next(symbol.offset for symbol in symbols if symbol.name == module)
    with Path(f"/tmp/perf-{os.getpid()}.map").open("a") as file:
        for symbol in symbols:
            name = module if symbol.name == module else f"{module}::{symbol.name}"
            file.write(f"{entry_address - entry_offset + symbol.offset:x} {symbol.num_bytes:x} {name}\n")
