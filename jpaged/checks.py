"""Checks of the values that callers give, and the one form of every refusal: `name: got X, allowed: Y; way out`.

A rule is a function that returns a value as it is kept, or raises Unfit; `check` makes of that an error that names the
value. An error about an option shows the value as Python writes it (`shown`); one about a request, whose values may be
of a prompt and whose text reaches clients, logs and tracing backends, tells no more than its kind (`told`). Pure
Python; imports only errors and names.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, field
from inspect import cleandoc
from numbers import Integral, Real
from pathlib import Path
from sys import float_info
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from .errors import InvalidRequestError, JpagedError
from .not_available import WAYS_OUT

INT64 = (-(1 << 63), (1 << 63) - 1)
MAX_EXACT_FLOAT = 1 << 53
"""A float64 holds every integer up to this one."""
MAX_NAME_CHARS = 100
"""Longer names are cut in messages."""
Rule = Callable[[Any], Any]

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class Unfit(Exception):  # noqa: N818
    """A rule refuses a value. Callers of `check` never see it."""

    def __init__(self, allowed: str, way_out: str = "", *, got: str | None = None):
        """`got` is what the message shows instead of the value."""
        super().__init__(allowed)
        self.allowed, self.way_out, self.got = allowed, way_out, got


def check(name: str, value: Any, rule: Rule, *, error: type[JpagedError] = InvalidRequestError) -> Any:
    """Return the value as the rule keeps it, or raise `error` with what is allowed."""
    try:
        return rule(value)
    except Unfit as unfit:
        raise refusal(name, unfit.got or _got(value, error), unfit.allowed, unfit.way_out, error=error) from None


def refusal(
    name: str, got: object, allowed: str, way_out: str = "", *, error: type[JpagedError] = InvalidRequestError
) -> JpagedError:
    """Return the error that refuses a value. `got` is written as it is: pass `told(value)` for a value of a request,
    and `shown(value)` for one of an option."""
    return error(f"{name}: got {got}, allowed: {allowed}{way_out and '; '}{way_out}", param=name)


@contextmanager
def sent_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let InvalidRequestErrors of the `with` block name fields as the caller has sent them.

    `names` maps the name that the code within uses to the one that was sent. It replaces an error's `param`, and that
    name at the start of its message. A name with an underscore is replaced anywhere in a message, since it is no word
    of the sentence: {"max_tokens": "max_completion_tokens"} changes what is said of `min_tokens` too.
    """
    try:
        yield
    except InvalidRequestError as error:
        message, param = str(error), names.get(error.param or "", error.param)
        if message.startswith(f"{error.param}: "):
            message = f"{param}{message.removeprefix(str(error.param))}"
        for name, sent in names.items():
            if "_" in name:
                message = re.sub(rf"(?<![\w./]){re.escape(name)}(?![\w./])", sent, message)
        if message == str(error) and param == error.param:
            raise
        raise error.reworded(message, param=param) from error.__cause__


@contextmanager
def fields_of(name: str) -> Iterator[None]:
    """Let InvalidRequestErrors of the `with` block name fields as those of the object `name`: name.field.

    The messages must begin with the field, as those of `refusal` and `check_name` do.
    """
    try:
        yield
    except InvalidRequestError as error:
        if error.param in (None, name):
            raise
        raise error.reworded(f"{name}.{error}", param=f"{name}.{error.param}") from error.__cause__


def check_name(
    name: Any,
    known: Collection[str],
    kind: str,
    *,
    not_available: Collection[str] = (),
    value: Any = None,
    place: str = "",
    way_out: str = "",
    error: type[JpagedError] = InvalidRequestError,
) -> None:
    """Do nothing if `name` is among `known`; otherwise raise `error` with a message that helps to correct it.

    A name in `not_available` is refused as one that this version does not have, together with its `value` if that is
    not None; the entry of `WAYS_OUT` for it, else `way_out`, else "leave it out" ends the message. Any other name is
    refused as an unknown `kind`, such as "option", with the nearest known name; where none is near, `way_out` or the
    list of `known` names follows. `place` is where the name stands, such as "stream_options.", and is put before it.
    Example: "temprature: unknown option; did you mean temperature?".
    """
    if name in known:
        return
    place_and_name, param = place + shown_name(name), place + str(name)[:MAX_NAME_CHARS]
    if name in not_available:
        got = "" if value is None else f" (got {_got(value, error)})"
        way_out = WAYS_OUT.get(str(name).lstrip("-").replace("-", "_")) or way_out or "leave it out"
        raise error(f"{place_and_name}: not available in this version{got}; {way_out}", param=param)
    near = nearest(str(name)[:MAX_NAME_CHARS], known)
    hint = f"did you mean {near}?" if near else way_out or f"allowed: {', '.join(known)}"
    raise error(f"{place_and_name}: unknown {kind}; {hint}", param=param)


