"""Names for native code in Linux's profiler, perf: it reads them from /tmp/perf-PID.map."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTION, SYMBOL_TABLE = 2, 2
"""Type of an ELF symbol that is a function, and of the section that holds all symbols."""
SECTION, SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
"""A section's header: name, type, flags, address, offset, size, link, info, alignment, entry size; and a symbol: name,
type in its lower 4 bits, visibility, section, value, size. Source: the ELF-64 object file format, 1998."""
SECTIONS_OFFSET, NUM_SECTIONS_OFFSET = 0x28, 0x3C
"""Where the header of a file has the offset of its sections' headers, and their number."""


class _Symbol(NamedTuple):
    """A function in object code: its name, its offset among all functions, and its bytes."""

    name: str
    offset: int
    num_bytes: int


def name_functions(module: str, entry_address: int, code: bytes) -> None:
    """Append the functions of a module to the map of this process; the module's entry has the module's name.

    `code` is the module's object code, an ELF file of 64 bits, and `entry_address` where its entry lies in memory.
    Functions are called as in the code, behind the module's name.
    """
    symbols = list(_functions(code))
    entry_offset = next(symbol.offset for symbol in symbols if symbol.name == module)
    with Path(f"/tmp/perf-{os.getpid()}.map").open("a") as file:
        for symbol in symbols:
            name = module if symbol.name == module else f"{module}::{symbol.name}"
            file.write(f"{entry_address - entry_offset + symbol.offset:x} {symbol.num_bytes:x} {name}\n")


def _functions(code: bytes) -> Iterator[_Symbol]:
    """Yield the functions of an ELF file."""
    (first_section,) = struct.unpack_from("<Q", code, SECTIONS_OFFSET)
    (num_sections,) = struct.unpack_from("<H", code, NUM_SECTIONS_OFFSET)
    sections = [SECTION.unpack_from(code, first_section + index * SECTION.size) for index in range(num_sections)]
    for _, section_type, _, _, offset, size, link, *_ in sections:
        if section_type != SYMBOL_TABLE:
            continue
        names_offset = sections[link][4]
        for symbol_offset in range(offset, offset + size, SYMBOL.size):
            name, symbol_type, _, _, value, num_bytes = SYMBOL.unpack_from(code, symbol_offset)
            if symbol_type & 0xF == FUNCTION:
                name_end = code.index(b"\0", names_offset + name)
                yield _Symbol(code[names_offset + name : name_end].decode(), value, num_bytes)
