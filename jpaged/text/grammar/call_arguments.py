"""Writes the arguments of tool calls as a format has them: JSON, a dialect of it, texts between tags, or raw text."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...checks import check, refusal, sent_as
from ...errors import InvalidRequestError
from ...structured_outputs import StructuredOutputsParams
from ..answers.answer_spec import parameter_types
from ..answers.bound_format import BoundFormat
from ..answers.formats import CallFormat, Channels, JsonCalls, NamedCalls, TaggedCalls
from ..chat.tools import CUSTOM_ARGUMENT, Tool
from ..schemas.ecma_regex import portable_regex
from ..schemas.lark_text import within_slashes
from .compiler import GrammarCompiler, GrammarParts
from .dialect_arguments import DialectWriter
from .mark_texts import ANY_TEXT, MarkTexts
from .structured_grammar import PLAIN_JSON, StructuredGrammars
from .tagged_arguments import TaggedWriter

MAX_SENT_BYTES, MAX_ENFORCED_BYTES = 1 << 19, 1 << 17
"""The JSON of all schemas of a request that are enforced: as they were sent, and without descriptions and the like, but
with the grammars of custom tools. What compiling them takes grows with the latter: up to about a second."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function for which none was given."""
TEXT_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
"""The schema by which the model sees a custom tool."""


@dataclass
class Arguments:
    """The arguments of a request's tools."""

    body: JsonCalls | TaggedCalls | NamedCalls
    expressions: dict[str, str] = field(default_factory=dict)
    """Tool → the expression of its arguments, by a reference to the first of its parts."""
    parts_of: dict[str, GrammarParts] = field(default_factory=dict)
    raw_tools: set[str] = field(default_factory=set)
    """Tools whose argument is a text that stands alone."""
    unenforced: dict[str, list[str]] = field(default_factory=dict)
    """Why something is not enforced → the places in the request."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each reason why something is not enforced."""
        return tuple(_sentence(reason, places) for reason, places in self.unenforced.items())

    @staticmethod
    def place_of(index: int, tool: Tool) -> str:
        """Return the place of a tool's schema or grammar in a request."""
        return f"tools[{index}].{'function.parameters' if tool.kind == 'function' else 'custom.format.grammar'}"