def shown_name(name: Any) -> str:
    """Return the name that a caller gave to something, as errors show it: as it is, or on one line and cut.

    It may be long, no string, or unprintable.
    """
    is_plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS
    return name if is_plain else shown(name)


def nearest(word: str, known: Collection[str]) -> str | None:
    """Return the name that begins with `word`, or the one most like it; None where none is near."""
    near = [name for name in known if word and name.startswith(word)] or difflib.get_close_matches(word, known, n=1)
    return near[0] if near else None


def integer(min: int, max: int | None = None) -> Rule:
    """Return a rule for `check`: it takes an integer in [min, max], numpy's too, and returns a Python integer.

    The rule raises Unfit for anything else, booleans and floats included. `max` of None is no bound.
    """

    def rule(value: Any) -> int:
        value = scalar(value)
        if not is_integer(value) or value < min or (max is not None and value > max):
            # A message need not name the bound of int64, which no caller reaches by a sensible value.
            is_unbounded = max is None or (min >= 0 and max == INT64[1])
            raise Unfit(f"an integer ≥ {min}" if is_unbounded else f"an integer in [{min}, {max}]")
        return int(value)

    return rule


def number(min: float, max: float = float_info.max, *, open_min: bool = False, open_max: bool = False) -> Rule:
    """Return a rule for `check`: it takes a real number in [min, max], of any type but a boolean, and returns a float.

    `open_min` and `open_max` exclude the bound itself. The default maximum is the largest finite float. The rule raises
    Unfit for anything else, NaN and infinities included, with the interval in its message.
    """

    def rule(value: Any) -> float:
        """Return `value` as a float; raise Unfit if it is no number in the interval. −0.0 becomes 0.0."""
        value = scalar(value)
        try:
            real = float(value) if is_number(value) else math.nan
        except OverflowError:  # An integer of hundreds of digits.
            real = math.nan
        # What is no number is NaN here, which compares false with everything and fails the first test.
        if not min <= real <= max or (open_min and real == min) or (open_max and real == max):
            interval = f"{'(' if open_min else '['}{min:g}, {max:g}{')' if open_max else ']'}"
            raise Unfit(f"a finite number ≥ {min:g}" if max == float_info.max else f"a number in {interval}")
        # Adding zero turns −0.0 into 0.0: the sampler compares thresholds by their bits.
        return real + 0.0

    return rule


def json_integer(value: Any) -> Any:
    """Return a whole number that JSON wrote as a float, such as 4.0, as an integer; any other value as it is.

    JSON has one type of numbers. Beyond ±2⁵³ a float stands for several integers, and stays one.
    """
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT_FLOAT
    return int(value) if is_whole else value


def boolean(value: Any) -> bool:
    """Take True or False; 0, 1 and numpy's booleans are refused."""
    if not isinstance(value, bool):
        raise Unfit("true or false")
    return value


def one_of(*words: str) -> Rule:
    """Return a rule for `check`: it returns a value that is one of `words`, and raises Unfit for anything else."""

    def rule(value: Any) -> str:
        # The type comes first: another type's `in` may compare in its own way, as arrays do.
        if not isinstance(value, str) or value not in words:
            raise Unfit(", ".join(words))
        return value

    return rule


def text(allowed: str) -> Rule:
    """Return a rule for `check`: it takes a string or a path that is not empty, and returns it as a string.

    The rule raises Unfit for anything else, with `allowed` as the description of what is expected.
    """

    def rule(value: Any) -> str:
        if not isinstance(value, str | Path) or not str(value):
            raise Unfit(allowed)
        return str(value)

    return rule


def or_none(rule: Rule) -> Rule:
    """Return a rule that takes None as it is, and any other value as `rule` does."""
    return lambda value: None if value is None else rule(value)


