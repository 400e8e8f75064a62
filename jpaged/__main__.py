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
"""The same status as in `commands.process`, which cannot be imported here: its import may be what is interrupted."""


def main(module: str = "cli") -> NoReturn:
    """Run this process's command line, `sys.argv`, by `commands.<module>.main`, and exit with the status it returns.

    After an interrupt (Ctrl-C) the process ends at once with status 130: it waits neither for threads that compile nor
    for the device. It writes "interrupted" to stderr if the interrupt came outside of the command's own handling. Once
    the command has returned, its results are complete, and a later interrupt is ignored. This function never returns.
    """
    try:
        from .commands.process import run_command

        status = run_command(lambda argv: import_module(f".commands.{module}", "jpaged").main(argv), sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        if sys.stderr is not None:  # `print(file=None)` would write to stdout.
            with suppress(OSError, ValueError):
                print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    if status == EXIT_INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            # A stream that was closed is None or raises ValueError; one whose reader has gone raises OSError.
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(status)  # `sys.exit` would join threads that compile.
    sys.exit(status)


if __name__ == "__main__":
    main()
