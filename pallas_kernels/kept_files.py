"""Files that later processes find what was computed in: a header and bytes, whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

logger = logging.getLogger("jpaged")

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

    If the file system refuses the file, the next process computes again; the first time a warning says so.
    """
    rest = json.dumps(kept.header).encode() + b"\n" + kept.content
    try:
        with new_file(path) as file:
            file.write(hashlib.sha256(rest).digest() + rest)
    except OSError as error:
        _warn_of_refusal(path.parent, error.strerror)


@cache
def _warn_of_refusal(directory: Path, cause: str) -> None:
    """Say that a directory refuses files, once for each cause."""
    logger.warning("%s: programs are not kept, each start compiles them anew: %s", directory, cause)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write, which becomes the file `path` once the `with` has ended without an error.

    So `path` appears whole or not at all. Several threads and processes may write it: each writes a file of its own,
    whose name ends in `.part`. Raises OSError.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def hash_of_sources(*packages: str) -> str:
    """Return a hash of the sources of packages, the modules of their subpackages included.

    Those of a package are read once in a process: call this first as they are imported, since a later version of them
    may be installed while the process runs.
    """
    return hashlib.sha256("".join(map(_hash_of_package, packages)).encode()).hexdigest()


@cache
def _hash_of_package(package: str) -> str:
    return hash_of_folder(Path(importlib.import_module(package).__path__[0]))


def hash_of_folder(folder: Path) -> str:
    """Return a hash of the names and contents of all Python files in a folder and the folders below it."""
    digest, name_start = hashlib.sha256(), len(os.path.join(folder, ""))
    for directory, folders, files in os.walk(folder):
        folders.sort()  # `os.walk` goes on in this order.
        for name in sorted(file for file in files if file.endswith(".py")):
            path = os.path.join(directory, name)  # A `Path` takes as long as reading the file.
            digest.update(path[name_start:].encode() + b"\0")
            with open(path, "rb") as file:
                digest.update(file.read() + b"\0")
    return digest.hexdigest()
