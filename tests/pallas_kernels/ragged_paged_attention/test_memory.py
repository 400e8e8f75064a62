"""Memory of attention's programs as XLA optimizes them for users: pages are donated and never copied or gathered."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend, KVShape, LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

from ...paged_steps import metadata

pytestmark = pytest.mark.usefixtures("optimized")


def chain_of_layers(
    num_layers: int, cache: PagedCache, q: jax.Array, k: jax.Array, step: Any
) -> tuple[jax.Array, PagedCache]:
    """Run layers whose queries and keys depend on the output of the layer before, as in a model."""
    for layer in range(num_layers):
        out, cache = cache.attend(layer, q, k, k * 0.5, step, scale=0.125)
        q, k = q + out, k + out[:, :2]
    return q, cache


@pytest.mark.parametrize("backend", [NativeBackend(), XlaBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_tokens", [64])
def test_the_cache_is_updated_in_place_and_never_gathered(num_tokens: int, dtype: str, backend: Backend) -> None:
    """Temporary memory is a small part of the cache and does not grow with it; the donated pages are the output's."""
    temps = []
    for num_pages in (256, 512):
        layout = backend.layout(KVShape(2, num_pages, page_size=64, num_kv_heads=2, head_size=64, dtype=dtype))
        pages = tuple(jax.ShapeDtypeStruct(shape, layout.stored_dtype) for shape in layout.shapes)
        cache = PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend)  # type: ignore[arg-type]
        step = metadata(
            backend, [1], [1], [[[1]]], page_size=64, num_tokens=num_tokens, num_rows=num_tokens, table_len=16
        )
        q, k = (jax.ShapeDtypeStruct((num_tokens, heads, 64), dtype) for heads in (4, 2))
        memory = (
            jax.jit(partial(chain_of_layers, 2), donate_argnums=0).lower(cache, q, k, step).compile().memory_analysis()
        )
        assert memory is not None
        cache_bytes = layout.page_bytes * num_pages
        assert memory.alias_size_in_bytes >= cache_bytes
        assert memory.temp_size_in_bytes < 0.05 * 256 * layout.page_bytes * (4 // layout.dtype.itemsize)
        temps.append(memory.temp_size_in_bytes)
    assert temps[0] == temps[1]


def test_temporary_memory_does_not_grow_with_the_layers() -> None:
    """XLA:CPU may make early, for all layers at once, whatever of a layer depends on none before it."""
    backend = NativeBackend()
    temps = []
    layout = backend.layout(KVShape(8, 64, page_size=64, num_kv_heads=2, head_size=64, dtype="float32"))
    pages = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in layout.shapes)
    step = metadata(backend, [1], [1], [[[1]]], page_size=64, num_tokens=16, num_rows=16, table_len=16)
    q, k = (jax.ShapeDtypeStruct((16, heads, 64), jnp.float32) for heads in (4, 2))
    for num_layers in (2, 8):
        cache = PagedCache(pages, layout, tuple(LayerPlace(0, i) for i in range(num_layers)), backend)  # type: ignore[arg-type]
        run = jax.jit(partial(chain_of_layers, num_layers), donate_argnums=0)
        memory = run.lower(cache, q, k, step).compile().memory_analysis()
        assert memory is not None
        temps.append(memory.temp_size_in_bytes)
    # Six layers more, and not as much as one layer's queries.
    assert temps[1] - temps[0] < 16 * 4 * 64 * 4
