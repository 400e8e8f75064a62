"""Writes the arguments of calls in a dialect of JSON: strings between two marks, and keys without quotes."""

from __future__ import annotations

import re
from typing import Any

from ...checks import refusal
from ..schemas.lark_text import literal
from ..schemas.schema_grammar import NotWrittenError, SchemaWriter
from ..schemas.schema_merging import UnmergeableError
from ..schemas.schema_numbers import allowed_values
from .mark_texts import ANY_TEXT, COUNT, MarkTexts
from .raw_texts import NotRawError, RawTexts

BARE_KEY = re.compile(r"[A-Za-z_][0-9A-Za-z_.-]*")
MEANINGLESS = ("$defs", "definitions")


class DialectWriter(SchemaWriter):
    """The rules of one schema's values."""

    def __init__(self, root: dict[str, Any], quote: str, marks: MarkTexts):
        """`quote` is the mark that begins and ends strings, which have no escapes."""
        super().__init__(root, {"lenient": False, "coerce_one_of": False, "whitespace_flexible": False})
        self._raw = RawTexts(root)
        self._quote = marks.expression(quote)
        is_apart = marks.is_apart(quote)
        self._any_text = ANY_TEXT if is_apart else f"{ANY_TEXT} & ~/(?s:.*){marks.regex(quote)}(?s:.*)/"
        self._bounded_text = "TEXT" if is_apart else marks.text_without(quote)
        self._is_lexeme = not marks.is_token(quote)
        self._has_any = False

    def is_own(self, schema: Any) -> bool:
        """Return True: llguidance compiles JSON alone."""
        return True

    def expression(self, schema: Any, path: str) -> str:
        """Return an expression of the values that a schema allows; empty if there are none."""
        if schema is False:
            return ""
        if schema is True or not schema.keys() - set(MEANINGLESS):
            return self._any()
        try:
            if "$ref" in schema and schema.keys() <= {"$ref", *MEANINGLESS}:
                return self._referred(schema["$ref"])
            plain = self._without_references(schema, ())
            return self._of_plain(plain, path) if plain is not False else ""
        except (NotWrittenError, UnmergeableError, NotRawError):
            got = f"a part that this model's format of calls does not hold, at {path[:500]}"
            raise refusal("json", got, "a simpler schema") from None

    def grammar(self) -> str:
        """Return the whole grammar of the schema."""
        start = self.expression(self._root, "#")
        if not start:
            raise refusal("json", "a schema that nothing satisfies at #", "one that some value satisfies")
        return self.grammar_of(start)

    def grammar_of(self, start: str) -> str:
        """Return the grammar whose start is an expression."""
        return "\n".join([f"start: {start}", *self.lines, f"TEXT: {self._any_text}"])

    def quoted(self, text: str) -> str:
        """Return an expression of a string whose text is that of another expression."""
        return f"{self._quote} {text} {self._quote}"

    def string(self, text: str) -> str:
        """Return an expression of a string whose text a terminal allows."""
        if text == ANY_TEXT:
            text = "TEXT"
        elif text != '""':
            name = f"S{len(self.lines)}"
            self.lines.append(f"{name}: ({text}) & {self._bounded_text if COUNT.search(text) else 'TEXT'}")
            text = name
        if not self._is_lexeme:
            return self._rule(self.quoted(text))
        # One lexeme with its quotes: the text could begin like the closing one.
        name = f"Q{len(self.lines)}"
        self.lines.append(f"{name}: {self.quoted(text)}")
        return name

    def _any(self) -> str:
        """Return the rule of any value."""
        if not self._has_any:
            self._has_any = True
            string = self.string(ANY_TEXT)
            self.lines += [
                f'any: {string} | NUMBER | "true" | "false" | "null" | any_array | any_object',
                'any_array: "[" (any ("," any)*)? "]"',
                'any_object: "{" (any_field ("," any_field)*)? "}"',
                'any_field: BARE_KEY ":" any',
                "NUMBER: /-?(?:0|[1-9][0-9]*)(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/",
                f"BARE_KEY: /{BARE_KEY.pattern}/",
            ]
        return "any"

    def _scalar(self, schema: dict[str, Any], path: str) -> str:
        if schema["type"] == "string":
            text = self._raw.expression(schema, "string", path)
            return self.string(text) if text else ""
        return self._rule('"null"' if schema["type"] == "null" else '"true" | "false"')

    def _of_values(self, schema: dict[str, Any]) -> str:
        rest = {name: value for name, value in schema.items() if name not in ("const", "enum", "type")}
        if rest:
            raise NotWrittenError
        return self._one_of(self._constant(value) for value in allowed_values(schema))

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._rule(self.quoted(literal(value) if value else ""))
        return super()._constant(value)

    def _key(self, name: str) -> str:
        if BARE_KEY.fullmatch(name):
            return literal(f"{name}:")
        return f'{self._quote} {literal(name)} {self._quote} ":"'

    def _other_names(self, names: list[str]) -> str:
        taken = [literal(name) for name in names if BARE_KEY.fullmatch(name)]
        text = f"/{BARE_KEY.pattern}/" + (f" & ~({' | '.join(taken)})" if taken else "")
        if text not in self._rules:
            self._rules[text] = f"NAME{len(self._rules)}"
            self.lines.append(f"{self._rules[text]}: {text}")
        return self._rules[text]

    def _compiled(self, schema: Any) -> str:
        if not isinstance(schema, dict) or schema.get("type") not in ("number", "integer"):
            raise NotWrittenError
        return super()._compiled(schema)
