"""Work behind waits while requests run, and gets its share of the time all the same."""

import threading
from collections.abc import Iterator

import pytest

from jpaged.step.pauses import MAX_HELD, PAUSE_S, Pauses


class Clock:
    """Seconds that stand still until a test moves them."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """A thread that waits for a pause."""

    def __init__(self, pauses: Pauses):
        self.is_urgent = False
        self.has_begun = threading.Event()
        threading.Thread(target=self._run, args=(pauses,), daemon=True).start()

    def _run(self, pauses: Pauses) -> None:
        pauses.wait(lambda: self.is_urgent)
        self.has_begun.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> Iterator[Pauses]:
    pauses = Pauses(clock)
    yield pauses
    clock.now_s += 1e9  # No thread of a test stays.
    pauses.recheck()


def test_work_waits_until_no_request_has_run_for_a_while(pauses: Pauses, clock: Clock) -> None:
    pauses.note_work(1000.0)
    pauses.note(are_running=True)
    work = Work(pauses)
    clock.now_s += 100 * PAUSE_S
    pauses.recheck()
    assert not work.has_begun.wait(0.02), "a request runs"
    pauses.note(are_running=False)
    clock.now_s += PAUSE_S / 2
    pauses.note(are_running=True)
    clock.now_s += PAUSE_S
    pauses.recheck()
    assert not work.has_begun.wait(0.02), "the next one has come soon"
    pauses.note(are_running=False)
    clock.now_s += PAUSE_S
    pauses.recheck()
    assert work.has_begun.wait(30)


def test_requests_that_never_pause_hold_work_for_a_multiple_of_what_the_last_took(pauses: Pauses, clock: Clock) -> None:
    pauses.note(are_running=True)
    assert Work(pauses).has_begun.wait(30), "nothing is known of the first"
    for work_s in 2.0, 0.5:
        pauses.note_work(work_s)
        work = Work(pauses)
        while not pauses.is_holding:
            pass
        clock.now_s += MAX_HELD * work_s - 0.01
        pauses.recheck()
        assert not work.has_begun.wait(0.02)
        clock.now_s += 0.01
        pauses.recheck()
        assert work.has_begun.wait(30)


def test_work_that_a_request_needs_is_not_held(pauses: Pauses) -> None:
    pauses.note_work(1000.0)
    pauses.note(are_running=True)
    work = Work(pauses)
    assert not work.has_begun.wait(0.02)
    work.is_urgent = True
    pauses.recheck()
    assert work.has_begun.wait(30)
