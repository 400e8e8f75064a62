"""What every command does as a process: its standard streams, its interrupts, and the exit status of its errors."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Self

from ..checks import one_line
from ..errors import EngineStoppedError, JpagedError, ModelLoadError
from ..startup.sizing.device_memory import reserve_device_memory
from .progress import say

EXIT_FAILED = 1
EXIT_SOME_FAILED = 3
EXIT_INTERRUPTED = 130
REPEAT_DROPPED_S = 0.01
"""Seconds after which an interrupt that Python has dropped is raised again."""
REPEAT_S = 3.0
"""Seconds after which an interrupt is raised again if the command still runs."""


def run_command(run: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Call `run` with the arguments and return the exit status of the process.

    The status is what `run` returns, 130 if an interrupt came and `run` raised any error, or 1 after an error of the
    user or the system, which is one line on stderr. Other errors, which are bugs, are raised. Before, the standard
    streams are made safe to write to, and JAX's share of a GPU's memory is set, unless the user has set it.
    """
    prepare_streams()
    reserve_device_memory()
    interrupts = Interrupts()
    try:
        with interrupts:
            return run(list(argv))
    except BaseException as error:
        if interrupts.have_come or isinstance(error, KeyboardInterrupt):
            say("interrupted")
            return EXIT_INTERRUPTED
        return _status_of(error)


def _status_of(error: BaseException) -> int:
    """Print an error of the user or the system as one line on stderr and return 1; raise any other error, a bug, again.

    Errors of the user are those of jpaged, errors of the system are OSErrors and the end of a core process. A broken
    pipe is not printed: it is how `| head` ends a command.
    """
    if isinstance(error, JpagedError | ModelLoadError | EngineStoppedError):
        say(f"error: {one_line(error, 10_000)}")
    elif isinstance(error, BrokenPipeError):  # With None, Python does not try to flush stdout again when it exits.
        sys.stdout = None  # type: ignore[assignment]
    elif isinstance(error, OSError):  # A full disk, a device that went away.
        say(f"error: {error}")
    else:
        raise error
    return EXIT_FAILED


def prepare_streams() -> None:
    """Make sure that no write to a standard stream fails or ends up in another file.

    If descriptor 0, 1 or 2 is closed, it is opened on the null device. Otherwise the next file that is opened would get
    its number, and a library that writes to stderr would write into, say, the output file. `sys.stdin` and `sys.stdout`
    of closed streams stay None, so that commands can refuse to use them; `sys.stderr` then writes to the null device.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The system gives it the lowest free number, which is `descriptor`.
    if sys.stderr is None or sys.stderr.closed:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # A character that stdout cannot encode must not end the run.


@contextmanager
def garbage_uncollected() -> Iterator[None]:
    """Let Python not look for garbage during a `with` that imports and opens a model, nor later in what it has made.

    Almost all of that stays. Looking through it again and again takes an eighth of the time of JAX's import, and a
    twentieth of a first start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back SIGINT during a `with` and raise it at the end: JAX's library crashes if interrupted in its import.

    The handler from before is put back first. Several interrupts are raised as one, also if the body raises an error.
    Does nothing outside the main thread, where handlers cannot be set, and where SIGINT has no Python handler, for
    example because it is ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held_signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held_signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held_signals:
            signal.raise_signal(signal.SIGINT)


class Interrupts:
    """A context manager that makes sure that an interrupt ends its body, wherever the interrupt comes.

    Python drops an exception in a finalizer or in a callback of its garbage collector, such as JAX's, and a library in
    C may turn it into another one. So `have_come` says whether there was an interrupt. Each one also arms the interval
    timer of the process: if the body has not ended after REPEAT_S, SIGALRM raises KeyboardInterrupt again. An interrupt
    that Python reports as dropped arms the timer for REPEAT_DROPPED_S. The body must not use SIGALRM itself. Outside of
    the main thread, and where interrupts are ignored, nothing is done.
    """

    def __init__(self) -> None:
        """Keep the handlers and the hook that are in force, to put them back at the end; change nothing yet."""
        self.have_come = False
        self._is_installed = False
        self._handler = signal.getsignal(signal.SIGINT)
        self._alarm_handler = signal.getsignal(signal.SIGALRM)
        self._hook = sys.unraisablehook

    def __enter__(self) -> Self:
        """Install the handlers of SIGINT and SIGALRM, and the hook that learns of dropped exceptions.

        Nothing is installed outside the main thread, or if SIGINT has no Python handler (it is ignored, for example).
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(self._handler):
            self._is_installed = True
            sys.unraisablehook = self._note_dropped
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the timer and put back the handlers and the hook that were there before."""
        if self._is_installed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, self._handler)
            signal.signal(signal.SIGALRM, self._alarm_handler)
            sys.unraisablehook = self._hook

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGALRM: arm the timer and call the former SIGINT handler (raises KeyboardInterrupt)."""
        self.have_come = True
        signal.setitimer(signal.ITIMER_REAL, REPEAT_S)
        if callable(self._handler):
            self._handler(number, frame)

    def _note_dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Arm the timer if Python has dropped a KeyboardInterrupt; give other dropped exceptions to the former hook.

        It cannot raise the interrupt itself, because Python drops exceptions of this hook too.
        """
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, REPEAT_DROPPED_S)
        else:
            self._hook(unraisable)
