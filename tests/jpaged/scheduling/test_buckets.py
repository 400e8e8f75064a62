"""Every size that can occur has a bucket, and the buckets are few."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.sampling.sampling_params import SampleMode
from jpaged.scheduling.buckets import deterministic_tokens, make_buckets, one_bucket

PLATFORMS = ("cpu", "gpu", "tpu")


@given(platform=st.sampled_from(PLATFORMS), num_seqs=st.integers(1, 1100), more=st.integers(0, 20_000), data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_every_count_up_to_the_caps_finds_the_smallest_bucket_that_holds_it(platform, num_seqs, more, data):
    cap = num_seqs + more
    buckets = make_buckets(max_num_batched_tokens=cap, max_num_seqs=num_seqs, platform=platform)
    for sizes in (buckets.num_tokens, buckets.num_samples, buckets.num_plain_samples):
        assert list(sizes) == sorted(set(sizes))
    count = data.draw(st.integers(1, cap) | st.sampled_from([1, cap]))
    size = buckets.tokens_for(count)
    assert size == min(each for each in buckets.num_tokens if each >= count)
    assert buckets.rows_for(size) >= min(count, num_seqs)
    assert all(buckets.rows_for(size) == size for size in buckets.decode_sizes), "each token may be a row"
    count = data.draw(st.integers(1, num_seqs) | st.sampled_from([1, num_seqs]))
    for mode in SampleMode:
        assert buckets.samples_for(count, mode) == min(each for each in buckets.sample_sizes(mode) if each >= count)


def test_greedy_rows_have_samplers_and_decode_programs_of_their_own_on_a_gpu_alone():
    """A GPU's sampler cannot leave out at run time what no row needs."""
    for platform in PLATFORMS:
        buckets = make_buckets(max_num_batched_tokens=8192, max_num_seqs=256, platform=platform)
        own = SampleMode.GREEDY if platform == "gpu" else SampleMode.RANDOM
        assert buckets.mode_for(SampleMode.GREEDY) is buckets.decode_mode_for(SampleMode.GREEDY) is own


def test_a_count_beyond_the_cap_has_no_bucket():
    buckets = make_buckets(max_num_batched_tokens=64, max_num_seqs=8, platform="cpu")
    for ask in (lambda: buckets.tokens_for(65), lambda: buckets.samples_for(9, SampleMode.GREEDY)):
        with pytest.raises(IndexError):
            ask()


@pytest.mark.parametrize(("platform", "most"), [("cpu", 36), ("gpu", 40), ("tpu", 36)])
def test_the_default_sizes_need_few_executables(platform, most):
    tokens, seqs = (1024, 64) if platform == "cpu" else (8192, 256)
    buckets = make_buckets(max_num_batched_tokens=tokens, max_num_seqs=seqs, platform=platform)
    forwards = len(buckets.forward_tokens) + len(buckets.forward_decode_tokens)
    decodes = len(buckets.decode_sizes) * len(buckets.decode_modes)
    others = 6  # Table updates, allocation, rules of a slot, page copies, swap-out and swap-in.
    samples = sum(len(buckets.sample_sizes(mode)) for mode in buckets.modes)
    assert forwards + decodes + samples + others <= most


@pytest.mark.parametrize("max_num_seqs", [1, 8, 16, 17, 64, 256])
def test_a_deterministic_engine_has_one_bucket_and_one_way_to_sample(max_num_seqs):
    buckets = one_bucket(max_num_seqs)
    (size,) = buckets.num_tokens
    assert max_num_seqs <= size == deterministic_tokens(max_num_seqs) == buckets.rows_for(size)
    assert buckets.tokens_for(1) == buckets.samples_for(1, SampleMode.FULL) == size
    assert {buckets.mode_for(mode) for mode in SampleMode} == set(buckets.modes) == {SampleMode.FULL}
