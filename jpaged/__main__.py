"""`python -m jpaged COMMAND …` is `jpaged COMMAND …`."""

import sys

from .cli import main

sys.exit(main())
