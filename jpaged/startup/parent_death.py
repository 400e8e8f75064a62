"""A process that ends with the one that started it, whatever either of them does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when the thread that started it ends."""


def end_with_stdin(stdin: IO[bytes], clean_up: Callable[[], None]) -> None:
    """End this process once its stdin does, which its parent holds open. A thread waits for that from now on."""

    def wait() -> None:
        while stdin.read(1 << 16):
            continue
        clean_up()
        os._exit(0)

    threading.Thread(target=wait, name="jpaged parent watch", daemon=True).start()


def kill_with_parent(parent: int) -> None:
    """Let Linux kill this process once the thread that started it ends, even if native code holds Python's lock.

    `parent` is the id of that thread's process; if it has died already, this process ends here. Other systems do
    nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
