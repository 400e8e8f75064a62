"""The sampler against float64 numpy, against exact probabilities, and against plain jax.random calls."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from jpaged.sampling.control_flow import DYNAMIC, STATIC
from jpaged.sampling.drawing import draw_branches, draw_tokens, num_draw_levels, num_levels
from jpaged.sampling.sample_columns import Score
from jpaged.sampling.sampler import PURPOSE_SAMPLE, SampleSettings, sample
from jpaged.sampling.sampling_params import SampleMode, ScoreKind
from jpaged.sampling.sampling_rows import SamplingRows
from jpaged.sampling.thresholds import kept_counts_and_masses
from jpaged.sampling.token_scores import given_scores
from jpaged.sampling.top_blocks import block_rows
from jpaged.sampling.truncation import KeptTokens, TruncationLimits, truncate
from jpaged.sampling.uniforms import uniforms

OPTIMIZED = {
    "xla_backend_optimization_level": "3", "xla_llvm_disable_expensive_passes": False, "xla_disable_hlo_passes": "",
}  # fmt: skip
"""Compiler options of functions for many rows, or for the sums of a large vocabulary, which round less with vectors."""
NO_RULE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
GREEDY_ROW = {**NO_RULE, "temperature": 0.0}
RULES = {
    "none": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 2.0},
    "near the greedy limit": {"temperature": 2e-5},
    "top-k 1": {"top_k": 1},
    "top-k 7": {"top_k": 7},
    "top-k V": {"top_k": "V"},
    "top-k beyond V": {"top_k": 2**31 - 1},
    "top-k off": {"top_k": -1},
    "top-p tiny": {"top_p": 1e-30},
    "top-p vanishing in float32": {"top_p": 1e-60},
    "top-p 0.5": {"top_p": 0.5},
    "top-p 0.999": {"top_p": 0.999},
    "min-p 0.02": {"min_p": 0.02},
    "min-p 1": {"min_p": 1.0},
    "top-k after min-p": {"min_p": 0.3, "top_k": 1000},
    "all": {"temperature": 0.7, "min_p": 0.001, "top_k": 40, "top_p": 0.8},
}
VOCAB_SIZES = (11, 512, 1000, 49152)
PINNED_UNIFORMS = [1203694, 5310714, 12629330, 12899568]
"""Numbers of seeds 0, 1, 2⁶³, 2⁶⁴ − 1 with sample indices 0 to 3 and output indices 0, 5, 6, 7, in units of 2⁻²⁴."""


def full_rules(rule, vocab_size):
    rule = {**NO_RULE, **rule}
    return {**rule, "top_k": vocab_size} if rule["top_k"] == "V" else rule


def make_rows(rules, *, seed=0, sample_index=0, output_index=0):
    """Return rows with these rules. Seeds and indices are one number for all rows, or an array."""
    num_rows = len(rules)
    seeds = np.broadcast_to(np.asarray(seed, np.uint64), num_rows)

    def ints(values):
        return np.broadcast_to(np.asarray(values), num_rows).astype(np.int32)

    def floats(name):
        return np.array([rule[name] for rule in rules], np.float32)

    return SamplingRows(
        ruled_slot=ints(0),
        score=ints(Score.OWN | Score.TOPS),
        seed_low=(seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32),
        seed_high=(seeds >> np.uint64(32)).astype(np.uint32).view(np.int32),
        sample_index=ints(sample_index),
        output_index=ints(output_index),
        top_k=ints([rule["top_k"] for rule in rules]),
        temperature=floats("temperature"),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
    )


run = jax.jit(sample, static_argnums=(2, 3))
run_many = jax.jit(sample, static_argnums=(2, 3), compiler_options=OPTIMIZED)
jitted_branches = jax.jit(draw_branches)
jitted_uniforms = jax.jit(uniforms, static_argnums=(1, 2))


@partial(jax.jit, static_argnums=2, compiler_options=OPTIMIZED)
def truncated(logits, rows, control_flow):
    """Return the weights of logits whose row maximum is 0, and which tokens truncation keeps."""
    limits = TruncationLimits(rows.min_p, rows.top_k, rows.top_p)
    is_drawn = jnp.ones(len(logits), bool)

    def weigh(logits):
        return jnp.exp(logits / rows.temperature[:, None])

    return weigh(logits), truncate(block_rows(logits), weigh, limits, is_drawn, control_flow)


def kept_weights(logits, rows, control_flow):
    """Return the weights that truncation keeps, after a check of their sums by blocks."""
    weights, kept = truncated(logits, rows, control_flow)
    weights = np.where(weights >= kept.threshold[:, None], weights, 0)
    blocks = np.pad(weights.astype(np.float64), ((0, 0), (0, -weights.shape[1] % 128))).reshape(len(weights), -1, 128)
    np.testing.assert_allclose(kept.block_sums, blocks.sum(axis=2), rtol=1e-5)
    return weights


def draw(logits, rules, mode=SampleMode.RANDOM, max_logprobs=5, *, is_padded=True, control_flow=DYNAMIC, **which):
    """Sample the rows; they are padded to a multiple of 32, so that most tests share one executable."""
    settings = SampleSettings(max_logprobs=max_logprobs, control_flow=control_flow)
    num_rows = len(rules)
    num_more = -num_rows % 32 if is_padded else 0
    rows = jax.tree.map(lambda leaf: np.pad(leaf, (0, num_more)), make_rows(rules, **which))
    function = run_many if num_rows > 1000 else run
    drawn = function(np.pad(logits, ((0, num_more), (0, 0))), rows, mode, settings)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:num_rows], drawn)


def make_logits(num_rows, vocab_size, *, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


def exact_weights(logits, rule):
    """Return the kept tokens' weights by definition, in float64, relative to the most likely token's.

    Temperature, then min-p, top-k and top-p, each over what the one before left; tokens that tie with the last one kept
    are kept. Also returns how far the nearest comparison was from going the other way, relative to what it compared.
    """
    logits = logits.astype(np.float64)
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(rule["temperature"])))
    order = np.unique(weights)[::-1]
    margin = 1.0
    least = np.float64(np.float32(rule["min_p"]))
    if least > 0:
        margin = min(margin, np.min(np.abs(order / least - 1), where=order != least, initial=1.0))
    kept = weights >= least
    if 0 < rule["top_k"] < len(weights) and kept.sum() > rule["top_k"]:
        kept &= weights >= np.sort(weights[kept])[-rule["top_k"]]
    if rule["top_p"] < 1:
        levels = np.unique(weights[kept])[::-1]
        mass = np.cumsum([np.sum(weights[kept & (weights == level)]) for level in levels])
        wanted = np.float64(np.float32(rule["top_p"])) * mass[-1]
        margin = min(margin, np.abs(mass / mass[-1] - wanted / mass[-1]).min())
        kept &= weights >= levels[np.argmax(mass >= wanted)]
    return np.where(kept, weights, 0), margin


@pytest.mark.parametrize("control_flow", [DYNAMIC, STATIC])
@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES[:-1], pytest.param(VOCAB_SIZES[-1], marks=pytest.mark.slow)])
def test_each_rule_keeps_exactly_the_tokens_of_its_definition(vocab_size, control_flow):
    """Rows of all kinds in one batch, in float32 against float64.

    Where a comparison is closer than float32 sums over a vocabulary are exact (1e-6), as top-p's is among 49152 tokens,
    the sets may differ by that much probability.
    """
    rules = [full_rules(rule, vocab_size) for rule in RULES.values()]
    logits = make_logits(len(rules), vocab_size, seed=2)
    shifted = jnp.asarray(logits - logits.max(axis=1, keepdims=True))
    kept = np.asarray(kept_weights(shifted, make_rows(rules), control_flow))
    num_near = 0
    for name, rule, row, weights in zip(RULES, rules, logits, kept, strict=True):
        exact, margin = exact_weights(row, rule)
        # Below 1e-36 float32 runs out of numbers; such a token is never drawn.
        differs = ((weights > 0) != (exact > 0)) & ((exact == 0) | (exact > 1e-36))
        num_near += margin <= 1e-6
        assert margin <= 1e-6 or not differs.any(), name
        assert np.maximum(weights, exact)[differs].sum() <= 1e-6 * exact.sum(), name
        # exp in float32 is good to a few units in the last place, and its argument, up to 80, to 6e-8 of itself.
        is_both = (weights > 0) & (exact > 1e-36)
        np.testing.assert_allclose(weights[is_both], exact[is_both], rtol=1e-5, err_msg=name)
    assert num_near <= (vocab_size == 49152)


@pytest.mark.parametrize("control_flow", [DYNAMIC, STATIC])
@pytest.mark.parametrize("vocab_size", [11, 1000])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_tokens_that_tie_with_the_last_one_kept_are_kept(rule, vocab_size, control_flow):
    rule = full_rules(rule, vocab_size)
    logits = np.random.default_rng(3).integers(-3, 3, (1, vocab_size)).astype(np.float32)
    shifted = jnp.asarray(logits - logits.max())
    weights = np.asarray(kept_weights(shifted, make_rows([rule]), control_flow))[0]
    exact, _ = exact_weights(logits[0], rule)
    assert np.array_equal(weights > 0, exact > 1e-37)
    assert all((weights[logits[0] == level] > 0).all() for level in np.unique(logits[0][weights > 0]))


@pytest.mark.parametrize("control_flow", [DYNAMIC, STATIC])
def test_top_k_tells_neighbouring_float32_numbers_apart(control_flow):
    logits = np.array([[0.0, -1.2e-7, -1.0]], np.float32)
    kept = kept_weights(logits, make_rows([{**NO_RULE, "top_k": 1}]), control_flow)
    assert (kept > 0).tolist() == [[True, False, False]]


def test_a_uniform_distribution_keeps_every_token_under_every_rule():
    rules = [full_rules(rule, 1000) for rule in RULES.values()]
    for control_flow in (DYNAMIC, STATIC):
        assert (np.asarray(kept_weights(jnp.zeros((len(rules), 1000)), make_rows(rules), control_flow)) == 1.0).all()


def is_drawn_from(weights, counts):
    """Return whether the counts pass a chi-squared test, which a correct sampler fails for one seed in a million."""
    if counts[weights == 0].sum() > 0:
        return False
    expected = weights / weights.sum() * counts.sum()
    rare = expected < 5
    seen, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() > 0:
        seen, wanted = np.append(seen, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    assert len(wanted) > 1
    return np.sum((seen - wanted) ** 2 / wanted) < chi2.isf(1e-6, len(wanted) - 1)


DRAWN_RULES = {name: RULES[name] for name in ("none", "cold", "hot", "top-k 7", "top-p 0.5", "min-p 0.02", "all")}


@pytest.mark.parametrize("vocab_size", [11, pytest.param(700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", DRAWN_RULES.values(), ids=DRAWN_RULES.keys())
def test_draws_have_the_exact_probabilities(rule, vocab_size):
    """The test makes 2¹⁶ draws with a fixed seed."""
    rule = full_rules(rule, vocab_size)
    logits = make_logits(1, vocab_size, seed=4, scale=1.0)
    num_rows, num_calls = 1 << 13, 1 << 3
    tiled = np.tile(logits, (num_rows, 1))
    counts = np.zeros(vocab_size, np.int64)
    for call in range(num_calls):
        tokens = draw(tiled, [rule] * num_rows, seed=77, sample_index=call, output_index=np.arange(num_rows)).token_ids
        counts += np.bincount(tokens, minlength=vocab_size)
    exact, _ = exact_weights(logits[0], rule)
    assert is_drawn_from(exact, counts)


def test_greedy_rows_give_the_argmax_whatever_other_rows_there_are():
    """Ties go to the lowest id."""
    logits = make_logits(32, 1000, seed=5)
    logits[3, [40, 900]] = 30.0
    rules = [GREEDY_ROW] * 32
    alone = draw(logits, rules, SampleMode.GREEDY).token_ids
    assert np.array_equal(alone, logits.argmax(axis=1))
    mixed_rules = [GREEDY_ROW if row % 2 else full_rules(RULES["all"], 1000) for row in range(32)]
    for mode in (SampleMode.RANDOM, SampleMode.FULL):
        mixed = draw(logits, mixed_rules, mode, output_index=np.arange(32)).token_ids
        assert np.array_equal(mixed[1::2], alone[1::2])
        assert not np.array_equal(mixed[::2], alone[::2])


def test_a_temperature_that_is_greedy_on_the_host_is_greedy_on_the_device():
    """A temperature just below 1e-5 rounds to float32's 1e-5; among equal logits only a greedy row picks token 0."""
    rules = [{**NO_RULE, "temperature": np.nextafter(1e-5, 0)}] * 64
    assert (draw(np.zeros((64, 50), np.float32), rules, output_index=np.arange(64)).token_ids == 0).all()


