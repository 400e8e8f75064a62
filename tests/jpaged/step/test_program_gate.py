"""The gate of a server that compiles admits a request once all of its programs are ready, beside those that run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.sampling.sampling_params import SampleMode, SamplingParams, ScoreKind
from jpaged.scheduling.buckets import make_buckets
from jpaged.step.compile_plan import CompilePlan
from jpaged.step.program_choice import ProgramChoice
from jpaged.step.program_gate import ProgramGate
from jpaged.step.program_keys import SET_RULES_KEY

from ..host_requests import new_request

RANDOM, FULL = SampleMode.RANDOM, SampleMode.FULL
CPU = make_buckets(max_num_batched_tokens=256, max_num_seqs=64, platform="cpu")
BUCKETS = replace(CPU, masks_apart=True)
SAMPLERS = [(name, size, mode) for name in ("sample", "sample_masked") for size in (1, 64) for mode in (RANDOM, FULL)]
DECODES = [("decode", size, mode) for size in CPU.decode_sizes for mode in (RANDOM, FULL)]
KEYS: list[Any] = [*SAMPLERS, *DECODES, SET_RULES_KEY, ("score", 64, ScoreKind(0)), ("forward", 64), ("forward", 128)]


@pytest.fixture
def plan() -> Iterator[CompilePlan]:
    """Give a plan of programs that compile at once; a test replaces those that shall not."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    plan = CompilePlan({key: lambda: lowered for key in KEYS})
    yield plan
    plan.close()


@pytest.fixture
def gate(plan: CompilePlan) -> ProgramGate:
    plan.get(("sample", 64, RANDOM))
    plan.get(("forward", 64))
    return ProgramGate(plan, ProgramChoice(BUCKETS, plan.is_ready), max_tokens=200, max_logprobs=20)


def request(*, has_grammar: bool = False, **params: Any) -> Any:
    one = new_request([1, 2, 3], params=SamplingParams(**params))
    one.grammar = object() if has_grammar else None
    return one


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def ready(plan: CompilePlan) -> set[Any]:
    return {key for key in KEYS if plan.is_ready(key)}


@pytest.mark.parametrize(
    ("one", "lacks"),
    [
        (request(), []),
        (request(temperature=0.0), []),
        (request(logprobs=0), [("sample", 64, FULL)]),
        (request(presence_penalty=1.0), [("sample", 64, FULL), SET_RULES_KEY]),
        (request(has_grammar=True), [("sample_masked", 64, RANDOM)]),
        (request(has_grammar=True, logprobs=3), [("sample_masked", 64, FULL)]),
        (request(prompt_logprobs=0), [("score", 64, ScoreKind(0))]),
    ],
)
def test_a_request_is_admitted_once_exactly_the_programs_that_it_lacks_are_compiled(
    plan: CompilePlan, gate: ProgramGate, one: Any, lacks: list[Any]
) -> None:
    before, version = ready(plan), gate.version
    for key in lacks:
        assert not gate.admits(one)
        wait_for(lambda key=key: plan.is_ready(key))
    assert gate.admits(one)
    assert ready(plan) - before == set(lacks)
    assert gate.version == version + len(lacks)


def test_where_all_samplers_take_masks_a_grammar_waits_for_none(plan: CompilePlan) -> None:
    for key in (("sample", 64, RANDOM), ("forward", 64)):
        plan.get(key)
    gate = ProgramGate(plan, ProgramChoice(CPU, plan.is_ready), max_tokens=200, max_logprobs=20)
    assert gate.admits(request(has_grammar=True))


def test_the_decode_programs_of_a_mode_are_compiled_once_a_request_of_it_runs(
    plan: CompilePlan, gate: ProgramGate
) -> None:
    gate.enter(request(max_tokens=3))
    wait_for(lambda: {key for key in DECODES if key[2] is RANDOM} <= ready(plan))
    assert not {key for key in DECODES if key[2] is FULL} & ready(plan)
    gate.enter(request(logprobs=1))
    wait_for(lambda: set(DECODES) <= ready(plan))


