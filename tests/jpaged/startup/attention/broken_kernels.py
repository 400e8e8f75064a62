"""Backends that fail their check in ways that only a subprocess survives. Imported by child processes."""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.ragged_paged_attention.interface import BackendUnavailableError, CheckGuard
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend


@dataclasses.dataclass(frozen=True)
class Right(XlaBackend):
    """A backend that agrees with `xla`."""

    name = "pallas-gpu"
    needs_check = True
    check_guard = CheckGuard.CHILD


@dataclasses.dataclass(frozen=True)
class Nan(Right):
    """A backend whose output is NaN."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        out, pages = super().attend(pages, layout, inputs)
        return out * jnp.nan, pages


@dataclasses.dataclass(frozen=True)
class Crashes(Right):
    """A backend that ends its process while it computes."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        jax.debug.callback(lambda: os.kill(os.getpid(), signal.SIGSEGV))
        return super().attend(pages, layout, inputs)


@dataclasses.dataclass(frozen=True)
class OutOfMemory(Right):
    """A backend that finds the device's memory taken."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")


@dataclasses.dataclass(frozen=True)
class Killed(Right):
    """A backend whose process is killed by somebody else."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Noisy(Right):
    """A backend that agrees, in a process that writes what no text is, before and after the answer."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        os.write(1, b"\xff\xfe noise")
        os.write(2, b"\xff\xfe noise")
        atexit.register(os.write, 1, b"more noise\n")
        return super().attend(pages, layout, inputs)


@dataclasses.dataclass(frozen=True)
class CrashesAtExit(Right):
    """A backend that agrees, in a process that crashes once it has answered."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
        return super().attend(pages, layout, inputs)


@dataclasses.dataclass(frozen=True)
class Hangs(Right):
    """A backend that never comes back from computing."""

    check_guard = CheckGuard.WATCHDOG

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        jax.debug.callback(lambda: time.sleep(600))
        return super().attend(pages, layout, inputs)


@dataclasses.dataclass(frozen=True)
class Unavailable(Right):
    """A backend that does not take the device."""

    @classmethod
    def on(cls, devices: Any, shape: Any, deterministic: bool, tuned: Any) -> Any:
        raise BackendUnavailableError("the device is of another kind")
