"""Compiles native code for this processor, keeps it on disk, and registers it with XLA.

A module is named by all that its code depends on beside our sources. So a module that an earlier process has compiled
is neither written nor compiled again: its object code is loaded by its name, on x86-64 without LLVM.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import jax

from ..kept_files import Kept, hash_of_sources, read_kept, write_kept
from . import object_code
from .perf_map import name_functions
from .processor import processor

_SOURCES_HASH = hash_of_sources("jpaged.pallas_kernels")
_VERSIONS = version("llvmlite"), version("jaxlib")
if TYPE_CHECKING:
    from llvmlite import ir

Build = Callable[[], "ir.Module"]
"""Writes a module."""
_lock = RLock()
_addresses: dict[str, int] = {}
"""Where the function of each loaded module begins, by the module's name, which is the function's too."""
_engines: list[object] = []
"""LLVM's owners of the code that it has loaded, which XLA may call for as long as the process lives."""
_handlers: dict[str, None] = {}
"""Names of the modules that are registered with XLA, in order."""
_linked: list[str] = []
"""Names of modules that were linked, in the order of the calls of `link`."""
_has_perf_map = False


class _ObjectCode(NamedTuple):
    """A module's object code, and the names of the linked modules that it calls."""

    code: bytes
    calls: list[str]


def register(name: str, build: Build) -> str:
    """Compile the module that `build` writes, and register its handler with XLA under its name; return the name.

    The handler is the module's function of the same name. If a module of this name is already registered, nothing is
    done: equal names mean equal code. Several threads may trace steps at once: the first one compiles while the others
    wait.
    """
    with _lock:
        if name not in _handlers:
            _register(name, _address_of(name, build))
    return name


def link(name: str, build: Build) -> str:
    """Compile the module that `build` writes for the module that is being written, which may call its function of the
    same name; return that name.

    Code that many modules need is compiled once so. Equal names mean equal code.
    """
    with _lock:
        _linked.append(name)
        if name not in _addresses:
            _address_of(name, build)
    return name


def registered() -> list[str]:
    """Return the names of the modules that are registered with XLA."""
    return list(_handlers)


def register_kept(names: Sequence[str]) -> bool:
    """Register modules of these names whose object code is kept, for programs that call them; return whether all are.

    Nothing is written or compiled.
    """
    with _lock:
        for name in names:
            if name not in _handlers:
                address = _load_kept(name)
                if address is None:
                    return False
                _register(name, address)
    return True


def name_functions_for_perf() -> None:
    """From now on, name the functions of each module in the map of Linux's perf (`perf_map`)."""
    global _has_perf_map
    _has_perf_map = True


def _register(name: str, address: int) -> None:
    """Register a handler with XLA."""
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")
    _handlers[name] = None


def _address_of(name: str, build: Build) -> int:
    """Return the address of a module's function of its own name, from kept object code or newly compiled."""
    address = _load_kept(name)
    if address is None:
        code = _compile(build)
        _write(name, code)
        address = _load(name, code)
    return address


def _load_kept(name: str) -> int | None:
    """Load a module's kept object code and the modules that it calls; return the address of its function.

    None if one of them is not kept.
    """
    kept = _read(name)
    return _load(name, kept) if kept is not None and all(map(_link_kept, kept.calls)) else None


def _load(name: str, kept: _ObjectCode) -> int:
    """Load a module's object code; return the address of its function of the module's name.

    LLVM loads what `object_code` refuses: code for other processors, and what a later LLVM may write.
    """
    try:
        address = object_code.load(kept.code, _function).get(name, 0)
    except ValueError:
        from . import compiler

        engine, address = compiler.load(name, kept.code, {each: _addresses[each] for each in kept.calls})
        _engines.append(engine)
    if address == 0:
        raise RuntimeError(f"native code: its object code holds no function {name}")
    _addresses[name] = address
    if _has_perf_map:
        name_functions(name, address, kept.code)
    return address


def _function(name: str) -> int:
    """Return the address of a function of a linked module, or else of the C library."""
    if name in _addresses:
        return _addresses[name]
    return ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value or 0


def _link_kept(name: str) -> bool:
    """Load a linked module whose object code is kept; return whether it is."""
    return name in _addresses or _load_kept(name) is not None


def _compile(build: Build) -> _ObjectCode:
    """Return the object code of a newly written module, for this processor, and the modules that it calls."""
    from . import compiler

    num_linked = len(_linked)
    module = build()
    return _ObjectCode(compiler.compile_module(module), list(dict.fromkeys(_linked[num_linked:])))


def _path_of(name: str) -> Path | None:
    """Return where the object code of a module is kept, in JAX's compilation cache; None if there is no cache.

    The file's name is a hash of all that the code depends on: our sources, the versions of LLVM (llvmlite's) and of
    XLA, the processor, how far it is optimized, and the module's name.
    """
    directory = jax.config.values.get("jax_compilation_cache_dir")
    is_optimized = not jax.config.read("jax_disable_most_optimizations")
    parts = _SOURCES_HASH, *_VERSIONS, processor(), str(is_optimized), name
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(directory, f"native_{key}.o") if directory else None


def _read(name: str) -> _ObjectCode | None:
    """Return a module's kept object code; None if it is not kept. The header has the modules that it calls."""
    path = _path_of(name)
    kept = read_kept(path) if path else None
    return kept and _ObjectCode(kept.content, kept.header)


def _write(name: str, code: _ObjectCode) -> None:
    """Keep object code for later processes, if there is a cache."""
    if path := _path_of(name):
        write_kept(path, Kept(code.calls, code.code))
