"""Ragged paged attention: mixed prefill and decode over pages, one interface for every backend.

Nothing is imported until it is asked for: `names` answers before JAX is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .interface import NULL_PAGE, AttentionMetadata, Backend, KVLayout, LayerPlace, PagedCache
    from .xla import XlaBackend

__all__ = ["NULL_PAGE", "AttentionMetadata", "Backend", "KVLayout", "LayerPlace", "PagedCache", "XlaBackend"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(".xla" if name == "XlaBackend" else ".interface", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
