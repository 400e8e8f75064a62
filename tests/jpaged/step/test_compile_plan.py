"""Executables are compiled when they are asked for: at once, after the first step, or when somebody waits for one."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jpaged import compile_plan
from jpaged.compile_plan import CompilePlan


class Lowering:
    """Programs that note when they are lowered, and wait until they may be: all of them, or one by its own gate."""

    def __init__(self):
        self.begun: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def program(self, key, gate=None):
        def lower():
            self.begun.append(key)
            assert (gate or self.may_go_on).wait(30)
            return jax.jit(lambda x: x + 1).lower(jnp.zeros(3))

        return lower


@pytest.fixture
def lowering():
    return Lowering()


@pytest.fixture
def plan(lowering):
    plan = CompilePlan({key: lowering.program(key) for key in "abc"})
    yield plan
    plan.close()


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_is_put_off_is_compiled_once_the_first_step_is_done(plan, lowering):
    plan.start(["a"])
    plan.wait()
    assert not plan.is_compiling
    plan.start_later(["b", "c"])
    assert plan.is_compiling, "a step ahead might have to wait for it"
    assert lowering.begun == ["a"]
    plan.start_rest()
    plan.wait()
    assert sorted(lowering.begun) == ["a", "b", "c"]
    assert not plan.is_compiling
    plan.start_rest()
    assert len(lowering.begun) == 3


def test_without_a_step_it_is_compiled_after_a_while(plan, lowering, monkeypatch):
    monkeypatch.setattr(compile_plan, "LATER_S", 0.05)
    plan.start_later(["b"])
    wait_for(lambda: plan.num_compiled == 1)
    assert lowering.begun == ["b"]


def test_who_needs_it_sooner_gets_it(plan, lowering):
    plan.start_later(["b", "c"])
    assert plan.get("b")(jnp.zeros(3)).tolist() == [1, 1, 1]
    assert lowering.begun == ["b"]
    plan.start_rest()
    plan.wait()
    assert lowering.begun == ["b", "c"]


def test_who_needs_it_now_does_not_wait_for_what_was_asked_for_before(plan, lowering):
    gates = {key: threading.Event() for key in "abcd"}
    plan.programs = {key: lowering.program(key, gate) for key, gate in gates.items()}
    plan.start("abcd")
    wait_for(lambda: len(lowering.begun) == 2)
    gates["d"].set()
    assert plan.get("d")(jnp.zeros(3)).tolist() == [1, 1, 1]
    assert lowering.begun == ["a", "b", "d"]
    assert plan.num_compiled == 1
    for gate in gates.values():
        gate.set()
    plan.wait()
    assert lowering.begun == ["a", "b", "d", "c"]


def test_what_could_not_be_compiled_is_not_ready(plan, caplog):
    plan.programs["b"] = lambda: 1 / 0
    plan.start("ab")
    with pytest.raises(ZeroDivisionError):
        plan.wait()
    with pytest.raises(ZeroDivisionError):
        plan.get("b")
    wait_for(lambda: not plan.is_compiling)
    assert plan.num_compiled == 1
    assert "b was not compiled" in caplog.text


def test_a_closed_plan_compiles_nothing_more(plan, lowering, monkeypatch):
    monkeypatch.setattr(compile_plan, "LATER_S", 0.05)
    plan.start_later(["b"])
    plan.close()
    time.sleep(0.2)
    plan.start_rest()
    assert lowering.begun == []


def test_nothing_put_off_is_nothing_to_wait_for(plan):
    plan.start_later([])
    assert not plan.is_compiling


def test_it_says_whether_something_is_being_compiled(plan, lowering):
    assert not plan.is_compiling
    lowering.may_go_on.clear()
    plan.start(["a"])
    wait_for(lambda: lowering.begun)
    assert plan.is_compiling
    lowering.may_go_on.set()
    plan.wait()
    assert not plan.is_compiling


def test_a_key_outside_the_plan_is_refused(plan):
    with pytest.raises(KeyError, match="d is outside the compile plan of 3 executables"):
        plan.start(["a", "d"])
