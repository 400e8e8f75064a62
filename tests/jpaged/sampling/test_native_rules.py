"""Rules and masks in native code: what is drawn and scored is what XLA's passes give."""

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

    def sampled(self, mode: SampleMode, logprobs_mode: str, with_masks: bool, is_native: bool) -> SampledRows:
        settings = SampleSettings(max_logprobs=3, logprobs_mode=logprobs_mode, has_native_code=is_native)
        rules = self.rules if mode is SampleMode.FULL else None

        def draw(logits: jax.Array, rules: LogitRulesState | None, masks: jax.Array | None) -> SampledRows:
            return sample(logits, self.rows, mode, settings, rules, masks)

        return jax.tree.map(np.asarray, jax.jit(draw)(self.logits, rules, self.masks if with_masks else None))


jitted_set = jax.jit(set_rules)


@pytest.mark.parametrize(
    ("vocab_size", "mode", "logprobs_mode", "with_masks"),
    [
        (203, SampleMode.FULL, "raw_logprobs", True),  # Two blocks, of which the last is short.
        pytest.param(203, SampleMode.FULL, "processed_logprobs", True, marks=pytest.mark.slow),
        pytest.param(203, SampleMode.RANDOM, "raw_logprobs", True, marks=pytest.mark.slow),
        pytest.param(203, SampleMode.SCORED, "raw_logprobs", True, marks=pytest.mark.slow),
        pytest.param(256, SampleMode.FULL, "raw_logprobs", False, marks=pytest.mark.slow),
        pytest.param(100, SampleMode.FULL, "tempered_logprobs", False, marks=pytest.mark.slow),
        pytest.param(
            10_001, SampleMode.FULL, "raw_logprobs", True, marks=pytest.mark.slow
        ),  # Whole vectors and blocks.
    ],
)
def test_rows_are_sampled_as_by_xla(vocab_size, mode, logprobs_mode, with_masks):
    requests = Requests(vocab_size)
    native, wanted = (requests.sampled(mode, logprobs_mode, with_masks, is_native) for is_native in (True, False))
    finite = wanted.is_finite
    assert np.array_equal(native.is_finite, finite)
    assert 0 < finite.sum() < ROWS
    assert np.array_equal(native.token_ids[finite], wanted.token_ids[finite])
    if wanted.scores is not None:
        scored = finite & (np.asarray(requests.rows.score) > 0)
        # The totals are added up in another order, of exponentials that may differ in the last bit.
        np.testing.assert_allclose(native.scores.logprobs[scored], wanted.scores.logprobs[scored], rtol=0, atol=1e-6)
        assert np.array_equal(native.scores.ranks[scored], wanted.scores.ranks[scored])
        if mode is SampleMode.FULL:
            with_tops = scored & (np.asarray(requests.rows.score) & Score.TOPS > 0)
            assert np.array_equal(native.scores.top_token_ids[with_tops], wanted.scores.top_token_ids[with_tops])


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
