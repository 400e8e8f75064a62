"""Step programs kept on disk, as modules and as executables: a later start neither traces nor compiles them.

The first start that needs a program traces it, which makes a module of StableHLO, and compiles that. Both are kept: a
start that ends while XLA compiles leaves the module. Later starts load the executable. JAX's own cache has executables
too, and finds them only by a module that was lowered anew, which takes longer than to load one. These files lie in the
directory of that cache, and are trusted as its files are.

`jpaged generate` and `serve` keep programs. Engines in a process of the caller's own do not, where our functions may
have been replaced by others.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import SingleDeviceSharding

from ..checks import one_line
from ..pallas_kernels.kept_files import Kept, hash_of_sources, read_kept, write_kept
from ..pallas_kernels.native.processor import processor
from ..pallas_kernels.ragged_paged_attention.interface import Backend
from ..sampling.sampler import SampledRows
from ..sampling.token_scores import TokenScores
from .freed_memory import return_freed_memory

logger = logging.getLogger("jpaged")

PACKAGES = "jax", "jaxlib", "flax", "llvmlite", "numpy"
"""Packages whose versions a program depends on."""
LOCAL_SETTINGS = ("jax_compilation_cache_dir",)
"""Settings of JAX that no program depends on."""
XLA_SETTINGS = "XLA_FLAGS"
"""The variable of the environment with XLA's own settings."""
CompilerOptions = dict[str, Any]
"""XLA's options for one program, by name; those that are left out are XLA's defaults."""
_SOURCES_HASH = hash_of_sources("jpaged", "jpaged.models", "jpaged.pallas_kernels", "jpaged.sharding")


@dataclass(frozen=True)
class Program:
    """A program of a step: a function, and the abstract shapes that it is lowered for."""

    name: str
    """Its name in profiles."""
    run: Callable[..., Any]
    """Takes `arguments`; returns the new state, and either an array or SampledRows. The state alone if `has_rest` is
    false."""
    arguments: tuple[Any, ...]
    """Trees of abstract arrays."""
    compiler_options: CompilerOptions = field(default_factory=dict)
    donated: int = 1
    """The argument that is the state, which is donated; the new one is a tree like it."""
    made: Any = None
    """The state of a program that makes one and has no arguments: a tree of abstract arrays with their placement."""
    has_rest: bool = True
    """Whether it returns something beside the state."""

    @property
    def state(self) -> Any:
        """Return the state that it returns, as a tree of abstract arrays."""
        return self.arguments[self.donated] if self.made is None else self.made

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the program."""

        def named(*arguments: Any) -> Any:
            return self.run(*arguments)

        named.__name__ = self.name
        if self.made is None:
            jitted = jax.jit(named, donate_argnums=self.donated, compiler_options=self.compiler_options)
        else:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.made)
            jitted = jax.jit(named, out_shardings=shardings, compiler_options=self.compiler_options)
        return jitted.lower(*self.arguments)

    def trace(self) -> tuple[bytes, list[str]]:
        """Return the program's module, a function of the leaves of its arguments, for one CPU device.

        The second value are the places of the last results in what it returns beside the state: "" for all of it,
        ".token_ids".
        """
        leaves, tree = jax.tree.flatten(self.arguments)
        paths = list[str]()

        def named(*leaves: Any) -> list[Any]:
            results = self.run(*jax.tree.unflatten(tree, leaves))
            state, rest = results if self.has_rest else (results, None)
            with_paths, _ = jax.tree_util.tree_flatten_with_path(rest)
            paths.extend(jax.tree_util.keystr(path) for path, _ in with_paths)
            return [*jax.tree.leaves(state), *(array for _, array in with_paths)]

        named.__name__ = self.name
        shapes = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        jitted = jax.jit(named, keep_unused=True, donate_argnums=self._donated_leaves())
        module: Any = jitted.trace(*shapes).lower(lowering_platforms=("cpu",)).compiler_ir()
        return mlir.module_to_bytecode(module), paths

    def _donated_leaves(self) -> range:
        """Return the numbers of the leaves of all arguments that are the state's."""
        if self.made is not None:
            return range(0)
        ends = list(itertools.accumulate(len(jax.tree.leaves(argument)) for argument in self.arguments))
        return range(ends[self.donated] - len(jax.tree.leaves(self.state)), ends[self.donated])


class _Traced(NamedTuple):
    """A traced program."""

    module: bytes
    """StableHLO, as MLIR's bytecode."""
    native: list[str]
    """The native code that it calls."""
    rest_paths: list[str]
    """The places of its last results, as `Program.trace` returns them."""


class MemorySizes(NamedTuple):
    """The bytes that an executable takes, under JAX's names."""

    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


