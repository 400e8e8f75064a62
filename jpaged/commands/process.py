"""What every command does as a process: its standard streams, its interrupts, and the exit status of its errors."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..checks import one_line
from ..errors import JpagedError, ModelLoadError
from ..startup.device_memory import reserve_device_memory
from .progress import say

EXIT_BAD_START = 1
EXIT_INTERRUPTED = 130
LOST_INTERRUPT_S = 0.01
"""Seconds after which an interrupt that Python has dropped is raised again."""


def run_command(run: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Run a command and return its exit status: 1 with one line on stderr for what is wrong, 130 after an interrupt."""
    prepare_streams()
    reserve_device_memory()
    try:
        with lost_interrupts_raised():
            return run(list(argv))
    except (JpagedError, ModelLoadError) as error:
        say(f"error: {one_line(error, 10_000)}")
        return EXIT_BAD_START
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of stdout has closed it, as `| head` does.
        sys.stdout = None  # type: ignore[assignment]
        return EXIT_BAD_START
    except OSError as error:  # A full disk, a device that went away.
        say(f"error: {error}; an output file keeps every finished request: go on with --resume")
        return EXIT_BAD_START


def prepare_streams() -> None:
    """Make sure that writing to any standard stream is harmless.

    A descriptor that is closed is opened on the null device: the next file that is opened would get its number, and a
    library that writes to stderr would write into an output file. `sys.stdin` and `sys.stdout` of closed streams stay
    None, so that commands can refuse to use them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest number that is free, this one.
    if sys.stderr is None or sys.stderr.closed:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # A character that stdout cannot encode must not end the run.


@contextmanager
def lost_interrupts_raised() -> Iterator[None]:
    """Raise an interrupt again that came where Python drops exceptions: in a finalizer or a callback of its collector.

    JAX has such a callback, which runs often while a process starts.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def raise_later(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # Not now: this function itself is called where exceptions are dropped.
            signal.setitimer(signal.ITIMER_REAL, LOST_INTERRUPT_S)
        else:
            hook(unraisable)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = raise_later
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
