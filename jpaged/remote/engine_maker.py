"""What makes the engine of a core process, unless a test names something else."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ..config.engine_config import EngineConfig

if TYPE_CHECKING:
    from ..engine import Engine
    from ..startup.build_engine import Progress


def make_engine(
    config: EngineConfig, progress: Progress, *, keeps_programs: bool = False, compiles_behind: bool = False
) -> Engine:
    """Return the engine of a config, with the options of `Engine.from_engine_args`. Raise as that does."""
    gc.disable()  # Almost all that a start makes stays.
    from ..engine import Engine  # This loads JAX.

    engine = Engine.from_engine_args(
        config, progress=progress, keeps_programs=keeps_programs, compiles_behind=compiles_behind
    )
    gc.freeze()
    gc.enable()
    return engine
