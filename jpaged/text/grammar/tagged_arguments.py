"""Writes the arguments of calls whose values are plain text between tags, each parameter by itself.

A string stands as it is up to its end tag, so a text may not hold what the reader of calls would take for its end. All
other values are JSON. Required parameters must appear, in the schema's order; others than listed ones may not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...checks import refusal
from ..answers.formats import CallFormat, TaggedCalls
from ..schemas.lark_text import within_slashes
from ..schemas.schema_analysis import TYPES, escaped
from ..schemas.schema_grammar import SchemaWriter
from .mark_texts import ANY_TEXT, COUNT, MarkTexts
from .raw_texts import NotRawError, RawTexts

KEY = re.compile(r'[^<>"\n]+')
ROOT_KEYWORDS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
"""Keywords of the schema of all arguments that are enforced here."""
READ_AS: dict[str, str] = {
    "null": "(?:null|None)",
    "boolean": "(?i:true|false)",
    "integer": "-?[0-9]+(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "number": "-?[0-9]+(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "object": "\\{(?s:.*)",
    "array": "\\[(?s:.*)",
}
"""Type → the texts that are read as values of it where a parameter may be one or a string."""


class TaggedWriter:
    """The rules of one tool's arguments."""

    def __init__(self, body: TaggedCalls, calls: CallFormat, marks: MarkTexts, names: Sequence[str]):
        """`names` are the tool's parameters."""
        self._body, self._marks = body, marks
        self.lines: list[str] = []
        self._num_values = 0
        line_feed = "\n" if body.has_lines else ""
        self._before_value = body.key_close + body.value_open + line_feed
        self._after_value = line_feed + body.value_close
        separator = "\n" if body.has_lines else ""
        self._separator = separator
        self._is_lexeme = not self._marks.opening(self._after_value)[0]
        self._ends = [end for end in (body.value_close, calls.close) if not self._marks.is_apart(end)]
        self._text = self._free_text(names)

    def _free_text(self, names: Sequence[str]) -> str:
        """Return the terminal of texts that end nowhere before their end tag."""
        body = self._body
        forbidden = [self._marks.regex(end) for end in self._ends]
        if not self._marks.is_apart(body.key_open) and names:
            forbidden.append(
                f"{self._marks.regex(body.key_open)}\\s*(?:{'|'.join(map(self._marks.regex, names))})\\s*<?"
            )
        if body.close:
            forbidden.append(f"{self._marks.regex(body.close)}\\s*<")
        return f"{ANY_TEXT} & ~/(?s:.*)(?:{'|'.join(forbidden)})(?s:.*)/" if forbidden else ANY_TEXT

    def field(self, name: str, value: str) -> str:
        """Return an expression of a parameter; `value` is that of its value and the end tag."""
        return f"{self._marks.expression(self._body.key_open + name + self._before_value)} {value}"

    def ended(self, value: str) -> str:
        """Return an expression of a value that is no plain text, and the end tag."""
        return f"{value} {self._marks.expression(self._after_value + self._separator)}"

    def text(self, terminal: str) -> str:
        """Return an expression of plain text that a terminal allows, and the end tag."""
        self._num_values += 1
        name = f"V{self._num_values}"
        bounded = "TEXT" if terminal == ANY_TEXT else f"({terminal}) & TEXT" if terminal != '""' else terminal
        if COUNT.search(terminal) and self._text != ANY_TEXT:
            tags = (*self._ends, self._body.key_open, self._body.close)
            bounded = f"({terminal}) & {self._marks.text_without(*tags)}"
        if self._is_lexeme:  # With the end tag, whose beginning the text could be.
            end = self._after_value + self._separator
            self.lines += [f"{name}: {name}_TEXT /{self._marks.regex(end)}/", f"{name}_TEXT: {bounded}"]
            return name
        self.lines.append(f"{name}: {bounded}")
        return self.ended(name)

    def any_fields(self) -> str:
        """Return an expression of parameters of any names, each with any text."""
        self.lines.append("KEY: /[A-Za-z_][0-9A-Za-z_.-]*/")
        opening = self._marks.expression(self._body.key_open)
        return f"({opening} KEY {self._marks.expression(self._before_value)} {self.text(ANY_TEXT)})*"

    def grammar(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self.lines, f"TEXT: {self._text}"])

    def fields_of(self, root: dict[str, Any], types_of_names: dict[str, tuple[str, ...]]) -> str:
        """Return an expression of the parameters of a checked schema.

        `types_of_names` are the types by which the reader of calls takes a text as a value. Raise InvalidRequestError,
        with the place, for a schema that cannot be enforced so.
        """
        if others := root.keys() - set(ROOT_KEYWORDS):
            raise _refused(f"#/{min(others)}")
        named, required = root.get("properties", {}), root.get("required", [])
        names = list(dict.fromkeys([*named, *required]))
        if not names and root.get("additionalProperties", True) not in (False,):
            if root.get("additionalProperties", True) not in (True, {}):
                raise _refused("#/additionalProperties")
            return self.any_fields()
        writer = SchemaWriter(root, {"lenient": False, "coerce_one_of": False, "whitespace_flexible": False})
        raw, fields = RawTexts(root), []
        for name in names:
            path = f"#/properties/{escaped(name)}"
            if not KEY.fullmatch(name) or name != name.strip():
                raise _refused(path)
            schema = named.get(name, root.get("additionalProperties", True))
            try:
                value = self._value(schema, types_of_names.get(name, ()), path, writer, raw)
            except NotRawError as error:
                raise _refused(str(error)) from None
            if value:
                field = self.field(name, value)
                fields.append(field if name in required else f"({field})?")
            elif name in required:
                raise _refused(path)
        self.lines += writer.lines
        return " ".join(fields) or '""'

    def _value(self, schema: Any, types: tuple[str, ...], path: str, writer: SchemaWriter, raw: RawTexts) -> str:
        """Return an expression of a value that a schema allows and of its end tag; empty if there is none."""
        if not types or set(types) == {"string"}:
            text = raw.expression(schema, "string", path)
            return self.text(text) if text else ""
        if "string" not in types:
            value = writer.expression(schema, path)
            return self.ended(value) if value else ""
        others = [name for name in types if name != "string"]
        options = []
        read_as = "|".join(dict.fromkeys(READ_AS[name] for name in others))
        if text := raw.expression(schema, "string", path):
            options.append(self.text(f"({text}) & ~/\\s*(?:{within_slashes(read_as)})\\s*/"))
        # Each of them is one lexeme with its end tag, since a text could begin like it.
        for kind in ("number", "boolean", "null"):
            is_wanted = kind in others or (kind == "number" and "integer" in others)
            if is_wanted and (text := raw.expression(schema, kind, path)):  # type: ignore[arg-type]
                options.append(self.text(text))
        if has_parts := [name for name in others if name in ("object", "array")]:
            value = writer.expression({"allOf": [schema, {"type": has_parts}]}, path)
            options += [self.ended(value)] if value else []
        return f"({' | '.join(options)})" if options else ""


def _refused(path: str) -> Exception:
    got = f"a part that this model's format of calls does not hold, at {path[:500]}"
    return refusal("json", got, "a simpler schema")


assert set(READ_AS) == set(TYPES) - {"string"}
