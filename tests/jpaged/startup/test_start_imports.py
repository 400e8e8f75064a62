"""What a start loads whose programs and weights an earlier one has kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..tiny_model import write_tiny_model

START = """
import sys
from jpaged.models.weights import kept_weights
kept_weights.MIN_BYTES = 1  # The model is tiny.
from jpaged.commands.generate import main
assert main(sys.argv[1:]) == 0
print("modules:", *sys.modules, file=sys.stderr)
"""
NEVER = (
    "flax", "gguf", "jax.extend", "jaxlib.mlir.dialects.mhlo", "optax", "orbax", "torch", "tqdm", "transformers",
    "jax.experimental.pallas", "llvmlite.binding", "llvmlite.ir",
    "jpaged.models.decoder", "jpaged.models.layers", "jpaged.models.served", "jpaged.models.weights.loading",
    "jpaged.models.weights.live_weights", "jpaged.models.weights.dummy", "jpaged.pallas_kernels.native.layer_ops",
    "jpaged.pallas_kernels.native.products", "jpaged.pallas_kernels.ragged_paged_attention.native.attention",
    "jpaged.research.trainer", "jpaged.research.scores", "jpaged.research.arrays", "jpaged.serving",
    "jpaged.remote", "jpaged.async_engine", "jpaged.commands.bench", "jpaged.commands.serve",
)  # fmt: skip
"""Modules and packages that only tracing, reading weights, a trainer, a server or a bench needs."""


def start(folder: Path) -> tuple[str, list[str]]:
    """Run `jpaged generate` in a process of its own; return the text and the modules that it has loaded."""
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_COMPILATION_CACHE_DIR": ""}
    arguments = ["--model", str(folder / "model"), "--prompt", "a b", "--max-tokens", "3", "--temperature", "0"]
    run = subprocess.run(
        [sys.executable, "-c", START, *arguments, "--num-decode-steps", "1"],
        env={**os.environ, **caches}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return run.stdout, run.stderr.rpartition("modules: ")[2].split()


def test_a_start_of_kept_programs_imports_neither_models_nor_what_traces_them(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    first_text, first_modules = start(tmp_path)
    text, modules = start(tmp_path)
    assert text == first_text
    assert "flax" in first_modules
    assert [name for name in modules if any(name == each or name.startswith(f"{each}.") for each in NEVER)] == []