@pytest.mark.parametrize("control_flow", [DYNAMIC, pytest.param(STATIC, marks=pytest.mark.slow)])
def test_a_top_p_of_zero_leaves_the_token_that_is_taken_without_a_draw(control_flow):
    """Also where tokens tie, after the other rules, and for what is told of the draw."""
    logits = np.random.default_rng(24).integers(-3, 3, (18, 1000)).astype(np.float32)
    rules = [{**full_rules(rule, 1000), "top_p": 0.0} for rule in [*RULES.values(), NO_RULE]]
    found = draw(logits, rules, output_index=np.arange(18), control_flow=control_flow)
    assert np.array_equal(found.token_ids, logits.argmax(axis=1))
    rows = replace(make_rows(rules), score=np.full(18, Score.OWN | Score.TOPS | Score.MASS, np.int32))
    for mode in ("processed_logprobs", "tempered_logprobs"):
        settings = SampleSettings(max_logprobs=4, logprobs_mode=mode, control_flow=control_flow)
        scores = run(logits, rows, SampleMode.FULL, settings).scores
        both = zip(logits, rules, strict=True)
        exact = np.array([exact_logprobs(row, rule["temperature"]).max() for row, rule in both])
        np.testing.assert_allclose(scores.log_kept_masses, exact, atol=1e-4)
        np.testing.assert_allclose(scores.logprobs, 0 * exact if mode == "processed_logprobs" else exact, atol=1e-4)
        assert mode != "processed_logprobs" or (np.asarray(scores.top_logprobs)[:, 1] == -np.inf).all()


