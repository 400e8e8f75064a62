"""Writes the texts by which a schema's strings, numbers, booleans and null stand without quotes, each as one lexeme.

Some formats of tool calls have values as plain text up to a tag. Knows schemas of the keywords that `json_schema.py`
has checked.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from ..schemas.ecma_regex import literal_regex
from ..schemas.lark_text import json_text, within_slashes
from ..schemas.number_texts import multiple_regex, range_regex
from ..schemas.schema_analysis import SchemaAnalysis, type_of, types_of, values_of
from ..schemas.schema_numbers import allows, has_multiple_regex, number_range
from ..schemas.string_formats import EXPRESSIONS, IPV4, TIME
from .mark_texts import ANY_TEXT

Kind = Literal["string", "number", "boolean", "null"]
MAX_DEPTH = 50
"""References and alternatives within one another."""
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
FORMATS = {
    **EXPRESSIONS,
    "ipv4": IPV4,
    "time": TIME,
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "hostname": _HOST,
    "email": rf"[0-9A-Za-z_+-]{{1,32}}(?:\.[0-9A-Za-z_+-]{{1,32}})?@{_HOST}",
    "duration": "P(?:[0-9]{1,4}W|[0-9]{1,4}D(?:T[0-9]{1,4}H)?|T(?:[0-9]{1,4}H)?[0-9]{1,4}M)",
}
"""Format → the expression of whole texts that have it, for e-mail addresses and durations of the usual ones alone."""
STRING_KEYWORDS = ("pattern", "minLength", "maxLength", "format")


class NotRawError(Exception):
    """A part of a schema that is not written without quotes. The message is its place."""


class RawTexts:
    """The texts of one schema's parts."""

    def __init__(self, root: Any):
        self._analysis = SchemaAnalysis(root)

    def expression(self, schema: Any, kind: Kind, path: str = "#", depth: int = 0) -> str:
        """Return an expression of a terminal: the texts of the values of one kind that a part allows.

        It is empty if there are none. Raise NotRawError for a part that cannot be written so.
        """
        if schema is False:
            return ""
        if schema is True:
            schema = {}
        if depth > MAX_DEPTH:
            raise NotRawError(path)
        own = {name: value for name, value in schema.items() if name not in ("$defs", "definitions")}
        joined = []
        if "$ref" in own:
            joined.append(self.expression(self._analysis.target(own["$ref"]), kind, str(own["$ref"]), depth + 1))
        for index, part in enumerate(own.get("allOf", ())):
            joined.append(self.expression(part, kind, f"{path}/allOf/{index}", depth + 1))
        if "anyOf" in own:
            options = [
                self.expression(part, kind, f"{path}/anyOf/{index}", depth + 1)
                for index, part in enumerate(own["anyOf"])
            ]
            joined.append(" | ".join(dict.fromkeys(option for option in options if option)))
        joined.append(self._plain(own, kind, path))
        if not all(joined):
            return ""
        several = [part for part in dict.fromkeys(joined) if part != ANY_TEXT] or [ANY_TEXT]
        return several[0] if len(several) == 1 else " & ".join(f"({part})" for part in several)

    def _plain(self, schema: dict[str, Any], kind: Kind, path: str) -> str:
        """Return an expression of what the keywords of one schema allow by themselves."""
        if (values := values_of(schema)) is not None:
            return self._values(schema, values, kind, path)
        types = types_of(schema)
        if kind == "number":
            return self._numbers(schema, types, path)
        if kind not in types:
            return ""
        if kind == "string":
            return self._strings(schema, path)
        return "/null/" if kind == "null" else "/true|false/"

    def _values(self, schema: dict[str, Any], values: list[Any], kind: Kind, path: str) -> str:
        if kind == "string" and any(name in schema for name in STRING_KEYWORDS):
            raise NotRawError(path)
        texts = [
            value if isinstance(value, str) else json_text(value)
            for value in values
            if type_of(value) in ((kind, "integer") if kind == "number" else (kind,)) and allows(schema, value)
        ]
        return f"/{within_slashes('|'.join(map(literal_regex, texts)))}/" if any(texts) else '""' if texts else ""

    def _numbers(self, schema: dict[str, Any], types: set[str], path: str) -> str:
        if not types & {"number", "integer"}:
            return ""
        tight = number_range(schema, is_integer="number" not in types).tightened()
        if tight is None or not (regex := range_regex(tight)):
            return ""
        if tight.multiple is None:
            return f"/{within_slashes(regex)}/"
        if not has_multiple_regex(tight):
            raise NotRawError(f"{path}/multipleOf")
        return f"/{within_slashes(regex)}/ & /{within_slashes(multiple_regex(tight.multiple))}/"

    def _strings(self, schema: dict[str, Any], path: str) -> str:
        parts = []
        if "pattern" in schema:
            parts.append(_searched(schema["pattern"], path))
        if "format" in schema:
            parts.append(f"(?:{FORMATS[schema['format']]})")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            parts.append(f"(?s:.{{{least},{'' if most is None else most}}})")
        return " & ".join(f"/{within_slashes(part)}/" for part in parts) or ANY_TEXT


def _searched(pattern: str, path: str) -> str:
    """Return an expression of the whole texts in which a pattern is found.

    Anchors count at the ends of a pattern without alternatives at its top.
    """
    body, is_start = (pattern[1:], True) if pattern.startswith("^") else (pattern, False)
    is_end = re.search(r"(?<!\\)(?:\\\\)*\$$", body) is not None
    body = body[:-1] if is_end else body
    if (is_start or is_end) and _has_alternatives(body):
        raise NotRawError(f"{path}/pattern")
    return f"{'' if is_start else '(?s:.*)'}(?:{body}){'' if is_end else '(?s:.*)'}"


def _has_alternatives(pattern: str) -> bool:
    """Return whether a bar stands in a pattern outside of groups and classes."""
    bare = re.sub(r"\\.", "", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    depth = 0
    for char in bare:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and depth == 0:
            return True
    return False
