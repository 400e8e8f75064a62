"""Logit rules against a numpy definition of each field, token by token."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import ConfigError, InvalidRequestError
from jpaged.sampling.logit_rules import apply_rules, new_rules, record_tokens, set_rules
from jpaged.sampling.logit_rules_spec import MAX_BAD_TOKENS, LogitRulesSpec
from jpaged.sampling.logits_processor import LogitsProcessor
from jpaged.sampling.sampler import SampleSettings, sample
from jpaged.sampling.sampling_params import SampleMode, SamplingParams

from .test_sampler import NO_RULE, OPTIMIZED, exact_weights, is_drawn_from, make_rows

VOCAB_SIZE = 40
NUM_SLOTS = 12
SCALE = LogitsProcessor("scale", ("factor",), lambda logits, factor: logits * factor)
LIFT = LogitsProcessor("lift", ("token", "height"), lambda logits, token, height: jnp.where(
    jnp.arange(logits.shape[0]) == token.astype(jnp.int32), logits + height, logits
))  # fmt: skip
SPEC = LogitRulesSpec(VOCAB_SIZE, (SCALE, LIFT))
STOP_IDS = (3, 17)
BAD_WORDS = ((5,), (6, 7), (6, 7, 8, 6, 7, 9), (7, 7, 7), (9,) * 12)
ASKED = {
    "nothing": {},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.5},
    "min_tokens": {"min_tokens": 3},
    "logit_bias": {"logit_bias": {0: -100.0, 39: 100.0, 20: 0.25}},
    "allowed": {"allowed_token_ids": [1, 2, 3, 5, 39]},
    "bad words": {"bad_words": ["given as ids"]},
    "a processor": {"extra_args": {"factor": 0.5}},
    "all": {
        "presence_penalty": 0.5, "frequency_penalty": -0.4, "repetition_penalty": 1.7, "min_tokens": 5,
        "logit_bias": {4: 3.0, 17: 2.0, 30: 1.0}, "allowed_token_ids": list(range(3, 35)), "bad_words": ["ids"],
        "extra_args": {"token": 33, "height": 7.5, "factor": 1.25}, "max_tokens": 100,
    },
}  # fmt: skip


def expected(logits, params, prompt, output, bad_words):
    """Apply each field as its description says, one after another, in float64."""
    logits = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        logits[~np.isin(np.arange(len(logits)), params.allowed_token_ids)] = -np.inf
    for word in bad_words:
        if tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1]) and len(output) >= len(word) - 1:
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[list(STOP_IDS)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    extra = params.extra_args or {}
    if "factor" in extra:
        logits = logits * extra["factor"]
    if "token" in extra:
        logits[int(extra["token"])] += extra["height"]
    for token_id in {*prompt, *output}:
        factor = 1 / params.repetition_penalty if logits[token_id] > 0 else params.repetition_penalty
        logits[token_id] *= factor
    for token_id in set(output):
        logits[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return logits


def row_of(params, prompt, output=()):
    bad_words = BAD_WORDS if params.bad_words else ()
    return SPEC.row(params, prompt=prompt, output=list(output), stop_ids=STOP_IDS, bad_words=bad_words)


jitted_set = jax.jit(set_rules)
jitted_note = jax.jit(record_tokens)
jitted_apply = jax.jit(lambda *arguments: apply_rules(*arguments, SPEC.processors))


def check_rows(logits, rules, slots, histories):
    """Compare apply_rules with `expected`. `histories` holds parameters, prompt and output of each row."""
    index = jnp.array([len(output) for _, _, output in histories], jnp.int32)
    got = np.asarray(jitted_apply(jnp.asarray(logits), rules, jnp.asarray(slots, jnp.int32), index))
    for row, (params, prompt, output) in enumerate(histories):
        wanted = expected(logits[row], params, prompt, list(output), BAD_WORDS if params.bad_words else ())
        assert np.array_equal(np.isneginf(got[row]), np.isneginf(wanted)), (row, params)
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(got[row][finite], wanted[finite], rtol=2e-6, atol=1e-5, err_msg=str(params))


def test_each_row_follows_its_own_rules_token_by_token_beside_rows_of_all_kinds():
    """Slots are in any order; each draws forty tokens, which nearly complete bad words again and again."""
    rng = np.random.default_rng(0)
    all_params = [SamplingParams(**asked) for asked in ASKED.values()]
    slots = rng.permutation(np.arange(1, NUM_SLOTS + 1))[: len(all_params)]
    rules = new_rules(SPEC, NUM_SLOTS + 1)
    histories = []
    for params, slot in zip(all_params, slots, strict=True):
        prompt = rng.integers(0, VOCAB_SIZE, 9).tolist()
        rules = jitted_set(rules, row_of(params, prompt), np.int32(slot))
        histories.append((params, prompt, []))
    num_banned = 0
    for _ in range(40):
        logits = rng.normal(0, 4, (len(all_params), VOCAB_SIZE)).astype(np.float32)
        check_rows(logits, rules, slots, histories)
        letters = [6, 7, 8, 9, int(rng.integers(0, VOCAB_SIZE))]
        tokens = rng.choice(letters, len(all_params), p=[0.2, 0.3, 0.1, 0.3, 0.1])
        for (_, _, output), token in zip(histories, tokens.tolist(), strict=True):
            output.append(token)
        rules = jitted_note(rules, jnp.asarray(slots, jnp.int32), jnp.asarray(tokens, jnp.int32))
        output = histories[list(ASKED).index("bad words")][2]
        num_banned += sum(output[-len(word) + 1 :] == list(word[:-1]) for word in BAD_WORDS if len(word) > 1)
    assert num_banned > 10


TEMPERED = {"temperature": 0.8}
RANDOM = {
    "repetition": {**TEMPERED, "repetition_penalty": 1.8},
    "bias": {**TEMPERED, "logit_bias": {0: -100.0, 39: 4.0, 6: 1.5}},
    "all": {
        **TEMPERED,
        **ASKED["all"],
        "extra_args": {"token": 33, "height": 1.0},
        "min_tokens": 0,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}


@pytest.mark.parametrize(
    "asked",
    [pytest.param(asked, id=name, marks=[pytest.mark.slow] * (name != "all")) for name, asked in RANDOM.items()],
)
def test_draws_under_rules_have_the_exact_probabilities(asked):
    """Chi-squared over 2¹⁵ draws after a prompt and an output, against rules and truncation in float64."""
    rng = np.random.default_rng(5)
    params = SamplingParams(**asked)
    prompt, output = rng.integers(0, VOCAB_SIZE, 9).tolist(), rng.integers(0, VOCAB_SIZE, 15).tolist()
    rules = jitted_set(new_rules(SPEC, NUM_SLOTS + 1), row_of(params, prompt, output), np.int32(4))
    logits = rng.normal(0, 1, VOCAB_SIZE).astype(np.float32)
    num_rows = 1 << 15
    own = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    @partial(jax.jit, compiler_options=OPTIMIZED)
    def draw(logits, rules, rows):  # Logits as an argument: XLA folds a constant for half a minute.
        tiled = jnp.broadcast_to(logits, (num_rows, VOCAB_SIZE))
        return sample(tiled, rows, SampleMode.RANDOM, SampleSettings(SPEC.processors), rules).token_ids

    rows = make_rows([own] * num_rows, seed=np.arange(num_rows), output_index=len(output))
    rows = replace(rows, ruled_slot=jnp.full(num_rows, 4, jnp.int32))
    counts = np.bincount(draw(logits, rules, rows), minlength=VOCAB_SIZE)
    ruled = expected(logits, params, prompt, output, BAD_WORDS if params.bad_words else ())
    exact, margin = exact_weights(ruled, own)
    assert margin > 1e-4
    plain, _ = exact_weights(logits, {**NO_RULE, "temperature": own["temperature"]})
    assert is_drawn_from(exact, counts)
    assert not is_drawn_from(plain, counts)


def test_a_resumed_sequence_has_the_rules_it_had():
    """Its rules, packed with its tokens so far and written to another slot, equal those updated as it drew them."""
    rng = np.random.default_rng(1)
    for asked in ASKED.values():
        params = SamplingParams(**asked)
        prompt, output = rng.integers(0, VOCAB_SIZE, 12).tolist(), [*rng.choice([6, 7, 9], 30).tolist(), 6, 7]
        stayed = jitted_set(new_rules(SPEC, NUM_SLOTS + 1), row_of(params, prompt), np.int32(4))
        for token in output:
            stayed = jitted_note(stayed, jnp.array([4], jnp.int32), jnp.array([token], jnp.int32))
        back = jitted_set(new_rules(SPEC, NUM_SLOTS + 1), row_of(params, prompt, output), np.int32(9))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[4], y[9]), stayed, back)


def test_slot_0_changes_no_logits_and_records_no_tokens():
    rules = new_rules(SPEC, NUM_SLOTS + 1)
    logits = np.random.default_rng(2).normal(0, 4, (5, VOCAB_SIZE)).astype(np.float32)
    slots, index = jnp.zeros(5, jnp.int32), jnp.arange(5, dtype=jnp.int32)
    assert np.array_equal(jitted_apply(jnp.asarray(logits), rules, slots, index), logits)
    after = jitted_note(rules, slots, jnp.array([1, 1, 2, 3, 5], jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, rules, after)


def test_an_end_token_without_a_row_in_the_head_is_ignored():
    """A model's config may name one; it can never be drawn."""
    params = SamplingParams(min_tokens=3)
    with_it = SPEC.row(params, prompt=[1], output=[], stop_ids=(3, VOCAB_SIZE), bad_words=())
    assert np.array_equal(with_it, SPEC.row(params, prompt=[1], output=[], stop_ids=(3,), bad_words=()))


