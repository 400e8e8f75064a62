"""The table of attention backends: what has to be known of each before JAX, or the backend's own code, is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendEntry:
    """One backend of the table. Everything else that a start has to know is said by the backend's class."""

    name: str
    """Value of `attention_backend` that asks for this backend."""
    class_path: str
    """Module, relative to this package, and class of the backend: "xla.backend.XlaBackend"."""
    platforms: tuple[str, ...] = ()
    """JAX platforms that the backend runs on. It is their default unless `min_jax` or `not_deterministic` rules
    it out. Empty for the fallback, which runs on all platforms."""
    block_size: int = 64
    """Tokens of a page by default: the first of the class's `block_sizes`."""
    min_jax: tuple[int, ...] = ()
    """First version of JAX that has what the backend needs; empty where every supported version has it."""
    verified_on: tuple[str, ...] = ()
    """Kinds of device, as JAX names them, on which the project's check script of this backend has passed; a start on
    another one says so."""
    check_script: str = ""
    """That script; empty for backends that the tests run on the device itself."""
    not_deterministic: str = ""
    """Why this backend cannot serve with `deterministic=True`, as a clause; empty where it can."""

    def runs_on(self, platform: str) -> bool:
        """Return whether the backend has code for this JAX platform."""
        return not self.platforms or platform in self.platforms


BACKENDS = (
    BackendEntry("xla", "xla.backend.XlaBackend"),
    BackendEntry("native", "native.backend.NativeBackend", platforms=("cpu",)),
    BackendEntry(
        "pallas-tpu",
        "tpu.backend.TpuBackend",
        platforms=("tpu",),
        block_size=128,
        check_script="scripts/tpu_check.py",
        not_deterministic="its kernels round a prompt as it is cut, and write a row's keys while other rows attend",
    ),
    BackendEntry(
        "pallas-gpu",
        "gpu.backend.GpuBackend",
        platforms=("gpu",),
        verified_on=("NVIDIA H100 80GB HBM3",),
        check_script="scripts/gpu_check.py",
        min_jax=(0, 11),
    ),
)
"""Every backend, one entry each. `auto` takes the first that is a default of the device's platform and can serve, else
the fallback: see `jpaged.startup.attention.choice`."""

BACKEND_NAMES = tuple(entry.name for entry in BACKENDS)
