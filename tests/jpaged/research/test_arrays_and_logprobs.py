"""One definition of a logprob: what is drawn, what is scored, and what a trainer computes, to 1e-4."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import BeamSearchParams, ContextLengthError, Engine, InvalidRequestError, SamplingParams
from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy

from ..tiny_model import SIZES, reference_logits
from .trainer_requests import NEW, OLD, PROMPTS

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=5, ignore_eos=True)
MODES = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")


def reference(ids, temperature=1.0, seed=0):
    """Return the logprob of each token but the first in float64, by code that is not jpaged's."""
    logits = reference_logits(list(ids), seed)[:-1] / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1))


def check_arrays(arrays, prompts, temperature):
    """Compare the logprob of every token with the reference."""
    columns = zip(arrays.tokens, arrays.logprobs, arrays.mask, arrays.prompt_indices, strict=True)
    for tokens, logprobs, mask, index in columns:
        prompt, drawn = prompts[int(index)], np.asarray(tokens)[np.asarray(mask)]
        wanted = reference(np.array([*prompt, *drawn]), temperature)[len(prompt) - 1 :]
        assert np.abs(np.asarray(logprobs)[np.asarray(mask)] - wanted).max() < 1e-4


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])])
def test_drawn_and_scored_tokens_have_the_logprobs_of_the_mode(tiny, mode):
    """Greedy, at a temperature, with several samples, and in several chunks."""
    with Engine(tiny, logprobs_mode=mode, **SIZES, long_prefill_token_threshold=16) as engine:
        for temperature in (1.0, 0.7):
            scores = engine.logprobs(PROMPTS, temperature=temperature)
            assert scores.shape == (len(PROMPTS), 24)
            for prompt, row in zip(PROMPTS, np.asarray(scores), strict=True):
                count = len(prompt) - 1
                assert np.abs(row[:count] - reference(prompt, temperature)).max() < 1e-4
                assert not row[count:].any()
        for params in (replace(PARAMS, temperature=0.0), replace(PARAMS, n=3)):
            arrays = engine.generate(PROMPTS, params, return_arrays=True)
            assert arrays.tokens.shape == (len(PROMPTS) * params.n, 24)
            drawn = [sample.token_ids for output in engine.generate(PROMPTS, params) for sample in output.outputs]
            assert np.asarray(arrays.tokens).tolist() == [list(ids) for ids in drawn]
            assert arrays.mask.all()
            is_tempered = mode != "raw_logprobs" and params.temperature
            check_arrays(arrays, PROMPTS, params.temperature if is_tempered else 1.0)
        # Outputs with an object for each token say the same.
        tops = engine.generate(PROMPTS[:2], [replace(PARAMS, logprobs=count) for count in (5, 2)], return_arrays=True)
        assert tops.top_logprobs.shape == (2, 24, 5)
        assert not tops.top_logprobs[1, :, 2:].any()
        for row, output in enumerate(engine.generate(PROMPTS[:2], replace(PARAMS, logprobs=2))):
            for place, entries in enumerate(output.outputs[0].logprobs):
                likeliest = sorted(entries, key=lambda token: -entries[token].logprob)[:2]
                assert tops.top_token_ids[row, place, :2].tolist() == likeliest
                wanted = [entries[token].logprob for token in likeliest]
                assert np.abs(tops.top_logprobs[row, place, :2] - np.array(wanted)).max() < 1e-5
        sample = engine.generate(PROMPTS[0], replace(PARAMS, logprobs=0))[0].outputs[0]
        drawn = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        wanted = reference(np.array([*PROMPTS[0], *sample.token_ids]), 1.0 if mode == MODES[0] else 0.7)
        assert np.abs(np.array(drawn) - wanted[len(PROMPTS[0]) - 1 :]).max() < 1e-4


@pytest.mark.slow
def test_the_mass_that_truncation_left_is_what_tempered_and_processed_logprobs_differ_by(tiny):
    params = replace(PARAMS, top_k=12, top_p=0.8, min_p=0.01, logprobs=0, log_kept_mass=True)
    arrays = {}
    for mode in MODES[1:]:
        with Engine(tiny, logprobs_mode=mode, **SIZES) as engine:
            arrays[mode] = engine.generate(PROMPTS, params, return_arrays=True)
            engine.reset_prefix_cache()  # The same steps again.
            sample = engine.generate(PROMPTS, params)[0].outputs[0]
            greedy = engine.generate(PROMPTS[0], replace(params, temperature=0.0), return_arrays=True)
    tempered, processed = arrays.values()
    assert (tempered.tokens == processed.tokens).all()
    assert np.abs(tempered.logprobs - processed.logprobs - tempered.log_kept_masses).max() < 1e-5
    assert (tempered.log_kept_masses < 0).any()
    assert np.array_equal(np.array(sample.log_kept_masses, np.float32), processed.log_kept_masses[0])
    assert not greedy.log_kept_masses.any()
    with pytest.raises(InvalidRequestError, match=r"^log_kept_mass: got true, allowed: false without logprobs"):
        SamplingParams(log_kept_mass=True)


def test_preempted_samples_keep_their_logprobs(tiny):
    sizes = {**SIZES, "num_blocks": 25, "num_host_blocks": 25}
    with Engine(tiny, logprobs_mode="tempered_logprobs", **sizes) as engine:
        for preemption in ("recompute", "swap"):
            before = engine.stats()[f"preemptions_{preemption}"]
            engine.scheduler.preemption = PreemptionPolicy(PreemptionMode(preemption))
            check_arrays(engine.generate(PROMPTS, replace(PARAMS, n=4), return_arrays=True), PROMPTS, 0.7)
            assert engine.stats()[f"preemptions_{preemption}"] > before


