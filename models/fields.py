"""Reads checked values from the metadata that comes with a model: JSON objects and GGUF headers.

Each method checks the value that it returns. Every failure is a ModelLoadError of one line: the file, the key, the
value that was found and the allowed ones. This module does not know what a key means.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from .errors import ModelLoadError

MAX_INT = 2**31 - 1
# The largest file that is read here is the index of a sharded checkpoint, about 0.1 MB per thousand tensors.
MAX_JSON_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    Raises ModelLoadError if the file cannot be read, is larger than MAX_JSON_BYTES, is not JSON, or holds another JSON
    value than an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {path.stat().st_size} bytes, at most {MAX_JSON_BYTES} are read as JSON")
        raw = path.read_bytes()  # Its first 16 bytes are quoted if it is not JSON.
        data = json.loads(raw)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    # Besides invalid JSON, a number with too many digits and a file that is not UTF-8 raise ValueError. RecursionError
    # comes from deep nesting. The error for a file that is too large is itself a ValueError and passes through.
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: is not JSON ({error}), it starts with {raw[:16]!r}: fetch it again") from error
    if not isinstance(data, dict):
        kind = "null" if data is None else type(data).__name__
        raise ModelLoadError(f"{path}: holds a JSON {kind}, wanted an object {{…}}: fetch it again")
    return data


@dataclass(frozen=True)
class Fields:
    """The named values of one file. None (JSON's null) counts as absent, as in transformers."""

    data: Mapping[str, Any]
    path: Path
    names: Mapping[str, str] = field(default_factory=dict)
    """Key → what the file calls it, for errors, where `data` was made from another format's metadata."""
    asked: set[str] = field(default_factory=set, compare=False)
    """Keys that were asked for so far; a nested object adds its own, as in "rope_parameters.factor"."""
    prefix: str = ""
    """What stands in front of these keys in `asked`."""
    way_out: str = ""
    """What a user can do about a wrong value, for errors; "" where each error says it itself."""

    def has(self, key: str) -> bool:
        """Return whether `key` is present and not null."""
        self.asked.add(self.prefix + key)
        return self.data.get(key) is not None

    def name_of(self, key: str) -> str:
        """Return what the file calls `key`."""
        return self.names.get(key, self.prefix + key)

    def wrong(self, key: str, wanted: str) -> ModelLoadError:
        """Return (do not raise) the error for `key`: its value, or that it is missing, what was `wanted`, `way_out`."""
        name = self.name_of(key)
        got = f"is {reprlib.repr(self.data[key])}" if self.has(key) else "is missing"
        way_out = f"; {self.way_out}" if self.way_out else ""
        return ModelLoadError(f"{self.path}: {name} {got}, wanted {wanted}{way_out}")

    def integer(self, key: str, default: int | None = None, *, min: int = 1, max: int = MAX_INT) -> int:
        """Return an integer from `min` to `max`; without a default the key is required."""
        wanted = f"an integer from {min} to {max}"
        return int(self._value(key, default, lambda value: type(value) is int and min <= value <= max, wanted))

    def number(
        self, key: str, default: float | None = None, *, above: float = -inf, min: float = -inf, max: float = inf
    ) -> float:
        """Return a finite number `> above`, `>= min` and `<= max` as a float.

        `default` is the value of an absent key, and is checked too; without it the key is required. An integer of the
        file counts as a number, and true and false do not. Raises ModelLoadError, which names the key and the bounds,
        such as "wanted a number above 0 up to 1".
        """

        def is_right(value: Any) -> bool:
            # isfinite would raise for an integer that no float can hold, so large ones are excluded first.
            is_number = type(value) is float or (type(value) is int and abs(value) <= 2**63)
            return is_number and isfinite(value) and value > above and min <= value <= max

        # A list times False is empty, so the error names only the bounds that are finite.
        bounds = [f"above {above:g}"] * (above > -inf) + [f"from {min:g}"] * (min > -inf)
        wanted = " ".join(["a number", *bounds, *[f"up to {max:g}"] * (max < inf)])
        return float(self._value(key, default, is_right, wanted))

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false; `default` if the key is absent."""
        return bool(self._value(key, default, lambda value: isinstance(value, bool), "true or false"))

    def text(self, key: str) -> str:
        """Return a string that is not empty; the key is required."""
        return str(self._value(key, None, lambda value: isinstance(value, str) and value != "", "a string"))

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return one of the `allowed` words; without a default the key is required."""
        wanted = f"one of {', '.join(allowed)}"
        return str(self._value(key, default, lambda value: isinstance(value, str) and value in allowed, wanted))

    def mapping(self, key: str) -> Fields:
        """Return the fields of an object; an absent one is empty."""
        data = self._value(key, {}, lambda value: isinstance(value, dict), "an object {…}")
        return replace(self, data=data, prefix=f"{self.prefix}{key}.")

    def with_data(self, data: Mapping[str, Any]) -> Fields:
        """Return the fields of the same object with other values; keys that are asked for are noted in the same set."""
        return replace(self, data=data)

    def items(self, key: str, kind: type | tuple[type, ...], default: list[Any] | None = None) -> list[Any]:
        """Return a list whose items are all of the type `kind`, or of one of these types.

        `default` is the value of an absent key; without it the key is required. Items of a subclass pass too: true and
        false are accepted where `kind` is int. Raises ModelLoadError for another value.
        """

        def is_right(value: Any) -> bool:
            # A vocabulary has 100,000 items and more, of few types: checking each type once is faster.
            return isinstance(value, list) and all(issubclass(type_, kind) for type_ in set(map(type, value)))

        names = " or ".join(type_.__name__ for type_ in (kind if isinstance(kind, tuple) else (kind,)))
        return self._value(key, default, is_right, f"a list of {names} values")

    def token_ids(self, key: str, *, vocab_size: int = MAX_INT) -> tuple[int, ...]:
        """Return the token ids under `key`, which may be absent, null, one id or a list; repeated ids are left out.

        An absent key and null give no ids; 2 gives (2,), and [2, 7, 2] gives (2, 7). Raises ModelLoadError for an id
        that is not an integer from 0 to `vocab_size` − 1.
        """
        value = self.data[key] if self.has(key) else None
        # A single value becomes a list of one, and None an empty list.
        ids = value if isinstance(value, list) else [value] * (value is not None)
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.wrong(key, f"null, a token id from 0 to {vocab_size - 1}, or a list of them")
        return tuple(dict.fromkeys(ids))

    def _value(self, key: str, default: Any, is_right: Callable[[Any], bool], wanted: str) -> Any:
        """Return the value of `key`, or `default` if it is absent.

        Raises ModelLoadError if `is_right` refuses the value, `default` included: a default of None makes a key
        required where `is_right` refuses None. `wanted` says in the error what is allowed.
        """
        value = self.data[key] if self.has(key) else default
        if not is_right(value):
            raise self.wrong(key, wanted)
        return value
