"""Work behind waits while requests run, and gets its share of the time all the same."""

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest

from jpaged.step import pauses as module
from jpaged.step.pauses import LEAST_WORK_S, MAX_HELD, PAUSE_S, Pauses


class Simulation:
    """Pauses whose clock stands still but while work waits: then it goes on to the next event of `at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.pauses = Pauses(lambda: self.now_s)
        self._events: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(self.pauses._changed, "wait", self._wait)

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Let something happen then, or at once; later than all that was given before."""
        self._events.append((time_s, event))
        if time_s <= self.now_s:
            self._wait(0.0)

    def begin_s(self, is_released: Callable[[], bool] = lambda: False) -> float:
        """Return when a piece of work begins that waits from now on."""
        self.pauses.wait(is_released)
        return self.now_s

    def work(self, work_s: float) -> None:
        """Let a piece of work take some time."""
        self.now_s += work_s
        self.pauses.note_work(work_s)

    def _wait(self, timeout_s: float) -> None:
        event_s, event = self._events[0] if self._events else (math.inf, lambda: None)
        end_s = max(self.now_s + timeout_s, math.nextafter(self.now_s, math.inf) if timeout_s else 0.0)
        self.now_s = min(end_s, event_s)
        assert self.now_s < 1e6, "work is held for ever"
        if event_s <= end_s:
            del self._events[0]
            event()


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


def test_work_waits_until_no_request_has_run_for_a_while(simulation: Simulation) -> None:
    simulation.work(1000.0)
    simulation.at(1000.0, simulation.pauses.begin_requests)
    simulation.at(1050.0, simulation.pauses.end_requests)
    simulation.at(1050.0 + PAUSE_S / 2, simulation.pauses.begin_requests)
    simulation.at(1060.0, simulation.pauses.end_requests)
    assert simulation.begin_s() == 1060.0 + PAUSE_S
    assert simulation.begin_s() == 1060.0 + PAUSE_S, "in a pause one piece follows the other"


def test_requests_that_never_pause_hold_work_for_a_multiple_of_what_it_takes(simulation: Simulation) -> None:
    simulation.pauses.begin_requests()
    assert simulation.begin_s() == pytest.approx(MAX_HELD * LEAST_WORK_S)
    simulation.work(2.0)
    before_s = simulation.now_s
    assert simulation.begin_s() - before_s == pytest.approx(MAX_HELD * 2.0), "it may take as long"
    simulation.work(0.5)
    before_s = simulation.now_s
    assert simulation.begin_s() - before_s == pytest.approx(MAX_HELD * 0.5), "what it did not take is left"


def test_after_short_work_the_next_is_held_as_if_it_were_as_long_as_the_longest(simulation: Simulation) -> None:
    """Programs of milliseconds come first, in the pause before the first request; they were held for that pause."""
    simulation.work(3.0)
    simulation.pauses.end_requests()
    assert simulation.begin_s() == 3.0 + PAUSE_S
    for _ in range(5):
        simulation.work(0.001)
    simulation.pauses.begin_requests()
    request_s, left_s = simulation.now_s, PAUSE_S - 5 * MAX_HELD * 0.001
    assert simulation.begin_s() == pytest.approx(request_s + MAX_HELD * 3.0 - left_s)


def test_without_any_work_before_a_first_request_has_a_while_without_any(simulation: Simulation) -> None:
    request_s = 0.99 * PAUSE_S
    simulation.at(request_s, simulation.pauses.begin_requests)
    assert simulation.begin_s() - request_s >= PAUSE_S


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_never_pause_make_work_take_a_bounded_time(simulation: Simulation, seed: int) -> None:
    rng = random.Random(seed)
    work = [10 ** rng.uniform(-3, 1) for _ in range(100)]
    simulation.pauses.begin_requests()
    for work_s in work:
        simulation.begin_s()
        simulation.work(work_s)
    assert simulation.now_s <= (1 + MAX_HELD) * sum(work) + MAX_HELD * max(work)
    assert simulation.pauses.held_s == pytest.approx(simulation.now_s - sum(work))


def test_work_that_is_released_is_not_held(simulation: Simulation) -> None:
    simulation.work(1000.0)
    simulation.pauses.begin_requests()
    assert simulation.begin_s(lambda: True) == 1000.0
    released: list[float] = []
    simulation.at(1007.0, lambda: released.append(simulation.now_s))
    assert simulation.begin_s(lambda: bool(released)) == 1007.0


@pytest.mark.parametrize("are_running", [False, True])
def test_work_waits_for_all_that_is_urgent_and_for_the_request_that_needed_it(
    simulation: Simulation, are_running: bool
) -> None:
    """However long that takes, also if other requests run, whose share of the time is over."""
    if are_running:
        simulation.pauses.begin_requests()
    first, second = Future[None](), Future[None]()
    for urgent in first, second, first:
        simulation.pauses.put_first(urgent)
    for end_s, urgent in (1000.0, first), (2000.0, second):
        simulation.at(end_s, partial(simulation.pauses.note_work, 1000.0))
        simulation.at(end_s, partial(urgent.set_result, None))
    simulation.at(2000.0 + PAUSE_S / 2, simulation.pauses.begin_requests)
    simulation.at(2000.0 + 0.75 * PAUSE_S, simulation.pauses.end_requests)
    assert simulation.begin_s() == 2000.0 + 1.75 * PAUSE_S
    simulation.pauses.put_first(first)
    assert simulation.begin_s() == simulation.now_s, "urgent work that was done before holds nothing"


def test_held_seconds_are_those_of_the_piece_that_waits_too(simulation: Simulation) -> None:
    simulation.work(100.0)
    simulation.pauses.begin_requests()
    found: list[tuple[bool, float]] = []
    simulation.at(107.0, lambda: found.append((simulation.pauses.is_holding, simulation.pauses.held_s)))
    simulation.at(110.0, simulation.pauses.end_requests)
    simulation.begin_s()
    assert found == [(True, 7.0)]
    simulation.work(3.0)
    assert (simulation.pauses.is_holding, simulation.pauses.held_s) == (False, 10.0 + PAUSE_S)


CHANGES: dict[str, Callable[[Pauses, "Future[None]", list[int]], object]] = {
    "requests end": lambda pauses, urgent, released: pauses.end_requests(),
    "urgent work ends": lambda pauses, urgent, released: urgent.set_result(None),
    "it is released": lambda pauses, urgent, released: (released.append(1), pauses.recheck()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_lets_work_begin_wakes_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    pauses, urgent, released = Pauses(), Future[None](), list[int]()
    pauses.note_work(1e6)
    if change == "urgent work ends":
        pauses.put_first(urgent)
    else:
        pauses.begin_requests()
    thread = threading.Thread(target=pauses.wait, args=(lambda: bool(released),), daemon=True)
    thread.start()
    end_s = time.monotonic() + 30
    while not pauses.is_holding:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    CHANGES[change](pauses, urgent, released)
    thread.join(30)
    assert not thread.is_alive()
    assert not pauses.is_holding
