"""What makes the engine of a core process, unless a test names something else."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ..config.engine_config import EngineConfig

if TYPE_CHECKING:
    from ..engine import Engine
    from ..startup.build_engine import Progress


def make_engine(config: EngineConfig, progress: Progress, **options: bool) -> Engine:
    """Return the engine of a config; `options` are those of `Engine.from_engine_args`. Raise as that does."""
    gc.disable()  # Almost all that a start makes stays.
    from ..engine import Engine  # This loads JAX.

    engine = Engine.from_engine_args(config, progress=progress, **options)
    gc.freeze()
    gc.enable()
    return engine