def test_programs_behind_are_held_while_requests_run_but_for_one_that_another_request_lacks(
    plan: CompilePlan, gate: ProgramGate
) -> None:
    plan.pauses.note_work(1e6)  # So long that they would be held for ever.
    one, other, masked = request(), request(temperature=0.0), request(has_grammar=True)
    gate.enter(one)
    gate.enter(other)
    before = ready(plan)
    plan.start_behind([("forward", 128), ("sample_masked", 64, RANDOM), SET_RULES_KEY])
    wait_for(lambda: plan.pauses.is_holding)
    gate.leave(one)
    assert not gate.admits(masked)
    wait_for(lambda: gate.admits(masked))
    assert ready(plan) - before == {("sample_masked", 64, RANDOM)}
    gate.leave(other)
    wait_for(lambda: {("forward", 128), SET_RULES_KEY} <= ready(plan))


def test_pauses_are_told_of_the_first_request_that_enters_and_of_the_last_that_leaves(
    plan: CompilePlan, gate: ProgramGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in "begin_requests", "end_requests":
        monkeypatch.setattr(plan.pauses, name, lambda name=name: told.append(name))
    one, other = request(), request(has_grammar=True)
    for _ in range(2):
        gate.enter(one)
        assert told.pop() == "begin_requests"
        gate.enter(other)
        gate.leave(one)
        assert told == []
        gate.leave(other)
        assert told.pop() == "end_requests"


def test_a_request_waits_for_a_sampler_that_draws_its_rows_beside_those_that_run(
    plan: CompilePlan, gate: ProgramGate
) -> None:
    """One sampler draws all rows of a step: with masks for one, and with the rules of another."""
    masked, full = request(has_grammar=True), request(logprobs=1)
    for key in (("sample_masked", 64, RANDOM), ("sample", 64, FULL)):
        plan.get(key)
    assert gate.admits(full)
    gate.enter(masked)
    assert not gate.admits(full)
    wait_for(lambda: plan.is_ready(("sample_masked", 64, FULL)))
    assert gate.admits(full)


def test_where_that_sampler_cannot_be_compiled_the_request_runs_once_the_others_have_left(
    plan: CompilePlan, gate: ProgramGate
) -> None:
    plan.programs["sample_masked", 64, FULL] = lambda: 1 / 0
    masked, full = request(has_grammar=True), request(logprobs=1)
    for key in (("sample_masked", 64, RANDOM), ("sample", 64, FULL)):
        plan.get(key)
    gate.enter(masked)
    assert not gate.admits(full)
    wait_for(lambda: ("sample_masked", 64, FULL) in plan.failures)
    assert not gate.admits(full)
    assert gate.fault_of(full) is None
    version = gate.version
    gate.leave(masked)
    assert gate.version > version
    assert gate.admits(full)


def test_a_request_fails_only_where_no_program_can_take_the_place_of_its_own(
    plan: CompilePlan, gate: ProgramGate
) -> None:
    plan.programs["sample_masked", 64, RANDOM] = lambda: 1 / 0
    masked = request(has_grammar=True)
    assert not gate.admits(masked)
    wait_for(lambda: bool(plan.failures))
    assert gate.fault_of(masked) is None
    assert not gate.admits(masked), "that of the next mode is compiled in its place"
    wait_for(lambda: plan.is_ready(("sample_masked", 64, FULL)))
    assert gate.admits(masked)


def test_steps_get_larger_as_programs_get_ready(plan: CompilePlan, gate: ProgramGate) -> None:
    limits = gate.new_limits()
    assert limits is not None
    assert limits.max_tokens == 64
    assert gate.new_limits() is None, "nothing has changed"
    plan.get(("forward", 128))
    limits = gate.new_limits()
    assert limits is not None
    assert limits.max_tokens == 128
