"""The entry of `python -m jpaged COMMAND …`, which is `jpaged COMMAND …`."""

import sys

from .commands.cli import main

sys.exit(main())
