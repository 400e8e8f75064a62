"""One step ahead and several tokens a dispatch: when steps are dispatched and read, and that no token depends on it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine, EngineConfig, SamplingParams, assembly
from jpaged.buckets import make_buckets
from jpaged.runner import StepOutputs
from jpaged.sampling_params import SampleMode
from jpaged.sizing import Demand

from .tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=49, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.2, top_p=0.9, max_tokens=49, ignore_eos=True, seed=3)
SIZES: dict[str, Any] = {"max_num_seqs": 8, "block_size": 16, "max_model_len": 256}
PROMPTS = [[20 + index] * (3 + 7 * index) for index in range(5)]
MODES: dict[str, dict[str, Any]] = {
    "one after another": {"async_scheduling": False, "num_decode_steps": 1},
    "one ahead": {"num_decode_steps": 1},
    "three tokens": {"async_scheduling": False, "num_decode_steps": 3},
    "auto": {},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@dataclass(frozen=True)
class Noted:
    """Results that say when they are read."""

    outputs: StepOutputs
    number: int
    events: list[tuple[str, int]]

    def read(self) -> Any:
        self.events.append(("read", self.number))
        return self.outputs.read()


@contextmanager
def traced(engine: Engine) -> Iterator[list[tuple[str, int]]]:
    """What the engine's runner is asked, in order."""
    events: list[tuple[str, int]] = []
    dispatch = engine.runner.dispatch

    def noted(step: Any) -> Any:
        number = sum(kind == "dispatch" for kind, _ in events)
        events.append(("dispatch", number))
        return Noted(dispatch(step), number, events)

    engine.runner.dispatch = noted  # type: ignore[method-assign, assignment]
    yield events
    engine.runner.dispatch = dispatch  # type: ignore[method-assign]


def tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def test_every_mode_gives_the_same_tokens(tiny: str) -> None:
    """Greedy and drawn rows, samples of one prompt, ends by length, by token and by text, more requests than rows."""
    ends = replace(DRAWN, ignore_eos=False, stop_token_ids=(100, 101, 102, 103, 104, 105), stop=["e"], temperature=1.5)
    params = [GREEDY, replace(DRAWN, n=3), replace(GREEDY, max_tokens=7), ends, replace(ends, seed=8, max_tokens=200)]
    found = {}
    for name, options in MODES.items():
        with Engine(tiny, **SIZES, **options) as engine:
            outputs = engine.generate(PROMPTS * 3, params * 3, use_tqdm=False)
            found[name] = tokens(outputs), [one.finish_reason for output in outputs for one in output.outputs]
            assert engine.stats()["blocks_used"] == engine.stats()["recompiles"] == 0
    assert {reason for reason in found["auto"][1]} == {"length", "stop"}
    assert all(each == found["one after another"] for each in found.values())


@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_a_step_is_dispatched_before_the_one_before_it_is_read(tiny: str, num_decode_steps: int) -> None:
    with Engine(tiny, **SIZES, num_decode_steps=num_decode_steps) as engine, traced(engine) as events:
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        last = max(number for _, number in events)
        for number in range(last):
            assert events.index(("dispatch", number + 1)) < events.index(("read", number))
        assert [number for kind, number in events if kind == "read"] == list(range(last + 1))