EVERYWHERE = list(range(1000))
BAD_ROWS = {
    "a NaN first": [([0], np.nan)],
    "a NaN in the middle": [([500], np.nan)],
    "a NaN last": [([999], np.nan)],
    "an infinity": [([70], np.inf)],
    "a NaN and an infinity": [([70], np.inf), ([3], np.nan)],
    "NaN throughout": [(EVERYWHERE, np.nan)],
    "nothing but −inf": [(EVERYWHERE, -np.inf)],
}


@pytest.mark.parametrize("mode", SampleMode)
@pytest.mark.parametrize("damage", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_row_that_is_not_finite_is_flagged_and_changes_no_other_row(mode, damage):
    """Bit for bit: rows share an executable and nothing else."""
    logits = make_logits(6, 1000, seed=6)
    rules = [full_rules(rule, 1000) for rule in list(RULES.values())[-6:]]
    before = draw(logits, rules, mode)
    assert before.is_finite.all()
    for places, value in damage:
        logits[2, places] = value
    after = draw(logits, rules, mode)
    assert after.is_finite.tolist() == [row != 2 for row in range(6)]
    assert 0 <= after.token_ids[2] < 1000
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.delete(x, 2, 0), np.delete(y, 2, 0)), before, after)


def test_minus_infinity_is_a_token_that_is_never_drawn():
    logits = np.full((32, 1000), -np.inf, np.float32)
    allowed = [0, 511, 512, 999]
    logits[:, allowed] = 0.0
    for rule in ("none", "top-k 7", "top-p 0.5", "all"):
        found = set()
        for call in range(16):
            result = draw(logits, [full_rules(RULES[rule], 1000)] * 32, output_index=32 * call + np.arange(32))
            assert result.is_finite.all()
            found |= set(result.token_ids.tolist())
        assert sorted(found) == allowed


