"""Files that later processes find what was computed in: a header and bytes, whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

CHECKSUM_BYTES = 32


class Kept(NamedTuple):
    """What a file holds."""

    header: Any
    """A value of JSON."""
    content: bytes


def read_kept(path: Path) -> Kept | None:
    """Return what is kept in a file; None if there is none, or one whose checksum does not match.

    A file holds the SHA-256 checksum of the rest, of CHECKSUM_BYTES, a line of JSON with the header, and the content.
    """
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        checksum, rest = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
        if checksum == hashlib.sha256(rest).digest():
            header, _, content = rest.partition(b"\n")
            return Kept(json.loads(header), content)
    return None


def write_kept(path: Path, kept: Kept) -> None:
    """Keep a header and bytes for later processes.

    The file appears whole or not at all, since several threads and processes may write it: each writes a file of its
    own and renames it. Errors of the file system are ignored: the next process computes again.
    """
    rest = json.dumps(kept.header).encode() + b"\n" + kept.content
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(rest).digest() + rest)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


@cache
def hash_of_sources(*packages: str) -> str:
    """Return a hash of the sources of imported packages, the modules of their subpackages included.

    It is computed once in a process: call it first as the sources are imported, since a later version of them may be
    installed while the process runs.
    """
    files = {path for package in packages for path in Path(sys.modules[package].__path__[0]).rglob("*.py")}
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(files))).hexdigest()
