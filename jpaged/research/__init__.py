"""What an engine offers to a trainer in the same process: live weights, sleep, logprobs, arrays, distillation.

Names are imported at their first use, so that a module of this folder does not load the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distillation import DistillCounts, distill
    from .distilled import DistilledBatch, DistilledSequence, read_distilled

__all__ = ["DistillCounts", "DistilledBatch", "DistilledSequence", "distill", "read_distilled"]

_MODULE_OF = {"DistillCounts": "distillation", "distill": "distillation"}
"""Name → its module in this folder, if that is not `distilled`."""


def __getattr__(name: str) -> Any:
    """Return a public name of this folder, imported at this first use; raise AttributeError for any other."""
    if name not in __all__:
        raise AttributeError(f"module 'jpaged.research' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_MODULE_OF.get(name, 'distilled')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
