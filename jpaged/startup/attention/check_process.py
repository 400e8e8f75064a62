"""Compares a backend with numpy in a subprocess, so that a crash or a hang there ends no engine.

    parent ── CheckRequest, JSON on stdin ─▶ python -m jpaged.startup.attention.check_process
                                             compares         ── CheckResult, JSON on stdout ─▶ parent

A start runs it before it opens a GPU itself: both processes need memory there, and the child takes no more of it than
it uses. What another start would find as well is remembered, with the versions of everything that it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import jax
import msgspec

from ...checks import one_line
from ...config.engine_config import EngineConfig
from ...models.config.spec import ModelSpec
from ...pallas_kernels.ragged_paged_attention.interface import (
    AttentionShape,
    Backend,
    BackendUnavailableError,
    CheckGuard,
)
from ...pallas_kernels.ragged_paged_attention.names import BACKENDS
from ...sharding import select_devices, visible_accelerators
from ..import_path import import_path
from ..parent_death import kill_with_parent
from ..sizing.sizes import chosen_dtypes
from .check import EACH_START, keep_result, kernel_error, result_file, source_digest, too_different
from .choice import attention_shape, load_backend

logger = logging.getLogger("jpaged")

LIMIT_S = 60.0
"""Seconds after which a child is ended: about 20 go by with its start, that of the GPU and compilation."""
KILL_WAIT_S = 5
"""Seconds that a killed child has to be gone, and that a child lives on if nobody kills it."""
DRIVER_FILES = ("/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus/*/information")
"""Files in which the driver tells its version and the models of the GPUs, without a GPU being opened."""
DRIVER_FIELDS = ("NVRM version:", "Model:")
"""Beginnings of the lines with these."""
DEVICE_IS_OPEN, RESULT = "device is open", "result: "
"""Lines of a child's stdout, or how they begin; libraries may write others."""
ENDED_BY_OTHERS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGALRM")
"""Signals that somebody else sends, and no crash does."""
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "out of memory")
"""Texts in errors of a device whose memory others use."""
LESS_MEMORY = "start the engine before other work on the GPU, or set XLA_PYTHON_CLIENT_PREALLOCATE=false for that"
"""The way out where other work holds that memory."""


@dataclass(frozen=True)
class CheckRequest:
    """A comparison that a child process is to make."""

    backend: str
    """Module and class of the backend: "package.module:Class"."""
    device: str
    """Kind of the device, as `select_devices` takes it."""
    shape: AttentionShape
    dtype: str
    """Data type of queries, keys and values."""
    block_size: int
    is_deterministic: bool

    @classmethod
    def of(cls, backend: type[Backend], **others: Any) -> CheckRequest:
        """Return the request for a class of backends; `others` are the other fields."""
        return cls(f"{backend.__module__}:{backend.__qualname__}", **others)


@dataclass(frozen=True)
class CheckResult:
    """What a comparison has found."""

    failure: str | None
    """A clause that says why the backend must not serve; None if it may."""
    is_lasting: bool
    """Whether another start would find the same: the backend agrees, differs, does not compile, crashes or hangs. What
    is due to a full GPU, a missing one, or a process that cannot be started may be over by then."""


@functools.cache
def check_in_subprocess(request: CheckRequest, limit_s: float = LIMIT_S) -> str | None:
    """Compare a backend with numpy in a child process; return why it must not serve, as a clause, or None if it may.

    A child that crashes, does not answer within `limit_s` seconds, or finds a difference is a failure. Lasting results
    (`CheckResult.is_lasting`), failures too, are kept in a file of this user's cache, and no child is started if the
    file is there. A file that cannot be read is written anew, with a warning. A failure from the file, or one that was
    just written to it, says how to check again. Within a process `functools.cache` compares each request only once.
    """
    path = _result_path(request)
    try:
        if path is not None and path.exists():
            return _with_hint(json.loads(path.read_text())["failure"], path)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        logger.warning("%s is not read, the check is made again: %s", path, problem)
    result = _run_child(request, limit_s)
    if result.failure is None:
        logger.info("%s agrees with numpy, by its check in a subprocess", request.backend)
    if path is None or not result.is_lasting:
        return result.failure
    is_kept = keep_result(path, {"failure": result.failure, "request": request}, "a backend")
    return _with_hint(result.failure, path) if is_kept else result.failure


