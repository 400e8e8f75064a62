"""A server answers while it compiles: requests wait for what they need alone, and get what they get otherwise."""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from jpaged import Engine, EngineConfig, SamplingParams
from jpaged.errors import EngineStoppedError
from jpaged.sampling.sampling_params import SampleMode
from jpaged.startup import build_engine
from jpaged.step import compile_plan
from jpaged.step.compile_threads import MAX_NICE, NICE
from jpaged.step.pauses import PAUSE_S, Pauses
from jpaged.step.program_choice import ProgramChoice
from jpaged.step.programs import Programs

from .tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables")
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
MORE: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "a penalty": {"presence_penalty": 0.5},
    "prompt logprobs": {"prompt_logprobs": 1},
}
"""Requests for which a server that is just ready lacks a program."""


class Compiler:
    """Says which programs compile: those that are held wait for `release`, and those that fail raise."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.fails = False
        self.num_held = 0
        self.may_go_on = threading.Event()

    def lower(self, key: Any, lower: Any) -> Any:
        self.begun.append(key)
        if key[0] == "score" or SampleMode.FULL in key:
            if self.fails:
                raise MemoryError("no room for the compiler")
            self.num_held += 1
            assert self.may_go_on.wait(60)
            self.num_held -= 1
        return lower()


def watch(monkeypatch: pytest.MonkeyPatch, watched: Callable[[Any, Any], Any]) -> None:
    """Let `watched` lower the programs of engines, given each program's key and the function that lowers it."""
    init = Programs.__init__

    def init_watched(self: Programs, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        for programs in (self.lower, self.lower_masked, self.lower_scores):
            programs.update({key: partial(watched, key, lower) for key, lower in programs.items()})

    monkeypatch.setattr(Programs, "__init__", init_watched)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Hold the programs that plain requests do not need."""
    compiler = Compiler()
    watch(monkeypatch, compiler.lower)
    yield compiler
    compiler.may_go_on.set()


def serving(tiny: str, **options: Any) -> Engine:
    """Return an engine as servers have it."""
    config = EngineConfig(model=tiny, **{**SIZES, "warmup": "lazy", **options})
    return Engine.from_engine_args(config, compiles_behind=True)


def run(engine: Engine, until: Any) -> dict[str, Any]:
    """Step until the requests named in `until` have ended; return all last outputs by request."""
    outputs: dict[str, Any] = {}
    end_s = time.monotonic() + 60
    while not until <= {name for name, output in outputs.items() if output.finished}:
        assert time.monotonic() < end_s
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def results(output: Any) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs


def test_a_server_that_is_ready_has_computed_a_step(tiny: str, compiler: Compiler) -> None:
    """Its hidden states are there, which begin as +0, all bits 0, and nothing of it counts."""
    compiler.may_go_on.set()
    with serving(tiny) as engine:
        assert np.asarray(engine.runner.state.hidden).view(np.int32).any()
        assert engine.stats()["steps"] == engine.stats()["prompt_tokens"] == 0


@pytest.mark.parametrize("name", MORE)
def test_a_request_waits_for_the_program_that_it_lacks_and_no_other_request_does(
    tiny: str, compiler: Compiler, name: str
) -> None:
    params = SamplingParams(**{**GREEDY, **MORE[name]})
    with serving(tiny) as engine:
        waited_s = engine.plan.waited_s
        for index in range(40):
            engine.add_request(f"more {index}", "Hello", params)
        plain = {"greedy": SamplingParams(**GREEDY), "random": SamplingParams(max_tokens=6, seed=1, ignore_eos=True)}
        for key, each in plain.items():
            engine.add_request(key, "Hello", each)
        outputs = run(engine, set(plain))
        assert set(outputs) == set(plain)
        engine.step()
        assert engine.stats()["requests_waiting"] == 40
        done, total = engine.plan.progress
        assert done < total
        compiler.may_go_on.set()
        outputs |= run(engine, {f"more {index}" for index in range(40)})
        assert engine.stats()["recompiles"] == 0
        assert engine.plan.waited_s == waited_s, "no step has waited for a program"
    with Engine(tiny, **SIZES) as engine:
        for key, each in {**plain, "more 7": params}.items():
            assert results(outputs[key]) == results(engine.generate("Hello", each, use_tqdm=False)[0]), key


def test_the_program_that_a_request_waits_for_goes_first(tiny: str, compiler: Compiler) -> None:
    """One program is being compiled, and does not end; more wait before the one that the request needs."""
    with serving(tiny) as engine:
        engine.add_request("scored", "Hello", SamplingParams(**{**GREEDY, **MORE["prompt logprobs"]}))
        engine.step()
        wait_for(lambda: any(key[0] == "score" for key in compiler.begun))
        compiler.may_go_on.set()
        run(engine, {"scored"})


@pytest.mark.parametrize("name", MORE)
def test_a_program_that_cannot_be_compiled_fails_the_requests_that_need_it_and_no_other(
    tiny: str, compiler: Compiler, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.fails = True
    with serving(tiny) as engine:
        for index in range(3):
            engine.add_request(f"more {index}", "Hello", SamplingParams(**{**GREEDY, **MORE[name]}))
            engine.add_request(f"plain {index}", "Hello", SamplingParams(**GREEDY))
        outputs = run(engine, {f"{kind} {index}" for kind in ("more", "plain") for index in range(3)})
        for index in range(3):
            assert outputs[f"more {index}"].error == (
                "a program that this request needs was not compiled (MemoryError: no room for the compiler); "
                "requests without it are served"
            )
            assert outputs[f"plain {index}"].outputs[0].finish_reason == "length"
        assert engine.stats()["recompiles"] == 0
    lines = [record.getMessage() for record in caplog.records if "was not compiled" in record.getMessage()]
    assert lines
    assert len(set(lines)) == len(lines), "each is told once"


def test_a_shutdown_ends_the_wait_for_a_program(tiny: str, compiler: Compiler) -> None:
    engine = serving(tiny)
    engine.add_request("full", "Hello", SamplingParams(**{**GREEDY, "logprobs": 2}))
    assert engine.step() == []
    engine.shutdown()
    assert compiler.num_held, "it has not waited for the program"
    with pytest.raises(EngineStoppedError):
        engine.step()


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_tokens_and_logprobs_do_not_depend_on_which_programs_were_ready(tiny: str, seed: int) -> None:
    """Programs get ready in any order between steps, from those with which a server starts to all."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randint(1, 100))] for _ in range(8)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 4, "top_k": 5},
        {"logprobs": 1, "seed": 5},
    ]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **kinds[index % 4]) for index in range(8)]
    with Engine(tiny, **SIZES) as engine:
        expected = [
            results(output)
            for output in engine.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        ]
        keys = list(engine.plan.programs)
        buckets = engine.core.builder.buckets
        ready = {
            ("forward", 64), ("forward_decodes", 1), ("sample", 8, SampleMode.RANDOM), ("sample", 8, SampleMode.FULL),
        }  # fmt: skip
        choice = engine.core.builder.choice = engine.runner.choice = ProgramChoice(buckets, ready.__contains__)
        for index, one in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": one}, params[index])
        outputs: dict[str, Any] = {}
        engine.reset_prefix_cache()
        while engine.has_unfinished_requests():
            engine.scheduler.shape.limits = choice.limits(64)
            outputs |= {output.request_id: output for output in engine.step()}
            ready.add(rng.choice(keys))
        assert [results(outputs[str(index)]) for index in range(8)] == expected


