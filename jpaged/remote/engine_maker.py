"""What makes the engine of a core process, unless a test names something else."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config.engine_config import EngineConfig
from ..sampling.sampling_params import SampleMode

if TYPE_CHECKING:
    from ..engine import Engine
    from ..startup.build_engine import Progress


def make_engine(
    config: EngineConfig,
    progress: Progress,
    *,
    demands: Sequence[Sequence[Any]] = (),
    modes: Sequence[str] = (),
    keeps_programs: bool = False,
    compiles_behind: bool = False,
) -> Engine:
    """Return the engine of a config, with the options of `Engine.from_engine_args`. Raise as that does.

    `demands` have the fields of a `Demand` each, and `modes` are the values of `SampleMode`, as JSON has them.
    """
    gc.disable()  # Almost all that a start makes stays.
    from ..engine import Engine  # This loads JAX, and so does the next.
    from ..startup.sizing.sizes import Demand

    engine = Engine.from_engine_args(
        config,
        demands=[Demand(*one) for one in demands],
        modes=[SampleMode(mode) for mode in modes],
        progress=progress,
        keeps_programs=keeps_programs,
        compiles_behind=compiles_behind,
    )
    gc.freeze()
    gc.enable()
    return engine
