"""The default model with several samples a prompt, forks, swapping and preemption: each sample as if it were alone.

Alone means: one sequence with that sample index, in an engine with room for everything, replaying its own tokens
up to the fork without sharing a page. Sampled, not greedy: an index, a seed or a position that got lost shows.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine, InvalidRequestError, RequestOutput, SamplingParams
from jpaged.request import make_request

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())
PROMPTS: list[list[int]] = [item["prompt_ids"][:40] for item in GOLDEN["items"]][:6]
Z = 8
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": Z, "num_blocks": 257
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, ignore_eos=True, seed=11)


ONE_BY_ONE: dict[str, Any] = {"async_scheduling": False, "num_decode_steps": 1}
MODES: dict[str, dict[str, Any]] = {
    "one step after another": ONE_BY_ONE,
    "one step ahead": {"num_decode_steps": 1},
    "several tokens a step": {"async_scheduling": False, "num_decode_steps": 5},
    "both": {},
}
SLOW_MODES = "one step ahead", "several tokens a step"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_MODES)) for name in MODES]
)
def sizes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SIZES | MODES[request.param]


@pytest.fixture(scope="module")
def roomy(sizes: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def solo() -> Iterator[Engine]:
    with Engine(**SIZES, **ONE_BY_ONE) as engine:
        yield engine


def is_one_by_one(engine: Engine) -> bool:
    """Counts of steps and copies are told of this mode; the others have as many tokens, in other steps."""
    return not engine.config.async_scheduling and engine.config.num_decode_steps == 1


@pytest.fixture(scope="module")
def alone(solo: Engine) -> Any:
    """Output tokens of one sample by itself, from the output tokens `before` on; computed once each."""
    known: dict[Any, tuple[int, ...]] = {}

    def run(prompt: list[int], index: int = 0, before: tuple[int, ...] = (), params: SamplingParams = PARAMS) -> Any:
        key = (tuple(prompt), index, before, params.seed)
        if key not in known:
            request = make_request(
                request_id="alone",
                number=0,
                prompt_token_ids=prompt,
                params=replace(params, n=1),
                arrival_time=0.0,
                max_tokens=params.max_tokens or 0,
                engine_seed=0,
                num_groups=1,
                sample_indices=[index],
            )
            sequence = request.sequences[0]
            sequence.token_ids.extend(before)
            sequence.num_tokens = len(sequence.token_ids)
            solo.reset_prefix_cache()
            (output,) = solo.run_until_done([request])
            assert output.metrics.num_cached_tokens == 0
            known[key] = output.outputs[0].token_ids
        return known[key]

    return run


def check_everything_came_back(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats["blocks_used"], stats["host_blocks_used"], stats["requests"], stats["recompiles"]) == (0, 0, 0, 0)
    assert len(engine.scheduler.free_slots) == engine.sizes.max_num_seqs
    pools = engine.blocks.device, engine.blocks.host
    assert all(pool.num_free == pool.num_usable and not any(pool.ref_counts) for pool in pools)


@pytest.mark.parametrize(
    "num_prompt_tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2 * Z - 1, 2 * Z)), 2 * Z + 1]
)
def test_four_samples_share_a_prompt_and_draw_as_each_alone(roomy: Engine, alone: Any, num_prompt_tokens: int) -> None:
    prompt = PROMPTS[0][:num_prompt_tokens]
    before = roomy.stats()
    roomy.reset_prefix_cache()
    (output,) = roomy.generate([prompt], replace(PARAMS, n=4), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert [completion.token_ids for completion in output.outputs] == [alone(prompt, index) for index in range(4)]
    assert len({completion.token_ids for completion in output.outputs}) == 4
    after = roomy.stats()
    # The prompt is computed once; a half-filled last page is copied by all but the last who writes it.
    assert after["step_tokens"] - before["step_tokens"] >= num_prompt_tokens + 4 * 31
    assert after["copies"] - before["copies"] == (3 if num_prompt_tokens % Z else 0)
    check_everything_came_back(roomy)


def test_shared_prompt_pages_are_taken_once(sizes: dict[str, Any]) -> None:
    with Engine(**sizes, enable_prefix_caching=False) as engine:
        engine.generate([PROMPTS[0][: 2 * Z + 1]], replace(PARAMS, n=4), use_tqdm=False)
        # 17 prompt tokens and 31 computed outputs: 6 pages each, the first 2 of which are shared.
        assert engine.stats()["peak_blocks_used"] == 2 + 4 * 4
        if is_one_by_one(engine):
            assert engine.stats()["steps"] == 32
        check_everything_came_back(engine)


@pytest.mark.parametrize(
    "num_tokens", [2 * Z, 2 * Z + 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2 * Z - 1, 2 * Z + 2))]
)
def test_a_fork_draws_as_it_would_alone(roomy: Engine, alone: Any, num_tokens: int) -> None:
    """Forked when prompt and output count so many tokens, the last of which is not yet computed."""
    prompt = PROMPTS[1][:10]
    before = roomy.stats()["copies"]
    roomy.add_request("a", prompt, PARAMS)
    seen: list[RequestOutput] = []
    while not seen or 10 + len(seen[-1].outputs[0].token_ids) < num_tokens:
        seen = roomy.step()
    so_far = seen[-1].outputs[0].token_ids
    assert roomy.fork("a", 2) == [1, 2]
    assert roomy.fork("a", sample=1, sample_indices=[7]) == [7]
    (output,) = roomy.run_until_done()
    drawn = {completion.index: completion.token_ids for completion in output.outputs}
    assert drawn == {0: alone(prompt)} | {index: alone(prompt, index, so_far) for index in (1, 2, 7)}
    assert len(set(drawn.values())) == 4
    # Four write the page that the last computed token half fills: three copies, or none where it is full.
    if is_one_by_one(roomy):
        assert roomy.stats()["copies"] - before == (0 if (num_tokens - 1) % Z == 0 else 3)
    check_everything_came_back(roomy)


def test_a_fork_of_a_request_that_waits_starts_with_it(roomy: Engine, alone: Any) -> None:
    roomy.add_request("a", PROMPTS[2], PARAMS)
    assert roomy.fork("a") == [1]
    (output,) = roomy.run_until_done()
    assert [one.token_ids for one in output.outputs] == [alone(PROMPTS[2], index) for index in (0, 1)]
    check_everything_came_back(roomy)


def test_a_fork_that_cannot_be_is_refused_and_the_request_goes_on(roomy: Engine, alone: Any) -> None:
    roomy.add_request("a", PROMPTS[1], PARAMS)
    roomy.step()
    for wrong, param in [
        (lambda: roomy.fork("b"), "request_id"),
        (lambda: roomy.fork("a", 0), "n"),
        (lambda: roomy.fork("a", 8), "n"),
        (lambda: roomy.fork("a", sample=3), "sample"),
        (lambda: roomy.fork("a", 2, sample_indices=[1]), "sample_indices"),
        (lambda: roomy.fork("a", 1, sample_indices=[0]), "sample_indices"),
        (lambda: roomy.fork("a", 1, sample_indices=[-1]), "sample_indices"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            wrong()
        assert caught.value.param == param
        assert "allowed" in str(caught.value) or "fork fewer" in str(caught.value)
    (output,) = roomy.run_until_done()
    assert [one.token_ids for one in output.outputs] == [alone(PROMPTS[1])]


# Six prompts with 32 tokens of output need 50 pages; there are 24.
POOL = {"num_blocks": 25}
SWAP_CASES = {
    "no host pool": ({"num_host_blocks": 0}, {"recompute"}),
    "a host pool of one page": ({"num_host_blocks": 2, "preemption_mode": "swap"}, {"recompute"}),
    "a host pool of half of what is needed": ({"num_host_blocks": 9, "preemption_mode": "swap"}, {"recompute", "swap"}),
    "a host pool with plenty": ({"num_host_blocks": 201, "preemption_mode": "swap"}, {"swap"}),
    "recompute beside a host pool": ({"num_host_blocks": 201, "preemption_mode": "recompute"}, {"recompute"}),
}


SLOW_CASES = "no host pool", "a host pool with plenty", "a host pool of one page", "recompute beside a host pool"


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW_CASES))
        for name, case in SWAP_CASES.items()
    ],
)
def test_whoever_is_preempted_draws_as_alone(
    sizes: dict[str, Any], alone: Any, options: dict[str, Any], modes: set[str]
) -> None:
    with Engine(**sizes | POOL | options, enable_prefix_caching=False) as engine:
        for n in (1, 2):
            outputs = engine.generate(PROMPTS, replace(PARAMS, n=n), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert [one.token_ids for one in output.outputs] == [alone(prompt, index) for index in range(n)]
            check_everything_came_back(engine)
        stats = engine.stats()
        assert {mode for mode in ("recompute", "swap") if stats[f"preemptions_{mode}"]} == modes
        assert sum(output.metrics.num_swaps for output in outputs) <= stats["preemptions_swap"]
        page_bytes = engine.runner.state.cache.layout.page_bytes
        assert stats["swap_bytes"] % page_bytes == 0
        assert (stats["swap_bytes"] > 0) == ("swap" in modes)
        if modes == {"swap"}:
            # Everything that went out came back.
            assert engine.runner.swap_out_bytes == engine.runner.swap_in_bytes > 0
        if "recompute" in modes and options.get("preemption_mode") == "swap":
            assert engine.blocks.store.counts["host_pool_full"] > 0


def test_auto_chooses_by_what_was_measured_and_says_why(
    sizes: dict[str, Any], alone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="jpaged")
    with Engine(**sizes | POOL, num_host_blocks=201, preemption_mode="auto") as engine:
        costs = engine.scheduler.preemption.costs
        assert costs is not None
        assert costs.swap_bytes_per_s > 1e6
        assert 1e-6 < costs.prefill_s_per_token < 1.0
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [alone(prompt) for prompt in PROMPTS]
        assert engine.stats()["preemptions"] > 0
        reasons = [record.message for record in caplog.records if "is preempted by" in record.message]
        assert len(reasons) == engine.stats()["preemptions"]
        assert all("ms" in reason or "nothing is computed" in reason for reason in reasons)
        check_everything_came_back(engine)


def test_evicted_prefixes_come_back_from_the_host_pool(sizes: dict[str, Any], alone: Any) -> None:
    with Engine(**sizes | POOL, num_host_blocks=101) as engine:
        first = engine.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0]
        engine.generate(PROMPTS[1:], PARAMS, use_tqdm=False)
        before = engine.stats()["swap_bytes"]
        again = engine.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0]
        assert engine.blocks.store.counts["come_back"] > 0
        assert engine.stats()["swap_bytes"] > before
        assert again.num_cached_tokens == (len(PROMPTS[0]) - 1) // Z * Z
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == alone(PROMPTS[0])
        check_everything_came_back(engine)


def test_a_pinned_prefix_outlives_others_and_a_reset(sizes: dict[str, Any], alone: Any) -> None:
    with Engine(**sizes | POOL) as engine:
        prompt = PROMPTS[0][:24]
        assert engine.pin_prefix(prompt) == 0
        engine.generate([prompt], replace(PARAMS, max_tokens=1), use_tqdm=False)
        engine.generate([[*prompt, 5]], replace(PARAMS, max_tokens=1), use_tqdm=False)
        assert engine.blocks.device.num_used == 3
        engine.generate(PROMPTS[1:], PARAMS, use_tqdm=False)
        longer = [*prompt, *PROMPTS[3][:8]]
        output = engine.generate([longer], PARAMS, use_tqdm=False)[0]
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (24, alone(longer))
        engine.reset_prefix_cache()
        assert engine.blocks.device.num_used == 0
        engine.generate([[*prompt, 5]], replace(PARAMS, max_tokens=1), use_tqdm=False)
        assert engine.blocks.device.num_used == 3
        engine.unpin_prefix(prompt)
        check_everything_came_back(engine)
        with pytest.raises(InvalidRequestError, match="not pinned"):
            engine.unpin_prefix(prompt)
        # A request that may still need 16 pages of the 24 leaves 8 for pins.
        engine.add_request("a", [7] * 90, replace(PARAMS, max_tokens=38))
        assert engine.pin_prefix([9] * 8 * Z) == 0
        with pytest.raises(InvalidRequestError, match="must be left for requests"):
            engine.pin_prefix([8] * Z)
        with pytest.raises(InvalidRequestError, match="a full page"):
            engine.pin_prefix([8] * (Z - 1))
