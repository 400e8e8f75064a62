"""Compares a backend with `xla` in a subprocess, so that a crash or a hang there ends no engine.

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
from ..sizing.sizes import chosen_dtypes
from .check import EACH_START, keep_result, kernel_error, result_file, source_digest, too_different
from .choice import attention_shape, load_backend

logger = logging.getLogger("jpaged")

LIMIT_S = 60.0
"""Seconds after which a child is ended: its start, the GPU's and the compilation of both backends take about 20."""
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
    """Return a clause that says why the backend must not serve, None if it may; asked once per process.

    A child that crashes, answers nothing within `limit_s`, or finds a difference is a failure. Where the lasting result
    of an earlier start is remembered, no child is started.
    """
    path = _result_path(request)
    try:
        if path is not None and path.exists():
            return _with_hint(json.loads(path.read_text())["failure"], path)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        logger.warning("%s is not read, the check is made again: %s", path, problem)
    result = _run_child(request, limit_s)
    if result.failure is None:
        logger.info("%s agrees with xla, by its check in a subprocess", request.backend)
    if path is None or not result.is_lasting:
        return result.failure
    is_kept = keep_result(path, {"failure": result.failure, "request": request}, "a backend")
    return _with_hint(result.failure, path) if is_kept else result.failure


def _with_hint(failure: str | None, path: Path) -> str | None:
    """Return a failure with the way to have it looked for again."""
    return failure and f"{failure}; remembered in {path}, delete it to check again"


def _result_path(request: CheckRequest) -> Path | None:
    """Return the file that remembers the result of this request on this machine; None if there is no place for it.

    None also where the driver does not say what GPUs there are: results of one chip must not count for another.
    """
    try:
        driver = [line for line in _driver_lines() if line.startswith(DRIVER_FIELDS)]
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
    """Make the comparison in a child process, which is gone after `limit_s`, or nearly so."""
    # -P and _import_path: no modules of the current folder are imported, which may be a downloaded model. Its own
    # session: a child of the child is ended too.
    command = [sys.executable or "python3", "-P", "-m", __name__, f"{limit_s:g}"]
    with TemporaryFile() as answer, TemporaryFile() as errors:

        def lines(file: IO[bytes]) -> list[str]:
            file.seek(0)
            return file.read().decode(errors="replace").strip().splitlines()

        try:
            environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": _import_path()}
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": answer, "stderr": errors}
            child = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        except OSError as problem:
            return CheckResult(f"its check cannot be started: {problem}", is_lasting=False)
        is_late = False
        try:
            child.communicate(msgspec.json.encode(request), timeout=limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            _end(child)
        except BaseException:  # Such as Ctrl-C: the child would keep the GPU's memory.
            _end(child)
            raise
        # An answer counts also if the child then crashes or hangs on its way out.
        answers = [line.removeprefix(RESULT) for line in lines(answer) if line.startswith(RESULT)]
        if answers and answers[-1].endswith("}"):
            return msgspec.json.decode(answers[-1], type=CheckResult)
        if is_late:
            failure = f"its check in a subprocess gave no answer within {limit_s:g} s"
            return CheckResult(failure, is_lasting=DEVICE_IS_OPEN in lines(answer))
        if child.returncode < 0:
            number = -child.returncode
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return CheckResult(f"its check in a subprocess ended by {name}", is_lasting=name not in ENDED_BY_OTHERS)
        last = (lines(errors) or ["no message"])[-1]
        failure = f"its check in a subprocess ended with status {child.returncode}: {one_line(last, 500)}"
        return CheckResult(failure, is_lasting=False)


def _import_path() -> str:
    """Return this process's paths of modules for PYTHONPATH, without the current folder unless jpaged is in it."""
    here, own = Path.cwd().resolve(), Path(__file__).resolve().parents[3]
    return os.pathsep.join(path for path in map(str, sys.path) if here == own or Path(path).resolve() != here)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with its own children. A process that waits inside the driver cannot be killed, and stays."""
    with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(KILL_WAIT_S)


def main(limit_s: float) -> int:
    """Answer the request on stdin by one line on stdout, RESULT and JSON."""
    # If the parent is gone, SIGALRM ends this process, also while native code hangs.
    signal.alarm(math.ceil(limit_s) + KILL_WAIT_S)
    result = _compare(msgspec.json.decode(sys.stdin.read(), type=CheckRequest))
    print(f"\n{RESULT}{msgspec.json.encode(result).decode()}", flush=True)
    return 0


def _compare(request: CheckRequest) -> CheckResult:
    """Compare in this process. A backend that does not take the device or the model has no failure to tell here."""
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
        return CheckResult(None, is_lasting=True)  # The start finds the same, and says it.
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
    """Compare the backends of a GPU in child processes while this process has not opened the GPU, if there is one.

    The result is asked for again once the backend is chosen. `report(done, total)` is told of a comparison, which may
    take a minute.
    """
    kinds = [config.device] if config.device != "auto" else visible_accelerators()
    if "gpu" not in kinds or not _jax_may_use_gpus():
        return
    for entry in BACKENDS:
        if "gpu" not in entry.platforms or config.attention_backend not in ("auto", entry.name):
            continue
        if jax.__version_info__ < entry.min_jax:
            continue
        try:
            backend = load_backend(entry)
        except BackendUnavailableError:
            continue  # The choice of the backend says so.
        if backend.check_guard is CheckGuard.CHILD:
            if report is not None:
                report(0, 1)
            check_in_subprocess(check_request(config, model, backend, "gpu"))
            if report is not None:
                report(1, 1)


def check_request(config: EngineConfig, model: ModelSpec, backend: type[Backend], platform: str) -> CheckRequest:
    """Return the comparison to be made before this backend serves the model.

    Models that differ in their number of layers alone are compared once: each window occurs once in the request.
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
    sys.exit(main(float(sys.argv[1])))
