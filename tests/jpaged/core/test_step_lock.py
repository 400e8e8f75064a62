"""The lock of steps: whose call runs when, and what an interrupt at any place leaves behind."""

import linecache
import os
import signal
import sys
import threading

import pytest

from jpaged.core.step_lock import StepLock

LIMIT_S = 60


def in_thread(run):
    """Start a thread that runs `run`; return it, and the list that its result or exception goes to."""
    found = []

    def keep():
        try:
            found.append(run())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    return thread, found


def wait_for_call(lock):
    """Wait until a call is queued behind the lock that this thread holds."""
    for _ in range(LIMIT_S * 1000):
        if lock._calls:
            return
        threading.Event().wait(0.001)
    raise AssertionError("no call came")


def test_a_call_runs_at_once_or_behind_the_step_of_another_thread():
    lock, done = StepLock(), []
    assert lock.call("alone", lambda: lock.is_own)
    with lock.hold():
        assert lock.is_own
        thread, found = in_thread(lambda: lock.call("other", lambda: done.append(threading.get_ident())))
        wait_for_call(lock)
        assert done == []
    thread.join(LIMIT_S)
    assert done == [threading.get_ident()], "the thread that computed the step ran it"
    assert found == [None]
    assert not lock.is_own


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_of_the_process_is_refused_and_does_not_wait_for_a_thread_that_it_lacks():
    lock, is_forked = StepLock(), threading.Event()
    is_held = threading.Event()

    def hold():
        with lock.hold():
            is_held.set()
            is_forked.wait(LIMIT_S)

    thread, _ = in_thread(hold)
    is_held.wait(LIMIT_S)
    if not (child := os.fork()):
        signal.alarm(10)  # Ends a child that waits.
        try:
            lock.call("child", int)
        except RuntimeError as error:
            os._exit(0 if "start processes by spawn" in str(error) else 2)
        finally:
            os._exit(1)
    is_forked.set()
    thread.join(LIMIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.call("parent", lambda: 3) == 3


def test_a_call_raises_to_its_own_caller_alone():
    lock = StepLock()
    with lock.hold():
        thread, found = in_thread(lambda: lock.call("other", lambda: 1 // 0))
        wait_for_call(lock)
    thread.join(LIMIT_S)
    assert isinstance(found[0], ZeroDivisionError)


def test_an_interrupt_in_the_call_of_another_thread_ends_the_step_and_the_call():
    def interrupted():
        raise KeyboardInterrupt

    def step_with_a_call():
        with lock.hold():
            threads.append(in_thread(lambda: lock.call("update_params", interrupted)))
            wait_for_call(lock)

    lock, threads = StepLock(), []
    with pytest.raises(KeyboardInterrupt):
        step_with_a_call()
    ((thread, found),) = threads
    thread.join(LIMIT_S)
    assert str(found[0]).startswith("update_params: was interrupted in the thread that computes the steps")
    assert lock.call("next", lambda: "runs") == "runs"


NOT_INTERRUPTED = "with self._lock:", "self._owner = None", "try:"
"""Lines before which Python looks for no interrupt: it does so behind calls and jumps back. A tracing function could
raise there all the same."""


class InterruptAt:
    """Raises KeyboardInterrupt in this thread at one line of step_lock.py: the one that is traced as number `count`."""

    def __init__(self, count):
        self.left = count

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith("step_lock.py"):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line not in NOT_INTERRUPTED:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_after_an_interrupt_at_any_line_the_lock_is_free_and_no_call_runs_twice_or_waits_for_ever():
    """One thread computes a step and runs the call of another; the interrupt comes at each line in turn."""
    num_lines, was_interrupted = 0, True
    while was_interrupted:
        num_lines += 1
        lock, runs, was_interrupted = StepLock(), [], False
        thread, found = None, []
        trace = sys.gettrace()
        try:
            sys.settrace(InterruptAt(num_lines))
            with lock.hold():
                sys.settrace(None)
                thread, found = in_thread(lambda lock=lock, runs=runs: lock.call("other", lambda: runs.append(1)))
                wait_for_call(lock)
                sys.settrace(InterruptAt(num_lines))
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.settrace(trace)
        if thread is not None:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), num_lines
            # The call was done, or its caller knows that it may not be.
            assert (found, len(runs)) == ([None], 1) or (isinstance(found[0], RuntimeError) and len(runs) <= 1)
        assert not lock.is_own
        assert lock.call("next", lambda lock=lock: lock.is_own), num_lines
        assert not lock._calls
    assert num_lines > 10, "the lines were traced"


def test_an_interrupt_of_a_caller_at_any_line_does_not_leave_its_call_for_later():
    num_lines, was_interrupted = 0, True
    while was_interrupted:
        num_lines += 1
        lock, runs, was_interrupted = StepLock(), [], False
        trace = sys.gettrace()
        try:
            sys.settrace(InterruptAt(num_lines))
            lock.call("own", lambda runs=runs: runs.append(1))
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.settrace(trace)
        num_runs = len(runs)
        assert lock.call("next", lambda lock=lock: lock.is_own), num_lines
        assert len(runs) == num_runs <= 1, num_lines
    assert num_lines > 10, "the lines were traced"
