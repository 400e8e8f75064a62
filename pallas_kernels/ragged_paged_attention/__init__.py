"""Ragged paged attention: mixed prefill and decode over pages, one interface for every backend.

Nothing is imported until it is asked for: `names` answers before JAX is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gpu import GpuBackend
    from .interface import NULL_PAGE, AttentionCache, AttentionMetadata, Backend, KVLayout, LayerPlace, PagedCache
    from .kv_scales import KVScales, quantize
    from .page_moves import MAX_MOVES, Page, copy_pages, put_pages, take_pages
    from .plain_steps import random_tables, step_of_rows
    from .tpu import TpuBackend
    from .xla import XlaBackend

__all__ = [
    "MAX_MOVES",
    "NULL_PAGE",
    "AttentionCache",
    "AttentionMetadata",
    "Backend",
    "GpuBackend",
    "KVLayout",
    "KVScales",
    "LayerPlace",
    "Page",
    "PagedCache",
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
    "GpuBackend": ".gpu",
    "TpuBackend": ".tpu",
    "XlaBackend": ".xla",
    **dict.fromkeys(("random_tables", "step_of_rows"), ".plain_steps"),
    **dict.fromkeys(("KVScales", "quantize"), ".kv_scales"),
    **dict.fromkeys(("MAX_MOVES", "Page", "copy_pages", "put_pages", "take_pages"), ".page_moves"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, ".interface"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
