"""The GPU kernels against the dense oracle, in an interpreter that knows the GPU's memories, copies and barriers."""

from typing import Any

import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.ragged_paged_attention import GpuBackend

from .paged_world import World, run_ragged, shape_of


def backend(num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64, **options: Any) -> GpuBackend:
    params = plgpu.InterpretGPUParams(detect_races=True)
    options = {"num_sms": 2, **options}
    return GpuBackend(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, interpret=params, **options)


def world(page_size: int = 16, *, backend_options: dict[str, Any] | None = None, **changes: Any) -> World:
    sizes = {name: changes[name] for name in ("num_heads", "num_kv_heads", "head_size") if name in changes}
    some = backend(**sizes, **(backend_options or {}))
    return World(shape_of(page_size, backend=some, slot_axes=(2, 2), **{"dtype": "bfloat16", **changes}))


@pytest.fixture(autouse=True)
def no_races():
    yield
    races = interpreter.get_races()
    assert races is None or not races.races_found


def test_ragged_rows_match_the_oracle() -> None:
    run_ragged(world(16))