def test_huge_logits_overflow_nothing():
    logits = np.tile(np.array([3e38, -3e38, 0.0, 3e38, 1e38], np.float32), (256, 1))
    result = draw(logits, [NO_RULE] * 256, SampleMode.FULL, 5, output_index=np.arange(256))
    assert result.is_finite.all()
    assert set(result.token_ids.tolist()) == {0, 3}
    np.testing.assert_allclose(result.scores.logprobs, np.log(0.5), atol=1e-6)


# Uniforms


def test_uniforms_follow_the_documented_key_path():
    """The path is: key of the seed as two words, then fold_in of sample index, output index and purpose."""
    rng = np.random.default_rng(8)
    seeds = rng.integers(0, 2**64, 40, np.uint64)
    samples, outputs = rng.integers(0, 128, 40), rng.integers(0, 2**17, 40)
    for purpose in (PURPOSE_SAMPLE, 1):
        rows = make_rows([NO_RULE] * 40, seed=seeds, sample_index=samples, output_index=outputs)
        got = np.asarray(jitted_uniforms(rows, purpose, 5))
        for values, seed, sample_index, output_index in zip(got, seeds.tolist(), samples, outputs, strict=True):
            key = jax.random.wrap_key_data(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32")
            for part in (sample_index, output_index, purpose):
                key = jax.random.fold_in(key, int(part))
            bits = np.asarray(jax.random.bits(key, (5,), jnp.uint32))
            assert np.array_equal(values, ((bits >> 8) * 2.0**-24).astype(np.float32))


@pytest.mark.parametrize("is_partitionable", [False, True])
def test_uniforms_depend_neither_on_how_many_they_are_nor_on_a_callers_configuration(is_partitionable):
    rows = make_rows([NO_RULE] * 3, seed=7, output_index=np.arange(3))
    wanted = np.asarray(jitted_uniforms(rows, PURPOSE_SAMPLE, 5))
    assert len(set(wanted.ravel().tolist())) == 15
    with jax.threefry_partitionable(is_partitionable):
        for count in range(1, 5):
            assert np.array_equal(jitted_uniforms(rows, PURPOSE_SAMPLE, count), wanted[:, :count])


def test_uniforms_are_the_same_in_every_release():
    """The numbers are pinned, because a stored seed must give the same text next year."""
    rows = make_rows([NO_RULE] * 4, seed=[0, 1, 2**63, 2**64 - 1], sample_index=[0, 1, 2, 3], output_index=[0, 5, 6, 7])
    assert (np.asarray(jitted_uniforms(rows, PURPOSE_SAMPLE, 1))[:, 0] * 2**24).astype(int).tolist() == PINNED_UNIFORMS


def test_a_draw_is_the_same_in_any_row_of_any_bucket():
    """The tokens are equal because no draw of these 24 sequences is within float32's rounding of an edge."""
    logits = make_logits(24, 3000, seed=9)
    rules = [full_rules(rule, 3000) for rule in [*RULES.values()][:12] * 2]
    seeds = np.arange(24) + 2**33

    def tokens(order, size):
        order = list(order) + [0] * (size - len(order))
        which = {"seed": seeds[order], "output_index": np.array(order)}
        result = draw(logits[order], [rules[row] for row in order], is_padded=False, **which)
        return result.token_ids

    together = tokens(range(24), 24)
    assert np.array_equal(tokens(range(23, -1, -1), 64)[:24], together[::-1])
    assert [tokens([row], 1)[0] for row in range(24)] == together.tolist()


# The tree

CDF_SHAPE = (16, 1300)
EDGES = np.array([0.0, 2.0**-24, 0.25, 0.5, 1 - 2.0**-23, 1 - 2.0**-24], np.float32)


def branches_of(weights, token):
    """Return (weights of a node's branches, the branch taken) from the root to a token, in float64."""
    found, sums, node = [], weights.astype(np.float64), token
    while True:
        above = -(-len(sums) // 16)
        found.append((sums[node % above :: above], node // above))
        if above == 1:
            return found[::-1]
        sums, node = np.pad(sums, (0, 16 * above - len(sums))).reshape(16, above).sum(axis=0), node % above


@pytest.mark.parametrize("vocab_size", [1, 2, 11, 16, 17, 255, 256, 257, 600, 4097])
def test_every_token_is_drawn_where_its_branches_lead(vocab_size):
    weights = np.random.default_rng(vocab_size).random(vocab_size).astype(np.float32) + 0.1
    middles = np.zeros((vocab_size, num_levels(vocab_size)), np.float32)
    for token in range(vocab_size):
        for level, (sums, branch) in enumerate(branches_of(weights, token)):
            middles[token, level] = (sums[:branch].sum() + sums[branch] / 2) / sums.sum()
    tokens = jitted_branches(np.tile(weights, (vocab_size, 1)), middles)
    assert np.asarray(tokens).tolist() == list(range(vocab_size))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.001, 0.02, 0.5, 0.98, 1.0]),
    spread=st.sampled_from([0.0, 1.0, 5.0, 30.0]),
    tail=st.sampled_from([0.0, 1e-38, 1e-9]),
)
def test_a_draw_takes_the_right_token_and_never_one_without_weight(seed, share, spread, tail):
    """Against sums in float64, with a tolerance of 1e-6 of a node's sum, which is what float32 sums lose."""
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random(CDF_SHAPE)).astype(np.float32)
    weights = np.where(rng.random(CDF_SHAPE) < share, weights, 0).astype(np.float32)
    weights[:, -3:-1] = tail
    weights[:, rng.integers(0, CDF_SHAPE[1])] = 1.0  # Last: every row has a token to draw.
    uniform = rng.choice(np.append(EDGES, rng.random(10, np.float32)), (CDF_SHAPE[0], num_levels(CDF_SHAPE[1])))
    tokens = np.asarray(jitted_branches(jnp.asarray(weights), jnp.asarray(uniform)))
    assert (weights[np.arange(CDF_SHAPE[0]), tokens] > 0).all()
    for row, token in enumerate(tokens):
        for level, (sums, branch) in enumerate(branches_of(weights[row], token)):
            ends = np.cumsum(sums)
            target, slack = uniform[row, level].astype(np.float64) * ends[-1], 1e-6 * ends[-1]
            assert ends[branch] > target - slack
            assert ends[branch] - sums[branch] <= target + slack


