"""Pages of one byte a number, by native code and by XLA's loops: numbers, bytes, scales, factors of channels."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import largest_number
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import Tiles, XlaBackend

from .paged_world import World, shape_of
from .scenarios import features, run_layer_without_keys, run_ragged, run_shared_pages

XLA = XlaBackend(Tiles(kv_splits=24, decode_keys=64, queries=16, prefill_keys=16, shared_rows=8))
BACKENDS: dict[str, dict[str, Any]] = {"native": {}, "xla": {"backend": XLA, "slot_axes": (2, 2)}}
BYTES = "int8", "float8_e4m3fn"
FEATURES = features(page_size=8)


def world_of(kind: str, dtype: str, **changes: Any) -> World:
    """Return a world of float32 queries, whose results are those of the same bytes but for float32's rounding."""
    return World(shape_of(dtype=dtype, step_dtype="float32", **BACKENDS[kind], **changes))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("dtype", BYTES)
def test_ragged_rows_attend_to_the_numbers_that_bytes_stand_for(dtype: str, kind: str) -> None:
    run_ragged(world_of(kind, dtype, options=FEATURES["all of them"]))
