"""What of the kernels' tests a JAX can run: the GPU kernels want instructions and an interpreter of a later one."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import pytest

# By version and not by asking for its name: of a later JAX that has another one these tests must fail, not be left out.
HAS_GPU_INTERPRETER = jax.__version_info__ >= (0, 11, 2)
collect_ignore = [] if HAS_GPU_INTERPRETER else ["test_gpu_attention.py", "test_gpu_check.py"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Name → that module of the folder `scripts`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module