class ArgumentWriter:
    """Writes the arguments of one request's tools."""

    def __init__(self, format: BoundFormat, compiler: GrammarCompiler, structured: StructuredGrammars):
        calls = format.format.channels or format.format.calls
        assert calls is not None, "tools for a model without calls"
        self._calls, self._structured, self._compiler = calls, structured, compiler
        self._marks = MarkTexts.of_format(compiler, format)
        self.arguments = Arguments(self._body())
        self._num_sent_bytes = self._num_enforced_bytes = 0

    def _body(self) -> JsonCalls | TaggedCalls | NamedCalls:
        """Return the one of several ways to write a call that this tokenizer has the marks of."""
        if isinstance(self._calls, Channels):
            return JsonCalls()
        for body in self._calls.bodies:
            if isinstance(body, NamedCalls) and body.before_arguments and self._marks.is_token(body.before_arguments):
                return body
        return self._calls.bodies[0]

    @property
    def _dialect_quote(self) -> str:
        body = self.arguments.body
        return body.dialect.quote if isinstance(body, NamedCalls) else ""

    def add(self, index: int, tool: Tool, *, is_enforced: bool, failure: str) -> None:
        """Add a tool. Its schema is enforced with `is_enforced`, unless `failure` says why that cannot be.

        Raise InvalidRequestError for a strict schema or a grammar that cannot be enforced.
        """
        name, place = f"tool{index}", self.arguments.place_of(index, tool)
        if tool.kind == "custom":
            with sent_as({"json": place, "grammar": place}):
                parts = self._custom(tool, name, place)
        else:
            schema = NO_PARAMETERS if tool.parameters is None else {**tool.parameters, "type": "object"}
            parts = []
            if failure:
                with suppress(InvalidRequestError):
                    self._counted(schema)
                self._warn(place, failure)
            elif is_enforced:
                parts = self._tried(schema, place, is_strict=tool.is_strict)
            parts = parts or self._any_object()
        self.arguments.parts_of[tool.name] = [{**parts[0], "name": name}, *parts[1:]]
        self.arguments.expressions[tool.name] = f"@{name}"

    def _tried(self, schema: dict[str, Any], place: str, *, is_strict: bool) -> GrammarParts:
        """Return the parts of a schema, none with a warning if it is not strict and cannot be enforced."""
        try:
            with sent_as({"json": place}):
                return self._of_schema(self._counted(schema), parameter_types(schema))
        except InvalidRequestError as error:
            if is_strict:
                raise
            self._warn(place, str(error).partition("got ")[2].partition(", allowed")[0])
            return []

    def _counted(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema's keywords that are enforced, and count the bytes of both.

        Raise InvalidRequestError for a schema that cannot be enforced, or if all so far have too many bytes.
        """
        self._num_sent_bytes += _num_bytes(schema)
        if self._num_sent_bytes <= MAX_SENT_BYTES:
            enforced = self._structured.enforced(schema, PLAIN_JSON)
            self._num_enforced_bytes += _num_bytes(enforced)
            if self._num_enforced_bytes <= MAX_ENFORCED_BYTES:
                return enforced
        got = f"more than {MAX_ENFORCED_BYTES} bytes of schemas of all tools, or {MAX_SENT_BYTES} with descriptions"
        raise refusal("json", got, "as many", "send fewer or smaller schemas")

    def _warn(self, place: str, reason: str) -> None:
        self.arguments.unenforced.setdefault(reason, []).append(place)

    def _of_schema(self, enforced: dict[str, Any], types: dict[str, tuple[str, ...]]) -> GrammarParts:
        """Return the parts of the arguments that a checked schema allows.

        `types` are those by which the reader of calls takes a parameter's text as a value.
        """
        body = self.arguments.body
        if isinstance(body, TaggedCalls):
            assert isinstance(self._calls, CallFormat)
            writer = TaggedWriter(body, self._calls, self._marks, list(types))
            return [{"lark_grammar": writer.grammar(writer.fields_of(enforced, types))}]
        if self._dialect_quote:
            return [{"lark_grammar": DialectWriter(enforced, self._dialect_quote, self._marks).grammar()}]
        return self._structured.json_grammar(enforced, PLAIN_JSON)

    def _any_object(self) -> GrammarParts:
        """Return the parts of any arguments."""
        body = self.arguments.body
        if isinstance(body, TaggedCalls):
            assert isinstance(self._calls, CallFormat)
            writer = TaggedWriter(body, self._calls, self._marks, [])
            return [{"lark_grammar": writer.grammar(writer.any_fields())}]
        return self._of_schema(ANY_OBJECT, {})

    def _custom(self, tool: Tool, name: str, place: str) -> GrammarParts:
        """Return the parts of a custom tool's text."""
        body = self.arguments.body
        self._num_enforced_bytes += len((tool.grammar or "").encode())
        if tool.grammar is not None and self._num_enforced_bytes > MAX_ENFORCED_BYTES:
            got = f"more than {MAX_ENFORCED_BYTES} bytes of schemas and grammars of all tools"
            raise refusal(place, got, "as many", "send fewer or smaller ones")
        is_lark = tool.grammar is not None and tool.grammar_syntax == "lark"
        is_raw = isinstance(body, TaggedCalls) or bool(self._dialect_quote) or isinstance(self._calls, Channels)
        if not is_raw:
            schema = TEXT_INPUT
            if is_lark:
                self._check_grammar(tool)
                self._warn(place, "this model writes the texts of tools as strings of JSON")
            elif tool.grammar is not None:
                pattern = f"^(?:{check(place, tool.grammar, portable_regex)})$"
                schema = {**TEXT_INPUT, "properties": {CUSTOM_ARGUMENT: {"type": "string", "pattern": pattern}}}
            return self._of_schema(schema, {})
        if is_lark:
            inner = self._structured.grammars_of(StructuredOutputsParams(grammar=tool.grammar), prefix=name)
            inner = [{**inner[0], "name": f"{name}_text"}, *inner[1:]]
            text, is_part = f"@{name}_text", True
        else:
            inner, is_part = [], False
            text = ANY_TEXT
            if tool.grammar is not None:
                text = f"/{within_slashes(check(place, tool.grammar, portable_regex))}/"
        if isinstance(self._calls, Channels):
            self.arguments.raw_tools.add(tool.name)
            return [{"lark_grammar": f"start: {text}"}, *inner]
        if isinstance(body, TaggedCalls):
            writer = TaggedWriter(body, self._calls, self._marks, [CUSTOM_ARGUMENT])
            value = writer.ended(text) if is_part else writer.text(text)
            return [{"lark_grammar": writer.grammar(writer.field(CUSTOM_ARGUMENT, value))}, *inner]
        dialect = DialectWriter(TEXT_INPUT, self._dialect_quote, self._marks)
        value = dialect.quoted(text) if is_part else dialect.string(text)
        return [{"lark_grammar": dialect.grammar_of(f'"{{" "{CUSTOM_ARGUMENT}:" {value} "}}"')}, *inner]

    def _check_grammar(self, tool: Tool) -> None:
        """Refuse a grammar in Lark that cannot be compiled."""
        wanted = StructuredOutputsParams(grammar=tool.grammar)
        if error := self._compiler.compiled(self._structured.grammars_of(wanted)).get_error():
            raise self._structured.refusal(wanted, error)


def _sentence(reason: str, places: list[str]) -> str:
    are = "is" if len(places) == 1 else f"and {len(places) - 1} more are"
    return f"{places[0]} {are} not enforced: {reason}"


def _num_bytes(schema: dict[str, Any]) -> int:
    return len(json.dumps(schema, ensure_ascii=False).encode())
