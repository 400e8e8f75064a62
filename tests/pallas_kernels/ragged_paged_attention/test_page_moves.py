"""Pages moved within a cache, out of it and back: which bits end up where, for whatever layout."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels.ragged_paged_attention.interface import KVLayout, KVShape
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.page_moves import MAX_MOVES, copy_pages, put_pages, take_pages
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

NUM_PAGES, NUM_LAYERS = 3 * MAX_MOVES, 3
SHUFFLED = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()


@dataclass(frozen=True)
class FusedLayout(KVLayout):
    """Keys and values in one array, and a scale per slot in another: no layout is like any other."""

    @property
    def shapes(self):
        pages = self.num_layers * self.num_pages
        return (pages, self.page_size, 2 * self.num_kv_heads, self.head_size), (pages, self.page_size)

    @property
    def logical_axes(self):
        return (None, None, "kv_heads", None), (None, None)


SIZES = {"num_layers": NUM_LAYERS, "num_pages": NUM_PAGES, "page_size": 4, "num_kv_heads": 2, "head_size": 8}
LAYOUTS = {
    "float32": XlaBackend().layout(KVShape(**SIZES, dtype="float32")),
    "pairs of bfloat16": NativeBackend().layout(KVShape(**SIZES, dtype="bfloat16")),
    "bfloat16": XlaBackend(platform="gpu").layout(KVShape(**SIZES, dtype="bfloat16")),
    "another layout": FusedLayout(**SIZES, dtype=np.dtype(np.float32)),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request):
    return request.param


def random_cache(layout):
    """Return pages of any bits: NaN with and without payloads, infinities, denormals, both zeros.

    In bfloat16 no payloads: a CPU, where pages hold pairs of them, may scatter single ones as float32 and lose them.
    """
    rng = np.random.default_rng(1)
    arrays = []
    for shape in layout.shapes:
        if np.dtype(layout.stored_dtype).itemsize == 4:
            unsigned = rng.integers(0, 2**32, shape, dtype=np.uint32)
            unsigned[..., 0] |= 0x7F80_0001
            arrays.append(jnp.asarray(unsigned.view(layout.stored_dtype)))
        else:
            unsigned = rng.integers(0, 2**16, shape, dtype=np.uint16)
            unsigned[(unsigned & 0x7FFF) > 0x7F80] = 0x7FC0
            arrays.append(jnp.asarray(unsigned.view(ml_dtypes.bfloat16)))
    return tuple(arrays)


def bits(arrays, layout):
    """Return each array [layers, pages, …] as unsigned integers, so that NaNs compare by their payload."""
    found = []
    for array in arrays:
        values = np.asarray(array)
        by_layer = values[layout.entry(np.arange(layout.num_layers)[:, None], np.arange(layout.num_pages))]
        found.append(by_layer.view(f"u{values.itemsize}").copy())
    return found


def page_list(pages):
    return jnp.array(list(pages) + [0] * (MAX_MOVES - len(pages)), jnp.int32)


def run(function, layout, *arguments):
    return jax.jit(partial(function, layout=layout))(*arguments)


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("num_moves", [1, pytest.param(MAX_MOVES - 1, marks=pytest.mark.slow), MAX_MOVES])
def test_a_copy_puts_the_source_of_every_layer_at_the_destination_and_changes_no_other_page(layout, num_moves):
    """Bit for bit: a copy has no rounding to forgive. One source has two copies."""
    before = random_cache(layout)
    sources, destinations = SHUFFLED[:num_moves], SHUFFLED[MAX_MOVES : MAX_MOVES + num_moves]
    sources[-1] = sources[0]
    expected = bits(before, layout)
    for array in expected:
        array[:, destinations] = array[:, sources]
    after = run(copy_pages, layout, before, page_list(sources), page_list(destinations))
    assert_equal(bits(after, layout), expected)


def test_copies_are_made_in_order(layout):
    """A chain: what one copy has written the next one reads."""
    before = random_cache(layout)
    expected = bits(before, layout)
    for array in expected:
        array[:, 7] = array[:, 6] = array[:, 5]
    assert_equal(bits(run(copy_pages, layout, before, page_list([5, 6]), page_list([6, 7])), layout), expected)


def test_a_page_taken_holds_each_layers_entries(layout):
    before = random_cache(layout)
    taken = run(take_pages, layout, before, page_list(SHUFFLED[:3]))
    assert len(taken) == MAX_MOVES
    for page, source in zip(taken, [*SHUFFLED[:3], *[0] * (MAX_MOVES - 3)], strict=True):
        for array, whole in zip(page, bits(before, layout), strict=True):
            assert array.shape[0] == NUM_LAYERS
            assert np.array_equal(np.asarray(array).view(whole.dtype), whole[:, source])


@pytest.mark.parametrize("num_moves", [1, pytest.param(MAX_MOVES - 1, marks=pytest.mark.slow), MAX_MOVES])
def test_pages_taken_come_back_bit_for_bit_elsewhere_and_padding_touches_the_null_page_only(layout, num_moves):
    before, other = random_cache(layout), tuple(array[::-1] for array in random_cache(layout))
    sources, destinations = SHUFFLED[:num_moves], SHUFFLED[-num_moves:]
    taken = run(take_pages, layout, before, page_list(sources))
    after, _ = run(put_pages, layout, other, taken, page_list(destinations))
    expected = bits(other, layout)
    for array, source in zip(expected, bits(before, layout), strict=True):
        array[:, destinations] = source[:, sources]
        if num_moves < MAX_MOVES:
            array[:, 0] = source[:, 0]
    assert_equal(bits(after, layout), expected)


def test_a_page_taken_outlives_what_happens_to_the_cache():
    """Donated to the copy that overwrites it, the cache is gone: the page is not."""
    layout = LAYOUTS["float32"]
    before = random_cache(layout)
    expected = [array[:, 5] for array in bits(before, layout)]
    page = run(take_pages, layout, before, page_list([5]))[0]
    overwrite = jax.jit(partial(copy_pages, layout=layout), donate_argnums=0)
    overwrite(before, page_list([9]), page_list([5]))
    assert all(array.is_deleted() for array in before)
    for array, held in zip(page, expected, strict=True):
        assert np.array_equal(np.asarray(array).view(np.uint32), held)
