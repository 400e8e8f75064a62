"""Ranges of keys and values: what a recorder sees and attends to, and the scales that follow."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config.spec import AttentionLayer
from jpaged.models.errors import ModelLoadError
from jpaged.models.inputs import unpaged_inputs
from jpaged.models.kv_ranges import LEAST_FACTOR, MARGINS, MEAN_POSITIONS, ChannelRanges, RangeRecorder, scales_of
from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import quantize

from ..pallas_kernels.ragged_paged_attention.dense_attention import dense_attention

LAYERS = tuple(AttentionLayer(num_heads=4, num_kv_heads=2, head_size=8, pages_of=owner) for owner in (None, None, 0))


@pytest.mark.parametrize("options", [{}, {"window": 3, "soft_cap": 2.0, "sinks": np.float32([0.5, -0.5, 1.0, 0.0])}])
def test_a_recorder_attends_in_each_text_alone_and_keeps_ranges(options: dict[str, Any]) -> None:
    rng, far = np.random.default_rng(0), MEAN_POSITIONS - 1 + np.arange(3)
    positions = np.array([0, 1, 2, 3, 4, *far], np.int32)
    q, k, v = (rng.normal(size=(8, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    step = unpaged_inputs(jnp.zeros(8, jnp.int32), jnp.asarray(positions)).attention
    recorder = RangeRecorder.new(LAYERS, 2, 8)
    out, recorder = recorder.attend(0, q, jnp.asarray(k), jnp.asarray(v), step, scale=0.3, **options)
    texts = [k[:5], k[5:]], [v[:5], v[5:]], [5, 3]
    np.testing.assert_allclose(out, dense_attention(q, *texts, scale=0.3, **options), rtol=0, atol=1e-5)
    for ranges, x in ((recorder.keys, k), (recorder.values, v)):
        wanted = [x.min(axis=0), x.max(axis=0), x[:6].mean(axis=0), x[0]]  # Two tokens are too far for the mean.
        if options:  # Sinks see keys and values that are shifted.
            largest = np.abs(x).max(axis=0)
            wanted = [-largest, largest, np.zeros_like(largest), np.zeros_like(largest)]
        np.testing.assert_allclose([array[0] for array in ranges], wanted, rtol=1e-5)
    _, recorder = recorder.attend(1, q, jnp.asarray(2 * k), jnp.asarray(v), step, scale=0.3, **options)
    again, _ = recorder.attend(2, q, None, None, step, scale=0.3, **options)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(recorder.keys.most[1], 2 * recorder.keys.most[0])


def test_a_range_that_one_of_two_layers_cannot_shift_is_symmetric() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(8, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    step = unpaged_inputs(jnp.zeros(8, jnp.int32), jnp.arange(8, dtype=jnp.int32)).attention
    for caps in ((2.0, None), (None, 2.0)):
        recorder = RangeRecorder.new(LAYERS, 2, 8)
        _, recorder = recorder.attend(0, q, k, v, step, scale=0.3, soft_cap=caps[0])
        _, recorder = recorder.attend(2, q, None, None, step, scale=0.3, soft_cap=caps[1])
        np.testing.assert_array_equal(recorder.keys.least[0], -recorder.keys.most[0])
        np.testing.assert_array_equal(recorder.values.first[0], v[0])  # Soft caps do not see values.


def ranges_of(half_ranges: np.ndarray, middles: np.ndarray | float = 0.0, first: np.ndarray | float = 0.0) -> Any:
    """Return ranges of channels around their middles, which are also the means."""
    means, firsts = (np.zeros_like(half_ranges) + x for x in (middles, first))
    return ChannelRanges(middles - half_ranges, middles + half_ranges, means, firsts)


@pytest.mark.parametrize("dtype", MARGINS)
def test_channels_are_brought_to_one_range_by_powers_of_two(dtype: str) -> None:
    keys = np.array([[[6.0, 5.0, 0.7, 1e-9], [0.0, 0.0, 0.0, 0.0]]], np.float32)
    middles = np.array([[[100.0, 0.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]], np.float32)
    values = np.array([[[3.0, 1.0, 0.0, 0.0], [0.0] * 4]], np.float32)
    found = scales_of(ranges_of(keys, middles, middles), ranges_of(values), LAYERS[:1], dtype)
    step = MARGINS[dtype] / (127 if dtype == "int8" else 448)
    assert found.key_channels is not None
    assert found.value_channels is not None
    np.testing.assert_array_equal(found.key_channels.factors[0, 0], [1, 1, 1 / 8, LEAST_FACTOR])
    np.testing.assert_array_equal(found.value_channels.factors[0, 0], [1, 1 / 2, LEAST_FACTOR, LEAST_FACTOR])
    np.testing.assert_array_equal(found.key_channels.offsets, middles)
    np.testing.assert_allclose(found.k, [[6 * step, step]], rtol=1e-5)  # A head of zeros has the range 1.
    np.testing.assert_allclose(found.v, [[3 * step, step]], rtol=1e-6)


@pytest.mark.parametrize("dtype", MARGINS)
def test_pages_hold_the_first_token_exactly(dtype: str) -> None:
    """The offset moves by no more than half a step of int8, and than 1/16 of float8_e4m3fn's number."""
    rng = np.random.default_rng(0)
    half_ranges, middles = rng.uniform(1, 2, (1, 2, 8)), rng.normal(size=(1, 2, 8))
    first = middles + half_ranges * rng.uniform(-1, 1, half_ranges.shape)
    ranges = ranges_of(half_ranges.astype(np.float32), middles.astype(np.float32), first.astype(np.float32))
    found = scales_of(ranges, ranges, LAYERS[:1], dtype)
    for scale, channels in ((found.k, found.key_channels), (found.v, found.value_channels)):
        assert channels is not None
        stored = quantize(channels.removed(0, jnp.asarray(ranges.first)), jnp.asarray(scale[0]), jnp.dtype(dtype))
        read = np.asarray(stored, np.float32) * scale[0][:, None] * channels.factors[0] + channels.offsets[0]
        np.testing.assert_allclose(read[0], ranges.first[0], rtol=0, atol=1e-5)
        steps = scale[..., None] * channels.factors / 2 if dtype == "int8" else np.abs(first - middles) / 16
        assert (np.abs(channels.offsets - middles) <= steps + 1e-6).all()


def test_a_layer_has_the_scales_of_the_one_whose_pages_it_reads() -> None:
    keys, values = np.ones((3, 2, 8), np.float32), np.ones((3, 2, 8), np.float32)
    keys[0], values[0], keys[2], values[2] = 4, 5, 0, 0
    found = scales_of(ranges_of(keys), ranges_of(values), LAYERS, "int8")
    np.testing.assert_array_equal(found.k[2], found.k[0])
    np.testing.assert_array_equal(found.v[2], found.v[0])


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_ranges_that_are_not_finite_are_refused_by_layer_and_tensor(fault: float) -> None:
    values = np.ones((3, 2, 8), np.float32)
    values[1, 1] = fault
    with pytest.raises(ModelLoadError, match=rf"the values of layer 1 reach {fault} .* set kv_cache_dtype to auto"):
        scales_of(ranges_of(np.ones((3, 2, 8), np.float32)), ranges_of(values), LAYERS, "int8")
