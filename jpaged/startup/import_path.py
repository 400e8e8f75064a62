"""Where child processes find this package, and nothing of the current folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def import_path() -> str:
    """Return `sys.path` as a value of PYTHONPATH, without the current folder unless jpaged itself is in it.

    With Python's flag -P it keeps modules of the current folder, which may be a downloaded model, from being imported.
    """
    # This file is jpaged/startup/import_path.py, so parents[2] is the folder that jpaged is in.
    here, own = Path.cwd().resolve(), Path(__file__).resolve().parents[2]
    return os.pathsep.join(path for path in map(str, sys.path) if here == own or Path(path).resolve() != here)