def _with_hint(failure: str | None, path: Path) -> str | None:
    """Return a failure with the hint that the check is made again if the file `path` is deleted; None stays None."""
    return failure and f"{failure}; remembered in {path}, delete it to check again"


def _result_path(request: CheckRequest) -> Path | None:
    """Return the path of the file that remembers the result of this request on this machine, or None with a warning.

    The name of the file is a digest of all that the result depends on: the request, the GPUs, their driver, and the
    versions of Python, JAX and its plugins. None if there is no home directory. None also if the driver does not tell
    which GPUs there are, since a result of one chip must not count for another. The file may not exist.
    """
    try:
        driver = [line for line in _driver_lines() if line.startswith(DRIVER_FIELDS)]  # Driver version, GPU models.
        if request.device != "cpu" and not driver:
            logger.warning(EACH_START, "a backend", f"no NVIDIA driver tells its version in {DRIVER_FILES[0]}")
            return None
        versions = [(each.name or "", each.version) for each in distributions()]
        versions = sorted(each for each in versions if each[0].startswith(("jax", "nvidia")))
        visible = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS")}
        python = sys.version_info[:2]
        return result_file([asdict(request), sorted(set(driver)), visible, versions, python, source_digest()])
    except (OSError, RuntimeError) as problem:
        logger.warning(EACH_START, "a backend", problem)
        return None


def _driver_lines() -> Iterator[str]:
    for pattern in DRIVER_FILES:
        for path in sorted(Path("/").glob(pattern[1:])):
            yield from path.read_text(errors="replace").splitlines()