def test_a_branch_without_weight_is_never_taken_even_where_the_running_sum_rises():
    """JAX adds prefixes up in a tree, so a sum may grow by its last bit where nothing was added; draw exactly there."""
    rng = np.random.default_rng(12)
    weights = np.where(rng.random((1 << 16, 16)) < 0.5, rng.random((1 << 16, 16)), 0).astype(np.float32)
    ends = np.asarray(jax.jit(partial(jnp.cumsum, axis=-1))(weights))
    rows, before = np.nonzero((weights[:, 1:] == 0) & (ends[:, :-1] > 0))
    aim = ends[rows, before] / ends[rows, -1]
    num_hit = 0
    for uniform in (aim, np.nextafter(aim, 0), np.nextafter(aim, 1)):
        uniform = np.minimum(uniform, np.float32(1 - 2.0**-24))
        tokens = np.asarray(jitted_branches(weights[rows], uniform[:, None]))
        assert (weights[rows, tokens] > 0).all()
        num_hit += np.sum(uniform * ends[rows, -1] == ends[rows, before])
    assert num_hit > 1000


def test_draws_rarely_change_with_the_rounding_of_another_executable():
    """Logits move by 5e-6, as they do where sums are added up in another order. With one running sum over the
    vocabulary 0.3 % of the draws would change; down the tree it is about one in 20,000."""
    rng = np.random.default_rng(3)
    logits = np.sort(rng.normal(0, 2.5, (64, 49152)), axis=1)[:, ::-1][:, rng.permutation(49152)].astype(np.float32)
    moved = (logits + rng.normal(0, 5e-6, logits.shape)).astype(np.float32)

    @partial(jax.jit, compiler_options=OPTIMIZED)
    def drawn(logits, uniform):
        rows, none = block_rows(logits), jnp.zeros(64)
        return draw_tokens(rows, jnp.exp, KeptTokens(none, jnp.exp(rows.blocks).sum(axis=2)), uniform)

    num_flips = 0
    for _ in range(60):
        uniform = jnp.asarray(rng.random((64, num_draw_levels(49152)), np.float32))
        num_flips += int(np.sum(np.asarray(drawn(logits, uniform)) != np.asarray(drawn(moved, uniform))))
    assert num_flips <= 3


