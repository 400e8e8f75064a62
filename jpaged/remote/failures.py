"""Exceptions that cross from one process to another: those of jpaged arrive as they were raised."""

from __future__ import annotations

from typing import Any

import msgspec

from .. import errors
from ..checks import one_line
from ..errors import JpagedError

KINDS: dict[str, type[Exception]] = {name: getattr(errors, name) for name in errors.__all__}
"""Name → class of the exceptions that arrive as they are."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception."""

    kind: str
    """The name of its class."""
    message: str
    fields: dict[str, Any] = {}
    """Its attributes, such as `param`."""


def failure_of(error: BaseException) -> Failure:
    """Return what `error_of` makes the same exception of; of one that is none of jpaged's, a text of its kind."""
    kind = next((one for one in type(error).__mro__ if KINDS.get(one.__name__) is one), None)
    if kind is None:
        return Failure(JpagedError.__name__, f"{type(error).__name__}: {one_line(error)}", {"param": None})
    plain = (str, int, float, bool, type(None))
    fields = {name: value for name, value in vars(error).items() if isinstance(value, plain)}
    return Failure(kind.__name__, str(error), fields)


def error_of(failure: Failure) -> Exception:
    """Return an exception of the same class, with the same message and attributes; JpagedError for unknown ones."""
    kind = KINDS.get(failure.kind, JpagedError)
    error = kind.__new__(kind)
    error.args = (failure.message,)
    vars(error).update(failure.fields)
    return error
