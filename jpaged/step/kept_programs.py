"""Step programs kept on disk as StableHLO: a later start lowers them without tracing the model in Python.

The first start that needs a program traces it, and keeps the module. That start compiles the module in the same way as
later ones, so that they find the executable in JAX's compilation cache, beside which programs are kept.

`jpaged generate` and `serve` keep programs. Engines in a process of the caller's own do not, where our functions may
have been replaced by others.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from ..checks import one_line
from ..pallas_kernels.kept_files import Kept, hash_of_sources, read_kept, write_kept
from ..pallas_kernels.ragged_paged_attention.interface import Backend
from ..sampling.sampler import SampledRows
from ..sampling.token_scores import TokenScores

logger = logging.getLogger("jpaged")

PACKAGES = "jax", "jaxlib", "flax", "llvmlite", "numpy"
"""Packages whose versions a program depends on."""
LOCAL_SETTINGS = ("jax_compilation_cache_dir",)
"""Settings of JAX that no program depends on."""
_SOURCES_HASH = hash_of_sources("jpaged", "jpaged.models", "jpaged.pallas_kernels", "jpaged.sharding")


@dataclass(frozen=True)
class Program:
    """A program of a step: a function, and the abstract shapes that it is lowered for."""

    name: str
    """Its name in profiles."""
    run: Callable[..., tuple[Any, Any]]
    """Takes `arguments`; returns the new state, a tree like argument 1, and either an array or SampledRows."""
    arguments: tuple[Any, ...]
    """Trees of abstract arrays. Argument 1 is the state, which is donated."""
    compiler_options: dict[str, str] | None = None

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the program."""
        return self._lower(self.run)

    def trace(self) -> _Traced:
        """Return the program's module, a function of the leaves of its arguments, for one CPU device."""
        leaves, tree = jax.tree.flatten(self.arguments)
        paths = list[str]()

        def run(*leaves: Any) -> list[Any]:
            state, rest = self.run(*jax.tree.unflatten(tree, leaves))
            named, _ = jax.tree_util.tree_flatten_with_path(rest)
            paths.extend(jax.tree_util.keystr(path) for path, _ in named)
            return [*jax.tree.leaves(state), *(array for _, array in named)]

        shapes = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        lowered = jax.jit(run, keep_unused=True).trace(*shapes).lower(lowering_platforms=("cpu",))
        results = [(list(result.shape), str(result.dtype)) for result in lowered.out_info]
        module: Any = lowered.compiler_ir()
        return _Traced(mlir.module_to_bytecode(module), results, paths)

    def lower_traced(self, traced: _Traced) -> jax.stages.Lowered:
        """Lower the program from its module."""
        shapes, state_tree = jax.tree.flatten(self.arguments[1])

        def run(*arguments: Any) -> tuple[Any, Any]:
            results = _call.bind(*jax.tree.leaves(arguments), traced=traced, name=self.name)
            state, rest = results[: len(shapes)], results[len(shapes) :]
            return jax.tree.unflatten(state_tree, state), traced.rest(rest)

        return self._lower(run)

    def _lower(self, run: Callable[..., Any]) -> jax.stages.Lowered:
        def named(*arguments: Any) -> Any:
            return run(*arguments)

        named.__name__ = self.name
        jitted = jax.jit(named, donate_argnums=1, compiler_options=self.compiler_options)
        return jitted.lower(*self.arguments)


@dataclass(frozen=True, eq=False)
class _Traced:
    """A traced program."""

    module: bytes
    """StableHLO, as MLIR's bytecode."""
    results: list[tuple[list[int], str]]
    """Shape and dtype of each result."""
    rest_paths: list[str]
    """The places of the last results in what the program returns beside the state: "" for all of it, ".token_ids"."""

    def rest(self, arrays: list[Any]) -> Any:
        """Return these arrays as what the program returns beside the state."""
        if self.rest_paths == [""]:
            return arrays[0]
        rows, scores = dict[str, Any](), dict[str, Any]()
        for path, array in zip(self.rest_paths, arrays, strict=True):
            *parents, field = path.removeprefix(".").split(".")
            (scores if parents == ["scores"] else rows)[field] = array
        return SampledRows(**rows, scores=TokenScores(**scores) if scores else None)


class KeptPrograms:
    """The programs of one engine on disk: one file for each, named by what its trace depends on."""

    def __init__(self, directory: Path, backend: Backend, device: jax.Device, identity: str) -> None:
        """Keep programs for a CPU device in a `directory` that exists.

        `identity` tells engines apart whose programs differ in more than their names and the shapes of their arguments.
        """
        self._directory, self._backend = directory, backend
        settings = sorted((name, value) for name, value in jax.config.values.items() if name not in LOCAL_SETTINGS)
        versions = [version(package) for package in PACKAGES]
        machine = backend, backend.hardware(device)
        self._identity = repr((_SOURCES_HASH, sys.version, versions, settings, machine, identity))

    def lower(self, program: Program) -> jax.stages.Lowered:
        """Lower a program: the kept one, or else one that is traced now and kept.

        If JAX refuses the module, which would be a fault of ours, a warning says so, and the program is traced.
        """
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(program.arguments)]
        name = hashlib.sha256(f"{self._identity}{program.name}{shapes}".encode()).hexdigest()
        path = self._directory / f"step_{name}"
        traced = self._read(path) or self._trace(program, path)
        try:
            return program.lower_traced(traced)
        except Exception as error:
            logger.warning("%s: the kept program cannot be used: %s", program.name, one_line(error))
            return program.lower()

    def _read(self, path: Path) -> _Traced | None:
        """Return a kept program; None if it is not there, or the native code that it calls is not."""
        kept = read_kept(path)
        if kept is None or not self._backend.load_native(kept.header["native"]):
            return None
        return _Traced(kept.content, kept.header["results"], kept.header["rest_paths"])

    def _trace(self, program: Program, path: Path) -> _Traced:
        """Trace a program, and keep it for later starts."""
        traced = program.trace()
        native = [name for name in self._backend.native_names() if name.encode() in traced.module]
        header = {"native": native, "results": traced.results, "rest_paths": traced.rest_paths}
        write_kept(path, Kept(header, traced.module))
        return traced


_call = Primitive("call_traced")
_call.multiple_results = True


def _results(*_: Any, traced: _Traced, name: str) -> list[ShapedArray]:
    return [ShapedArray(tuple(shape), jax.numpy.dtype(dtype)) for shape, dtype in traced.results]


_call.def_abstract_eval(_results)


def _lower_call(ctx: Any, *arguments: Any, traced: _Traced, name: str) -> list[Any]:
    """Put a traced module into the one that is being lowered, and call its main function."""
    context = ctx.module_context
    with context.module.context:
        module = ir.Module.parse(traced.module)
    main: Any = ir.SymbolTable(module.operation)["main"]
    types = main.type.results
    name = mlir.merge_mlir_modules(context.module, name, module, dst_symtab=context.symbol_table)
    call = func.CallOp(types, ir.FlatSymbolRefAttr.get(name), arguments)
    return list(call.results)


mlir.register_lowering(_call, _lower_call)