def _run_child(request: CheckRequest, limit_s: float) -> CheckResult:
    """Run `main` in a child process and return its result, or a failure if it crashes or takes longer than `limit_s`.

    The child is killed, with its own children, when its time is over or this process is interrupted; on Linux it dies
    with this process. An answer, a line
    that begins with RESULT, counts even if the child crashes or hangs after it; it says itself whether it is lasting.
    Without an answer, the failure is lasting if the child hung after it had opened the device, or was ended by a signal
    of a crash, such as SIGSEGV. It is not lasting if the child could not start or failed otherwise. Nothing is raised
    for a failed child.
    """
    # A session of its own lets `_end` kill the children of the child too.
    command = [sys.executable or "python3", "-P", "-m", __name__, f"{limit_s:g}", str(os.getpid())]
    with TemporaryFile() as answer, TemporaryFile() as errors:

        def lines(file: IO[bytes]) -> list[str]:  # All that the child has written to it so far.
            file.seek(0)
            return file.read().decode(errors="replace").strip().splitlines()

        try:
            environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": import_path()}
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": answer, "stderr": errors}
            child = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        except OSError as problem:
            return CheckResult(f"its check cannot be started: {problem}", is_lasting=False)
        is_late = False  # Whether the child was killed after `limit_s`.
        try:
            child.communicate(msgspec.json.encode(request), timeout=limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            _end(child)
        except BaseException:  # On Ctrl-C, for example, a child that lives on would keep the GPU's memory.
            _end(child)
            raise
        # The answer is complete if its line ends with the JSON object's brace.
        answers = [line.removeprefix(RESULT) for line in lines(answer) if line.startswith(RESULT)]
        if answers and answers[-1].endswith("}"):
            return msgspec.json.decode(answers[-1], type=CheckResult)
        if is_late:
            failure = f"its check in a subprocess gave no answer within {limit_s:g} s"
            return CheckResult(failure, is_lasting=DEVICE_IS_OPEN in lines(answer))
        if child.returncode < 0:  # Ended by the signal of this number, negated.
            number = -child.returncode
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return CheckResult(f"its check in a subprocess ended by {name}", is_lasting=name not in ENDED_BY_OTHERS)
        last = (lines(errors) or ["no message"])[-1]
        failure = f"its check in a subprocess ended with status {child.returncode}: {one_line(last, 500)}"
        return CheckResult(failure, is_lasting=False)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with its own children. A process that waits inside the driver cannot be killed, and stays."""
    with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(KILL_WAIT_S)


def main(limit_s: float, parent: int) -> int:
    """Answer the request on stdin, JSON, by one line on stdout: RESULT and the result as JSON. Return 0.

    `limit_s` is the time in seconds after which the process `parent` kills this one.
    """
    # If the parent is gone, SIGALRM ends this process, also while native code hangs; on Linux it ends at once.
    signal.alarm(math.ceil(limit_s) + KILL_WAIT_S)
    kill_with_parent(parent)
    result = _compare(msgspec.json.decode(sys.stdin.read(), type=CheckRequest))
    print(f"\n{RESULT}{msgspec.json.encode(result).decode()}", flush=True)
    return 0


def _compare(request: CheckRequest) -> CheckResult:
    """Compare a backend with numpy in this process, which is the child, and return the result.

    The line DEVICE_IS_OPEN is printed once the device is open. A backend that cannot be made for the device or the
    model is no failure of the check: the parent meets the same error when it makes the backend, and reports it. A
    missing device and too little device memory are failures that are not lasting; a difference and any other error are
    lasting ones.
    """
    module, name = request.backend.split(":")
    backend_class: type[Backend] = getattr(importlib.import_module(module), name)
    try:
        device = select_devices(request.device)[0]
    except RuntimeError as problem:
        return CheckResult(f"its check found no device: {one_line(problem, 500)}", is_lasting=False)
    print(f"\n{DEVICE_IS_OPEN}", flush=True)
    try:
        backend = backend_class.for_devices([device], request.shape, deterministic=request.is_deterministic)
    except (BackendUnavailableError, ValueError):
        return CheckResult(None, is_lasting=True)
    try:
        error = kernel_error(backend, request.shape, request.dtype, request.block_size, device)
    except Exception as problem:  # A kernel that does not compile may raise anything.
        failure = f"it failed its check on {device.device_kind}: {one_line(problem, 500)}"
        if any(text in str(problem) for text in OUT_OF_MEMORY):
            return CheckResult(f"{failure}; {LESS_MEMORY}", is_lasting=False)
        return CheckResult(failure, is_lasting=True)
    return CheckResult(too_different(error, device), is_lasting=True)


def check_before_opening(
    config: EngineConfig, model: ModelSpec, report: Callable[[int, int], None] | None = None
) -> None:
    """Compare the backends that may serve on a GPU in child processes, before this process opens the GPU.

    After that the child might find too little memory. The results are only remembered here (`check_in_subprocess`
    caches them); they count once a backend is chosen. Compared are the backends of GPUs whose `check_guard` is CHILD
    and that the option `attention_backend` allows; one that needs a newer JAX or cannot be imported is passed over.
    Does nothing if there is no GPU, or if the options or JAX's settings exclude it. `model` is the model as one device
    has it. `report` is called with (done, total), (0, 1) and (1, 1), around a comparison, which may take a minute.
    """
    kinds = [config.device] if config.device != "auto" else visible_accelerators()
    if "gpu" not in kinds or not _jax_may_use_gpus():
        return
    for entry in BACKENDS:
        if "gpu" not in entry.platforms or config.attention_backend not in ("auto", entry.name):
            continue
        if jax.__version_info__ < entry.min_jax:  # `choose_attention` says so.
            continue
        try:
            backend = load_backend(entry)
        except BackendUnavailableError:
            continue  # `choose_attention` will report it.
        if backend.check_guard is CheckGuard.CHILD:
            if report is not None:
                report(0, 1)
            check_in_subprocess(check_request(config, model, backend, "gpu"))
            if report is not None:
                report(1, 1)


def check_request(config: EngineConfig, model: ModelSpec, backend: type[Backend], platform: str) -> CheckRequest:
    """Return the comparison that must succeed before this backend serves the model on `platform`.

    `model` is the model as one device has it. Each window occurs once in the request, so that models which differ only
    in their number of layers have equal requests and share a result.
    """
    dtype, kv_dtype = chosen_dtypes(config, model, platform)
    shape = attention_shape(model, kv_dtype)
    return CheckRequest.of(
        backend,
        device=platform,
        shape=replace(shape, windows=tuple(dict.fromkeys(shape.windows))),
        dtype=dtype,
        block_size=config.block_size or backend.block_sizes[0],
        is_deterministic=config.deterministic,
    )


def _jax_may_use_gpus() -> bool:
    """Return whether the user's settings of JAX let it use GPUs. Opens none."""
    platforms = jax.config.values.get("jax_platforms") or os.environ.get("JAX_PLATFORMS", "")
    return not platforms or bool({"cuda", "gpu"} & set(platforms.split(",")))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
