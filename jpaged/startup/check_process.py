"""Compares a backend with `xla` in a process of its own, so that a crash or a hang there ends no engine.

    parent ── CheckRequest, JSON on stdin ─▶ python -m jpaged.startup.check_process
                                             compares       ── {"failure": …}, JSON on stdout ─▶ parent

A start runs it before it opens a GPU itself: both processes need memory there, and the child takes no more of it than
it uses. What was found, a failure too, is remembered with the versions of everything that it depends on.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

from ..checks import one_line
from ..config import EngineConfig
from ..models.config import ModelConfig
from ..pallas_kernels.ragged_paged_attention.interface import (
    AttentionShape,
    Backend,
    BackendUnavailableError,
    CheckGuard,
)
from ..pallas_kernels.ragged_paged_attention.names import BACKENDS
from ..sharding import select_devices, visible_accelerators
from .attention_check import kernel_error, result_file, source_digest, too_different
from .attention_choice import attention_shape, load_backend
from .sizing import chosen_dtypes
from .user_cache import make_private

logger = logging.getLogger("jpaged")

LIMIT_S = 60.0
"""Seconds after which a child is ended: its start, the GPU's and the compilation of both backends take about 20."""
DRIVER_FILES = ("/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus/*/information")
"""Files in which the driver tells its version and the models of the GPUs, without a GPU being opened."""


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

    @classmethod
    def from_json(cls, text: str) -> CheckRequest:
        """Read what `to_json` has written."""
        fields = json.loads(text)
        windows = tuple(fields["shape"].pop("windows"))
        return cls(**{**fields, "shape": AttentionShape(**fields["shape"], windows=windows)})

    def to_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))


@functools.cache
def find_failure_apart(request: CheckRequest, limit_s: float = LIMIT_S) -> str | None:
    """Return a clause that says why the backend must not serve, None if it may; asked once per process.

    A child that crashes, answers nothing within `limit_s`, or finds a difference is a failure. Where the result of an
    earlier start is remembered, no child is started.
    """
    mark = _mark_of(request)
    try:
        if mark is not None and mark.exists():
            return json.loads(mark.read_text())["failure"]
    except (OSError, ValueError, KeyError) as problem:
        logger.warning("%s is not read, the check is made again: %s", mark, problem)
    failure = _run_child(request, limit_s)
    if mark is not None:
        try:
            make_private(mark.parent)
            mark.write_text(json.dumps({"failure": failure, "request": request.to_json()}))
        except OSError as problem:
            logger.warning("the check of a backend is made at each start: %s", problem)
        else:
            if failure is not None:
                failure += f"; remembered in {mark}, delete it to check again"
    return failure


def _mark_of(request: CheckRequest) -> Path | None:
    """Return the file that remembers the result of this request on this machine; None if there is no place for it.

    None also where the driver does not say what GPUs there are: results of one chip must not count for another.
    """
    driver = [path.read_text() for pattern in DRIVER_FILES for path in sorted(Path("/").glob(pattern[1:]))]
    if request.device != "cpu" and not driver:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    versions = sorted((each.name, each.version) for each in distributions() if each.name.startswith(("jax", "nvidia")))
    key = [request.to_json(), driver, visible, versions, source_digest()]
    try:
        return result_file(key)
    except RuntimeError as problem:
        logger.warning("the check of a backend is made at each start: %s", problem)
        return None


def _run_child(request: CheckRequest, limit_s: float) -> str | None:
    """Make the comparison in a child process and return its failure."""
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        child = subprocess.run(
            command, input=request.to_json(), capture_output=True, text=True, timeout=limit_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"its check in a process of its own gave no answer within {limit_s:g} s"
    except OSError as problem:
        return f"its check cannot be started: {problem}"
    if child.returncode < 0:
        return f"its check in a process of its own ended by {signal.Signals(-child.returncode).name}"
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return f"its check in a process of its own ended with status {child.returncode}: {one_line(last[0], 500)}"
    failure: str | None = json.loads(lines[-1])["failure"]
    return failure


def main() -> int:
    """Answer the request on stdin by one line of JSON on stdout."""
    request = CheckRequest.from_json(sys.stdin.read())
    print(json.dumps({"failure": _failure(request)}))
    return 0


def _failure(request: CheckRequest) -> str | None:
    """Compare in this process. A backend that does not take the device or the model has no failure to tell here."""
    module, name = request.backend.split(":")
    backend_class: type[Backend] = getattr(importlib.import_module(module), name)
    device = select_devices(request.device)[0]
    try:
        backend = backend_class.for_devices([device], request.shape, deterministic=request.is_deterministic)
    except (BackendUnavailableError, ValueError):
        return None  # The start finds the same, and says it.
    try:
        error = kernel_error(backend, request.shape, request.dtype, request.block_size, device)
    except Exception as problem:  # A kernel that does not compile may raise anything.
        return f"it failed its check on {device.device_kind}: {one_line(problem, 500)}"
    return too_different(error, device)


def check_before_opening(config: EngineConfig, model: ModelConfig) -> None:
    """Compare the backends of a GPU in child processes while this process has not opened the GPU, if there is one.

    The result is asked for again once the backend is chosen.
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
            find_failure_apart(check_request(config, model, backend, "gpu"))


def check_request(config: EngineConfig, model: ModelConfig, backend: type[Backend], platform: str) -> CheckRequest:
    """Return the comparison to be made before this backend serves the model.

    Models that differ in their number of layers alone are compared once: each window occurs once in the request.
    """
    dtype, kv_dtype = chosen_dtypes(config, model, platform)
    shape = attention_shape(model, kv_dtype)
    return CheckRequest.of(
        backend,
        device=config.device,
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
    sys.exit(main())
