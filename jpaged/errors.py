"""Every error that jpaged raises because of what its caller gave.

JpagedError (a ValueError; `param` names the option, flag or field, `code` the kind of error where OpenAI has a word)
├── ConfigError           an engine option, a flag, or a combination of them
├── InvalidRequestError   a prompt or a sampling parameter
│   └── ContextLengthError   a prompt that does not fit the context: `code` is "context_length_exceeded"
└── QueueFullError        nothing is wrong with the request, but as many wait as `limits` allow
ModelLoadError (a ValueError, from the models room)   a checkpoint or a tokenizer
EngineStoppedError (a RuntimeError)   nothing is wrong with the request, but no engine computes it any more

Each message is one line: what, what was given, what is allowed, and the way out (`checks.py` phrases most of them).
"""

from __future__ import annotations

from typing import ClassVar, Self

from .models.errors import ModelLoadError

__all__ = [
    "ConfigError",
    "ContextLengthError",
    "EngineStoppedError",
    "InvalidRequestError",
    "JpagedError",
    "ModelLoadError",
    "QueueFullError",
]


class JpagedError(ValueError):
    """The caller gave something that cannot be served. `param` names it, where one name can."""

    code: ClassVar[str | None] = None
    """The word by which programs recognize this kind of error, as OpenAI's interface has it; None for most kinds."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param

    def reworded(self, message: str, *, param: str | None) -> Self:
        """Return the same error with another message and another name of what is wrong."""
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        error.args, error.param = (message,), param
        return error


class ConfigError(JpagedError):
    """An engine option or a combination of options is wrong; nothing was started."""


class InvalidRequestError(JpagedError):
    """A request is wrong; the engine has not begun it, and other requests go on."""

    def within(self, place: str) -> Self:
        """Return the same error with the place of the request, such as "prompt 3", in front of its message."""
        return self.reworded(f"{place}: {self}", param=self.param)


class ContextLengthError(InvalidRequestError):
    """A prompt does not fit the model's context, alone or together with the output that the request wants.

    Programs that shorten the prompt or take a model with a longer context recognize it by `code`, or by the first words
    of the message, which are those of OpenAI's servers.
    """

    code = "context_length_exceeded"
    num_prompt_tokens: int | None = None
    """Tokens of the prompt, or the fewest that it can have if not all were counted; None where that is not known."""

    @classmethod
    def of(
        cls, max_model_len: int, got: str, way_out: str, *, param: str = "prompt", num_prompt_tokens: int | None = None
    ) -> Self:
        """Return the error for a model with this context length, in tokens.

        `got` says what exceeds it, such as "your prompt has 130 tokens". The words "prompt is too long" are what
        LangChain looks for where the exception of OpenAI's package shows no code.
        """
        context = f"This model's maximum context length is {max_model_len} tokens"
        error = cls(f"{context}, but {got}; the prompt is too long, {way_out}", param=param)
        error.num_prompt_tokens = num_prompt_tokens
        return error


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
