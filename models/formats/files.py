"""The files of a checkpoint: their names, and the list of their SHA-256 sums.

The list is in the format of the program sha256sum, which checks it too. Checking reads every byte of the files, so that
a large model takes seconds. Imports neither jax nor numpy, so that a wrong directory is reported at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath, PurePosixPath

from ..errors import ModelLoadError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Says which of several safetensors files holds a tensor."""
TREE_FILE = "_METADATA"
"""Lists the arrays of an orbax folder. Orbax writes it last."""
UNFINISHED_ORBAX = ".orbax-checkpoint-tmp"
"""Part of the name of a folder that orbax has not finished."""
MANIFEST_FILE = "SHA256SUMS"
NUM_READERS = 4
"""Threads that compute sums."""
MAX_BYTES = 16 << 20
"""Bytes of the largest list that is read, some 100,000 files."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)", re.IGNORECASE)


def write_manifest(directory: Path) -> None:
    """Write the sums of all files below a directory."""
    names = sorted(path.relative_to(directory).as_posix() for path in _files(directory))
    lines = [f"{digest}  {name}\n" for name, digest in _sums(directory, names)]
    (directory / MANIFEST_FILE).write_text("".join(lines))


def check_manifest(directory: Path, read: Collection[PurePath]) -> list[str]:
    """Compare files of a directory with its list of sums, and return the names of those that the list does not have.

    `read` are the files that are read, relative to the directory, and folders all files of which are; one that is
    neither there nor listed does not count. Without a list nothing happens. Raises ModelLoadError for a listed file
    that is missing, and for one whose sum differs.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return []
    present = {file.relative_to(directory).as_posix() for name in read for file in _files(directory / name)}
    listed = _read(path)
    roots = {PurePosixPath(one.as_posix()) for one in read}
    wanted = {name for name in listed if not roots.isdisjoint((PurePosixPath(name), *PurePosixPath(name).parents))}
    if missing := sorted(wanted - present):
        raise ModelLoadError(f"{path}: lists {missing[0]}, which is not in the directory: fetch it")
    for name, digest in _sums(directory, sorted(wanted)):
        if digest != listed[name]:
            fault = f"its SHA-256 sum begins with {digest[:12]}, {MANIFEST_FILE} lists {listed[name][:12]}"
            raise ModelLoadError(f"{directory / name}: {fault}; the file was damaged or changed: fetch it again")
    return sorted(present - wanted)


def _files(path: Path) -> list[Path]:
    """Return all files below a directory, or the path itself if it is a file."""
    return [file for file in [path, *path.rglob("*")] if file.is_file()]


def _sums(directory: Path, names: list[str]) -> Iterable[tuple[str, str]]:
    """Yield the sum of each file; ModelLoadError for one that cannot be read."""

    def sum_of(name: str) -> str:
        try:
            with (directory / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            reason = error.strerror or error
            raise ModelLoadError(f"{directory / name}: cannot be read ({reason}); check its permissions") from error

    with ThreadPoolExecutor(NUM_READERS) as readers:
        yield from zip(names, readers.map(sum_of, names), strict=True)


def _read(path: Path) -> dict[str, str]:
    """Return the sum of each file that a list has."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: {path.stat().st_size} bytes, at most {MAX_BYTES} are read: shorten it")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error}); write it with sha256sum") from error
    listed = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        parts = PurePosixPath(match[2] if match else "/").parts
        if match is None or parts[0] == "/" or ".." in parts:
            wanted = "a SHA-256 sum, two spaces and the name of a file in the directory"
            raise ModelLoadError(f"{path}: line {number} is {line[:60]!r}, wanted {wanted}: write it with sha256sum")
        listed[match[2]] = match[1].lower()
    return listed
