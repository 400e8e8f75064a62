"""Batch invariance: whole on a model of two layers with wide gaps, and a covering array on the default model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from jpaged import SamplingParams
from jpaged.models.layers import WeightMaker
from jpaged.models.loading import abstract_weights

from .batch_invariance import (
    DIMENSIONS,
    KINDS,
    MAX_TOKENS,
    OF_ENGINE,
    Bench,
    Comparison,
    Solo,
    all_cases,
    covering_cases,
)
from .tiny_model import CONFIG, write_tiny_model

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "max_model_len": 128}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(str(write_tiny_model(tmp_path_factory.mktemp("tiny"))), range(2, CONFIG["vocab_size"]), SIZES)


@pytest.fixture(scope="module")
def solo(tiny: Bench) -> Iterator[Solo]:
    with tiny.solo() as solo:
        yield solo


def run_all(bench: Bench, solo: Solo, cases: Iterator[dict] | list[dict]) -> Comparison:
    """The cases of an engine share it, where they follow one another."""
    comparison = Comparison(solo)
    for _, of_engine in groupby(cases, key=lambda case: [case[name] for name in OF_ENGINE]):
        first, *others = of_engine
        with bench.engine(first) as engine:
            for case in [first, *others]:
                bench.run(engine, case, comparison)
    return comparison


def test_every_pair_of_values_is_in_the_covering_array() -> None:
    cases = covering_cases()
    for one in DIMENSIONS:
        for other in DIMENSIONS:
            if one != other:
                pairs = {(case[one], case[other]) for case in cases}
                assert len(pairs) == len(DIMENSIONS[one]) * len(DIMENSIONS[other])


def test_a_small_model_in_every_pair_of_circumstances(tiny: Bench, solo: Solo) -> None:
    comparison = run_all(tiny, solo, covering_cases())
    comparison.check()
    assert comparison.num_compared > 5_000


@pytest.mark.slow
def test_a_small_model_in_all_circumstances(tiny: Bench, solo: Solo) -> None:
    run_all(tiny, solo, all_cases()).check()


def test_the_comparison_fails_where_a_request_draws_by_its_place(tiny: Bench, solo: Solo) -> None:
    """Negative control: without seeds of their own, requests draw by the order in which they come."""
    unseeded = replace(tiny, given=lambda params: replace(params, seed=None))
    case = {**covering_cases()[0], "neighbours": "kin", "num_requests": 7, "order": "reversed"}
    with pytest.raises(AssertionError, match="sample 0, token 0"):
        run_all(unseeded, solo, [case]).check()


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_comparison_fails_where_a_page_holds_what_is_not_its_prefix(
    tiny: Bench, solo: Solo, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: cached pages are changed between two runs of a batch; times 1 changes nothing."""
    case = {**covering_cases()[0], "neighbours": "kin", "num_requests": 7, "cache": "warm", "block_size": 16}
    comparison = Comparison(solo)
    with tiny.engine(case) as engine:
        monkeypatch.setattr(engine, "reset_prefix_cache", lambda: None)
        tiny.run(engine, case, comparison)
        comparison.check()
        pages = engine.runner.state.cache.pages
        engine.runner._replace_pages(tuple(page * factor for page in pages))
        tiny.run(engine, {**case, "cache": "cold"}, comparison)
    assert bool(comparison.differences) is (factor != 1.0)


def test_logprobs_are_bitwise_equal_within_an_executable(tiny: Bench) -> None:
    """Eight requests always: all sizes of a step are the same, whoever the others are and in which order they come."""
    subject = [5, 9, 40, 77, 9, 5, 120, 33]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=MAX_TOKENS, logprobs=5, ignore_eos=True)
    rng = random.Random(0)
    seen = set()
    with tiny.engine({**covering_cases()[0], "cache": "off"}) as engine:
        for _ in range(10):
            prompts = [rng.choices(tiny.vocab, k=len(subject)) for _ in range(7)]
            place = rng.randrange(8)
            prompts.insert(place, subject)
            others = [replace(params, **{**rng.choice(KINDS), "n": 1, "seed": rng.randrange(99)}) for _ in range(8)]
            each = [params if index == place else other for index, other in enumerate(others)]
            completion = engine.generate(prompts, each, use_tqdm=False)[place].outputs[0]
            entries = [{token: one.logprob for token, one in entry.items()} for entry in completion.logprobs]
            seen.add((completion.token_ids, repr(entries)))
    assert len(seen) == 1


@pytest.fixture(scope="module")
def default() -> Bench:
    """The default model on real text."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())
    text = [token for item in golden["items"] for token in (*item["prompt_ids"], *item["output_ids"])]
    return Bench(None, text, SIZES, is_text=True)


@pytest.mark.slow
def test_the_default_model_in_every_pair_of_circumstances(default: Bench) -> None:
    """Pages of another size are another order in which keys are added up: logprobs of this model move by up to 3e-5."""
    with replace(default, tolerance=1e-4).solo(16) as solo:
        run_all(default, solo, covering_cases()).check()
    for size in DIMENSIONS["block_size"]:
        with default.solo(size) as solo:
            run_all(default, solo, [case for case in covering_cases() if case["block_size"] == size]).check()


def of_one_size(bench: Bench, block_size: int) -> Comparison:
    """The covering array with pages of one size. That is no company: it says how many keys are added up at once."""
    with bench.solo(block_size) as solo:
        return run_all(bench, solo, [{**case, "block_size": block_size} for case in covering_cases()])


ON_DEFAULT = pytest.param("default", 16, marks=pytest.mark.slow)
OTHER_SIZES = [pytest.param("tiny", size, marks=pytest.mark.slow) for size in (8, 32)]


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["as it is on one CPU", "deterministic"])
@pytest.mark.parametrize(("name", "block_size"), [("tiny", 16), *OTHER_SIZES, ON_DEFAULT])
def test_results_have_the_same_bits_in_every_pair_of_circumstances(
    name: str, block_size: int, is_deterministic: bool, request: pytest.FixtureRequest
) -> None:
    """Of tokens, logprobs and prompt logprobs. On one CPU all that adds numbers up is native and has an order of its
    own."""
    bench = replace(request.getfixturevalue(name), is_bitwise=True, is_deterministic=is_deterministic)
    comparison = of_one_size(bench, block_size)
    comparison.check()
    assert comparison.num_excused == 0
    assert comparison.num_compared > 5_000


def test_products_that_round_by_the_number_of_rows_need_deterministic(
    tiny: Bench, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Negative control. On a CPU our own products and norms have the same bits beside any number of rows; XLA's, as any
    device has them, do not."""
    monkeypatch.setattr(WeightMaker, "in_panels", False)
    # Engines before this test have made the same model with them.
    abstract_weights.cache_clear()
    request.addfinalizer(abstract_weights.cache_clear)
    bench = replace(tiny, is_bitwise=True, is_deterministic=True)
    case = {**covering_cases()[0], "num_requests": 64, "neighbours": "kin", "block_size": 16}
    with bench.solo() as solo:
        run_all(bench, solo, [case]).check()
        with pytest.raises(AssertionError, match="token"):
            run_all(replace(bench, is_deterministic=False), solo, [case]).check()
