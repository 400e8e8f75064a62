"""Executables are compiled when asked for: at start, after the first step, or when a caller waits for one."""

import gc
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jpaged.errors import EngineStoppedError
from jpaged.step import compile_plan, pauses
from jpaged.step.compile_plan import CompilePlan


class Lowering:
    """Programs that record when they are lowered, and wait for `may_go_on`, or each for a gate of its own."""

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
    plan.pauses.end_requests()  # The thread behind is free for the next test, also if this one has failed.


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_deferred_keys_are_compiled_after_the_first_step(plan, lowering):
    plan.start(["a"])
    plan.wait()
    assert not plan.is_compiling
    plan.defer(["b", "c"])
    assert plan.is_compiling, "the engine dispatches no step ahead that may have to wait for it"
    assert lowering.begun == ["a"]
    plan.start_deferred()
    plan.wait()
    assert sorted(lowering.begun) == ["a", "b", "c"]
    assert not plan.is_compiling
    plan.start_deferred()
    assert len(lowering.begun) == 3


def test_without_a_step_deferred_keys_are_compiled_after_a_delay(plan, lowering, monkeypatch):
    monkeypatch.setattr(compile_plan, "DEFERRED_START_S", 0.05)
    plan.defer(["b"])
    wait_for(lambda: plan.num_compiled == 1)
    assert lowering.begun == ["b"]


def test_a_deferred_key_is_compiled_when_get_asks_for_it(plan, lowering):
    plan.defer(["b", "c"])
    assert plan.get("b")(jnp.zeros(3)).tolist() == [1, 1, 1]
    assert lowering.begun == ["b"]
    plan.start_deferred()
    plan.wait()
    assert lowering.begun == ["b", "c"]


def test_get_does_not_wait_for_keys_before_it_in_the_queue(plan, lowering):
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


def test_keys_behind_are_compiled_one_at_a_time(plan, lowering):
    lowering.may_go_on.clear()
    plan.start_behind("ab")
    plan.start("c")
    wait_for(lambda: sorted(lowering.begun) == ["a", "c"])
    time.sleep(0.05)
    assert "b" not in lowering.begun
    assert plan.progress == (0, 3)
    lowering.may_go_on.set()
    plan.wait()
    assert plan.progress == (3, 3)
    assert all(map(plan.is_ready, "abc"))


def test_keys_behind_wait_while_requests_run_but_for_one_that_is_asked_for(plan, lowering):
    """Held for as long as it can be told: a program before them took very long."""
    plan.pauses.note_work(1e6)
    plan.pauses.begin_requests()
    plan.start_behind("abc")
    wait_for(lambda: plan.is_held)
    lowering.may_go_on.clear()
    asked = plan.ask("b")
    wait_for(lambda: lowering.begun == ["b"])
    assert plan.pauses.is_holding
    assert not plan.is_held, "b is being compiled"
    lowering.may_go_on.set()
    assert asked.result(30)(jnp.zeros(3)).tolist() == [1, 1, 1]
    assert plan.get("a")(jnp.zeros(3)).tolist() == [1, 1, 1], "also the one that is held now"
    plan.pauses.note_work(1e6)
    assert lowering.begun == ["b", "a"]
    assert plan.is_compiling
    plan.pauses.end_requests()
    plan.wait()
    assert lowering.begun == ["b", "a", "c"]


def test_the_key_that_is_held_now_is_compiled_once_it_is_asked_for(plan, lowering):
    plan.pauses.note_work(1e6)
    plan.pauses.begin_requests()
    plan.start_behind("a")
    wait_for(lambda: plan.is_held)
    assert plan.ask("a").result(30)(jnp.zeros(3)).tolist() == [1, 1, 1]


def test_keys_behind_wait_for_one_that_a_request_waits_for(plan, lowering, monkeypatch):
    """The request does not run yet. The first key had begun before; for the others a pause would have come at once."""
    monkeypatch.setattr(pauses, "PAUSE_S", 0.0)
    gates = {key: threading.Event() for key in "abcd"}
    plan.programs = {key: lowering.program(key, gate) for key, gate in gates.items()}
    plan.start_behind("abd")
    wait_for(lambda: lowering.begun == ["a"])
    asked = plan.ask("c")
    wait_for(lambda: lowering.begun == ["a", "c"])
    gates["a"].set()
    wait_for(lambda: plan.pauses.is_holding or "b" in lowering.begun)
    begun = list(lowering.begun)
    is_asked_once = plan.ask("c") is asked
    for key in "cbd":
        gates[key].set()
    plan.wait()
    assert begun == ["a", "c"]
    assert is_asked_once
    assert lowering.begun == ["a", "c", "b", "d"]


