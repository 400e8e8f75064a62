"""What makes the engines of core processes in tests: by its name here, with a fault or a hold-up."""

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.remote import message_socket, sent_outputs

POLL_S = 0.01


def held(config: EngineConfig, progress: Any, *, folder: str) -> Any:
    """Return an engine that computes no step while there is a file `step`, and compiles no grammar beside `grammar`.

    A hold-up that has begun is told by a file `step held`, or `grammar held`.
    """
    from jpaged.engine import Engine
    from jpaged.text.grammar.grammar import Grammars

    def wait(name: str) -> None:
        if (Path(folder) / name).exists():
            (Path(folder) / f"{name} held").touch()
        while (Path(folder) / name).exists():
            time.sleep(POLL_S)

    engine = Engine.from_engine_args(config, progress=progress)
    advance, matcher = engine.loop.advance, Grammars.matcher

    def slow_advance() -> None:
        wait("step")
        advance()

    def slow_matcher(grammars: Grammars, grammar: str) -> Any:
        wait("grammar")
        return matcher(grammars, grammar)

    engine.loop.advance = slow_advance  # type: ignore[method-assign]
    Grammars.matcher = slow_matcher  # type: ignore[method-assign]
    return engine


def cannot_compile(config: EngineConfig, progress: Any) -> Any:
    """Return an engine as servers have it, whose programs for logprobs of prompts cannot be compiled."""
    from jpaged.engine import Engine
    from jpaged.step.programs import Programs

    init = Programs.__init__

    def fails() -> Any:
        raise MemoryError("no room for the compiler")

    def init_failing(self: Programs, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.lower_scores.update(dict.fromkeys(self.lower_scores, fails))

    Programs.__init__ = init_failing  # type: ignore[method-assign]
    return Engine.from_engine_args(replace(config, warmup="lazy"), progress=progress, compiles_behind=True)


def has_short_messages(config: EngineConfig, progress: Any, *, max_bytes: int) -> Any:
    """Return an engine in a process that sends no message with more bytes, and logprobs of prompts in small pieces.

    It sends many heartbeats.
    """
    from jpaged.engine import Engine

    _beat_often()
    message_socket.MAX_MESSAGE_BYTES, sent_outputs.PIECE_LOGPROBS = max_bytes, 100
    return Engine.from_engine_args(config, progress=progress)


def has_room_and_beats_often(config: EngineConfig, progress: Any) -> Any:
    """Return an engine whose queue has the room of a default one, in a process that sends many heartbeats."""
    from jpaged.engine import Engine

    _beat_often()
    return Engine.from_engine_args(replace(config, limits={}), progress=progress)


def _beat_often() -> None:
    vars(sys.modules["__main__"])["HEARTBEAT_S"] = 0.05


def refuses(config: EngineConfig, progress: Any) -> Any:
    progress("load", 1, 2)
    raise ConfigError("model: got no good one", param="model")


def has_a_bug(config: EngineConfig, progress: Any) -> Any:
    return 1 // 0


def ends(config: EngineConfig, progress: Any) -> Any:
    os._exit(7)


def sleeps(config: EngineConfig, progress: Any) -> Any:
    time.sleep(600)


def holds_the_lock(config: EngineConfig, progress: Any) -> Any:
    """Let no other Python code run, and read no stdin: native code that hangs."""
    threading.Event().wait(0.1)  # The thread that reads stdin is there.
    ctypes.PyDLL(None).sleep(600)


def starts_late(config: EngineConfig, progress: Any, *, seconds: float) -> Any:
    from jpaged.engine import Engine

    time.sleep(seconds)
    return Engine.from_engine_args(config, progress=progress)


def holds_the_lock_in_steps(config: EngineConfig, progress: Any) -> Any:
    """Return an engine whose first step lets no other Python code run."""
    from jpaged.engine import Engine

    engine = Engine.from_engine_args(config, progress=progress)

    def holding_advance() -> None:
        engine.core.num_steps += 1
        time.sleep(1.5)  # The front learns that there is work.
        ctypes.PyDLL(None).sleep(600)

    engine.loop.advance = holding_advance  # type: ignore[method-assign]
    return engine


def starts_once(config: EngineConfig, progress: Any, *, folder: str) -> Any:
    """Return an engine the first time, and refuse to make another one."""
    from jpaged.engine import Engine

    if (Path(folder) / "started").exists():
        raise ConfigError("model: got one that is gone", param="model")
    (Path(folder) / "started").touch()
    return Engine.from_engine_args(config, progress=progress)


def starts_once_then_sleeps(config: EngineConfig, progress: Any, *, folder: str) -> Any:
    """Return an engine the first time; a second one never comes."""
    if (Path(folder) / "started").exists():
        (Path(folder) / "sleeps").touch()
        time.sleep(600)
    return starts_once(config, progress, folder=folder)


def dies_of(config: EngineConfig, progress: Any, *, ids: list[str], folder: str) -> Any:
    """Return an engine whose process is killed in a step with one of these requests; each time a file is written."""
    from jpaged.engine import Engine

    engine = Engine.from_engine_args(config, progress=progress)
    advance = engine.loop.advance

    def fatal_advance() -> None:
        if deadly := engine.loop.requests.keys() & ids:
            (Path(folder) / f"{min(deadly)} {os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        advance()

    engine.loop.advance = fatal_advance  # type: ignore[method-assign]
    return engine
