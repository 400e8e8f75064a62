"""A step gets the smallest program that is ready and large enough; without one, it gets the one that fits best."""

from dataclasses import replace

import pytest

from jpaged.sampling.sampling_params import SampleMode, ScoreKind
from jpaged.scheduling.buckets import make_buckets
from jpaged.step.program_choice import ProgramChoice

RANDOM, FULL, GREEDY = SampleMode.RANDOM, SampleMode.FULL, SampleMode.GREEDY
CPU = make_buckets(max_num_batched_tokens=256, max_num_seqs=64, platform="cpu")
APART = replace(CPU, masks_apart=True)
GPU = make_buckets(max_num_batched_tokens=1024, max_num_seqs=256, platform="gpu")


def choice(buckets, *keys):
    return ProgramChoice(buckets, set(keys).__contains__)


@pytest.mark.parametrize(
    ("buckets", "ready", "num_tokens", "decodes_only", "expected"),
    [
        (CPU, [("forward", 64)], 4, True, (64, False)),
        (CPU, [("forward", 64), ("forward", 16)], 4, True, (16, False)),
        (CPU, [("forward", 64), ("forward_decodes", 1)], 1, True, (1, True)),
        (CPU, [("forward", 64)], 1, True, (64, False)),
        (CPU, [("forward", 8)], 9, False, (16, False)),
        (GPU, [("forward", 64)], 20, True, (64, False)),
        (GPU, [("forward", 64), ("forward_decodes", 64)], 20, True, (64, True)),
        (GPU, [("forward_decodes", 64)], 20, False, (32, False)),
        (GPU, [], 20, True, (32, True)),
    ],
)
def test_a_step_is_padded_to_the_smallest_forward_program_that_is_ready(
    buckets, ready, num_tokens, decodes_only, expected
):
    assert choice(buckets, *ready).forward(num_tokens, decodes_only=decodes_only) == expected


@pytest.mark.parametrize(
    ("buckets", "ready", "num_rows", "mode", "is_masked", "expected"),
    [
        (CPU, [("sample", 64, RANDOM)], 3, GREEDY, False, ("sample", 64, RANDOM)),
        (CPU, [("sample", 64, RANDOM), ("sample", 8, FULL)], 3, RANDOM, False, ("sample", 64, RANDOM)),
        (CPU, [("sample", 1, FULL)], 1, RANDOM, False, ("sample", 1, FULL)),
        (APART, [("sample", 64, RANDOM), ("sample_masked", 64, FULL)], 3, RANDOM, True, ("sample_masked", 64, FULL)),
        (CPU, [("sample", 64, RANDOM)], 3, RANDOM, True, ("sample", 64, RANDOM)),
        (CPU, [("sample", 64, RANDOM)], 3, FULL, False, ("sample", 8, FULL)),
        (GPU, [("sample", 256, SampleMode.SCORED)], 3, GREEDY, False, ("sample", 256, SampleMode.SCORED)),
    ],
)
def test_rows_are_sampled_by_a_larger_program_or_that_of_a_later_mode_until_theirs_is_ready(
    buckets, ready, num_rows, mode, is_masked, expected
):
    assert choice(buckets, *ready).sampler(num_rows, mode, is_masked=is_masked) == expected


def test_given_tokens_are_scored_by_the_smallest_program_that_is_ready():
    kind = ScoreKind(0)
    assert choice(CPU, ("score", 32, kind)).score_rows(5, kind) == 32
    assert choice(CPU, ("score", 32, ScoreKind(4))).score_rows(5, kind) == 8


def test_steps_take_no_more_tokens_than_a_ready_program_and_decode_several_once_all_of_these_are():
    ready = {("forward", 64), ("forward_decodes", 1)}
    both = ProgramChoice(CPU, ready.__contains__)
    limits = both.limits(200)
    assert (limits.max_tokens, limits.token_buckets, limits.several_modes) == (64, (1, 64), frozenset())
    ready |= {("forward", 256)} | {("decode", size, RANDOM) for size in CPU.decode_sizes}
    limits = both.limits(200)
    assert (limits.max_tokens, limits.token_buckets) == (200, (1, 64, 256))
    assert limits.several_modes == {GREEDY, RANDOM}
    assert ProgramChoice(CPU).limits(200).several_modes == set(SampleMode)