def test_pauses_are_told_how_long_each_program_took(plan, monkeypatch):
    """However it was asked for, and also if it failed."""
    now_s, noted = [0.0], []

    def lower(work_s, failure=None):
        now_s[0] += work_s
        if failure:
            raise failure
        return jax.jit(lambda x: x + 1).lower(jnp.zeros(3))

    monkeypatch.setattr(compile_plan, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(plan.pauses, "note_work", noted.append)
    plan.programs = {"a": partial(lower, 3.0), "b": partial(lower, 2.0), "c": partial(lower, 5.0, ValueError("no"))}
    plan.get("a")
    plan.start_behind("b")
    plan.wait()
    with pytest.raises(ValueError, match="no"):
        plan.get("c")
    assert noted == [3.0, 2.0, 5.0]


def test_a_failed_compilation_that_was_asked_for_holds_nothing(plan, monkeypatch):
    monkeypatch.setattr(pauses, "PAUSE_S", 0.0)
    plan.programs["c"] = lambda: 1 / 0
    assert plan.ask("c").exception(30) is not None
    plan.start_behind("ab")
    wait_for(lambda: plan.is_ready("a") and plan.is_ready("b"))


def test_closing_ends_the_wait_for_a_pause(plan, lowering):
    plan.pauses.note_work(1e6)
    plan.pauses.begin_requests()
    plan.start_behind("ab")
    wait_for(lambda: plan.pauses.is_holding)
    plan.close()
    wait_for(lambda: not plan.is_compiling)
    assert lowering.begun == []


def test_a_failed_compilation_is_raised_logged_and_not_counted_as_ready(plan, caplog):
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
    monkeypatch.setattr(compile_plan, "DEFERRED_START_S", 0.05)
    plan.defer(["b"])
    plan.close()
    time.sleep(0.2)
    plan.start_deferred()
    assert lowering.begun == []


def test_closing_ends_waits_for_a_compilation_that_has_begun_and_drops_its_result(lowering, monkeypatch, caplog):
    monkeypatch.setattr(compile_plan, "CLOSE_S", 0.05)
    compiled, raised = [], []
    plan = CompilePlan({key: lowering.program(key) for key in "ab"}, on_compiled=lambda *one: compiled.append(one))
    lowering.may_go_on.clear()
    plan.start("ab")

    def get():
        try:
            plan.get("b")
        except Exception as error:
            raised.append(error)

    waiting = threading.Thread(target=get)
    waiting.start()
    wait_for(lambda: sorted(lowering.begun) == ["a", "b"])
    futures, start_s = list(plan._futures.values()), time.monotonic()
    plan.close()
    waiting.join(30)
    assert time.monotonic() - start_s < 5
    lowering.may_go_on.set()
    assert [str(error) for error in raised] == ["this engine was shut down; make a new one"]
    for call in (partial(plan.get, "a"), partial(plan.start, "a")):
        with pytest.raises(EngineStoppedError, match="shut down"):
            call()
    wait_for(lambda: all(future.done() for future in futures))
    assert (compiled, caplog.records) == ([], [])


def test_a_plan_dropped_without_close_frees_its_executables(lowering):
    plan = CompilePlan({"a": lowering.program("a")})
    executable = weakref.ref(plan.get("a"))
    del plan
    wait_for(lambda: gc.collect() >= 0 and executable() is None)


def test_progress_counts_keys_that_were_started_before(plan):
    reports: list[tuple[int, int]] = []
    plan.start(["a"])
    plan.wait()
    plan.start(["a", "b", "c"], progress=lambda *report: reports.append(report))
    plan.wait()
    wait_for(lambda: len(reports) == 4)
    assert reports[:2] == [(0, 3), (1, 3)]
    assert sorted(reports) == [(done, 3) for done in range(4)]


def test_deferring_no_key_leaves_the_plan_idle(plan):
    plan.defer([])
    assert not plan.is_compiling


def test_is_compiling_holds_until_everything_asked_for_is_ready(plan, lowering):
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
