"""Rounds sizes up: the closed set of padded shapes that steps are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .sampling_params import SampleMode

MIN_DEVICE_TOKENS = 16
MIN_DEVICE_SAMPLES = 8
EVERYTHING_SAMPLES = (8, 64, 256)
LEAST_FILLED = 64
"""Tokens of the smallest bucket that steps are cut down to: smaller ones cost little more than the weights' way."""


@dataclass(frozen=True)
class Buckets:
    """Padded sizes in ascending order. `num_tokens`: tokens of a step; `num_samples`: rows that are sampled."""

    num_tokens: tuple[int, ...]
    num_samples: tuple[int, ...]
    num_everything_samples: tuple[int, ...]
    """Of which some have rules or logprobs: fewer sizes, to save executables."""
    modes: tuple[SampleMode, ...] = tuple(SampleMode)
    """That there are executables of, in their order."""

    @property
    def max_samples(self) -> int:
        return self.num_samples[-1]

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Token buckets in which a step may be that decodes one token of each sequence, and no more."""
        return tuple(size for size in self.num_tokens if size <= self.tokens_for(self.max_samples))

    def tokens_for(self, count: int) -> int:
        """Smallest token bucket that holds `count`."""
        return self.num_tokens[bisect_left(self.num_tokens, count)]

    def rows_for(self, num_tokens: int) -> int:
        """Rows that a step of this token bucket has room for: each has at least one token."""
        return min(num_tokens, self.max_samples)

    def sample_sizes(self, mode: SampleMode) -> tuple[int, ...]:
        """Sample buckets of one mode."""
        return self.num_everything_samples if mode is SampleMode.EVERYTHING else self.num_samples

    def mode_for(self, mode: SampleMode) -> SampleMode:
        """The first one there is that does what `mode` does."""
        return mode if mode in self.modes else self.modes[0]

    def samples_for(self, count: int, mode: SampleMode) -> int:
        """Smallest sample bucket of a mode that holds `count`."""
        sizes = self.sample_sizes(mode)
        return sizes[bisect_left(sizes, count)]


def one_bucket(max_num_seqs: int) -> Buckets:
    """One size for all steps, and one way to sample: whatever a step holds, the same executables compute it."""
    size = (deterministic_tokens(max_num_seqs),)
    return Buckets(size, size, size, modes=(SampleMode.EVERYTHING,))


def deterministic_tokens(max_num_seqs: int) -> int:
    """Tokens, and rows, of every step of an engine that is to be deterministic."""
    return sample_sizes(max_num_seqs)[-1]


def make_buckets(*, max_num_batched_tokens: int, max_num_seqs: int, platform: str) -> Buckets:
    """Powers of two up to the caps; a CPU, on which each row costs, also gets small sizes, logits included."""
    num_tokens, num_samples = _powers_of_two(MIN_DEVICE_TOKENS, max_num_batched_tokens), sample_sizes(max_num_seqs)
    if platform == "cpu":
        num_tokens, num_samples = (1, 8, *num_tokens), (1, *_powers_of_two(MIN_DEVICE_SAMPLES, max_num_seqs))
    most = num_samples[-1]
    num_everything_samples = (*(size for size in EVERYTHING_SAMPLES if size < most), most)
    return Buckets(num_tokens, num_samples, num_everything_samples)


def sample_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Of a device; the last is also how many rows the largest steps have room for: no fewer than the smallest has
    tokens, each of which may be a row that decodes."""
    return _powers_of_two(MIN_DEVICE_SAMPLES, max(max_num_seqs, MIN_DEVICE_TOKENS))


def filled_tokens(sizes: Sequence[int], count: int, least: int = LEAST_FILLED) -> int:
    """How many of so many tokens a step computes that may leave some to the next: those that fill a bucket of `sizes`
    from `least` on, if at most half of that many are left; else all."""
    filled = max((size for size in sizes if least <= size <= count), default=count)
    return filled if 2 * (count - filled) <= filled else count


def _powers_of_two(first: int, at_least: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < at_least:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)
