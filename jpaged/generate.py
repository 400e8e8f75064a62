"""The entry of `python -m jpaged.generate …`, which is `jpaged generate …`."""

from __future__ import annotations

import sys

from .commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
