"""Masks of tokens in the sampler: a masked row draws what it would draw from logits with −inf in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.sampling.logit_rules import new_rules, set_rules
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.logits_processor import LogitsProcessor
from jpaged.sampling.sample_columns import SAMPLE_FIELDS, STEP_FIELDS, num_mask_words, pack_columns
from jpaged.sampling.sampler import SampleSettings, mask_bias, sample
from jpaged.sampling.sampling_params import SampleMode, SamplingParams
from jpaged.sampling.sampling_rows import SamplingRows

VOCAB, ROWS = 203, 6  # No multiple of 32.


def packed(allowed):
    """Return a mask, int32 [R, W], of bools [R, V], with all bits beyond the vocabulary set."""
    bits = np.ones((len(allowed), 32 * num_mask_words(VOCAB)), bool)
    bits[:, :VOCAB] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def rows_of(each):
    columns = np.zeros((len(SAMPLE_FIELDS), len(each)), np.int32)
    for row, params in enumerate(each):
        fixed = pack_columns(params, seq_slot=row + 1, sample_index=0, seed=7 + row, stop_ids=())
        columns[len(STEP_FIELDS) :, row] = fixed
    return SamplingRows.from_columns(jnp.asarray(columns))


def run(logits, each, mode, *, masks=None, settings=None, rules=None):
    draw = jax.jit(lambda logits, masks, rules: sample(logits, rows_of(each), mode, settings, rules, masks))
    settings = settings or SampleSettings(max_logprobs=3)
    drawn = draw(jnp.asarray(logits), None if masks is None else jnp.asarray(masks), rules)
    return jax.tree.map(np.asarray, drawn)


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)


@pytest.fixture
def allowed():
    allowed = np.random.default_rng(1).random((ROWS, VOCAB)) < 0.1
    allowed[2] = True
    allowed[3] = np.arange(VOCAB) == VOCAB - 1
    return allowed


MIXED = [
    SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.4),
    SamplingParams(temperature=2, top_k=3, logprobs=0), SamplingParams(temperature=0), SamplingParams(min_p=0.1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "logprobs_mode"),
    [
        (SampleMode.GREEDY, "raw_logprobs"),
        (SampleMode.RANDOM, "raw_logprobs"),
        (SampleMode.SCORED, "raw_logprobs"),
        (SampleMode.SCORED, "processed_logprobs"),
        pytest.param(SampleMode.GREEDY, "processed_logprobs", marks=pytest.mark.slow),
        pytest.param(SampleMode.RANDOM, "processed_logprobs", marks=pytest.mark.slow),
    ],
)
def test_a_masked_row_draws_what_it_draws_from_logits_that_lack_the_other_tokens(mode, logprobs_mode, logits, allowed):
    settings = SampleSettings(max_logprobs=3, logprobs_mode=logprobs_mode)
    masked = run(logits, MIXED, mode, masks=packed(allowed), settings=settings)
    bare = np.where(allowed, logits, -np.inf)
    expected = run(bare, MIXED, mode, settings=settings)
    assert masked.token_ids.tolist() == expected.token_ids.tolist()
    assert allowed[np.arange(ROWS), masked.token_ids].all()
    assert masked.is_finite.all()
    if mode is SampleMode.SCORED:
        # Raw logprobs are the model's: the mask does not change them.
        source = expected if logprobs_mode == "processed_logprobs" else None
        logprobs = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(ROWS), masked.token_ids]
        wanted = np.asarray(logprobs) if source is None else source.scores.logprobs
        scored = [row for row, params in enumerate(MIXED) if params.logprobs is not None]
        np.testing.assert_allclose(masked.scores.logprobs[scored], wanted[scored], rtol=1e-5, atol=1e-5)


def test_masks_come_after_rules_and_after_an_engine_s_own_logits_processors(logits, allowed):
    boost = LogitsProcessor("boost", ("token",), lambda row, token: row.at[token.astype(jnp.int32)].set(1e4))
    spec = LogitRulesSpec(VOCAB, (boost,))
    forbidden = int(np.flatnonzero(~allowed[0])[0])
    each = [SamplingParams(temperature=temperature, extra_args={"token": forbidden}) for temperature in (0, 1)]
    each += [SamplingParams(temperature=1, logit_bias={forbidden: 100.0}), SamplingParams(temperature=0)]
    rules = new_rules(spec, len(each) + 1)
    for slot, params in enumerate(each, 1):
        row = spec.row(params, prompt=[], output=[], stop_ids=(), bad_words=())
        rules = set_rules(rules, jnp.asarray(row), jnp.asarray(slot, jnp.int32))
    settings = SampleSettings(processors=(boost,), max_logprobs=3)
    logits, allowed = np.tile(logits[:1], (4, 1)), np.tile(allowed[:1], (4, 1))
    masked = run(logits, each, SampleMode.FULL, masks=packed(allowed), settings=settings, rules=rules)
    assert allowed[0, masked.token_ids].all()
    assert masked.token_ids[0] == masked.token_ids[3] == np.where(allowed, logits, -np.inf)[0].argmax()
    free = run(logits, each, SampleMode.FULL, settings=settings, rules=rules)
    assert free.token_ids[:3].tolist() == [forbidden] * 3


@pytest.mark.parametrize("mode", [SampleMode.GREEDY, SampleMode.RANDOM])
def test_a_row_that_may_draw_nothing_and_one_with_a_nan_are_not_finite(mode, logits, allowed):
    allowed[0] = False
    logits[1, np.flatnonzero(~allowed[1])[0]] = np.nan  # The mask forbids the token, and hides no fault of the model.
    masked = run(logits, MIXED, mode, masks=packed(allowed))
    assert masked.is_finite.tolist() == [False, False, True, True, True, True]


def test_a_mask_has_one_bit_for_each_token_the_lowest_first():
    words = np.zeros((1, num_mask_words(VOCAB)), np.int32)
    words[0, 0], words[0, 1] = 0b101, np.int32(-(1 << 31))
    found = np.asarray(mask_bias(jnp.asarray(words), VOCAB))[0]
    assert np.flatnonzero(found == 0).tolist() == [0, 2, 63]
    assert found.shape == (VOCAB,)
    assert (found[found != 0] == -np.inf).all()
