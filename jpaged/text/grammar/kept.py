"""Keeps what was computed for later requests that ask for the same, within a bound of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class KeptValues(Generic[Key, Value]):
    """Values by key, each with its size. Those that were used longest ago make room for new ones.

    Its caller sees to it that one thread at a time uses it.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which stays; None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def take(self, key: Key) -> Value | None:
        """Return the value of a key, and keep it no longer; None if there is none."""
        if key not in self._values:
            return None
        value, num_bytes = self._values.pop(key)
        self.num_bytes -= num_bytes
        return value

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep a value in the place of the key's old one. A value that is larger than the bound is not kept."""
        self.take(key)
        if num_bytes > self.max_bytes:
            return
        self._values[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self.take(next(iter(self._values)))