# Logprobs


@pytest.mark.parametrize("offset", [0.0, 100.0, -1e4, 1e4])
def test_logprobs_are_the_log_softmax_before_temperature_and_truncation(offset):
    """Logprobs are within 1e-5 of float64 on the sampler's float32 logits, however large these are."""
    logits = make_logits(len(RULES), 1000, seed=10) + np.float32(offset)
    result = draw(logits, [full_rules(rule, 1000) for rule in RULES.values()], SampleMode.FULL, 20)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    rows = np.arange(len(RULES))
    np.testing.assert_allclose(result.scores.logprobs, exact[rows, result.token_ids], atol=1e-5, rtol=0)
    np.testing.assert_allclose(
        result.scores.top_logprobs, np.take_along_axis(exact, result.scores.top_token_ids, 1), atol=1e-5, rtol=0
    )
    order = np.argsort(-logits, axis=1, kind="stable")
    assert np.array_equal(result.scores.top_token_ids, order[:, :20])
    assert result.scores.ranks.tolist() == [
        1 + int((row > row[token]).sum()) for row, token in zip(logits, result.token_ids, strict=True)
    ]


def test_the_mode_changes_no_token():
    logits = make_logits(len(RULES), 1000, seed=11)
    rules = [full_rules(rule, 1000) for rule in RULES.values()]
    with_logprobs = draw(logits, rules, SampleMode.FULL)
    without = draw(logits, rules, SampleMode.RANDOM)
    assert np.array_equal(with_logprobs.token_ids, without.token_ids)
    assert without.scores is None


@pytest.mark.parametrize(
    ("max_logprobs", "num_top"),
    [(0, 0), *(pytest.param(count, count, marks=pytest.mark.slow) for count in (1, 11)), (20, 11)],
)
def test_no_more_top_logprobs_than_the_vocabulary_has(max_logprobs, num_top):
    scores = draw(make_logits(2, 11), [NO_RULE] * 2, SampleMode.FULL, max_logprobs).scores
    assert [part.shape for part in scores.top(1, max_logprobs)] == [(num_top,)] * 2
    if num_top:
        assert scores.top_token_ids.shape == scores.top_logprobs.shape == (2, num_top)


def test_only_rows_that_ask_for_logprobs_get_some():
    """Any number of rows may ask, at any index, and logprobs change no drawn token."""
    logits = make_logits(32, 1000, seed=13)
    rules = [full_rules(RULES[name], 1000) for name in [*RULES, *RULES][:32]]
    rows = make_rows(rules, output_index=np.arange(32))
    settings = SampleSettings(max_logprobs=5)
    whole = jax.tree.map(np.asarray, run(jnp.asarray(logits), rows, SampleMode.FULL, settings))
    for wanted in ([], [0], [31], [3, 4, 11], list(range(8)), list(range(0, 32, 2)), list(range(32))):
        score = np.zeros(32, np.int32)
        score[wanted] = Score.OWN
        with_tops = wanted[::3] if len(wanted) > 1 else []
        score[with_tops] |= Score.TOPS
        changed = replace(rows, score=jnp.asarray(score))
        some = jax.tree.map(np.asarray, run(jnp.asarray(logits), changed, SampleMode.FULL, settings))
        for row in range(32):
            assert some.token_ids[row] == whole.token_ids[row]
            if row in wanted:
                exact = exact_logprobs(logits[row], 1.0)
                assert abs(some.scores.logprobs[row] - exact[some.token_ids[row]]) < 1e-5
            if row in with_tops:
                assert np.array_equal(some.scores.top_token_ids[row], whole.scores.top_token_ids[row])
                np.testing.assert_allclose(some.scores.top_logprobs[row], -np.sort(-exact)[:5], atol=1e-5, rtol=0)


