"""Compiles native code for this processor, keeps it on disk, and registers it with XLA."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from pathlib import Path
from threading import Lock

import jax
import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from .llvm import host_features, processor
from .perf_map import name_functions

CHECKSUM_BYTES = 32
_lock = Lock()
_engines: dict[str, llvm.ExecutionEngine] = {}
"""Execution engines by module name. They own the code, which XLA may call for as long as the process lives."""
_has_perf_map = False


def register(module: ir.Module) -> str:
    """Compile a module and register its handler with XLA under the module's name; return that name.

    The handler is the module's function of the same name. If a module of this name is already registered, nothing is
    done: equal names mean equal code. Several threads may trace steps at once: the first one compiles while the others
    wait.
    """
    with _lock:
        if module.name not in _engines:
            address = ctypes.c_void_p(_compile(module))
            jax.ffi.register_ffi_target(module.name, jax.ffi.pycapsule(address), platform="cpu")
    return module.name


def link(module: ir.Module) -> str:
    """Compile a module for other modules, which may call its function of the same name; return that name.

    Code that many modules need is compiled once so. It must be linked before any of them is compiled. Equal names mean
    equal code.
    """
    with _lock:
        if module.name not in _engines:
            llvm.add_symbol(module.name, _compile(module))
    return module.name


def _compile(module: ir.Module) -> int:
    """Compile a module, and return the address of its function of the same name.

    Object code is stored in JAX's compilation cache, if one is configured; later processes load it from there and skip
    optimisation and code generation. The engine is kept, as it owns the code.
    """
    features = host_features().flatten()  # It also registers LLVM's code generator.
    source, target, cpu = str(module), llvm.Target.from_default_triple(), llvm.get_host_cpu_name()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3)  # The engine below frees it.
    kept_code = _KeptCode(source)
    parsed = llvm.parse_assembly(source)
    parsed.verify()
    if kept_code.code is None:  # Else the engine takes the object code, and optimised text is not needed.
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.set_object_cache(lambda _, code: kept_code.keep(code), lambda _: kept_code.code)
    engine.finalize_object()
    _engines[module.name] = engine
    address: int = engine.get_function_address(module.name)
    if _has_perf_map:
        name_functions(module.name, address, kept_code.code or b"")
    return address


def name_functions_for_perf() -> None:
    """From now on, name the functions of each module that is compiled in the map of Linux's perf (`perf_map`)."""
    global _has_perf_map
    _has_perf_map = True


class _KeptCode:
    """Object code of a module for this processor, in a file that begins with its checksum."""

    def __init__(self, text: str) -> None:
        """Read the object code of the module with this source `text` from JAX's compilation cache, if it is there.

        The file's name is a hash of everything that the code depends on: LLVM's version (llvmlite's), the processor and
        the text. The file holds a SHA-256 checksum of `CHECKSUM_BYTES` and then the code. `code` stays None if no cache
        is configured, if the file cannot be read, or if the checksum does not match.
        """
        name = hashlib.sha256("\0".join((llvmlite.__version__, processor(), text)).encode()).hexdigest()
        directory = jax.config.values.get("jax_compilation_cache_dir")
        self._path = Path(directory, f"native_{name}.o") if directory else None
        self.code: bytes | None = None
        """The object code; None if the file is missing or damaged, until the module is compiled."""
        with contextlib.suppress(OSError):
            content = self._path.read_bytes() if self._path else b""
            checksum, code = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
            self.code = code if checksum == hashlib.sha256(code).digest() else None

    def keep(self, code: bytes) -> None:
        """Keep the object code, and write it for later processes unless it was read from the cache or there is none.

        The file appears whole or not at all, since several processes may write it: each writes a file of its own, named
        by its process id, and renames it. Errors of the file system are ignored: the next process compiles again.
        """
        if self.code is not None:
            return
        self.code = code
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_bytes(hashlib.sha256(code).digest() + code)
            new.replace(self._path)
