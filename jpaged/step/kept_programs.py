"""Step programs kept on disk as StableHLO: a later start lowers them without tracing the model in Python.

A program is traced and exported (`jax.export`) by the first start that needs it. That start too compiles what was
exported, so that XLA's own cache finds the executable at the next one. Programs lie beside that cache.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax import export

from ..pallas_kernels.kept_files import Kept, hash_of_sources, read_kept, write_kept
from ..pallas_kernels.ragged_paged_attention.interface import Backend
from ..sampling.sampler import SampledRows
from ..sampling.token_scores import TokenScores

PACKAGES = "jax", "jaxlib", "flax", "llvmlite"
"""Packages whose versions a program depends on."""
LOCAL_SETTINGS = ("jax_compilation_cache_dir",)
"""Settings of JAX that are not part of a program's identity."""

_SOURCES_HASH = hash_of_sources("jpaged", "jpaged.models", "jpaged.pallas_kernels", "jpaged.sharding")
# What programs return beside the state that they change; these classes have no static fields.
for _result in (SampledRows, TokenScores):
    export.register_pytree_node_serialization(
        _result,
        serialized_name=f"jpaged.{_result.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )


@dataclass(frozen=True)
class Program:
    """A program of a step: a function, and the abstract shapes that it is lowered for."""

    name: str
    """Its name in profiles."""
    run: Callable[..., tuple[Any, Any]]
    """Takes `arguments`; returns the new state, a tree like argument 1, and anything else."""
    arguments: tuple[Any, ...]
    """Trees of abstract arrays. Argument 1 is the state, which is donated."""
    compiler_options: dict[str, str] | None = None

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the program."""
        return self._lower(self.run)

    def lower_exported(self, exported: export.Exported) -> jax.stages.Lowered:
        """Lower the program as `export` exported it."""
        state_tree = jax.tree.structure(self.arguments[1])

        def run(*arguments: Any) -> tuple[Any, Any]:
            state, rest = exported.call(*jax.tree.leaves(arguments))
            return jax.tree.unflatten(state_tree, state), rest

        return self._lower(run)

    def export(self, code_names: Callable[[], Sequence[str]]) -> export.Exported:
        """Trace and export the program, as a function of the leaves of its arguments that returns those of the state.

        `code_names` gives the custom calls that it may have beside those of JAX.
        """
        leaves, tree = jax.tree.flatten(self.arguments)

        def run(*leaves: Any) -> tuple[tuple[Any, ...], Any]:
            state, rest = self.run(*jax.tree.unflatten(tree, leaves))
            return tuple(jax.tree.leaves(state)), rest

        jitted = jax.jit(run, keep_unused=True)
        jitted.trace(*leaves)  # Native code is named as it is traced; `export` takes this trace from JAX's cache.
        allowed = [export.DisabledSafetyCheck.custom_call(name) for name in code_names()]
        return export.export(jitted, platforms=["cpu"], disabled_checks=allowed)(*leaves)

    def _lower(self, run: Callable[..., Any]) -> jax.stages.Lowered:
        def named(*arguments: Any) -> Any:
            return run(*arguments)

        named.__name__ = self.name
        jitted = jax.jit(named, donate_argnums=1, compiler_options=self.compiler_options)
        return jitted.lower(*self.arguments)


class KeptPrograms:
    """The programs of one engine on disk: one file for each, named by all that its trace depends on."""

    def __init__(self, directory: Path, backend: Backend, identity: str) -> None:
        """Keep programs in a `directory` that exists. `identity` tells engines apart that have other programs."""
        self._directory, self._backend = directory, backend
        settings = sorted((name, value) for name, value in jax.config.values.items() if name not in LOCAL_SETTINGS)
        versions = [version(package) for package in PACKAGES]
        self._identity = repr((_SOURCES_HASH, sys.version, versions, settings, backend, identity))

    def lower(self, program: Program) -> jax.stages.Lowered:
        """Lower a program: the kept one, or else one that is exported now and kept."""
        name = hashlib.sha256(f"{self._identity}{program.name}".encode()).hexdigest()
        path = self._directory / f"step_{name}"
        return program.lower_exported(self._read(path) or self._export(program, path))

    def _read(self, path: Path) -> export.Exported | None:
        """Return a kept program; None if it is not there, or the native code that it calls is not.

        The header has the names of that code, the content is the program as JAX serializes it.
        """
        kept = read_kept(path)
        if kept is None or not self._backend.load_native(kept.header):
            return None
        return export.deserialize(bytearray(kept.content))

    def _export(self, program: Program, path: Path) -> export.Exported:
        """Trace and export a program, and keep it for later starts."""
        exported = program.export(self._backend.native_names)
        module = exported.mlir_module()
        names = [name for name in self._backend.native_names() if f"@{name}(" in module or f'@"{name}"(' in module]
        write_kept(path, Kept(names, bytes(exported.serialize())))
        return exported