def exact_logprobs(logits, temperature):
    """Return the log-softmax of a row at this temperature, 1 for a greedy row, in float64."""
    exact = (logits.astype(np.float64) - logits.max()) / (temperature or 1.0)
    return exact - np.log(np.exp(exact).sum())


def test_tempered_logprobs_are_those_before_truncation_in_every_mode_that_scores():
    rules = [full_rules(rule, 1000) for rule in [*RULES.values(), GREEDY_ROW]]
    logits = make_logits(len(rules), 1000, seed=17)
    for mode in (SampleMode.SCORED, SampleMode.FULL):
        settings = SampleSettings(max_logprobs=4, logprobs_mode="tempered_logprobs")
        result = jax.tree.map(np.asarray, run(jnp.asarray(logits), make_rows(rules), mode, settings))
        for row, rule in enumerate(rules):
            exact = exact_logprobs(logits[row], rule["temperature"])
            assert abs(result.scores.logprobs[row] - exact[result.token_ids[row]]) < 1e-5
        assert (result.scores.top_token_ids is None) == (mode is SampleMode.SCORED)


@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.slow), 4, 5])
def test_no_vocabulary_is_drawn_from_or_ranked_outside_of_what_is_run_on_demand(num_rows):
    """XLA moves what is the same in each turn of a loop in front of it: then every step pays, and ranking is a sort."""
    rows = make_rows([NO_RULE] * num_rows)
    sampler = partial(sample, mode=SampleMode.FULL, settings=SampleSettings(max_logprobs=20))
    step = jax.jit(sampler, compiler_options=OPTIMIZED)
    branches, entry = step.lower(jnp.asarray(make_logits(num_rows, 1000)), rows).compile().as_text().split("\nENTRY ")
    assert '"TopK"' in branches
    assert '"TopK"' not in entry
    whole = re.compile(r",1000\]|,8,128\]|,1024\]")
    assert not [line for line in (branches + entry).splitlines() if " sort(" in line and whole.search(line)]
    loops = [line for line in entry.splitlines() if " while(" in line and whole.search(line)]
    assert len(loops) == (2 if num_rows > 4 else 0), "over batches of rows"


def test_equal_logits_are_ranked_in_the_order_of_their_tokens():
    """Also where they lie in several of the blocks that are searched for the most likely tokens."""
    logits = np.random.default_rng(21).integers(-2, 3, (6, 49_152)).astype(np.float32)
    logits[:3] = np.where(np.random.default_rng(22).random((3, 49_152)) < 1e-4, logits[:3], -3.0)
    for max_logprobs in (20, 300):
        result = draw(logits, [NO_RULE] * 6, SampleMode.FULL, max_logprobs, is_padded=False)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :max_logprobs]
        assert np.array_equal(result.scores.top_token_ids, order)


