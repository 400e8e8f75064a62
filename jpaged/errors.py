"""Every error that jpaged raises because of what its caller gave.

JpagedError (a ValueError; `param` names the option, flag or field)
├── ConfigError           an engine option, a flag, or a combination of them
├── InvalidRequestError   a prompt or a sampling parameter
└── QueueFullError        nothing is wrong with the request, but as many wait as `limits` allow
ModelLoadError (a ValueError, from the models room)   a checkpoint or a tokenizer
EngineStoppedError (a RuntimeError)   nothing is wrong with the request, but no engine computes it any more

Each message is one line: what, what was given, what is allowed, and the way out (`checks.py` phrases most of them).
"""

from __future__ import annotations

from .models.errors import ModelLoadError

__all__ = [
    "ConfigError",
    "EngineStoppedError",
    "InvalidRequestError",
    "JpagedError",
    "ModelLoadError",
    "QueueFullError",
]


class JpagedError(ValueError):
    """The caller gave something that cannot be served. `param` names it, where one name can."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class ConfigError(JpagedError):
    """An engine option or a combination of options is wrong; nothing was started."""


class InvalidRequestError(JpagedError):
    """A request is wrong; the engine has not begun it, and other requests go on."""


class QueueFullError(JpagedError):
    """The queue is full, and this request was not queued; it may be given again later. Other requests are unchanged."""

    def __init__(self, limit: str, *, got: int, allowed: int):
        """Make the error for a limit of the queue, and its message.

        `limit` is a key of `EngineConfig.limits`, such as "waiting_tokens". `got` is how many requests or tokens would
        wait if this request were queued, and `allowed` is the limit's value.
        """
        super().__init__(
            f"{limit}: got {got} with this request, allowed: {allowed}; try again later, or start the engine with a "
            f"higher {limit} among its limits",
            param=limit,
        )
        self.limit, self.allowed = limit, allowed


class EngineStoppedError(RuntimeError):
    """The engine was shut down or has failed, and computes no more requests."""
