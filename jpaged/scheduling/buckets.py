"""Buckets: the closed set of padded sizes that steps are compiled for, and the rounding up to them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling.sampling_params import MODES, SampleMode

MIN_DEVICE_TOKENS = 16
MIN_DEVICE_SAMPLES = 8
DEVICE_SAMPLES = (8, 64, 256)
"""Sample buckets of a GPU or TPU below the largest one. A GPU has them in every sampling mode. Elsewhere only the mode
FULL has all of them; other modes have the smallest and the largest bucket. They are few, to save executables: steps
that only decode sample in decode programs, and padding rows cost little beside reading the head's weights."""
GPU_MODES = (SampleMode.GREEDY, SampleMode.SCORED, SampleMode.FULL)
"""Sampling modes that a GPU has samplers for. On other devices mode RANDOM serves greedy rows too, since its program
skips at run time what no row needs. A GPU's sampler cannot skip work, so greedy rows have their own. The mode SCORED
serves random rows there: it scores each drawn token, which costs one more pass over the logits."""
GPU_DECODE_MODES = (SampleMode.GREEDY, SampleMode.SCORED)
"""Sampling modes of a GPU's decode programs. The host would have to read the condition of a branch there, so that
programs of the mode SCORED make a draw for every row, greedy ones too."""
MIN_FILLED = 64
"""Tokens of the smallest bucket that steps are cut down to; a smaller step costs little more than reading weights."""


