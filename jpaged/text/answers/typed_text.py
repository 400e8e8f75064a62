"""A value that a model writes as plain text, as the JSON that its parameter's type asks for.

A text that fits none of the types becomes a string. Types are tried in this order: null, boolean, integer, number,
object and array, string. JSON stays as it was written.
"""

from __future__ import annotations

import json
import re

from .cursor import WHITESPACE, PushReader
from .json_text import JsonText, read_json

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NULLS = ("null", "None")


def is_text(types: tuple[str, ...]) -> bool:
    """Return whether every text is a string of these types, so that none must be complete before it is passed on."""
    return not types or set(types) == {"string"}


def is_text_or_null(types: tuple[str, ...]) -> bool:
    """Return whether every text that is not the beginning of null is a string."""
    return set(types) == {"string", "null"}


def json_of_text(text: str, types: tuple[str, ...]) -> str:
    """Return the JSON of a complete text."""
    bare = text.strip(WHITESPACE)
    if "null" in types and bare in NULLS:
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if ("integer" in types and _INTEGER.fullmatch(bare)) or ("number" in types and _NUMBER.fullmatch(bare)):
        return bare
    if (bare[:1] == "{" and "object" in types) or (bare[:1] == "[" and "array" in types):
        mended = _mended_json(bare)
        if mended is not None:
            return mended
    return json.dumps(text, ensure_ascii=False)


def _mended_json(text: str) -> str | None:
    """Return JSON as it was written, its strings mended; None if the text is no JSON."""
    pieces: list[str] = []
    reader = PushReader(lambda cursor: read_json(cursor, JsonText(pieces.append), {}))
    reader.feed(text)
    is_whole = reader.finish() and reader.cursor.place == len(reader.cursor.text)
    return "".join(pieces) if is_whole else None
