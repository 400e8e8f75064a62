"""/health tells how long compiling takes, without the time in which it is held for requests."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.remote.core_client import CoreStatus
from jpaged.serving.http import server_state
from jpaged.serving.http.server_state import ServerState, StartedEngine
from jpaged.serving.options import ServeOptions, served_limits
from jpaged.step import compile_plan
from jpaged.step.compile_plan import CompilePlan
from jpaged.step.pauses import Pauses


def wait_for(condition: Any) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def status_of(plan: CompilePlan) -> CoreStatus:
    """Return the status of a core that has a plan and nothing else."""
    num_done, num_programs = plan.progress
    return CoreStatus(
        is_alive=True,
        is_sleeping=False,
        num_programs_done=num_done,
        num_programs=num_programs,
        held_s=plan.pauses.held_s,
        is_compiling=plan.is_compiling,
        num_steps=0,
        has_work=False,
    )


def test_the_rest_of_compiling_is_told_without_what_is_held_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four programs has taken 4 s after 100 s of requests: the others take 12."""
    now_s, may_go_on = [0.0], threading.Event()

    def clock() -> float:
        return now_s[0]

    def first() -> Any:
        now_s[0] += 4.0
        return jax.jit(lambda x: x + 1).lower(jnp.zeros(3))

    def other() -> Any:
        may_go_on.wait(30)
        return first()

    monkeypatch.setattr(compile_plan, "Pauses", lambda: Pauses(clock))
    monkeypatch.setattr(server_state, "time", SimpleNamespace(monotonic=clock, time=time.time))
    plan = CompilePlan({"a": first, **dict.fromkeys("bcd", other)})
    state = ServerState(ServeOptions(), ("tiny",), served_limits({}), "0")
    unused: Any = None
    state._started = StartedEngine(unused, unused, unused, "tiny")
    client: Any = SimpleNamespace(status=lambda: status_of(plan), states=list)
    state._client = client
    plan.pauses.begin_requests()
    plan.start_behind("abcd")
    wait_for(lambda: plan.is_held)
    assert state.health() == {"status": "ok", "phase": "compile", "done": 0, "total": 4, "eta_s": None}
    now_s[0] = 100.0
    plan.pauses.recheck()
    wait_for(lambda: plan.progress[0] == 1)
    try:
        assert state.health() == {"status": "ok", "phase": "compile", "done": 1, "total": 4, "eta_s": 12.0}
    finally:
        may_go_on.set()
        plan.close()
