"""What of the kernels' tests a JAX can run: the GPU kernels want instructions and an interpreter of a later one."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from jax.experimental.pallas import mosaic_gpu

collect_ignore = [] if hasattr(mosaic_gpu, "InterpretGPUParams") else ["test_gpu_attention.py", "test_gpu_check.py"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Name → that module of the folder `scripts`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module
