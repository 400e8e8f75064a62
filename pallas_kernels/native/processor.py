"""The processor of this machine, as LLVM and the system tell it. Nothing here writes code."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

import llvmlite.binding as llvm

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Arguments of arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), by which a process asks Linux for tiles."""


@cache
def host_features() -> llvm.FeatureMap:
    """Register LLVM's code generator for this processor; return which of LLVM's feature names the processor has."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_features()


def host_has(feature: str) -> bool:
    """Return whether the processor has the feature of that LLVM name."""
    return host_features().get(feature, False)


@cache
def processor_name() -> str:
    """Return LLVM's name of the processor."""
    name: str = llvm.get_host_cpu_name()
    return name


@cache
def processor() -> str:
    """Return the name and features of the processor: compiled code is kept for these."""
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
