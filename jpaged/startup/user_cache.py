"""Where this user's files are kept between runs: models and executables, readable by nobody else."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(*names: str) -> Path:
    """The folder `jpaged/NAMES…` in the user's cache. RuntimeError if the user has no home directory."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    home = configured if configured.is_absolute() else Path.home() / ".cache"
    return home.joinpath("jpaged", *names)


def make_private(directory: Path) -> None:
    """Create `directory`; those of its parents that are ours, from `jpaged` on, are as private as itself."""
    ours = [path for path in (*reversed(directory.parents), directory) if "jpaged" in path.parts]
    (ours or [directory])[0].parent.mkdir(parents=True, exist_ok=True)
    for path in ours or [directory]:
        path.mkdir(mode=0o700, exist_ok=True)