def test_without_async_scheduling_each_step_is_read_before_the_next(tiny: str) -> None:
    with Engine(tiny, **SIZES, async_scheduling=False) as engine, traced(engine) as events:
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert events == [(kind, number) for number in range(len(events) // 2) for kind in ("dispatch", "read")]


@pytest.mark.parametrize(("num_decode_steps", "most"), [(2, 24), (4, 12), (16, 3), ("auto", 3)])
def test_decoding_takes_a_dispatch_for_so_many_tokens(tiny: str, num_decode_steps: Any, most: int) -> None:
    """One for the prompts and 48 tokens of each sequence behind the first one."""
    with Engine(tiny, **SIZES, num_decode_steps=num_decode_steps) as engine, traced(engine) as events:
        engine.generate([[20 + index] * 9 for index in range(5)], GREEDY, use_tqdm=False)
        assert sum(kind == "dispatch" for kind, _ in events) == 1 + most


@pytest.mark.parametrize("max_num_seqs", [1, 8, 9])
def test_few_sequences_decode_in_the_smallest_bucket_of_a_device(
    tiny: str, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has more tokens than there are sequences."""
    sizes = SIZES | {"max_num_seqs": max_num_seqs}
    prompts = PROMPTS[:max_num_seqs]
    with Engine(tiny, **sizes) as engine:
        wanted = tokens(engine.generate(prompts, GREEDY, use_tqdm=False))
    monkeypatch.setattr(assembly, "make_buckets", lambda **options: make_buckets(**options | {"platform": "tpu"}))
    with Engine(tiny, **sizes) as engine:
        assert tokens(engine.generate(prompts, GREEDY, use_tqdm=False)) == wanted
        assert engine.stats()["steps"] < 20, "several tokens each"


def test_rows_that_end_leave_a_bucket_that_the_others_need_not_fill(tiny: str) -> None:
    """Nine rows, of which eight end after five tokens: the ninth goes on alone, in a smaller bucket."""
    with Engine(tiny, **SIZES | {"max_num_seqs": 16}) as engine:
        shapes = []
        dispatch = engine.runner.dispatch

        def noted(step: Any) -> Any:
            shapes.append((step.layout.num_tokens, max(step.draws, default=1)))
            return dispatch(step)

        engine.runner.dispatch = noted  # type: ignore[method-assign]
        params = [replace(GREEDY, max_tokens=6)] * 8 + [replace(GREEDY, max_tokens=22)]
        engine.generate([[20 + index] for index in range(9)], params, use_tqdm=False)
        assert shapes == [(16, 1), (16, 5), (1, 16)]


def test_an_end_that_the_device_draws_stops_its_loop(tiny: str) -> None:
    """Tokens behind a stop are neither computed nor shown; the next dispatch, which was under way, does nothing."""
    with Engine(tiny, **SIZES) as engine:
        (free,) = tokens(engine.generate([PROMPTS[1]], DRAWN, use_tqdm=False))
        stop = next(token for token in free[3:] if free.index(token) >= 3)
        place = free.index(stop)
        seen = []
        take_in = engine.core._take_in_several

        def noted(step: Any, sampled: Any) -> None:
            seen.append(sampled.token_ids[:, 0].tolist())
            take_in(step, sampled)

        engine.core._take_in_several = noted  # type: ignore[method-assign]
        (ended,) = tokens(engine.generate([PROMPTS[1]], replace(DRAWN, stop_token_ids=(stop,)), use_tqdm=False))
        assert ended == free[: place + 1]
        drawn = [token for step in seen for token in step if token]
        assert drawn == list(free[1 : place + 1])


def test_what_waits_is_served_before_anybody_decodes_on(tiny: str) -> None:
    with Engine(tiny, **SIZES | {"max_num_seqs": 2}) as engine:
        lens = []
        dispatch = engine.runner.dispatch

        def noted(step: Any) -> Any:
            lens.append((len(engine.scheduler.waiting), max(step.draws, default=1)))
            return dispatch(step)

        engine.runner.dispatch = noted  # type: ignore[method-assign]
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert {steps for waiting, steps in lens if waiting} == {1}
        assert max(steps for _, steps in lens) == 16


def test_logprobs_are_read_token_by_token(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine, traced(engine) as events:
        (output,) = engine.generate([PROMPTS[0]], replace(GREEDY, logprobs=2), use_tqdm=False)
        assert len(output.outputs[0].logprobs) == 49
        assert sum(kind == "dispatch" for kind, _ in events) == 49


def test_pages_ahead_are_not_taken_from_others(tiny: str) -> None:
    """Two sequences in a pool that holds both to their ends, with no page to spare: nobody gives way."""
    params = replace(GREEDY, max_tokens=33)
    with Engine(tiny, **SIZES | {"max_model_len": 96}, num_blocks=7, enable_prefix_caching=False) as engine:
        wanted = [tokens(engine.generate([prompt], params, use_tqdm=False))[0] for prompt in PROMPTS[:2]]
        assert tokens(engine.generate(PROMPTS[:2], params, use_tqdm=False)) == wanted
        assert engine.stats()["preemptions"] == 0
        assert engine.stats()["peak_blocks_used"] == 6


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_abort_with_steps_under_way_changes_nobody_else(tiny: str, num_steps: int) -> None:
    with Engine(tiny, **SIZES) as engine:
        wanted = tokens(engine.generate(PROMPTS[:2], DRAWN, use_tqdm=False))
        for index in range(2):
            engine.add_request(str(index), PROMPTS[index], DRAWN)
        for _ in range(num_steps):
            engine.step()
        engine.abort_request("0")
        outputs = list(engine.run_until_done())
        assert tokens(outputs) == wanted[1:]
        assert engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("what", ["dispatch", "read"])
def test_a_step_that_fails_costs_no_token(tiny: str, what: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        wanted = tokens(engine.generate(PROMPTS, DRAWN, use_tqdm=False))
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, DRAWN)
        dispatch, left = engine.runner.dispatch, [2]

        def failing(step: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and what == "dispatch":
                raise RuntimeError("a fault")
            outputs = dispatch(step)
            if left[0] == 0:
                outputs.sampled.token_ids.delete()
            return outputs

        engine.runner.dispatch = failing  # type: ignore[method-assign]
        found = {}
        for _ in range(30):
            with suppress(RuntimeError):
                found.update({output.request_id: output for output in engine.step()})
        assert left[0] < 0
        assert tokens([found[str(index)] for index in range(len(PROMPTS))]) == wanted


def test_warmup_full_compiles_the_plan_at_start_and_off_nothing(tmp_path: Path) -> None:
    tiny = str(write_tiny_model(tmp_path))
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
    with Engine(tiny, **sizes, warmup="full") as engine:
        stats = engine.stats()
        assert stats["executables"] == stats["planned_executables"] > 10
    with Engine(tiny, **sizes, warmup="off") as engine:
        assert engine.stats()["executables"] == 1, "what allocates the cache"
        engine.generate([[5, 6, 7]], replace(GREEDY, max_tokens=2), use_tqdm=False)
        # The prompt's bucket, its sampler, and the second token's.
        assert engine.stats()["executables"] <= 4


def test_the_first_token_does_not_wait_for_executables_of_later_steps(tiny: str) -> None:
    """They are compiled behind it: no step is dispatched ahead that would have to wait for one."""
    with Engine(tiny, **SIZES) as engine, traced(engine) as events:
        engine.runner.plan.start_later([("decode", 8)])
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
        while not (outputs := engine.step()):
            pass
        assert outputs[0].outputs[0].token_ids
        assert events == [("dispatch", 0), ("read", 0)]
        engine.runner.plan.wait()
        while engine.has_unfinished_requests():
            engine.step()


@pytest.mark.parametrize(
    ("prompt_len", "options"),
    [(80, {}), (150, {}), (250, {}), (90, {"enable_chunked_prefill": False}), (200, {"max_num_batched_tokens": 64})],
)
def test_a_known_prompt_waits_for_nothing_that_was_not_begun_at_the_start(
    tiny: str, prompt_len: int, options: dict[str, Any]
) -> None:
    """A step leaves tokens to the next one rather than fill half of a larger bucket: what it takes is compiled."""
    config = EngineConfig(model=tiny, max_num_seqs=1, block_size=16, max_model_len=256, **options)
    demands, modes = [Demand(prompt_len, 2)], [SampleMode.GREEDY]
    with Engine.from_engine_args(config, demands=demands, modes=modes) as engine:
        plan = engine.runner.plan
        plan.wait()
        begun, waited = plan.num_compiled, plan.waited_seconds
        engine.add_request("a", {"prompt_token_ids": [5] * prompt_len}, replace(GREEDY, max_tokens=2))
        while not engine.step():
            pass
        assert plan.waited_seconds == waited
        assert begun <= 5, "not everything there is"
