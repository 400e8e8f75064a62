"""Lets XLA compile programs for a CPU in less time; they run slower, and round differently at most."""

import os
from collections.abc import Mapping
from threading import local
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

ONE_MODULE: dict[str, Any] = {"xla_cpu_parallel_codegen_split_count": 1}
"""One module of LLVM for a program, since two test processes keep two cores busy. Its results have the same bits."""
OPTIONS = ONE_MODULE | {"xla_disable_hlo_passes": "while-loop-invariant-code-motion,simplify-while-loops"}
"""Beside that no search for what loops could do once: it takes half of the time of a program that draws tokens."""
if jax.__version_info__ < (0, 11):  # Newer versions of XLA have no other way to emit loops.
    # Loops by LLVM alone instead of MLIR, whose contexts and passes take longer than what they do for a small program.
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

CONTEXT_PROGRAMS = 10
"""Programs that are lowered in one context of MLIR, about as many as in JAX 0.12. To make a context, with all its
dialects, takes a third of the time of a small program; one context for all would keep every type and place in the
source that it was given."""


def use_in_this_process() -> None:
    """Compile with OPTIONS while `jax_disable_most_optimizations` is set, and else with ONE_MODULE.

    JAX has no setting of its own for them: those of XLA_FLAGS hold for programs that are to be optimized too. Versions
    before 0.12 also make fewer contexts of MLIR from here on.
    """
    compile_options = compiler.get_compile_options

    def quick_options(*arguments: Any, env_options_overrides: Mapping[str, Any] | None = None, **options: Any) -> Any:
        quick = OPTIONS if jax.config.read("jax_disable_most_optimizations") else ONE_MODULE
        overrides = {**quick, **(env_options_overrides or {})}
        return compile_options(*arguments, env_options_overrides=overrides or None, **options)

    compiler.get_compile_options = quick_options
    if jax.__version_info__ < (0, 12):
        _reuse_contexts()


def _reuse_contexts() -> None:
    """Have each thread lower CONTEXT_PROGRAMS programs in one context, where JAX makes one for each."""
    make_context = mlir.make_ir_context
    thread_state = local()

    def reused_context() -> Any:
        num_left = getattr(thread_state, "num_left", 0)
        if num_left == 0:
            thread_state.context = make_context()
            num_left = CONTEXT_PROGRAMS
        thread_state.num_left = num_left - 1
        return thread_state.context

    mlir.make_ir_context = reused_context


def environment(*flags: str) -> dict[str, str]:
    """Return the environment of a child that compiles as this process does, with further XLA flags."""
    is_unoptimized = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "").lower() not in ("", "false", "0")
    options = OPTIONS if is_unoptimized else ONE_MODULE
    quick = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*flags, *quick])}
