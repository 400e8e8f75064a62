"""Padded sizes for tests that say nothing of them: a program for each size takes most of the time of a short test."""

from dataclasses import replace
from typing import Any

from jpaged.sampling.sampling_params import SampleMode
from jpaged.scheduling.buckets import Buckets, make_buckets


def fewest_buckets(*, platform: str, **sizes: int) -> Buckets:
    """Return a CPU's largest steps, those in which every sequence decodes, and one number of samples."""
    buckets = make_buckets(platform=platform, **sizes)
    if platform != "cpu":
        return buckets
    samples = buckets.num_samples[-1:]
    num_tokens = tuple(sorted({buckets.tokens_for(samples[0]), buckets.num_tokens[-1]}))
    return replace(
        buckets,
        num_tokens=num_tokens,
        num_samples=samples,
        num_plain_samples=samples,
        forward_tokens=num_tokens,
        forward_decode_tokens=(),
    )


def one_mode(**options: Any) -> Buckets:
    """Return the same with one way to sample, which scores each token and knows every rule."""
    return replace(fewest_buckets(**options), modes=(SampleMode.FULL,), decode_modes=(SampleMode.FULL,))
