"""The processor of this machine, as the system tells it, or LLVM where that does not. Nothing here writes code."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Arguments of arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), by which a process asks Linux for tiles."""
CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux describes each processor."""
CPU_FIELDS = "vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features"
"""How its lines begin that tell processors apart."""


@cache
def _system_lines() -> list[str]:
    """Return the lines of CPU_FIELDS of the first processor; none where the system is not Linux."""
    with suppress(OSError):
        first, _, _ = CPU_INFO.read_text().partition("\n\n")
        return [line for line in first.splitlines() if line.startswith(CPU_FIELDS)]
    return []


@cache
def _system_flags() -> frozenset[str]:
    """Return Linux's names of what an x86 processor can do, without "_": "avx512bf16", "amxbf16". None elsewhere."""
    flags = [line.partition(":")[2] for line in _system_lines() if line.startswith("flags")]
    return frozenset(" ".join(flags).replace("_", "").split())


def host_has(feature: str) -> bool:
    """Return whether the processor has the feature of that LLVM name, such as "amx-bf16"."""
    if flags := _system_flags():
        return feature.replace("-", "") in flags
    from .compiler import host_features

    return host_features().get(feature, False)


@cache
def processor() -> str:
    """Return what tells this processor from others: compiled code is kept for these.

    On Linux its name, model and features, elsewhere LLVM's name and features, or without LLVM the name alone.
    """
    if lines := _system_lines():
        return " ".join(" ".join(lines).split())
    try:
        from .compiler import host_features, processor_name
    except ModuleNotFoundError:
        return f"{platform.machine()} {platform.processor()}"
    return f"{processor_name()} {host_features().flatten()}"


def host_has_avx512() -> bool:
    """Return whether the processor has AVX-512: 32 vectors of 16 float32, and not 16 vectors of 8."""
    return host_has("avx512f")


@cache
def has_amx_unit() -> bool:
    """Return whether the processor has a matrix unit for bfloat16 and the system lets this process use it."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and host_has("amx-bf16")):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def cpu_features() -> str:
    """Return the processor features that native code uses, as text for the log: "AVX-512, AVX512-BF16, AMX".

    A processor without AVX-512 has "vectors of 8 float32" in its place. If there is a matrix unit (AMX) but the system
    does not let this process use it, the text says so. Features that the processor lacks are not named.
    """
    parts = ["AVX-512" if host_has_avx512() else "vectors of 8 float32"]
    if host_has("avx512bf16"):
        parts.append("AVX512-BF16")
    if has_amx_unit():
        parts.append("AMX")
    elif host_has("amx-bf16"):
        parts.append("no AMX: the system does not let this process use it")
    return ", ".join(parts)
