"""Every error that jpaged raises for its caller's sake.

JpagedError (a ValueError)
├── ConfigError           an engine option, a flag, or a combination of them
└── InvalidRequestError   a prompt or a sampling parameter; `param` names the field
ModelLoadError (a ValueError, from the models room)   a checkpoint or a tokenizer

Each message says what, what was given, what is allowed, and the way out, in one line.
"""

from __future__ import annotations

from .models.errors import ModelLoadError

__all__ = ["ConfigError", "InvalidRequestError", "JpagedError", "ModelLoadError"]


class JpagedError(ValueError):
    """The caller gave something that cannot be served."""


class ConfigError(JpagedError):
    """An engine option or a combination of options is wrong; nothing was started."""


class InvalidRequestError(JpagedError):
    """A request is wrong; the engine was not touched and other requests go on."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param