class KeptExecutable:
    """An executable of XLA that takes and returns the trees of its program.

    It runs on one CPU device. The leaves of its arguments are of the program's shapes: arrays of JAX on that device, or
    of numpy. With a numpy array among them, a call takes 0.5 ms more than one of `jax.stages.Compiled`.
    """

    def __init__(
        self, executable: Any, device: jax.Device, program: Program, rest_paths: list[str], memory: MemorySizes
    ) -> None:
        """Take an executable of XLA's client, and the places of its results behind those of the state."""
        self._executable, self._sharding = executable, SingleDeviceSharding(device)
        self._has_rest, self._rest_paths = program.has_rest, rest_paths
        self._state_tree: Any = jax.tree.structure(program.state)
        self._memory = memory

    def __call__(self, *arguments: Any) -> Any:
        """Start the program; return its results, which may not be computed yet."""
        leaves = [
            self._on_device(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in jax.tree.leaves(arguments)
        ]
        results = self._executable.execute_sharded(leaves)
        arrays = [array for (array,) in results.disassemble_into_single_device_arrays()]
        state = self._state_tree.unflatten(arrays[: self._state_tree.num_leaves])
        return (state, self._rest(arrays[self._state_tree.num_leaves :])) if self._has_rest else state

    def _on_device(self, array: np.ndarray) -> jax.Array:
        """Return an array of JAX of a numpy array; this takes a third of the time of `device_put`."""
        return jax.make_array_from_callback(array.shape, self._sharding, lambda _: array)

    def _rest(self, arrays: list[Any]) -> Any:
        """Return these arrays as what the program returns beside the state."""
        if self._rest_paths == [""]:
            return arrays[0]
        rows, scores = dict[str, Any](), dict[str, Any]()
        for path, array in zip(self._rest_paths, arrays, strict=True):
            *parents, field = path.removeprefix(".").split(".")
            (scores if parents == ["scores"] else rows)[field] = array
        return SampledRows(**rows, scores=TokenScores(**scores) if scores else None)

    def memory_analysis(self) -> MemorySizes:
        """Return the bytes that it takes, as `jax.stages.Compiled` does."""
        return self._memory


class KeptPrograms:
    """The programs of one engine on disk: two files for each, named by what it depends on."""

    def __init__(self, directory: Path, backend: Backend, device: jax.Device, identity: str) -> None:
        """Keep programs for a CPU device in a `directory` that exists.

        `identity` tells engines apart whose programs differ in more than their names and the shapes of their arguments.
        """
        self._directory, self._backend, self._device = directory, backend, device
        settings = sorted((name, value) for name, value in jax.config.values.items() if name not in LOCAL_SETTINGS)
        settings.append((XLA_SETTINGS, os.environ.get(XLA_SETTINGS)))
        versions = [version(package) for package in PACKAGES]
        machine = backend, backend.hardware(device), processor(), device.id
        self._identity = repr((_SOURCES_HASH, sys.version, versions, settings, machine, identity))

    def lower(self, program: Program) -> KeptProgram:
        """Return a program that can be compiled: its kept executable, or else its module, kept or traced now."""
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((program.arguments, program.made))]
        name = hashlib.sha256(f"{self._identity}{program.name}{shapes}".encode()).hexdigest()
        found = self._read(self._executable_path(name, program))
        return KeptProgram(self, program, name, self.traced(program, name) if found is None else found)

    def traced(self, program: Program, name: str) -> _Traced:
        """Return a program's module: the kept one, or else one that is traced now and kept."""
        path = self._directory / f"step_{name}"
        if (kept := self._read(path)) is not None:
            return _Traced(kept.content, kept.header["native"], kept.header["rest_paths"])
        module, rest_paths = program.trace()
        native = [each for each in self._backend.native_names() if each.encode() in module]
        write_kept(path, Kept({"native": native, "rest_paths": rest_paths}, module))
        return _Traced(module, native, rest_paths)

    def load(self, program: Program, kept: Kept) -> KeptExecutable:
        """Load a kept executable. Raises what XLA raises if it refuses it."""
        executable = self._device.client.deserialize_executable(kept.content, [self._device])
        memory = MemorySizes(*kept.header["memory"])
        return KeptExecutable(executable, self._device, program, kept.header["rest_paths"], memory)

    def compile(self, program: Program, traced: _Traced, name: str) -> KeptExecutable:
        """Compile a traced program, and keep the executable if XLA can write it."""
        from jax.extend.backend import get_compile_options  # With all of `jax.extend`, Pallas too.

        options = get_compile_options(
            num_replicas=1,
            num_partitions=1,
            device_assignment=[self._device.id],
            env_options_overrides=program.compiler_options,
        )
        executable = self._device.client.compile_and_load(traced.module, [self._device], options)
        return_freed_memory()  # The compiler has used some 100 MB.
        stats = executable.get_compiled_memory_stats()
        memory = MemorySizes(*(getattr(stats, field) for field in MemorySizes._fields))
        header = {"native": traced.native, "rest_paths": traced.rest_paths, "memory": memory}
        try:
            write_kept(self._executable_path(name, program), Kept(header, executable.serialize()))
        except jax.errors.JaxRuntimeError as error:
            logger.info("%s: each start compiles it: %s", program.name, one_line(error))
        return KeptExecutable(executable, self._device, program, traced.rest_paths, memory)

    def _read(self, path: Path) -> Kept | None:
        """Return what a file holds; None if it is not there, or the native code that its program calls is not."""
        kept = read_kept(path)
        return kept if kept is not None and self._backend.load_native(kept.header["native"]) else None

    def _executable_path(self, name: str, program: Program) -> Path:
        """Return the file of an executable, which depends on XLA's options too; a module does not."""
        options = repr(sorted(program.compiler_options.items()))
        return self._directory / f"executable_{hashlib.sha256(f'{name}{options}'.encode()).hexdigest()}"


@dataclass(frozen=True)
class KeptProgram:
    """A program that can be compiled, as `jax.stages.Lowered` can."""

    programs: KeptPrograms
    program: Program
    name: str
    """Its name in files."""
    found: Kept | _Traced
    """Its executable, or its module if that is not kept."""

    def compile(self) -> KeptExecutable:
        """Load the kept executable, or compile the module and keep the executable.

        If XLA refuses what is kept, a warning says so, and the module is compiled anew.
        """
        if isinstance(self.found, _Traced):
            return self.programs.compile(self.program, self.found, self.name)
        try:
            return self.programs.load(self.program, self.found)
        except Exception as error:
            logger.warning("%s: the kept program cannot be used: %s", self.program.name, one_line(error))
            return self.programs.compile(self.program, self.programs.traced(self.program, self.name), self.name)
