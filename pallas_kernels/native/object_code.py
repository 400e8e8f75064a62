"""Object code that LLVM has compiled: its functions, and how it is loaded into memory without LLVM.

A start whose native code is kept calls no compiler. To place some sections and fill in the addresses that they name, it
need not load LLVM's library, which takes 46 MB of memory and a twentieth of a second.

Source: the ELF-64 object file format, version 1.5, 1998, and the System V ABI's AMD64 supplement for the relocation.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

MAGIC, X86_64 = b"\x7fELF", 62
CONTENT, SYMBOL_TABLE, RELOCATIONS = 1, 2, 4
"""Types of sections: bytes of the program, all symbols, and the addresses that go into another section."""
WRITABLE, ALLOCATED = 1, 2
"""Flags of sections."""
FUNCTION, GLOBAL = 2, 1
"""Type and binding of a symbol."""
ABSOLUTE = 1
"""The one relocation of code of LLVM's large model: the 64 bits of an address (R_X86_64_64)."""
_MACHINE, _SECTIONS, _NUM_SECTIONS = (struct.Struct(f"<{letter}") for letter in "HQH")
MACHINE_OFFSET, SECTIONS_OFFSET, NUM_SECTIONS_OFFSET = 0x12, 0x28, 0x3C
"""Where the header of a file has its processor, the offset of its sections' headers, and their number."""
_SECTION, _SYMBOL, _RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_ADDRESS = struct.Struct("<Q")


class Function(NamedTuple):
    """A function of object code: its name, its offset in the section of all functions, and its bytes."""

    name: str
    offset: int
    num_bytes: int


class _Section(NamedTuple):
    """A section's header. `link` and `info` are numbers of sections whose meaning depends on the type."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    """An entry of a symbol table. It is defined elsewhere if its section is 0."""

    name: str
    type: int
    binding: int
    section: int
    value: int
    size: int


def functions(code: bytes) -> list[Function]:
    """Return the functions of an ELF file of 64 bits. Raises ValueError if they lie in more than one section."""
    sections = _sections(code)
    found = [symbol for table in _symbols(code, sections).values() for symbol in table if symbol.type == FUNCTION]
    if len(numbers := {symbol.section for symbol in found}) > 1:
        raise ValueError(f"object code: got functions in the sections {sorted(numbers)}, allowed: one section")
    return [Function(symbol.name, symbol.value, symbol.size) for symbol in found]


def load(code: bytes, address_of: Callable[[str], int]) -> dict[str, int]:
    """Load object code into memory of this process that can be run and not be written; return where each of its global
    functions begins.

    The memory is never freed: threads of XLA may run the code until the process is gone, after Python has ended.
    `address_of` returns the address of a function that the code calls and does not define. Raises ValueError if the
    code is no ELF file of 64 bits for x86-64, or has a section to write, a symbol in none, or a relocation other than
    ABSOLUTE: LLVM's large model, which a compiler for the running process uses, writes none of these for our modules.
    """
    if not code.startswith(MAGIC) or _MACHINE.unpack_from(code, MACHINE_OFFSET) != (X86_64,):
        raise ValueError(f"object code: got a file that begins with {code[:20].hex()}, allowed: ELF for x86-64")
    sections, offsets, size = _sections(code), dict[int, int](), 0
    for number, section in enumerate(sections):
        if section.flags & ALLOCATED and section.flags & WRITABLE and section.size:
            raise ValueError(f"object code: got a section to write, number {number}, allowed: none")
        if section.type == CONTENT and section.flags & ALLOCATED:
            alignment = max(1, section.alignment)
            offsets[number] = -(-size // alignment) * alignment
            size = offsets[number] + section.size
    memory = _new_memory(size)
    start = ctypes.addressof(memory)
    for number, offset in offsets.items():
        section = sections[number]
        ctypes.memmove(start + offset, code[section.offset : section.offset + section.size], section.size)
    symbols = _symbols(code, sections)

    def address(symbol: _Symbol) -> int:
        if symbol.section == 0:
            return address_of(symbol.name)
        if symbol.section not in offsets:
            raise ValueError(f"object code: got {symbol.name} in section {symbol.section}, allowed: a loaded section")
        return start + offsets[symbol.section] + symbol.value

    for section in sections:
        if section.type == RELOCATIONS and section.info in offsets:
            for offset, info, addend in _RELOCATION.iter_unpack(code[section.offset : section.offset + section.size]):
                symbol_number, relocation_type = divmod(info, 1 << 32)
                if relocation_type != ABSOLUTE:
                    raise ValueError(f"object code: got a relocation of type {relocation_type}, allowed: {ABSOLUTE}")
                symbol = symbols[section.link][symbol_number]
                _ADDRESS.pack_into(memory, offsets[section.info] + offset, address(symbol) + addend)
    if _libc().mprotect(memory, len(memory), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError(ctypes.get_errno(), "the system does not let memory be made executable")
    defined = (symbol for table in symbols.values() for symbol in table if symbol.section in offsets)
    return {symbol.name: address(symbol) for symbol in defined if symbol.binding == GLOBAL}


def _new_memory(num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return new memory that begins at a page of the system and stays until the process ends."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc().mmap(None, max(1, num_bytes), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the system gives no memory for native code")
    return (ctypes.c_char * max(1, num_bytes)).from_address(address)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, for whose functions Python has no memory that outlives its objects."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _sections(code: bytes) -> list[_Section]:
    (first,) = _SECTIONS.unpack_from(code, SECTIONS_OFFSET)
    (count,) = _NUM_SECTIONS.unpack_from(code, NUM_SECTIONS_OFFSET)
    return [_Section(*_SECTION.unpack_from(code, first + number * _SECTION.size)) for number in range(count)]


def _symbols(code: bytes, sections: list[_Section]) -> dict[int, list[_Symbol]]:
    """Return the symbols of each symbol table, by the number of its section."""
    return {
        number: list(_table(code, section, sections[section.link].offset))
        for number, section in enumerate(sections)
        if section.type == SYMBOL_TABLE
    }


def _table(code: bytes, section: _Section, names: int) -> Iterator[_Symbol]:
    """Yield the symbols of a table, whose names begin at the offset `names` of the file."""
    for name, info, _, of_section, value, size in _SYMBOL.iter_unpack(
        code[section.offset : section.offset + section.size]
    ):
        text = code[names + name : code.index(b"\0", names + name)].decode()
        yield _Symbol(text, info & 0xF, info >> 4, of_section, value, size)
