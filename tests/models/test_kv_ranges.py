"""Ranges of keys and values: what a recorder sees and attends to, and the scales that follow."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config.spec import AttentionLayer
from jpaged.models.errors import ModelLoadError
from jpaged.models.inputs import unpaged_inputs
from jpaged.models.kv_ranges import LEAST_FACTOR, MARGINS, RangeRecorder, scales_of

from ..pallas_kernels.ragged_paged_attention.dense_attention import dense_attention

LAYERS = tuple(AttentionLayer(num_heads=4, num_kv_heads=2, head_size=8, pages_of=owner) for owner in (None, None, 0))


@pytest.mark.parametrize("options", [{}, {"window": 3, "soft_cap": 2.0, "sinks": np.float32([0.5, -0.5, 1.0, 0.0])}])
def test_a_recorder_attends_in_each_text_alone_and_keeps_the_largest_numbers(options: dict[str, Any]) -> None:
    rng, positions = np.random.default_rng(0), np.array([0, 1, 2, 3, 4, 100, 101, 102], np.int32)
    q, k, v = (rng.normal(size=(8, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    step = unpaged_inputs(jnp.zeros(8, jnp.int32), jnp.asarray(positions)).attention
    recorder = RangeRecorder.new(LAYERS, 2, 8)
    out, recorder = recorder.attend(0, q, jnp.asarray(k), jnp.asarray(v), step, scale=0.3, **options)
    texts = [k[:5], k[5:]], [v[:5], v[5:]], [5, 3]
    np.testing.assert_allclose(out, dense_attention(q, *texts, scale=0.3, **options), rtol=0, atol=1e-5)
    lowest, highest = k.min(axis=0), k.max(axis=0)
    if options:  # Sinks and soft caps see keys that are shifted.
        highest = np.maximum(-lowest, highest)
        lowest = -highest
    np.testing.assert_array_equal(recorder.keys[:, 0], [lowest, highest])
    np.testing.assert_array_equal(recorder.values[0], np.abs(v).max(axis=(0, 2)))
    _, recorder = recorder.attend(1, q, jnp.asarray(2 * k), jnp.asarray(v), step, scale=0.3, **options)
    again, _ = recorder.attend(2, q, None, None, step, scale=0.3, **options)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(recorder.keys[:, 1], 2 * recorder.keys[:, 0])


@pytest.mark.parametrize("dtype", MARGINS)
def test_channels_are_brought_to_one_range_by_powers_of_two(dtype: str) -> None:
    keys = np.array([[[6.0, 5.0, 0.7, 1e-9], [0.0, 0.0, 0.0, 0.0]]], np.float32)
    middles = np.array([[[100.0, 0.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]], np.float32)
    found = scales_of(np.stack([middles - keys, middles + keys]), np.array([[3.0, 0.0]], np.float32), LAYERS[:1], dtype)
    largest = MARGINS[dtype] / (127 if dtype == "int8" else 448)
    assert found.channels is not None
    np.testing.assert_array_equal(found.channels[0, 0], [1, 1, 1 / 8, LEAST_FACTOR])
    np.testing.assert_array_equal(found.offsets, middles)
    np.testing.assert_allclose(found.k, [[6 * largest, largest]], rtol=1e-5)  # A head of zeros has the range 1.
    np.testing.assert_allclose(found.v, [[3 * largest, largest]], rtol=1e-6)


def test_a_layer_has_the_scales_of_the_one_whose_pages_it_reads() -> None:
    keys, values = np.ones((3, 2, 8), np.float32), np.ones((3, 2), np.float32)
    keys[0], values[0], keys[2], values[2] = 4, 5, 0, 0
    found = scales_of(np.stack([-keys, keys]), values, LAYERS, "int8")
    np.testing.assert_array_equal(found.k[2], found.k[0])
    np.testing.assert_array_equal(found.v[2], found.v[0])


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_ranges_that_are_not_finite_are_refused_by_layer_and_tensor(fault: float) -> None:
    values = np.ones((3, 2), np.float32)
    values[1, 1] = fault
    with pytest.raises(ModelLoadError, match=rf"the values of layer 1 reach {fault} .* set kv_cache_dtype to auto"):
        scales_of(np.ones((2, 3, 2, 8), np.float32), values, LAYERS, "int8")
