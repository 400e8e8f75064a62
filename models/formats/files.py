"""The files of a checkpoint: their names, and the list of their SHA-256 sums.

The list is in the format of the program sha256sum, which can check it too. Checking reads every byte of the files,
which takes seconds for a large model. This module imports neither jax nor numpy, so that a wrong directory is reported
at once.
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
STEP_FILE = "_CHECKPOINT_METADATA"
"""Says in an orbax folder when it was finished. A folder that has it and no TREE_FILE holds several such folders."""
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
    """Compare files of a directory with its list SHA256SUMS, and return the sorted names that the list lacks.

    `read` are the files to check, and folders whose files are all checked, relative to the directory. A path that
    neither exists nor is listed is skipped. Without a list nothing is checked and the result is empty. Raises
    ModelLoadError for a listed file that is missing, for one whose sum differs, and for a list that cannot be read.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return []
    present = {file.relative_to(directory).as_posix() for root in read for file in _files(directory / root)}
    listed = _read(path)  # Name → sum, for all files that the list names.
    roots = {PurePosixPath(path.as_posix()) for path in read}
    # Listed files to check: those in `read`, and those below a folder in `read`.
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
    """Yield (name, SHA-256 sum) of each file in the directory, in the order of `names`.

    Names are relative to the directory. NUM_READERS threads compute sums, of several files at once: reading and
    hashing release Python's lock. Raises ModelLoadError for a file that cannot be read, once it is its turn.
    """

    def sum_of(name: str) -> str:
        """Return the SHA-256 sum of the file as 64 hexadecimal digits; ModelLoadError if it cannot be read."""
        try:
            with (directory / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            reason = error.strerror or error
            raise ModelLoadError(f"{directory / name}: cannot be read ({reason}); check its permissions") from error

    with ThreadPoolExecutor(NUM_READERS) as readers:
        yield from zip(names, readers.map(sum_of, names), strict=True)


def _read(path: Path) -> dict[str, str]:
    """Return name → sum of the files in the list `path`, a file as sha256sum writes it.

    A line such as "5f1d…  model.safetensors" has 64 hexadecimal digits, two spaces or a space and `*`, and a name; "./"
    in front of the name is dropped. The last line counts if a name is there twice. Raises ModelLoadError if the list
    cannot be read, is larger than MAX_BYTES, or has a line of another form, or the name of a file outside of the
    directory.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: {path.stat().st_size} bytes, at most {MAX_BYTES} are read: shorten it")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error}); write it with sha256sum") from error
    listed = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)  # Its groups are the sum and the name.
        parts = PurePosixPath(match[2] if match else "/").parts  # Absolute names, and ".." in a name, are refused.
        if match is None or not parts or parts[0] == "/" or ".." in parts:
            wanted = "a SHA-256 sum, two spaces and the name of a file in the directory"
            raise ModelLoadError(f"{path}: line {number} is {line[:60]!r}, wanted {wanted}: write it with sha256sum")
        listed[match[2]] = match[1].lower()
    return listed