class StartClock:
    """Seconds that pass only while programs are lowered, one for each; they stand still where nothing is compiled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.nice_of: dict[Any, int] = {}
        """The nice value of the thread that lowered each program, by the program's key."""

    def __call__(self) -> float:
        return self.now_s

    def lower(self, key: Any, lower: Any) -> Any:
        self.now_s += 1.0
        self.nice_of[key] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if sys.platform == "linux" else 0
        return lower()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StartClock:
    clock = StartClock()
    monkeypatch.setattr(compile_plan, "Pauses", lambda: Pauses(clock))
    watch(monkeypatch, clock.lower)
    return clock


def test_while_a_request_runs_what_is_left_is_held_and_steps_are_dispatched_ahead(tiny: str, clock: StartClock) -> None:
    """What is left is compiled in the pause behind the request, by a thread that gives way to steps."""
    with serving(tiny) as engine:
        plan, at_ready = engine.plan, set(clock.nice_of)
        wait_for(lambda: plan.is_held or len(clock.nice_of) > len(at_ready))
        assert set(clock.nice_of) == at_ready, "the first pause begins when the server is ready"
        engine.add_request("one", "Hello", SamplingParams(**GREEDY))
        max_ahead, outputs = 0, []
        while not any(output.finished for output in outputs):
            outputs = engine.step()
            max_ahead = max(max_ahead, len(engine.core.in_flight))
            clock.now_s += PAUSE_S / 10
            plan.pauses.recheck()
        assert max_ahead == 1
        assert set(clock.nice_of) == at_ready
        clock.now_s += PAUSE_S
        plan.pauses.recheck()
        wait_for(lambda: len(clock.nice_of) > len(at_ready))
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        behind = {nice for key, nice in clock.nice_of.items() if key not in at_ready}
        assert behind == {min(own + NICE, MAX_NICE)}


def test_a_start_that_fails_at_its_end_leaves_nothing_to_compile(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[compile_plan.CompilePlan] = []

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def start_behind(self: compile_plan.CompilePlan, keys: Any) -> None:
        plans.append(self)

    monkeypatch.setattr(compile_plan.CompilePlan, "start_behind", start_behind)
    monkeypatch.setattr(build_engine, "_reload_weights", fail)
    with pytest.raises(KeyboardInterrupt):
        serving(tiny)
    assert [plan.is_closed for plan in plans] == [True]
