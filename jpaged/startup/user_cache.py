"""Folders of this user's cache: models, executables, weights and check results, readable by their owner only."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(*names: str) -> Path:
    """Return the folder `jpaged/NAMES…` in the user's cache; RuntimeError if the user has no home directory."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that relative paths are ignored.
    home = configured if configured.is_absolute() else Path.home() / ".cache"
    return home.joinpath("jpaged", *names)


def make_private(directory: Path) -> None:
    """Create `directory` and its missing parents; `directory` itself is made accessible to its owner only.

    The same holds for a folder named `jpaged` among the parents and for all folders below it; other parents get the
    usual permissions. Folders that exist keep theirs. Example: for ~/.cache/jpaged/xla the folders jpaged and xla are
    private, and .cache is not.
    """
    # From the outermost folder to `directory`: those that are named jpaged or lie in a folder of that name.
    ours = [path for path in (*reversed(directory.parents), directory) if "jpaged" in path.parts]
    (ours or [directory])[0].parent.mkdir(parents=True, exist_ok=True)
    for path in ours or [directory]:
        path.mkdir(mode=0o700, exist_ok=True)