def test_a_trainer_may_guard_its_own_code_against_transfers(tiny):
    with Engine(tiny, **SIZES) as engine, jax.transfer_guard("disallow_explicit"):
        arrays = engine.generate(PROMPTS, PARAMS, return_arrays=True)
        scores = engine.logprobs(PROMPTS[0])
    check_arrays(arrays, PROMPTS, 1.0)
    assert np.abs(scores - reference(PROMPTS[0])).max() < 1e-4


def test_arrays_say_where_samples_end_and_which_weights_drew_them(tiny):
    with Engine(tiny, **SIZES) as engine:
        whole = engine.generate(PROMPTS[:2], PARAMS)[0].outputs[0].token_ids
        params = [replace(PARAMS, stop_token_ids=[whole[5]], max_tokens=16), replace(PARAMS, max_tokens=3)]
        engine.update_params(NEW, version=9)
        engine.update_params(OLD, version=10)
        arrays = engine.generate(PROMPTS[:2], params, return_arrays=True)
        end = whole.index(whole[5]) + 1
        assert np.asarray(arrays.mask).tolist() == [[at < count for at in range(16)] for count in (end, 3)]
        assert np.asarray(arrays.versions).tolist() == [[10 * (at < count) for at in range(16)] for count in (end, 3)]
        assert not np.asarray(arrays.logprobs)[~np.asarray(arrays.mask)].any()
        assert np.asarray(arrays.prompt_indices).tolist() == [0, 1]
        assert arrays.errors == (None, None)
        assert np.asarray(arrays.is_truncated).tolist() == [False, True]
        assert np.asarray(arrays.prompt_tokens).tolist() == [[0, *PROMPTS[0]], PROMPTS[1]]
        assert np.asarray(arrays.prompt_mask).sum(axis=1).tolist() == [20, 21]
        assert arrays.log_kept_masses is None
        assert jax.jit(lambda arrays: arrays.tokens.sum())(arrays) == arrays.tokens.sum(), "a pytree"
        assert {arrays.tokens.dtype, arrays.versions.dtype} == {jnp.dtype("int32")}


def test_scoring_changes_no_later_draws_and_takes_one_sequence_or_many(tiny):
    drawing = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, detokenize=False)
    with Engine(tiny, **SIZES) as engine, Engine(tiny, **SIZES) as other:
        one = engine.logprobs(PROMPTS[0])
        assert one.shape == (19,)
        for same in (jnp.array(PROMPTS[0]), np.array(PROMPTS[0]), tuple(PROMPTS[0])):
            assert np.array_equal(engine.logprobs(same), one)
        pair = engine.logprobs(np.array([PROMPTS[0]] * 2))
        assert pair.shape == (2, 19)
        longest = [1 + index % 60 for index in range(128)]  # As many tokens as `max_model_len`.
        assert np.abs(engine.logprobs(longest, temperature=0.5) - reference(longest, 0.5)).max() < 1e-4
        assert engine.logprobs([[5], [5, 6]]).tolist() == [[0.0], [float(engine.logprobs([5, 6])[0])]]
        first, second = (
            [out.outputs[0].token_ids for out in each.generate(PROMPTS, drawing)] for each in (engine, other)
        )
        assert first == second


def test_an_engine_and_a_trainer_are_compared(tiny):
    def trainer(shift):
        return lambda ids: jnp.stack([jnp.asarray(reference(row)) for row in np.asarray(ids)]) + shift

    with Engine(tiny, **SIZES) as engine:
        same = engine.compare_logprobs(trainer(0.0), PROMPTS, PARAMS)
        assert same.num_tokens == 24 * len(PROMPTS)
        assert same.mean <= same.p95 <= same.max < 1e-4
        assert same.share_outside == 0.0
        apart = engine.compare_logprobs(trainer(0.5), PROMPTS, PARAMS)
        assert abs(apart.mean - 0.5) < 1e-4
        assert apart.share_outside == 1.0
        words = r"^trainer_fn: got the shape \(6, 3\) for ids \(6, 49\), allowed: \(6, 48\)"
        with pytest.raises(InvalidRequestError, match=words):
            engine.compare_logprobs(lambda ids: jnp.zeros((6, 3)), PROMPTS, PARAMS)
        with pytest.raises(InvalidRequestError, match=r"^prompts: got none"):
            engine.compare_logprobs(trainer(0.0), [], PARAMS)


def test_what_arrays_cannot_hold_is_refused(tiny):
    with Engine(tiny, **SIZES) as engine:
        refused = "beside return_arrays; arrays hold no beams, no prompt_logprobs and no logprobs of -1"
        for name, value in (("logprobs", -1), ("prompt_logprobs", 0)):
            with pytest.raises(InvalidRequestError, match=rf"^{name}: got {value}, allowed: .* {refused}"):
                engine.generate(PROMPTS, replace(PARAMS, **{name: value}), return_arrays=True)
        with pytest.raises(InvalidRequestError, match=rf"^sampling_params: got BeamSearchParams, .* {refused}"):
            engine.generate(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=3), return_arrays=True)
        for ids in (
            [],
            [[]],
            "text",
            ["text"],
            {"prompt_token_ids": [1]},
            [{"prompt_token_ids": [1]}],
            np.zeros((0, 3)),
            5,
        ):
            with pytest.raises(InvalidRequestError, match=r"^ids: got .*, allowed: a list or an array of token ids"):
                engine.logprobs(ids)
        for temperature in (0, -1, 1e-6, 2.5, "warm"):
            with pytest.raises(InvalidRequestError, match=r"^temperature: got "):
                engine.logprobs(PROMPTS, temperature=temperature)
        with pytest.raises(ContextLengthError, match=r"^prompt 0: This model's .* 128 tokens, but your prompt has 129"):
            engine.logprobs([1] * 129)
