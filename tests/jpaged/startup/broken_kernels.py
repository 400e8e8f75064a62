"""Backends that fail their check in ways that only a process of its own survives. Imported by child processes."""

from __future__ import annotations

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