class CheckedFields:
    """Base of frozen dataclasses that check each field by the rule in its `metadata["rule"]`.

    An unknown keyword is refused with the nearest field's name, where a dataclass would raise a TypeError.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _kind: ClassVar[str]
    _error: ClassVar[type[JpagedError]]
    _not_available: ClassVar[Collection[str]]

    def __init_subclass__(cls, *, kind: str, error: type[JpagedError], not_available: Collection[str] = ()) -> None:
        """Set what errors call a field (`kind`), the class of errors, and names that this version does not have."""
        cls._kind, cls._error, cls._not_available = kind, error, not_available

    def __new__(cls, **values: Any) -> Self:
        """Raise the class's error for a keyword that is no field, before the dataclass would raise a TypeError."""
        known = cls.__dataclass_fields__
        for name, value in values.items():
            if name not in known:
                check_name(name, known, cls._kind, not_available=cls._not_available, value=value, error=cls._error)
        return super().__new__(cls)

    def _check_fields(self) -> None:
        """Check each field that has a rule, and store what the rule returns; raise the class's error if it refuses."""
        values = self.__dict__  # Frozen: fields cannot be set, and object.__setattr__ takes twice as long.
        for name, one in self.__dataclass_fields__.items():
            if rule := one.metadata.get("rule"):
                values[name] = check(name, values[name], rule, error=self._error)

    def _refuse(self, name: str, allowed: str, way_out: str = "") -> NoReturn:
        """Refuse the value of a field because of another field's value."""
        raise refusal(name, _got(getattr(self, name), self._error), allowed, way_out, error=self._error)


def checked(default: Any, rule: Rule, help_text: str, *, hash: bool | None = None, **metadata: Any) -> Any:
    """Return a field of a `CheckedFields` class. `help_text` says in one sentence what it is, for `described` and for
    flags; `metadata` holds what else is known of the field."""
    return field(default=default, hash=hash, metadata={"rule": rule, "help": help_text, **metadata})


Described = TypeVar("Described", bound=CheckedFields)


def described(cls: type[Described]) -> type[Described]:
    """Add each field with its help to the docstring of a dataclass, so that Python's `help` shows them."""
    lines = [f"    {name}: {one.metadata['help']}" for name, one in cls.__dataclass_fields__.items() if one.metadata]
    cls.__doc__ = "\n".join([cleandoc(cls.__doc__ or ""), "", "Fields:", *lines])
    return cls


def shown(value: Any) -> str:
    """Return `value` as Python would write it, on one line, cut to what fits into any message."""
    try:
        return " ".join(_REPR.repr(value).split())
    except ValueError:  # Python does not write out integers of thousands of digits.
        return f"a huge {type(value).__name__}"


def told(value: Any) -> str:
    """Return what an error about a request says of a value: no text of a caller, but its kind in JSON's words.

    Numbers, true, false and null are written as in JSON. Examples: 0.5, null, a string of 12 characters, an array of 1
    item, an object of 3 keys.
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = (str, "a string", "character"), (list | tuple, "an array", "item"), (Mapping, "an object", "key")
    for type_, kind, unit in kinds:
        if isinstance(value, type_):
            return f"{kind} of {len(value)} {unit}{'' if len(value) == 1 else 's'}"
    value = scalar(value)
    if isinstance(value, float):
        return json.dumps(value)
    if is_integer(value) and abs(value) >= 10**60:
        return "a huge integer"
    return shown(value) if is_number(value) else f"a value of the type {type(value).__name__}"


def _got(value: Any, error: type[JpagedError]) -> str:
    """Return what an error of this type says of a value."""
    return told(value) if issubclass(error, InvalidRequestError) else shown(value)


def shorten(value: object) -> str:
    """Return Python's `ascii(value)` cut to 80 characters, which is safe to put into any error message."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


class RepeatedKeyError(Exception):
    """A JSON object has a key twice, `key`."""

    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's keys and values, for `json.loads(…, object_pairs_hook=unique_keys)`.

    Raise RepeatedKeyError if the object has a key twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RepeatedKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return value


def one_line(error: object, max_chars: int = 300) -> str:
    """Return the text of `error` on one line of at most `max_chars` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def scalar(value: Any) -> Any:
    """Return the Python number in an array without axes, of numpy or JAX, and any other value as it is.

    A scalar that JAX traces has no number yet, and is returned as it is too.
    """
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except TypeError:  # JAX's error for a traced value.
        return value


def is_number(value: Any) -> bool:
    """Return whether it is a real number of any type (numpy's too) and no boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Return whether it is an integer of any type (numpy's too) and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)