@dataclass(frozen=True)
class Buckets:
    """The padded sizes, in ascending order."""

    num_tokens: tuple[int, ...]
    """Tokens of a step."""
    num_samples: tuple[int, ...]
    """Rows that a step samples."""
    num_plain_samples: tuple[int, ...]
    """The subset of `num_samples` that samplers of all modes but FULL are compiled for."""
    forward_tokens: tuple[int, ...]
    """Token buckets that have a forward program for prompts and decodes."""
    forward_decode_tokens: tuple[int, ...]
    """Token buckets that have a forward program for steps in which every row has one token."""
    modes: tuple[SampleMode, ...] = (SampleMode.RANDOM, SampleMode.FULL)
    """Sampling modes that there are samplers of, in the order of SampleMode."""
    decode_modes: tuple[SampleMode, ...] = (SampleMode.RANDOM, SampleMode.FULL)
    """Sampling modes that there are decode programs of, in the order of SampleMode."""
    masks_apart: bool = True
    """Whether rows with masks are sampled by programs of their own. Elsewhere every sample program takes masks, and
    skips them at run time where no row has one: there are half as many programs."""

    @property
    def max_samples(self) -> int:
        return self.num_samples[-1]

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Return the token buckets of steps that only decode, one token of each sequence."""
        return tuple(size for size in self.num_tokens if size <= self.tokens_for(self.max_samples))

    def tokens_for(self, count: int) -> int:
        """Return the smallest token bucket that holds `count` tokens. IndexError if none does."""
        return self.num_tokens[bisect_left(self.num_tokens, count)]

    def rows_for(self, num_tokens: int) -> int:
        """Return the rows that a step of this token bucket has room for: each has at least one token."""
        return min(num_tokens, self.max_samples)

    def decode_mode_for(self, mode: SampleMode) -> SampleMode | None:
        """Return the first mode with a decode program that computes what `mode` needs; None if there is none.

        Without a decode program, rows of this mode decode one token a step.
        """
        return next((each for each in self.decode_modes if MODES.index(each) >= MODES.index(mode)), None)

    def mode_for(self, mode: SampleMode) -> SampleMode:
        """Return the first mode with a sampler that computes what `mode` needs."""
        return next(each for each in self.modes if MODES.index(each) >= MODES.index(mode))

    def has_decodes_apart(self, num_tokens: int) -> bool:
        """Return whether steps of this token bucket in which every row has one token run a program of their own."""
        return num_tokens in self.forward_decode_tokens

    def sample_sizes(self, mode: SampleMode) -> tuple[int, ...]:
        """Return the sample buckets of the samplers of one mode."""
        return self.num_samples if mode is SampleMode.FULL else self.num_plain_samples

    def samples_for(self, count: int, mode: SampleMode) -> int:
        """Return the smallest sample bucket of a mode that holds `count` rows. IndexError if none does."""
        sizes = self.sample_sizes(mode)
        return sizes[bisect_left(sizes, count)]


def one_bucket(max_num_seqs: int) -> Buckets:
    """Return buckets of one size and one sampling mode: the same executables compute every step, whatever it holds.

    Engines with `deterministic=True` use them. Every row of a step has one token, also if it is a token of a prompt. So
    there is no forward program for prompts, and no decode program that computes several tokens. The only sampling mode
    is FULL, which serves every request.
    """
    size = (deterministic_tokens(max_num_seqs),)
    modes = (SampleMode.FULL,)
    return Buckets(size, size, (), forward_tokens=(), forward_decode_tokens=size, modes=modes, decode_modes=())


def deterministic_tokens(max_num_seqs: int) -> int:
    """Return the tokens, and rows, of every step of an engine with `deterministic=True`."""
    return sample_sizes(max_num_seqs)[-1]


def make_buckets(*, max_num_batched_tokens: int, max_num_seqs: int, platform: str) -> Buckets:
    """Return the buckets of an engine on a platform: "cpu", "gpu" or "tpu".

    The sizes are powers of two, up to the first one that reaches the cap. A CPU also gets the sizes 1 and 8, because
    every padded row costs time there. On other devices, steps that only decode have forward programs of their own: the
    kernels and loops for prompts take time there even if a step has no prompt.

    Example of a CPU with caps of 64 tokens and 8 sequences: token buckets 1, 8, 16, 32 and 64, sample buckets 1 and 8.
    """
    num_tokens = _powers_of_two(MIN_DEVICE_TOKENS, max_num_batched_tokens)
    if platform == "cpu":
        num_samples = (1, *_powers_of_two(MIN_DEVICE_SAMPLES, max_num_seqs))
        # A step of one token is a decode, or a prompt of one token, which is computed as one.
        sizes = (1, 8, *num_tokens)
        forward_sizes, decode_sizes = sizes[1:], sizes[:1]
        return Buckets(sizes, num_samples, num_samples, forward_sizes, decode_sizes, masks_apart=False)
    largest = sample_sizes(max_num_seqs)[-1]
    num_samples = (*(size for size in DEVICE_SAMPLES if size < largest), largest)
    is_gpu = platform == "gpu"
    return Buckets(
        num_tokens,
        num_samples,
        num_plain_samples=num_samples if is_gpu else (num_samples[0], largest),
        forward_tokens=num_tokens,
        forward_decode_tokens=tuple(size for size in num_tokens if size <= largest),
        modes=GPU_MODES if is_gpu else Buckets.modes,
        decode_modes=GPU_DECODE_MODES if is_gpu else Buckets.decode_modes,
    )


def sample_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sample buckets of a device.

    The last one is also the number of rows that the largest steps have room for. It is no smaller than the smallest
    token bucket, each token of which may be a row that decodes.
    """
    return _powers_of_two(MIN_DEVICE_SAMPLES, max(max_num_seqs, MIN_DEVICE_TOKENS))


def filled_tokens(sizes: Sequence[int], count: int, min_filled: int = MIN_FILLED) -> int:
    """Return how many of `count` pending tokens a step should compute, so that it fills a bucket without padding.

    This is the largest bucket of `sizes` that `count` tokens fill, if it has at least `min_filled` tokens and at most
    half as many tokens are left to the next step. Otherwise it is `count`.

    Example with buckets of 64, 128 and 256 tokens: 150 gives 128, since 22 are left; 200 gives 200, since 72 are more
    than half of 128.
    """
    filled = max((size for size in sizes if min_filled <= size <= count), default=count)
    return filled if 2 * (count - filled) <= filled else count


def _powers_of_two(first: int, at_least: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < at_least:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)
