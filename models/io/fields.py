"""Takes checked values out of the metadata that comes with a model: JSON objects and GGUF headers.

Each method checks one value as it takes it, and every failure is one ModelLoadError line: the file, the key,
what was found and what is allowed. Knows nothing of what a key means.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelLoadError

MAX_INT = 2**31 - 1
# The largest file read here is the index of a sharded checkpoint: about 0.1 MB for every thousand tensors.
MAX_JSON_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """Read `path`, which must hold one JSON object; ModelLoadError says why it cannot be used."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {path.stat().st_size} bytes, at most {MAX_JSON_BYTES} are read as JSON")
        raw = path.read_bytes()
        data = json.loads(raw)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    # Too many digits in a number, and a file that is no UTF-8, are ValueErrors too.
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: is not JSON ({error}), it starts with {raw[:16]!r}: fetch it again") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(data).__name__}, wanted an object {{…}}")
    return data


@dataclass(frozen=True)
class Fields:
    """Named values of one file. A value of None (JSON's null) counts as absent, as it does in transformers."""

    data: Mapping[str, Any]
    path: Path

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.data.get(key) is not None

    def wrong(self, key: str, wanted: str) -> ModelLoadError:
        """Return the error that names `key`, its value and what it should have been."""
        if not self.has(key):
            return ModelLoadError(f"{self.path}: {key} is missing, wanted {wanted}")
        return ModelLoadError(f"{self.path}: {key} is {reprlib.repr(self.data[key])}, wanted {wanted}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INT) -> int:
        """Take an integer from `least` to `most`; required unless a default is given."""
        value = self.data[key] if self.has(key) else default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = -math.inf,
        least: float = -math.inf,
        most: float = math.inf,
    ) -> float:
        """Take a finite number `> above`, `>= least` and `<= most`; required unless a default is given."""
        value: Any = self.data[key] if self.has(key) else default
        # The bound on integers keeps those that no float can hold out of isfinite, which would raise.
        is_number = type(value) is float or (type(value) is int and abs(value) <= 2**63)
        if not is_number or not math.isfinite(value) or not (value > above and least <= value <= most):
            bounds = [f"above {above:g}"] * (above > -math.inf) + [f"from {least:g}"] * (least > -math.inf)
            raise self.wrong(key, " ".join(["a number", *bounds, *[f"up to {most:g}"] * (most < math.inf)]))
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self.data[key] if self.has(key) else default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """Take one of the `allowed` words; required unless a default is given."""
        value = self.data[key] if self.has(key) else default
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, f"one of {', '.join(allowed)}")
        return value

    def mapping(self, key: str) -> Fields:
        """Take an object; an absent one is empty."""
        value = self.data[key] if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object {…}")
        return Fields(value, self.path)

    def token_ids(self, key: str, *, vocab_size: int = MAX_INT) -> tuple[int, ...]:
        """Take token ids below `vocab_size`: null, one integer or a list of them."""
        value = self.data.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.wrong(key, f"null, a token id from 0 to {vocab_size - 1}, or a list of them")
        return tuple(dict.fromkeys(ids))
