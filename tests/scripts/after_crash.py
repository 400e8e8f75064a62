"""The check script that the variable CHECK names, with an item in front whose process ends with a signal."""

import importlib
import os
import sys

from toy_check import end_process, main, one

if __name__ == "__main__":
    checked = importlib.import_module(os.environ["CHECK"])
    items = [one("crash", end_process), *checked.ITEMS]
    sys.exit(main(__file__, checked.__doc__, items, checked.GOALS, checked.session_of))
