"""Ragged paged attention: mixed prefill and decode over pages, one interface for every backend.

Nothing is imported until it is asked for: `names` answers before JAX is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gpu.backend import GpuBackend
    from .interface import (
        NULL_PAGE,
        AttendOptions,
        AttentionMetadata,
        AttentionShape,
        Backend,
        BackendUnavailableError,
        KVLayout,
        KVShape,
        LayerPlace,
        PlanRows,
    )
    from .kv_scales import KVScales, quantize
    from .native.backend import NativeBackend
    from .page_moves import MAX_MOVES, Page, copy_pages, put_pages, take_pages
    from .paged_cache import AttentionCache, PagedCache
    from .plain_steps import random_tables, step_of_rows
    from .tpu.backend import TpuBackend
    from .xla.backend import XlaBackend

__all__ = [
    "MAX_MOVES",
    "NULL_PAGE",
    "AttendOptions",
    "AttentionCache",
    "AttentionMetadata",
    "AttentionShape",
    "Backend",
    "BackendUnavailableError",
    "GpuBackend",
    "KVLayout",
    "KVScales",
    "KVShape",
    "LayerPlace",
    "NativeBackend",
    "Page",
    "PagedCache",
    "PlanRows",
    "TpuBackend",
    "XlaBackend",
    "copy_pages",
    "put_pages",
    "quantize",
    "random_tables",
    "step_of_rows",
    "take_pages",
]

_HOMES = {
    "GpuBackend": ".gpu.backend",
    "NativeBackend": ".native.backend",
    "TpuBackend": ".tpu.backend",
    "XlaBackend": ".xla.backend",
    **dict.fromkeys(("random_tables", "step_of_rows"), ".plain_steps"),
    **dict.fromkeys(("KVScales", "quantize"), ".kv_scales"),
    **dict.fromkeys(("MAX_MOVES", "Page", "copy_pages", "put_pages", "take_pages"), ".page_moves"),
    **dict.fromkeys(("AttentionCache", "PagedCache"), ".paged_cache"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, ".interface"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
