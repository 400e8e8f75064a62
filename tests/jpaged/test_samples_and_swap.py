"""Several samples per prompt, forks, swapping and preemption: every sample draws what it would draw alone.

Alone means: one sequence with that sample index, in an engine with room for everything, which computes its own tokens
up to the fork and shares no page. Tokens are sampled, not greedy, so that a lost index, seed or position shows.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine, InvalidRequestError, RequestOutput, SamplingParams

from .host_requests import new_request
from .tiny_model import CONFIG, SIZES

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
Z = SIZES["block_size"]
"""Tokens per page."""
PARAMS = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, ignore_eos=True, seed=11)
POOL = {"num_blocks": 25}
"""24 usable pages, where six prompts with 32 output tokens need about 50."""
ONE_BY_ONE: dict[str, Any] = {"async_scheduling": False, "num_decode_steps": 1}
MODES: dict[str, dict[str, Any]] = {
    "one step after another": ONE_BY_ONE,
    "one step ahead": {"num_decode_steps": 1},
    "several tokens a step": {"async_scheduling": False, "num_decode_steps": 5},
    "both": {},
}
Solo = Callable[..., tuple[int, ...]]


def in_worlds(*fast_modes: str) -> pytest.MarkDecorator:
    """Run a test with both models in every mode; only the tiny model in `fast_modes` is part of the fast suite."""
    worlds = [
        pytest.param(
            (model, mode), id=f"{model}, {mode}", marks=[pytest.mark.slow] * (model != "tiny" or mode not in fast_modes)
        )
        for model in ("tiny", "default")
        for mode in MODES
    ]
    return pytest.mark.parametrize("world", worlds, indirect=True)


@dataclass(frozen=True)
class World:
    """A model, six prompts of 36 to 40 tokens for it, and the sizes of its engines."""

    model: str | None
    prompts: list[list[int]]
    sizes: dict[str, Any]

    def engine(self, **options: Any) -> Engine:
        return Engine(self.model, **self.sizes | options)


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tiny: str) -> World:
    model, mode = request.param
    if model == "default":
        golden = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())
        return World(None, [item["prompt_ids"][:40] for item in golden["items"]][:6], SIZES | MODES[mode])
    rng = random.Random(0)
    prompts = [rng.choices(range(2, CONFIG["vocab_size"]), k=rng.randint(36, 40)) for _ in range(6)]
    return World(tiny, prompts, SIZES | MODES[mode])


@pytest.fixture(scope="module")
def roomy(world: World) -> Iterator[Engine]:
    with world.engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def tight(world: World) -> Iterator[Engine]:
    """Give an engine with fewer pages than the prompts need together, and a host pool that has room for all."""
    with world.engine(**POOL, num_host_blocks=101, preemption_mode="swap") as engine:
        yield engine


class SoloEngines(dict[str | None, Solo]):
    """Model → a function that gives the output tokens of one sample alone; each sample is computed once."""

    def __init__(self, stack: ExitStack):
        self.stack = stack

    def __missing__(self, model: str | None) -> Solo:
        engine = self.stack.enter_context(Engine(model, **SIZES, **ONE_BY_ONE))

        @cache
        def tokens_of(prompt: tuple[int, ...], index: int, before: tuple[int, ...]) -> tuple[int, ...]:
            request = new_request(prompt, params=PARAMS, max_tokens=PARAMS.max_tokens or 0, sample_indices=[index])
            sequence = request.sequences[0]
            sequence.token_ids.extend(before)
            sequence.num_tokens = len(sequence.token_ids)
            engine.reset_prefix_cache()
            (output,) = engine.run_until_done([request])
            assert output.metrics.num_cached_tokens == 0
            return output.outputs[0].token_ids

        self[model] = lambda prompt, index=0, before=(): tokens_of(tuple(prompt), index, before)
        return self[model]


@pytest.fixture(scope="module")
def solo_engines() -> Iterator[SoloEngines]:
    with ExitStack() as stack:
        yield SoloEngines(stack)


@pytest.fixture
def solo(world: World, solo_engines: SoloEngines) -> Solo:
    """Return the output tokens of sample `index` of a prompt alone, which goes on behind the output `before`."""
    return solo_engines[world.model]


def is_one_by_one(engine: Engine) -> bool:
    """Return whether steps decode one token and none runs ahead: counts of steps and copies hold only then."""
    return not engine.config.async_scheduling and engine.config.num_decode_steps == 1


def samples(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


def check_everything_came_back(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats["blocks_used"], stats["host_blocks_used"], stats["requests"], stats["recompiles"]) == (0, 0, 0, 0)
    assert len(engine.scheduler.free_slots) == engine.step_sizes.max_num_seqs
    pools = engine.blocks.device, engine.blocks.host
    assert all(pool.num_free == pool.num_usable and not any(pool.ref_counts) for pool in pools)


@in_worlds("both")
@pytest.mark.parametrize("num_prompt_tokens", [2 * Z - 1, 2 * Z, 2 * Z + 1])
def test_four_samples_share_a_prompt_and_draw_as_each_does_alone(
    world: World, roomy: Engine, solo: Solo, num_prompt_tokens: int
) -> None:
    prompt = world.prompts[0][:num_prompt_tokens]
    before = roomy.stats()
    roomy.reset_prefix_cache()
    (output,) = roomy.generate([prompt], replace(PARAMS, n=4), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert samples(output) == [solo(prompt, index) for index in range(4)]
    assert len(set(samples(output))) == 4
    after = roomy.stats()
    # The prompt is computed once; a half-filled last page is copied by all writers but the last.
    assert after["step_tokens"] - before["step_tokens"] >= num_prompt_tokens + 4 * 31
    assert after["copies"] - before["copies"] == (3 if num_prompt_tokens % Z else 0)
    check_everything_came_back(roomy)


@in_worlds("both", "one step after another")
@pytest.mark.parametrize("num_tokens", [2 * Z - 1, 2 * Z, 2 * Z + 1, 2 * Z + 2])
def test_a_fork_draws_as_it_would_alone(world: World, roomy: Engine, solo: Solo, num_tokens: int) -> None:
    """The fork comes when prompt and output have `num_tokens` tokens, the last of which is not yet computed."""
    prompt = world.prompts[1][:10]
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
    assert drawn == {0: solo(prompt)} | {index: solo(prompt, index, so_far) for index in (1, 2, 7)}
    assert len(set(drawn.values())) == 4
    # Four samples write the page that the last computed token half fills: three copies, or none where it is full.
    if is_one_by_one(roomy):
        assert roomy.stats()["copies"] - before == (0 if (num_tokens - 1) % Z == 0 else 3)
    check_everything_came_back(roomy)


def known(outputs: list[RequestOutput]) -> dict[int, tuple[int, ...]]:
    """Return the tokens so far of each sample of one request, by sample index."""
    return {sample.index: sample.token_ids for sample in outputs[-1].outputs}


@in_worlds("both")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_tree_of_forks_draws_what_requests_that_begin_alike_draw(
    world: World, roomy: Engine, solo: Solo, temperature: float
) -> None:
    """Three forks of three, each behind an earlier token and with a first token of its own; parents are pruned."""
    prompt, params = world.prompts[3][:13], replace(PARAMS, temperature=temperature, logprobs=0)
    roomy.add_request("a", prompt, params)
    seen: list[RequestOutput] = []
    while not seen or len(known(seen)[0]) < 6:
        seen = roomy.step()
    begins: dict[int, tuple[int, ...]] = {}
    for at, parent, firsts in ((4, 0, [5, 6, 7]), (9, 1, [8, 9, 10]), (10, 2, [8, 5, 5]), (7, 3, [3, 4, 5])):
        while len(known(seen).get(parent, ())) < at + 1:
            seen = roomy.step() or seen
        before = known(seen)[parent][:at]
        forks = roomy.fork("a", sample=parent, num_output_tokens=at, first_token_ids=firsts)
        begins |= {index: (*before, first) for index, first in zip(forks, firsts, strict=True)}
        for pruned in (parent, parent, *forks[1 : 1 + bool(parent)]):  # The second time changes nothing.
            roomy.abort_request("a", sample=pruned)
    (output,) = roomy.run_until_done()
    ends = {sample.index: sample for sample in output.outputs}
    assert sorted(index for index in ends if ends[index].finish_reason == "abort") == [0, 1, 2, 3, 5, 8, 11]
    kept = {index: sample for index, sample in ends.items() if sample.finish_reason == "length"}
    assert sorted(kept) == [4, 6, 7, 9, 10, 12]
    check_everything_came_back(roomy)
    for index, sample in kept.items():
        begin = begins[index]
        if temperature:
            assert sample.token_ids == solo(prompt, index, begin)
        num_left = PARAMS.max_tokens - len(begin)
        alone = roomy.generate([[*prompt, *begin]], replace(params, max_tokens=num_left), use_tqdm=False)[0].outputs[0]
        scores = roomy.logprobs([*prompt, *sample.token_ids])[len(prompt) - 1 :]
        drawn = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert drawn == pytest.approx(scores.tolist(), abs=1e-4), "the model's logprobs, of given tokens too"
        if not temperature:
            assert sample.token_ids == (*begin, *alone.token_ids)
            assert drawn[len(begin) :] == [
                entry[token].logprob for token, entry in zip(alone.token_ids, alone.logprobs, strict=True)
            ]


@in_worlds("both")
def test_a_fork_of_a_waiting_request_starts_with_it(world: World, roomy: Engine, solo: Solo) -> None:
    roomy.add_request("a", world.prompts[2], PARAMS)
    assert roomy.fork("a") == [1]
    (output,) = roomy.run_until_done()
    assert samples(output) == [solo(world.prompts[2], index) for index in (0, 1)]
    check_everything_came_back(roomy)


SWAP_CASES = {
    "no host pool": ({"num_host_blocks": 0}, {"recompute"}),
    "a host pool of one page": ({"num_host_blocks": 2, "preemption_mode": "swap"}, {"recompute"}),
    "a host pool of half of what is needed": ({"num_host_blocks": 9, "preemption_mode": "swap"}, {"recompute", "swap"}),
    "a host pool with plenty": ({"num_host_blocks": 201, "preemption_mode": "swap"}, {"swap"}),
    "recompute beside a host pool": ({"num_host_blocks": 201, "preemption_mode": "recompute"}, {"recompute"}),
}
FAST_CASE = "a host pool of half of what is needed"


@in_worlds("both")
@pytest.mark.parametrize(
    ("options", "modes"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name != FAST_CASE)) for name, case in SWAP_CASES.items()],
)
def test_a_preempted_request_draws_as_it_would_alone(
    world: World, solo: Solo, options: dict[str, Any], modes: set[str]
) -> None:
    with world.engine(**POOL | options, enable_prefix_caching=False) as engine:
        for n in (1, 2):
            outputs = engine.generate(world.prompts, replace(PARAMS, n=n), use_tqdm=False)
            for prompt, output in zip(world.prompts, outputs, strict=True):
                assert samples(output) == [solo(prompt, index) for index in range(n)]
            check_everything_came_back(engine)
        stats = engine.stats()
        assert {mode for mode in ("recompute", "swap") if stats[f"preemptions_{mode}"]} == modes
        assert sum(output.metrics.num_swaps for output in outputs) <= stats["preemptions_swap"]
        page_bytes = engine.runner.state.cache.layout.page_bytes
        assert stats["swap_bytes"] % page_bytes == 0
        assert (stats["swap_bytes"] > 0) == ("swap" in modes)
        if modes == {"swap"}:
            assert stats["swap_bytes"] % (2 * page_bytes) == 0, "not everything that went out came back"
        if "recompute" in modes and options.get("preemption_mode") == "swap":
            assert engine.blocks.store.counts["host_pool_full"] > 0


@in_worlds("both")
def test_auto_preemption_chooses_by_measured_costs_and_logs_why(
    world: World, solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="jpaged")
    with world.engine(**POOL, num_host_blocks=201, preemption_mode="auto") as engine:
        costs = engine.scheduler.config.preemption.costs
        assert costs is not None
        assert costs.swap_bytes_per_s > 1e6
        assert 1e-6 < costs.prefill_s_per_token < 1.0
        outputs = engine.generate(world.prompts, PARAMS, use_tqdm=False)
        assert [samples(output) for output in outputs] == [[solo(prompt)] for prompt in world.prompts]
        assert engine.stats()["preemptions"] > 0
        reasons = [record.message for record in caplog.records if "is preempted by" in record.message]
        assert len(reasons) == engine.stats()["preemptions"]
        assert all("ms" in reason or "nothing is computed" in reason for reason in reasons)
        check_everything_came_back(engine)


@in_worlds("both")
def test_evicted_prefixes_come_back_from_the_host_pool(world: World, tight: Engine, solo: Solo) -> None:
    prompts = world.prompts
    (first,) = tight.generate([prompts[0]], PARAMS, use_tqdm=False)
    tight.generate(prompts[1:], PARAMS, use_tqdm=False)
    before = tight.stats()["swap_bytes"]
    (again,) = tight.generate([prompts[0]], PARAMS, use_tqdm=False)
    assert tight.blocks.store.counts["host_hit"] > 0
    assert tight.stats()["swap_bytes"] > before
    assert again.num_cached_tokens == (len(prompts[0]) - 1) // Z * Z
    assert samples(first) == samples(again) == [solo(prompts[0])]
    check_everything_came_back(tight)


@in_worlds("both")
def test_a_pinned_prefix_survives_other_requests_and_a_reset(world: World, tight: Engine, solo: Solo) -> None:
    one_token, pages = replace(PARAMS, max_tokens=1), tight.blocks.device
    tight.reset_prefix_cache()
    prompt = world.prompts[0][:24]
    assert tight.pin_prefix(prompt) == 0
    tight.generate([prompt], one_token, use_tqdm=False)
    tight.generate([[*prompt, 5]], one_token, use_tqdm=False)
    assert pages.num_used == 3
    tight.generate(world.prompts[1:], PARAMS, use_tqdm=False)
    longer = [*prompt, *world.prompts[3][:8]]
    (output,) = tight.generate([longer], PARAMS, use_tqdm=False)
    assert (output.num_cached_tokens, samples(output)) == (24, [solo(longer)])
    tight.reset_prefix_cache()
    assert pages.num_used == 0
    tight.generate([[*prompt, 5]], one_token, use_tqdm=False)
    assert pages.num_used == 3
    tight.unpin_prefix(prompt)
    check_everything_came_back(tight)
    with pytest.raises(InvalidRequestError, match="not pinned"):
        tight.unpin_prefix(prompt)
    # A request that may still need 16 pages of the 24 leaves 8 for pins.
    tight.add_request("a", [7] * 90, replace(PARAMS, max_tokens=38))
    assert tight.pin_prefix([9] * 8 * Z) == 0
    with pytest.raises(InvalidRequestError, match="must be left for requests"):
        tight.pin_prefix([8] * Z)
    with pytest.raises(InvalidRequestError, match="a full page"):
        tight.pin_prefix([8] * (Z - 1))
    tight.abort_request("a")
    tight.unpin_prefix([9] * 8 * Z)
