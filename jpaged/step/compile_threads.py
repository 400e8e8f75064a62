"""Lets the threads of XLA's compiler give way to those that compute steps.

XLA compiles and loads programs on threads of its own, whatever the priority of the thread that asks for it. Most of
them have no names, so they are told by their work: those that have used a processor while this process did nothing but
compile. XLA's threads that compute may help the compiler then; they keep their priority.
Only Linux tells how long each thread has run; elsewhere no thread is found.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
NICE = 10
"""How much higher the nice value of the compiler's threads is: beside one that computes they get about a tenth of a
core, and all of an idle one. Without privileges it cannot be lowered again."""
MAX_NICE = 19
"""The highest nice value of Linux."""
COMPUTING_NAME = "tf_XLAEigen"
"""The name of XLA's threads that compute programs."""


@contextmanager
def compiling_alone() -> Iterator[set[int]]:
    """Return a context in which this process compiles, and computes nothing but by threads of Python.

    The set that it gives has the ids of the compiler's threads once the context has ended.
    """
    found: set[int] = set()
    before = _run_times()
    yield found
    of_python = {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}
    ran = {one for one, run_ns in _run_times().items() if run_ns > before.get(one, 0)}
    found |= {one for one in ran - of_python if _name(one) != COMPUTING_NAME}


def lower_priority(thread_ids: set[int]) -> None:
    """Give these threads of this process a nice value that is NICE above that of the calling thread."""
    nice = min(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + NICE, MAX_NICE)
    for one in thread_ids:
        with suppress(OSError):  # It has ended, or has a higher value already.
            os.setpriority(os.PRIO_PROCESS, one, nice)


def lower_own_priority() -> None:
    """Let the calling thread of Python, and threads that it starts, give way too; only Linux tells threads apart."""
    if sys.platform == "linux":
        lower_priority({threading.get_native_id()})


def _run_times() -> dict[int, int]:
    """Return how many nanoseconds each thread of this process has run, by its id; empty if the system does not tell."""
    times: dict[int, int] = {}
    with suppress(OSError):
        for task in TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # It has ended, or the kernel keeps no times.
                times[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return times


def _name(thread_id: int) -> str:
    """Return the name of a thread as the system knows it; empty if it has ended."""
    with suppress(OSError):
        return (TASKS / str(thread_id) / "comm").read_text().strip()
    return ""
