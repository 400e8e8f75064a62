"""Progress of a command on stderr: one bar per phase on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

LINE_EVERY_S = 10.0
"""Seconds between two plain lines of one phase."""
IMPORTED_S = time.monotonic()
"""Time of this module's import, in seconds of `time.monotonic()`."""


class ProgressReport:
    """Shows the phases of a command, such as load, compile and requests. Phases may overlap, on several threads."""

    def __init__(self) -> None:
        """Show nothing yet: a phase appears with the first call of this object that names it.

        If stderr is a terminal, now, phases have bars; else they have lines.
        """
        self._is_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._bars: dict[str, Any] = {}
        self._since: dict[str, float] = {}
        """Start of each phase that has not ended, in seconds of `time.monotonic()`."""
        self._last_line_s = time.monotonic()
        self._is_closed = False

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Report that `done` of `total` units of phase `name` are done; `total` is None while it is not known.

        The first report begins the phase, and the one with `done == total` ends it; a later report of the same name
        begins a new one. The end is always a line on stderr, such as "load: 8 of 8 (2.1 s)"; before it a terminal has a
        bar, and any other stderr at most one line per LINE_EVERY_S. After `close`, reports are ignored. Any thread may
        call.
        """
        with self._lock:
            if self._is_closed:
                return
            now = time.monotonic()
            if name not in self._since:
                self._since[name] = self._last_line_s = now
            since = self._since[name]
            if self._is_terminal:
                self._show_bar(name, done, total)
            if done == total:
                self._end(name)
            if done == total or (not self._is_terminal and now - self._last_line_s > LINE_EVERY_S):
                self._last_line_s = now
                of_all = "" if total is None else f" of {total}"
                say(f"{name}: {done}{of_all} ({now - since:.1f} s)")

    def close(self) -> None:
        """Remove the bars and ignore later reports: phases that have not ended must not write into other output."""
        with self._lock:
            self._is_closed = True
            for name in list(self._since):
                self._end(name)

    def _show_bar(self, name: str, done: int, total: int | None) -> None:
        """Set the bar of a phase to `done` of `total` units, and make the bar if the phase has none."""
        if name not in self._bars:
            from tqdm import tqdm

            self._bars[name] = tqdm(total=total, desc=name, file=sys.stderr, leave=False)
        bar = self._bars[name]
        bar.total = total
        bar.update(done - bar.n)  # tqdm takes the units since the last update.

    def _end(self, name: str) -> None:
        self._since.pop(name, None)
        if (bar := self._bars.pop(name, None)) is not None:
            bar.close()


def say(text: str) -> None:
    """Print one line on stderr. If that fails, this line and all later ones are dropped, and no error is raised."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (BrokenPipeError, OSError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def seconds_since_start() -> float:
    """Return the seconds since the process started; without /proc (not Linux), since this module was imported.

    The clock counts from the boot of the machine, as the start of a process in /proc does.
    """
    try:
        # The 22nd field is the start in clock ticks after boot; the 2nd, in parentheses, may hold spaces. The text is
        # cut after the 2nd one, so the 22nd has the index 19.
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError):
        return time.monotonic() - IMPORTED_S