def test_a_slots_new_sequence_has_only_its_own_rules():
    first, second = (SamplingParams(**ASKED[name]) for name in ("all", "presence"))
    rules = jitted_set(new_rules(SPEC, NUM_SLOTS + 1), row_of(first, [1, 2], [6, 7, 8]), np.int32(2))
    rules = jitted_set(rules, row_of(second, [9]), np.int32(2))
    fresh = jitted_set(new_rules(SPEC, NUM_SLOTS + 1), row_of(second, [9]), np.int32(2))
    jax.tree.map(np.testing.assert_array_equal, rules, fresh)


def test_bad_words_may_have_max_bad_tokens_together():
    words = [*((30 + index % 7, index % 11, 12) for index in range(MAX_BAD_TOKENS // 3)), (39,)]
    assert sum(map(len, words)) == MAX_BAD_TOKENS
    row = SPEC.row(SamplingParams(bad_words=["x"]), prompt=[1], output=[], stop_ids=(), bad_words=words)
    rules = jitted_set(new_rules(SPEC, 2), row, np.int32(1))
    for token in (30, 0):
        rules = jitted_note(rules, jnp.array([1], jnp.int32), jnp.array([token], jnp.int32))
    got = np.asarray(jitted_apply(jnp.zeros((1, VOCAB_SIZE)), rules, jnp.array([1]), jnp.array([2])))[0]
    assert np.flatnonzero(np.isneginf(got)).tolist() == [12, 39]


def test_arguments_that_no_processor_takes_are_refused_by_name():
    with pytest.raises(
        InvalidRequestError,
        match=r"extra_args: got 'factr', allowed: arg.*: factor, token, height; did you mean factor",
    ):
        SPEC.check(SamplingParams(extra_args={"factr": 1}))
    with pytest.raises(InvalidRequestError, match=r"got 'zzz', allowed: .*: factor, token, height; leave it"):
        SPEC.check(SamplingParams(extra_args={"zzz": 1}))
    with pytest.raises(InvalidRequestError, match=r"got 'factor', allowed: .*: it has none; leave it out"):
        LogitRulesSpec(VOCAB_SIZE).check(SamplingParams(extra_args={"factor": 1}))
    with pytest.raises(
        InvalidRequestError, match="extra_args: got no height, allowed: all arguments of lift: token, height"
    ):
        SPEC.check(SamplingParams(extra_args={"token": 1}))
    SPEC.check(SamplingParams(extra_args={"token": 1, "height": 2.0}))


@pytest.mark.parametrize("name", ["", "  ", None, 5])
def test_a_processor_needs_a_name_that_errors_can_say(name):
    with pytest.raises(ConfigError, match="logits_processors: got the name"):
        LogitsProcessor(name, ("factor",), lambda logits, factor: logits)


@pytest.mark.parametrize("arguments", [(), "factor", ("a", "a"), ("",), (5,), None])
def test_a_processor_needs_arguments_of_different_names(arguments):
    with pytest.raises(ConfigError, match="logits_processors: got the arguments"):
        LogitsProcessor("p", arguments, lambda logits: logits)
