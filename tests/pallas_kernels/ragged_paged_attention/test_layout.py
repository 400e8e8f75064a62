"""KV layouts: the arrays that a cache is made of, what a page costs, what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend, KVLayout, KVShape
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.sharding import LOGICAL_TO_MESH


def layout(backend: Backend, dtype: str = "float32") -> KVLayout:
    return backend.layout(KVShape(num_layers=3, num_pages=5, page_size=8, num_kv_heads=2, head_size=64, dtype=dtype))


def test_a_page_costs_its_share_of_the_arrays() -> None:
    found = layout(XlaBackend())
    total = sum(np.zeros(shape, found.dtype).nbytes for shape in found.shapes)
    assert found.page_bytes * found.num_pages == total
    # Keys and values of 8 slots × 2 heads × 64 lanes in 3 layers, four bytes each.
    assert found.page_bytes == 2 * 3 * 8 * 2 * 64 * 4


def test_every_dimension_has_a_logical_axis_that_sharding_knows() -> None:
    found = layout(XlaBackend())
    for shape, axes in zip(found.shapes, found.logical_axes, strict=True):
        assert len(shape) == len(axes)
        for size, axis in zip(shape, axes, strict=True):
            assert axis is None or axis in LOGICAL_TO_MESH
            assert axis != "kv_heads" or size == found.num_kv_heads


@pytest.mark.parametrize(
    ("backend", "stored"),
    [(NativeBackend(), np.uint32), (XlaBackend(), np.uint16), (XlaBackend(platform="gpu"), jnp.bfloat16)],
)
def test_a_cpu_keeps_bfloat16_as_integers(backend: Backend, stored: Any) -> None:
    found = layout(backend, "bfloat16")
    assert (found.dtype, found.stored_dtype) == (jnp.bfloat16, stored)
    assert layout(backend).stored_dtype == np.float32
    assert found.page_bytes == layout(backend).page_bytes // 2


@pytest.mark.parametrize("backend", [NativeBackend(), XlaBackend()], ids=lambda backend: backend.name)
def test_other_dtypes_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype: got float16.* takes float32, bfloat16, int8"):
        layout(backend, "float16")


def test_layouts_and_backends_are_values() -> None:
    """Layouts and backends are static parts of a compiled step, so equal ones must be one cache key."""
    assert layout(XlaBackend()) == layout(XlaBackend())
    assert hash(layout(XlaBackend())) == hash(layout(XlaBackend()))
    assert layout(XlaBackend()) != layout(XlaBackend(), "float32").__class__(3, 6, 8, 2, 64, np.dtype("float32"))
    assert hash(XlaBackend()) == hash(XlaBackend())
