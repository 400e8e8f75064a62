"""Where a start keeps what later starts need: executables, step programs and weights."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

import jax

from .user_cache import make_private, user_cache

logger = logging.getLogger("jpaged")

NO_CACHE = "off"
"""The directory that stands for none."""


def use_compilation_cache(directory: str | None) -> None:
    """Set JAX's persistent compilation cache to `directory`, so that later processes find the executables.

    None means the directory that JAX has been given already, or else `xla` in this user's cache. "off" leaves JAX's
    configuration as it is. A directory that is made here is private to its owner. If it cannot be written, a warning is
    logged and JAX's configuration stays.
    """
    if directory == NO_CACHE:
        return
    if directory is None and jax.config.values.get("jax_compilation_cache_dir"):
        return
    path = _writable(directory, "xla", "compilation cache off, each start compiles anew")
    if path is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Keep every executable, however small it is and however fast it was compiled.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compilation_cache() -> Path | None:
    """Return the directory of JAX's persistent compilation cache, made if it is not there.

    None if there is none that can be written.
    """
    directory = jax.config.values.get("jax_compilation_cache_dir")
    if not directory:
        return None
    with suppress(OSError):
        Path(directory).mkdir(parents=True, exist_ok=True)
    return Path(directory) if os.access(directory, os.W_OK) else None


def weights_cache(directory: str | None) -> Path | None:
    """Return the directory in which weights are kept: `directory`, or `weights` in this user's cache if it is None.

    Return None for "off", and, with a warning, for a directory that cannot be written, or that every user may write to:
    another one could put weights there.
    """
    if directory == NO_CACHE:
        return None
    consequence = "weights cache off, each start converts the model's files anew"
    path = _writable(directory, "weights", consequence)
    if path is not None and path.stat().st_mode & stat.S_IWOTH:
        logger.warning("%s: every user may write to %s", consequence, path)
        return None
    return path


def _writable(directory: str | None, name: str, consequence: str) -> Path | None:
    """Return `directory`, or that `name` in this user's cache, made if it is not there.

    If it cannot be written, log a warning that begins with the `consequence`, and return None.
    """
    try:
        path = Path(directory) if directory else user_cache(name)
        make_private(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable")
    except (OSError, RuntimeError) as error:
        logger.warning("%s: %s", consequence, error)
        return None
    return path
