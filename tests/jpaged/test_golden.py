"""The default model against transformers with torch in float32 (golden file): same tokens, same logprobs.

Every variant runs the same prompts another way, and proves by a counter that it really went that way.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine, RequestOutput, SamplingParams

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())
ITEMS = GOLDEN["items"]
# Torch sums in another order: a smaller gap than this between the two likeliest tokens may fall either way.
DECIDED_MARGIN = 1e-3
LOGPROB_TOLERANCE = 1e-3
PARAMS = SamplingParams(temperature=0.0, max_tokens=GOLDEN["max_new_tokens"], logprobs=0)
SIZES: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256, "num_blocks": 257}


def run(engine: Engine, items: list[dict[str, Any]]) -> list[RequestOutput]:
    outputs = engine.generate([item["prompt_ids"] for item in items], PARAMS, use_tqdm=False)
    assert engine.stats()["blocks_used"] == 0, "every page came back"
    assert engine.stats()["recompiles"] == 0
    return outputs


def check(outputs: list[RequestOutput], items: list[dict[str, Any]]) -> None:
    for output, item in zip(outputs, items, strict=True):
        completion = output.outputs[0]
        assert all(margin > DECIDED_MARGIN for margin in item["top1_margin"]), "no position here is excused"
        assert list(completion.token_ids) == item["output_ids"]
        assert completion.finish_reason == item["finish"]
        assert completion.logprobs is not None
        ours = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert ours == pytest.approx(item["logprobs"], abs=LOGPROB_TOLERANCE)


def expected_peak_pages(items: list[dict[str, Any]], block_size: int) -> int:
    """If all prompts start in one step; a request holds pages for its prompt and all outputs but the last."""

    def held(item: dict[str, Any], step: int) -> int:
        is_alive = step < len(item["output_ids"])
        return -(-(len(item["prompt_ids"]) + step) // block_size) if is_alive else 0

    return max(sum(held(item, step) for item in items) for step in range(GOLDEN["max_new_tokens"]))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(**SIZES) as engine:
        yield engine


def test_all_at_once(engine: Engine) -> None:
    check(run(engine, ITEMS), ITEMS)
    num_steps = max(len(item["output_ids"]) for item in ITEMS)
    assert engine.stats()["steps"] <= num_steps + 1, "they shared every step; one more was under way at the end"


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_one_at_a_time(engine: Engine, every: int) -> None:
    before = engine.stats()["steps"]
    items = ITEMS[::every]
    for item in items:
        check(run(engine, [item]), [item])
    num_steps = sum(len(item["output_ids"]) for item in items)
    # Where an end was drawn, the step after it was already under way.
    assert num_steps <= engine.stats()["steps"] - before <= num_steps + len(items)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_several_tokens_a_dispatch(async_scheduling: bool) -> None:
    """Where nobody wants logprobs: they are read token by token."""
    params = replace(PARAMS, logprobs=None)
    with Engine(**SIZES, async_scheduling=async_scheduling) as engine:
        outputs = engine.generate([item["prompt_ids"] for item in ITEMS], params, use_tqdm=False)
        for output, item in zip(outputs, ITEMS, strict=True):
            assert list(output.outputs[0].token_ids) == item["output_ids"]
            assert output.outputs[0].finish_reason == item["finish"]
        # Of 64 tokens; the prompts take three steps.
        assert engine.stats()["steps"] < 20


def test_text_is_that_of_transformers(engine: Engine) -> None:
    chats = [item for item in ITEMS if item["kind"] == "chat"]
    outputs = engine.chat([item["messages"] for item in chats], PARAMS, use_tqdm=False)
    for output, item in zip(outputs, chats, strict=True):
        assert list(output.prompt_token_ids) == item["prompt_ids"]
        assert output.outputs[0].text == item["output_text"].removesuffix("<|im_end|>")


def test_in_chunks_of_16() -> None:
    with Engine(**SIZES | {"max_num_batched_tokens": 16, "enable_prefix_caching": False}) as engine:
        check(run(engine, ITEMS), ITEMS)
        num_prompt_tokens = sum(len(item["prompt_ids"]) for item in ITEMS)
        assert engine.stats()["prefill_chunks"] > len(ITEMS)
        assert engine.stats()["steps"] >= num_prompt_tokens / 16


@pytest.mark.parametrize("block_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (8, 16)), 32])
def test_page_sizes_and_a_warm_prefix_cache(block_size: int) -> None:
    with Engine(**SIZES, block_size=block_size) as engine:
        check(run(engine, ITEMS), ITEMS)
        cold_hits = engine.stats()["prefix_cache_hits"]
        warm = run(engine, ITEMS)
        check(warm, ITEMS)
        for output, item in zip(warm, ITEMS, strict=True):
            # Never the whole prompt: its last token has to be computed for the logits.
            assert output.num_cached_tokens == (len(item["prompt_ids"]) - 1) // block_size * block_size
        num_hits = engine.stats()["prefix_cache_hits"] - cold_hits
        assert num_hits == sum(output.num_cached_tokens for output in warm) > 0


@pytest.mark.parametrize("block_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (8, 16)), 32])
def test_no_more_pages_are_held_than_tokens_need(block_size: int) -> None:
    """Where no prompt is cut or waits for a prefix of another one, and no step runs ahead."""
    items = [item for item in ITEMS if len(item["prompt_ids"]) < 60]
    assert 128 < sum(len(item["prompt_ids"]) for item in items) <= 256, "all prompts in one step, which they fill"
    with Engine(**SIZES, block_size=block_size, enable_prefix_caching=False, async_scheduling=False) as engine:
        check(run(engine, items), items)
        assert engine.stats()["peak_blocks_used"] == expected_peak_pages(items, block_size)


def test_a_pool_so_small_that_requests_are_preempted() -> None:
    with Engine(**SIZES | {"num_blocks": 33, "max_model_len": 128}, block_size=8) as engine:
        outputs = run(engine, ITEMS)
        check(outputs, ITEMS)
        assert engine.stats()["preemptions"] > 0
        assert sum(output.metrics.num_preemptions for output in outputs) == engine.stats()["preemptions"]
        assert engine.stats()["peak_blocks_used"] <= 32
