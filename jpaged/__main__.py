"""The entry of `python -m jpaged COMMAND …`, and of the console script `jpaged`.

Nothing else is imported before `main` runs: an interrupt while modules are imported ends the process in one line too.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module


def main(module: str = "cli") -> int:
    """Run the command of this process, in this module of `commands`, and return its exit status.

    After it the results are complete, and an interrupt changes nothing any more; after an interrupt, the next one ends
    the process at once.
    """
    try:
        status: int = import_module(f".commands.{module}", "jpaged").main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    signal.signal(signal.SIGINT, signal.SIG_DFL if status == 130 else signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.exit(main())
