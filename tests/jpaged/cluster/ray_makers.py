"""What makes the engines of workers in tests: by its name here."""

import os
import signal
import time
from typing import Any

from jpaged.config.engine_config import EngineConfig

KILLING_PROMPT = "KILL"
TINY_CODES = [ord(char) - 33 + 2 for char in KILLING_PROMPT]
"""Its tokens in the vocabulary of the tiny model: two special tokens, then bytes in the order of their characters."""


def slow(config: EngineConfig, progress: Any, *, step_s: float) -> Any:
    """Return an engine whose steps take some time longer, and that ends its process at a step of KILLING_PROMPT."""
    from jpaged.engine import Engine

    engine = Engine.from_engine_args(config, progress=progress)
    advance = engine.loop.advance

    def slow_advance() -> None:
        if any(list(request.prompt_token_ids[: len(TINY_CODES)]) == TINY_CODES for request in engine.requests.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(step_s)
        advance()

    engine.loop.advance = slow_advance  # type: ignore[method-assign]
    return engine
