"""Native code is kept in JAX's compilation cache, and compiled again where that is broken or not for writing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MULTIPLY = """
import os, jax, jax.numpy as jnp, numpy as np
import jpaged
from jpaged.pallas_kernels import cpu_code
from jpaged.pallas_kernels.cpu_products import product
build = cpu_code.llvm.create_pass_builder
def noted(*args):
    print("compiles")
    return build(*args)
cpu_code.llvm.create_pass_builder = noted
jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"] or None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000.0)
found = jax.jit(product, static_argnums=2)(jnp.full((3, 64), 2.0), jnp.full((2, 64, 32), 0.5), 64)
assert (np.asarray(found) == 64.0).all()
"""


def multiply(cache: Path | None) -> str:
    environment = {**os.environ, "CACHE": str(cache or ""), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MULTIPLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_code_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    assert multiply(tmp_path) == "compiles\n"
    assert [path.suffix for path in tmp_path.glob("native_*")] == [".o"]
    assert multiply(tmp_path) == ""


@pytest.mark.parametrize("content", [b"", b"short", bytes(5000)], ids=["empty", "short", "zeros"])
def test_a_broken_file_is_made_anew(tmp_path: Path, content: bytes) -> None:
    multiply(tmp_path)
    (file,) = tmp_path.glob("native_*.o")
    whole = file.read_bytes()
    file.write_bytes(content)
    assert multiply(tmp_path) == "compiles\n"
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-1])
    assert multiply(tmp_path) == "compiles\n"


def test_without_a_cache_each_process_compiles(tmp_path: Path) -> None:
    assert multiply(None) == "compiles\n"
    (tmp_path / "file").write_text("")
    assert multiply(tmp_path / "file") == "compiles\n", "a directory that cannot be"