@pytest.mark.parametrize(
    "num_tops", [0, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 64)), 300, 1000, -1]
)
def test_given_tokens_are_scored_with_the_likeliest_and_what_these_leave(num_tops):
    """Also where several tokens tie with the least likely of the tops, and the rest of the probability is small."""
    logits = make_logits(4, 1000, seed=23)
    logits[1] = np.round(logits[1]) + 0.0  # No negative zero: it ranks behind the positive one.
    logits[2] *= 4
    given, temperatures = np.array([5, 0, 999, 128], np.int32), np.array([0.5, 1.0, 1.0, 2.0], np.float32)
    scores = given_scores(
        block_rows(jnp.asarray(logits)), jnp.asarray(given), jnp.asarray(temperatures), ScoreKind(num_tops), None,
        vocab_size=1000,
    )  # fmt: skip
    for row in range(4):
        exact = exact_logprobs(logits[row], temperatures[row])
        assert abs(scores.logprobs[row] - exact[given[row]]) < 1e-5
        assert scores.ranks[row] == 1 + (exact > exact[given[row]]).sum()
        if num_tops < 0:
            np.testing.assert_allclose(scores.all_logprobs[row], exact, atol=2e-5, rtol=0)
        elif num_tops:
            order = np.argsort(-exact, kind="stable")
            assert np.array_equal(scores.top_token_ids[row], order[:num_tops])
            np.testing.assert_allclose(scores.top_logprobs[row], exact[order[:num_tops]], atol=2e-5, rtol=0)
            rest = np.log(np.exp(exact[order[num_tops:]]).sum()) if num_tops < 1000 else -np.inf
            np.testing.assert_allclose(scores.log_rests[row], rest, atol=1e-4, rtol=0)
    asked = np.arange(4 * 7, dtype=np.int32).reshape(4, 7) * 35 % 1000
    kind, rows = ScoreKind(num_asked=7), block_rows(jnp.asarray(logits))
    scores = given_scores(
        rows, jnp.asarray(given), jnp.asarray(temperatures), kind, jnp.asarray(asked), vocab_size=1000
    )
    for row in range(4):
        exact = exact_logprobs(logits[row], temperatures[row])
        np.testing.assert_allclose(scores.asked_logprobs[row], exact[asked[row]], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("logprobs_mode", "mode"),
    [
        ("raw_logprobs", SampleMode.SCORED),
        ("processed_logprobs", SampleMode.FULL),
        pytest.param("raw_logprobs", SampleMode.FULL, marks=pytest.mark.slow),
        pytest.param("processed_logprobs", SampleMode.SCORED, marks=pytest.mark.slow),
    ],
)
def test_a_static_sampler_gives_the_same_without_a_branch_or_a_loop_of_unknown_length(logprobs_mode, mode):
    """A GPU's host would have to read each condition."""
    rules = [full_rules(rule, 1000) for rule in RULES.values()] + [GREEDY_ROW]
    logits, rows = jnp.asarray(make_logits(len(rules), 1000, seed=14)), make_rows(rules, output_index=3)
    settings = SampleSettings(max_logprobs=4, logprobs_mode=logprobs_mode)
    one, other = (run(logits, rows, mode, replace(settings, control_flow=each)) for each in (DYNAMIC, STATIC))
    for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    lowered = run.lower(logits, rows, mode, replace(settings, control_flow=STATIC))
    hlo = lowered.compile().as_text()
    assert " conditional(" not in hlo
    loops = [line for line in hlo.splitlines() if " while(" in line]
    assert all("known_trip_count" in line for line in loops), loops


def test_greedy_rows_are_not_truncated():
    """Else padding rows, which are all zeros, top-p 0 included, would have every step search thresholds for them."""
    rules = [{**full_rules(rule, 1000), "temperature": 0.0} for rule in [*RULES.values(), {"top_p": 0.0}]]
    logits = make_logits(len(rules), 1000, seed=15)
    settings = SampleSettings(max_logprobs=8, logprobs_mode="processed_logprobs")
    scores = run(jnp.asarray(logits), make_rows(rules), SampleMode.FULL, settings).scores
    plain = run(jnp.asarray(logits), make_rows([GREEDY_ROW] * len(rules)), SampleMode.FULL, settings).scores
    assert np.array_equal(scores.top_logprobs, plain.top_logprobs)


def test_what_a_row_keeps_does_not_depend_on_rows_whose_likely_tokens_do_not_suffice():
    """Bit for bit, though their neighbours make the sampler read whole rows."""
    rules = [full_rules(RULES[name], 49152) for name in ("all", "top-p 0.5", "top-p 0.999", "top-k 7", "min-p 0.02")]
    logits = make_logits(len(rules), 49152, seed=16)
    logits -= logits.max(axis=1, keepdims=True)
    found = {}
    for name, neighbours in {"alike": logits, "flat": np.zeros_like(logits)}.items():
        weights, kept = truncated(np.concatenate([logits, neighbours]), make_rows(rules * 2), DYNAMIC)
        found[name] = np.asarray(weights >= kept.threshold[:, None])[:5], np.asarray(kept.block_sums)[:5]
    assert found["flat"][0][0].sum() < 100
    jax.tree.map(np.testing.assert_array_equal, found["alike"], found["flat"])


@pytest.mark.parametrize("vocab_size", [pytest.param(49_152, marks=pytest.mark.slow), 151_936])
def test_the_masses_and_the_logprobs_of_a_row_do_not_depend_on_the_number_of_rows(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.random((16, vocab_size)), jnp.float32)
    thresholds = jnp.tile(jnp.asarray([0.1, 0.2, 0.3], jnp.float32), (16, 1))

    @jax.jit
    def results(weights: jax.Array, thresholds: jax.Array) -> list[jax.Array]:
        logits, first_ids = block_rows(jnp.log(weights)), jnp.zeros(len(weights), jnp.int32)
        kind = ScoreKind(num_tops=2)
        scores = given_scores(logits, first_ids, thresholds[:, 0], kind, None, vocab_size=vocab_size)
        return [kept_counts_and_masses(weights, thresholds)[1], scores.logprobs, scores.log_rests]

    together = results(weights, thresholds)
    for num_rows in (1, 2, 3, 8):
        for found, wanted in zip(results(weights[:num_rows], thresholds[:num_rows]), together, strict=True):
            np.testing.assert_array_equal(found, wanted[:num_rows])
