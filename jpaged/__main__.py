"""The entry of `python -m jpaged COMMAND …`, and of the console script `jpaged`.

This module imports the standard library alone, and `main` the rest: an interrupt during those imports ends the process
with one line too.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

EXIT_INTERRUPTED = 130
"""As in `commands.process`, whose import may be what is interrupted."""


def main(module: str = "cli") -> NoReturn:
    """Run the command of this process, in this module of `commands`, and end with its exit status.

    Once the command has returned, its results are complete, and a later interrupt is ignored. After an interrupt the
    process ends at once: neither threads that compile nor a device that computes are waited for.
    """
    try:
        from .commands.process import run_command

        status = run_command(lambda argv: import_module(f".commands.{module}", "jpaged").main(argv), sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        if sys.stderr is not None:  # Without a file, `print` would write to stdout.
            with suppress(OSError, ValueError):
                print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    if status == EXIT_INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # A closed stream is None, or refuses what is left.
                stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
