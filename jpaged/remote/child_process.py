"""A core process as its front sees it: how it is started, how it ends, and what is left of it.

A thread of its own starts the process and waits for its end: on Linux the process is killed when this thread ends,
which is when the front does. Knows no messages but the one line on the process's stdin.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from ..startup.import_path import import_path
from .machine_share import MachineShare
from .wire import StartSpec

logger = logging.getLogger("jpaged")

MODULE = "jpaged.remote.core_process"
MAX_PATH_BYTES = 107
"""Bytes of the path of a unix socket."""
SHORT_FOLDER = "/tmp"
"""Where the socket is where paths in the folder for temporary files are too long."""
STOP_S = 15.0
"""Seconds that a process has to end by itself: its step has 10."""


class ChildProcess:
    """One core process. It ends when this one does."""

    def __init__(
        self,
        maker: str,
        config: Mapping[str, Any],
        options: Mapping[str, Any],
        share: MachineShare,
        on_end: Callable[[], None],
    ):
        """Make the folder of the socket; `start` starts the process. `on_end` is called on a thread once it has ended.

        Raise OSError if no folder can be written to.
        """
        self._environment = share.environment
        self.folder = _socket_folder()
        self.address = f"ipc://{self.folder}/core"
        self._spec = StartSpec(
            address=self.address,
            parent=os.getpid(),
            maker=maker,
            config=dict(config),
            options=dict(options),
            log_level=logger.getEffectiveLevel(),
            cpus=share.cpus,
            host_bytes=share.host_bytes,
        )
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        """Why it could not be started."""
        self._is_started, self._has_ended = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start the process."""
        threading.Thread(target=self._run, name="jpaged core process", daemon=True).start()
        self._is_started.wait()

    @property
    def pid(self) -> int | None:
        """Return its process id; None if it could not be started."""
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self._has_ended.is_set()

    @property
    def end(self) -> str:
        """Return how it has ended, as a sentence without its full stop."""
        status = None if self._process is None else self._process.returncode
        if status is None:
            return f"the core process could not be started: {self._problem}"
        if status >= 0:
            return f"the core process has ended with status {status}"
        known = -status in set(signal.Signals)
        return f"the core process was ended by {signal.Signals(-status).name if known else f'signal {-status}'}"

    def remove_folder(self) -> None:
        """Remove the folder of the socket, which nothing needs once the two ends are connected."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for_end(self) -> None:
        """Wait for its end, however long that takes."""
        self._has_ended.wait()

    def wait(self, max_s: float = STOP_S) -> None:
        """Wait for its end, and kill it if that takes longer."""
        if not self._has_ended.wait(max_s):
            self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there. Any thread may call."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, and wait for its end. Any thread may call."""
        if self._process is not None:
            self._process.kill()
            self._has_ended.wait()

    def _run(self) -> None:
        """Start the process, and wait until it ends."""
        try:
            # Without a stderr of this process, its number may be that of any file.
            stderr = subprocess.DEVNULL if sys.stderr is None else None
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, self.folder],  # The folder, in case this process dies now.
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, **self._environment, "PYTHONPATH": import_path()},
                start_new_session=True,  # Ctrl-C in a terminal reaches the front alone.
            )
            self._is_started.set()
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                _write_line(stdin, msgspec.json.encode(self._spec))
                self._process.wait()
        except OSError as problem:
            self._problem = str(problem)
        finally:
            self.remove_folder()
            self._has_ended.set()
            self._is_started.set()
            self._on_end()


def _write_line(stdin: IO[bytes], line: bytes) -> None:
    """Write a line that stays the only one. A process that has died before it has read it is no error here."""
    with suppress(BrokenPipeError):
        stdin.write(line + b"\n")
        stdin.flush()


def _socket_folder() -> Path:
    """Return a new folder that only this user can open, with a path that is short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="jpaged-"))
    if len(os.fsencode(folder / "core")) > MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="jpaged-", dir=SHORT_FOLDER))
    return folder
