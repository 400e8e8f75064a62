"""Writes the grammar of what `structured_outputs` asks for: a JSON schema, an expression, texts, or a grammar.

A grammar is the JSON that llguidance reads: a list of grammars, of which the first one begins and refers to the others.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from ...checks import check, refusal, sent_as
from ...errors import JpagedError
from ...structured_outputs import StructuredOutputsParams, parsed_json
from ..schemas.closed_names import with_closed_objects
from ..schemas.ecma_regex import literal_regex, portable_regex
from ..schemas.json_schema import enforced_schema, located, unknown_formats
from ..schemas.schema_grammar import schema_grammar
from .compiler import GrammarCompiler, GrammarParts
from .compiler_errors import told
from .lark_grammar import is_gbnf, joined_texts, num_rules, readable_gbnf

logger = logging.getLogger("jpaged")
MAX_TOLD_FORMATS = 64
"""Formats that are not known and of which the log has a line."""
WHITE_SPACE = r"[ ]|\n{1,2}[ \t]{0,20}"
"""Between two tokens of JSON, at most once. Without a bound, small models fill their output with it."""
ESCAPES = 'nrbtf\\"'
"""Escapes in texts of JSON. Without those of numbers (\\u0061), a name has one spelling: another one would pass for a
further property, and then replace the value of the first."""
MAX_RULES = 500
"""Rules of one grammar in Lark or GBNF."""
PLAIN_JSON = StructuredOutputsParams(json_object=True)
"""JSON with the white space that is allowed without options."""
_INNER_SCHEMA = re.compile(r"%json\s*")
"""What stands before a JSON schema in a Lark grammar."""


def unenforced(params: StructuredOutputsParams) -> list[str]:
    """Return what the JSON schema of parameters says without effect: formats that are not known, with their places.

    The parameters are some that `Grammars.grammar_of` takes.
    """
    if params.json is None or '"format"' not in str(params.json):
        return []
    return unknown_formats(parsed_json(str(params.json)))


class StructuredGrammars:
    """Writes grammars of structured outputs. Threads may share it."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._told_formats: set[str] = set()
        """Formats that are not known, of which the log has a line."""

    def grammars_of(self, params: StructuredOutputsParams, prefix: str = "") -> GrammarParts:
        """Return the grammar of an output, whose parts but the first have names that begin with `prefix`.

        Raise InvalidRequestError for what cannot be enforced.
        """
        match params.kind:
            case "json" | "json_object":
                return self.json_grammar(self.enforced(self._schema_of(params), params), params)
            case "regex":
                return self._expression(check("regex", params.regex, portable_regex))
            case "choice":
                # One expression: as alternatives of a rule, each would be a lexeme, and an item of the parser.
                return self._expression("|".join(map(literal_regex, params.choice or ())))
            case _:
                return self._lark_grammar(params, prefix)

    def _lark_grammar(self, params: StructuredOutputsParams, prefix: str) -> GrammarParts:
        """Return a request's grammar in Lark, with what is enforced of the schemas within it.

        A schema that llguidance would not compile right is a grammar of its own, to which the request's one refers.
        """
        lark = str(params.grammar)
        if is_gbnf(lark):
            try:
                lark = self._compiler.llguidance.gbnf_to_lark.gbnf_to_lark(readable_gbnf(lark))
            except Exception as error:  # The converter raises errors of many kinds.
                raise self.refusal(params, str(error)) from None
        # The compiler follows a chain of rules by recursion, and its stack would overflow.
        if (num := num_rules(lark)) > MAX_RULES:
            raise refusal("grammar", f"{num} rules", f"at most {MAX_RULES}")
        lark = joined_texts(lark)
        parts: list[str] = []
        inner: list[dict[str, str]] = []
        end = 0
        for found in _INNER_SCHEMA.finditer(lark):
            if found.start() < end:
                continue
            try:
                schema, after = json.JSONDecoder().raw_decode(lark, found.end())
            except (ValueError, RecursionError):
                continue  # The compiler says where.
            with sent_as({"json": "grammar"}):
                enforced = self.enforced(schema, params)
            options = self._json_options(params)
            own = schema_grammar(enforced, options)
            if own:
                name = f"{prefix}json{len(inner)}"
                inner.append({"name": name, "lark_grammar": own})
                parts += [lark[end : found.start()], f"@{name}"]
            else:
                schema = {**enforced, "x-guidance": options}
                parts += [lark[end : found.end()], json.dumps(schema, ensure_ascii=False)]
            end = after
        return [{"lark_grammar": "".join([*parts, lark[end:]])}, *inner]

    def _schema_of(self, params: StructuredOutputsParams) -> Any:
        return {"type": "object"} if params.json is None else parsed_json(str(params.json))

    def enforced(self, schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
        """Return a schema of the keywords that are enforced. Raise InvalidRequestError if that cannot be."""
        unknown: list[str] = []
        enforced = enforced_schema(schema, closes_objects=params.disable_additional_properties, unknown=unknown)
        for place in unknown:
            name = place.partition(" at ")[0]
            if len(self._told_formats) < MAX_TOLD_FORMATS and name not in self._told_formats:
                self._told_formats.add(name)
                logger.warning("a schema has a format that is not known and not enforced: %s", place)
        compact = StructuredOutputsParams(json={}, disable_any_whitespace=True)

        def has_other_names(part: dict[str, Any]) -> bool:
            # Where no name is left, the empty object is all that can be written.
            return bool(self._compiler.compiled(self.json_grammar(part, compact)).compute_ff_bytes() != b"{}")

        def matches(pattern: str, name: str) -> bool:
            part = {"type": "string", "pattern": pattern, "enum": [name]}
            return not self._compiler.compiled(self.json_grammar(part, compact)).is_error()

        return with_closed_objects(enforced, has_other_names, matches)  # type: ignore[no-any-return]

    def json_grammar(self, schema: Any, params: StructuredOutputsParams) -> GrammarParts:
        """Return the grammar of an enforced schema."""
        options = self._json_options(params)
        if lark := schema_grammar(schema, options):
            return [{"lark_grammar": lark}]
        return _parts(self._compiler.llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options))

    def _expression(self, regex: str) -> GrammarParts:
        """Return the grammar of the texts that an expression matches as a whole."""
        return _parts(self._compiler.llguidance.LLMatcher.grammar_from_regex(regex))

    def _error_of(self, schema: dict[str, Any], params: StructuredOutputsParams) -> str:
        """Return what is said of an enforced schema that cannot be compiled; empty if it can."""
        try:
            return told(self._compiler.compiled(self.json_grammar(schema, params)).get_error(), is_from_grammar=False)
        except JpagedError as error:
            return str(error)

    def _json_options(self, params: StructuredOutputsParams) -> dict[str, Any]:
        """Return how JSON is written, and that nothing is loosened, as llguidance names it."""
        options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}
        if params.disable_any_whitespace:
            return options | {"whitespace_flexible": False}
        pattern = params.whitespace_pattern
        return options | {
            "whitespace_pattern": WHITE_SPACE
            if pattern is None
            else check("whitespace_pattern", pattern, portable_regex)
        }

    def place_of_failure(self, schema: Any, params: StructuredOutputsParams = PLAIN_JSON) -> str:
        """Return the place of the innermost part of a schema that cannot be compiled; # if only the whole cannot."""
        enforced = self.enforced(schema, params)
        if not self._error_of(enforced, params):
            return "#"
        return located(enforced, lambda part: self._error_of(part, params))

    def refusal(self, params: StructuredOutputsParams, message: str) -> JpagedError:
        """Return the error for parameters that llguidance refuses with this message."""
        place = ""
        if params.kind == "json":
            place = self.place_of_failure(self._schema_of(params), params)
        reason = told(message, is_from_grammar=params.kind == "grammar")
        got = f"one that cannot be enforced{f', at {place}' if place else ''}: {reason}"
        return refusal(params.kind, got, "what docs/structured_outputs.md lists")


def _parts(text: str) -> GrammarParts:
    """Return the parts of a grammar that llguidance has written."""
    grammars: GrammarParts = json.loads(text)["grammars"]
    return grammars
