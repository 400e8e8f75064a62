"""Rules and masks in native code: what is drawn and scored is what XLA's passes give."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.native import llvm, processor, ruled_rows
from jpaged.sampling.logit_rules import LogitRulesState, apply_rules, new_rules, record_tokens, set_rules
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.logits_processor import LogitsProcessor
from jpaged.sampling.native_rules import natively_ruled
from jpaged.sampling.sample_columns import SAMPLE_FIELDS, STEP_FIELDS, Score, num_mask_words, pack_columns
from jpaged.sampling.sampler import SampledRows, SampleSettings, mask_bias, sample
from jpaged.sampling.sampling_params import SampleMode, SamplingParams
from jpaged.sampling.sampling_rows import SamplingRows
from jpaged.sampling.top_blocks import block_rows

ROWS = 20
"""Three batches of eight."""
RULED = (
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": -0.4},
    {"logit_bias": {3: 2.5, 40: -100.0}, "bad_words": ["given as ids"], "min_tokens": 5, "max_tokens": 99},
    {},
    {"allowed_token_ids": list(range(5, 90)), "repetition_penalty": 0.8},
)
RANDOM = ({"temperature": 0}, {"top_k": 9, "top_p": 0.8}, {"temperature": 0}, {"temperature": 1.3}, {"min_p": 0.05})
LOGPROBS = (None, 3, 0)
ULP = 2.0**-23
"""The largest relative difference of neighbouring float32 numbers."""
VOCAB_SIZE = 5003
"""Forty blocks, of which a rule touches some; the last one is short."""


class Requests:
    """Rows of all kinds beside each other, with their logits, rules and masks, over a vocabulary of some size."""

    def __init__(self, vocab_size: int) -> None:
        rng = np.random.default_rng(vocab_size)
        spec = LogitRulesSpec(vocab_size)
        self.vocab_size, self.rules = vocab_size, new_rules(spec, ROWS + 1)
        columns = np.zeros((len(SAMPLE_FIELDS), ROWS), np.int32)
        for row in range(ROWS):
            asked = {**RULED[row % 4], **RANDOM[row % 5], "logprobs": LOGPROBS[row % 3]}
            asked["log_kept_mass"] = row % 2 == 0 and asked["logprobs"] is not None
            params = SamplingParams(**asked)
            columns[len(STEP_FIELDS) :, row] = pack_columns(
                params, seq_slot=row + 1, sample_index=0, seed=row, stop_ids=()
            )
            columns[SAMPLE_FIELDS.index("output_index"), row] = row % 7
            last = vocab_size - 1
            words = [(4,), (last,), (6, 0, last - 1), (7, 6), (vocab_size // 2,)] if "bad_words" in asked else []
            output = [*rng.integers(0, vocab_size, 11).tolist(), 6, 0]
            packed = spec.row(
                params,
                prompt=rng.integers(0, vocab_size, 9).tolist(),
                output=output,
                stop_ids=(2, last),
                bad_words=words,
            )
            self.rules = jitted_set(self.rules, packed, np.int32(row + 1))
        self.rows = SamplingRows.from_columns(jnp.asarray(columns))
        logits = rng.normal(0, 4, (ROWS, vocab_size)).astype(np.float32)
        logits[7, 5], logits[8, vocab_size - 1], logits[9] = np.nan, np.inf, -np.inf
        self.logits = jnp.asarray(logits)
        masks = rng.integers(-(2**31), 2**31 - 1, (ROWS, num_mask_words(vocab_size)), np.int32)
        masks[::3] = -1
        self.masks = jnp.asarray(masks)

    def sampled(self, mode: SampleMode, settings: SampleSettings, with_masks: bool) -> SampledRows:
        rules = self.rules if mode is SampleMode.FULL else None

        def draw(logits: jax.Array, rules: LogitRulesState | None, masks: jax.Array | None) -> SampledRows:
            return sample(logits, self.rows, mode, settings, rules, masks)

        return jax.tree.map(np.asarray, jax.jit(draw)(self.logits, rules, self.masks if with_masks else None))

    def meaningful_rows(self) -> dict[str, np.ndarray]:
        """Return which rows of each field of their scores mean something."""
        score = np.asarray(self.rows.score)
        is_scored, has_tops = score > 0, score & Score.TOPS > 0
        return {
            "logprobs": is_scored,
            "ranks": is_scored,
            "top_token_ids": has_tops,
            "top_logprobs": has_tops,
            "all_logprobs": has_tops,
            "log_kept_masses": np.ones(ROWS, bool),
        }


jitted_set = jax.jit(set_rules)


@pytest.mark.parametrize(
    ("vocab_size", "mode", "logprobs_mode", "with_masks", "max_logprobs"),
    [
        (203, SampleMode.RANDOM, "raw_logprobs", True, 3),  # Two blocks, of which the last is short.
        (203, SampleMode.SCORED, "raw_logprobs", True, 3),
        (203, SampleMode.FULL, "raw_logprobs", False, 100),  # More tops than are found natively.
        (10_001, SampleMode.FULL, "tempered_logprobs", True, 3),  # Whole vectors and blocks.
        pytest.param(203, SampleMode.FULL, "raw_logprobs", True, -1, marks=pytest.mark.slow),
        pytest.param(203, SampleMode.FULL, "processed_logprobs", True, 3, marks=pytest.mark.slow),
        pytest.param(256, SampleMode.FULL, "raw_logprobs", False, 3, marks=pytest.mark.slow),
        pytest.param(100, SampleMode.FULL, "tempered_logprobs", False, 3, marks=pytest.mark.slow),
        pytest.param(10_001, SampleMode.FULL, "raw_logprobs", True, 3, marks=pytest.mark.slow),
    ],
)
def test_rows_are_sampled_as_by_xla(vocab_size, mode, logprobs_mode, with_masks, max_logprobs):
    requests = Requests(vocab_size)
    native, wanted = (
        requests.sampled(mode, SampleSettings((), max_logprobs, logprobs_mode, has_native_code=is_native), with_masks)
        for is_native in (True, False)
    )
    finite = wanted.is_finite
    assert np.array_equal(native.is_finite, finite)
    assert 0 < finite.sum() < ROWS
    assert np.array_equal(native.token_ids[finite], wanted.token_ids[finite])
    if mode is SampleMode.RANDOM:
        assert native.scores is wanted.scores is None
        return
    rows = requests.meaningful_rows()
    for field in fields(wanted.scores):
        native_field, wanted_field = (getattr(sampled.scores, field.name) for sampled in (native, wanted))
        assert (native_field is None) == (wanted_field is None), field.name
        if wanted_field is not None:
            of_rows = finite & rows[field.name]
            assert of_rows.any()
            assert_equal_to_rounding(field.name, native_field[of_rows], wanted_field[of_rows])
    if mode is SampleMode.FULL:
        assert (wanted.scores.log_kept_masses[finite] < -0.01).sum() >= 3


def assert_equal_to_rounding(name: str, native: np.ndarray, wanted: np.ndarray) -> None:
    """Compare a field of scores: integers exactly, and logarithms within the rounding of the sums that they are of.

    Both ways add up a row's weights in orders of their own, of exponentials that may differ in their last bit, so that
    their sums may differ by 2 units in the last place: an absolute difference of the logarithm, however small that is.
    A logprob is of one sum, and a mass of two. Then the result is rounded, by at most a unit in its own last place: a
    fixed tolerance would be too wide for numbers near 0, or too narrow for those below −16.
    """
    if np.issubdtype(wanted.dtype, np.integer):
        assert np.array_equal(native, wanted), name
        return
    is_finite = np.isfinite(wanted)
    assert np.array_equal(native[~is_finite], wanted[~is_finite]), name
    native, wanted = native[is_finite], wanted[is_finite]
    num_sums = 2 if name == "log_kept_masses" else 1
    excess = np.abs(native - wanted) - (np.spacing(np.abs(wanted)) + 2 * ULP * num_sums)
    assert (excess <= 0).all(), (name, native[excess > 0], wanted[excess > 0])


@pytest.mark.parametrize("with_masks", [False, True], ids=["rules", "rules and masks"])
@pytest.mark.parametrize("has_avx512", [False, True], ids=["eight lanes", "sixteen"])
def test_logits_become_what_the_rules_say_and_are_given_back(has_avx512, with_masks, monkeypatch):
    if has_avx512 and not processor.host_has_avx512():
        pytest.skip("this processor has no vectors of sixteen lanes")
    monkeypatch.setattr(llvm, "host_has_avx512", lambda: has_avx512)
    requests = Requests(VOCAB_SIZE)
    rows, is_ruled = requests.rows, jnp.arange(ROWS) % 4 != 2

    def apply(logits: jax.Array, rules: LogitRulesState, masks: jax.Array | None) -> tuple[jax.Array, ...]:
        wanted = apply_rules(logits, rules, rows.ruled_slot, rows.output_index)
        wanted += 0.0 if masks is None else mask_bias(masks, VOCAB_SIZE)
        # Arithmetic, so that each array is one of its own and not the one that is changed in place.
        ruled = natively_ruled(block_rows(logits * 1), rows, is_ruled, rules, masks, vocab_size=VOCAB_SIZE)
        raw = ruled.raw(jnp.argmax(ruled.logits.blocks * 1, axis=2))
        again = natively_ruled(block_rows(logits * 1), rows, is_ruled, rules, masks, vocab_size=VOCAB_SIZE).logits
        return wanted, again.blocks * 1, again.maxima, again.has_nan, raw.blocks * 1

    ruled_rows._handler.cache_clear()
    masks = requests.masks if with_masks else None
    wanted, ruled, maxima, has_nan, raw = map(np.asarray, jax.jit(apply)(requests.logits, requests.rules, masks))
    ruled_rows._handler.cache_clear()
    blocks = np.asarray(block_rows(requests.logits).blocks)
    assert np.array_equal(raw, blocks, equal_nan=True)
    assert np.array_equal(ruled[~is_ruled], blocks[~is_ruled], equal_nan=True)
    given = ruled.reshape(ROWS, -1)[:, :VOCAB_SIZE]
    np.testing.assert_allclose(given[is_ruled], wanted[is_ruled], rtol=1e-6, atol=1e-6)
    assert np.array_equal(has_nan, np.isnan(ruled).any(axis=2))
    assert np.array_equal(np.where(has_nan, 0, maxima), np.where(has_nan, 0, np.max(ruled, axis=2)))


def test_a_drawn_token_touches_its_block():
    """Native code reads the penalties of touched blocks alone."""
    spec = LogitRulesSpec(300)
    row = spec.row(SamplingParams(logit_bias={130: 1.0}), prompt=(), output=(), stop_ids=(), bad_words=())
    rules = jitted_set(new_rules(spec, 3), row, np.int32(2))
    assert rules.touched.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    rules = record_tokens(rules, jnp.array([2, 0]), jnp.array([299, 5]))
    assert rules.touched.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1]]


def test_logits_processors_stay_between_rules_that_xla_applies():
    scale = LogitsProcessor("scale", ("factor",), lambda logits, factor: logits * factor)
    assert SampleSettings(has_native_code=True).applies_rules_natively
    assert not SampleSettings(processors=(scale,), has_native_code=True).applies_rules_natively
