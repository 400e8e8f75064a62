"""KV layouts: the arrays that a cache is made of, what a page costs, what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.ragged_paged_attention import KVLayout, KVShape, XlaBackend
from jpaged.sharding import LOGICAL_TO_MESH


def layout(backend: XlaBackend, dtype: str = "float32") -> KVLayout:
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


def test_a_cpu_keeps_bfloat16_in_pairs() -> None:
    on_cpu, on_gpu = layout(XlaBackend(), "bfloat16"), layout(XlaBackend(platform="gpu"), "bfloat16")
    assert (on_cpu.dtype, on_cpu.stored_dtype) == (jnp.bfloat16, np.uint32)
    assert (on_gpu.dtype, on_gpu.stored_dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert layout(XlaBackend()).stored_dtype == np.float32
    assert on_cpu.page_bytes == on_gpu.page_bytes == layout(XlaBackend()).page_bytes // 2


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_dtypes_are_refused(platform: str) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype: got int8.* takes float32, bfloat16"):
        layout(XlaBackend(platform=platform), "int8")


def test_layouts_and_backends_are_values() -> None:
    """They are static parts of a compiled step: equal ones must be one cache key."""
    assert layout(XlaBackend()) == layout(XlaBackend())
    assert hash(layout(XlaBackend())) == hash(layout(XlaBackend()))
    assert layout(XlaBackend()) != layout(XlaBackend(), "float32").__class__(3, 6, 8, 2, 64, np.dtype("float32"))
    assert hash(XlaBackend()) == hash(XlaBackend())
