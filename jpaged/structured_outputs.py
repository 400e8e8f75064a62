"""What the output of a request must look like: a JSON schema, a regular expression, some texts, or a grammar.

Values are checked here as far as no tokenizer is needed; `text/grammar` compiles them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checks import (
    CheckedFields,
    RepeatedKeyError,
    Rule,
    Unfit,
    boolean,
    checked,
    described,
    fields_of,
    or_none,
    unique_keys,
)
from .errors import InvalidRequestError
from .limits import ceiling

MAX_SCHEMA_BYTES = ceiling("schema_bytes")
"""A schema, a grammar, and all choices together may have so many bytes of UTF-8."""
MAX_SCHEMA_DEPTH = ceiling("json_depth")
MAX_REGEX_BYTES = ceiling("regex_bytes")
MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of which exactly one is given."""
JSON_KINDS = ("json", "json_object")
JSON_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
"""Fields that change what JSON is allowed."""


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises Unfit if it is no JSON, has a key twice in an object, or nests deeper than MAX_SCHEMA_DEPTH.
    """

    def no_constant(name: str) -> None:
        raise Unfit(f"JSON, which has no {name}", got=SHOWN_AS_TEXT)

    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=no_constant)
    except RepeatedKeyError:
        raise Unfit("each key once in an object; one stands twice", got=SHOWN_AS_TEXT) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # Also Python's limit on the digits of an integer.
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise Unfit(f"JSON; it cannot be parsed{place}", got=SHOWN_AS_TEXT) from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_deep()
    return value


SHOWN_AS_TEXT = "a string"
"""What errors show of a caller's schema or grammar, whose own text they never repeat."""


def _too_deep() -> Unfit:
    return Unfit(f"at most {MAX_SCHEMA_DEPTH} levels of objects and arrays", got="a schema that nests deeper")


def _children(value: Any) -> list[Any]:
    """Return what a JSON value holds directly: the values of an object, the items of an array."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _text(kind: str, max_bytes: int) -> Rule:
    """Return a rule that takes a text of valid Unicode which is not empty and at most `max_bytes` long in UTF-8."""

    def rule(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise Unfit(f"a text with {kind}")
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            raise Unfit("valid Unicode, without lone surrogates", got=SHOWN_AS_TEXT) from None
        if num_bytes > max_bytes:
            raise Unfit(f"at most {max_bytes} bytes", got=f"{num_bytes} bytes")
        return value

    return rule


def schema_of(value: Any) -> tuple[str, Any]:
    """Take a JSON schema as a mapping or as JSON text; return it as JSON text and as plain data, its keys in order."""
    allowed = "a JSON schema, as an object or as text"
    if isinstance(value, Mapping):
        try:
            value = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise _too_deep() from None
        except (TypeError, ValueError) as error:
            raise Unfit(f"{allowed}, of JSON values alone", got=f"an object that is no JSON ({error})"[:200]) from None
    if not isinstance(value, str):
        raise Unfit(allowed)
    text: str = _text("a JSON schema", MAX_SCHEMA_BYTES)(value)
    schema = parsed_json(text)
    if not isinstance(schema, dict | bool):
        raise Unfit(allowed, "begin it with { and give at least a type", got="JSON that is no object")
    return text, schema


def _schema_text(value: Any) -> str:
    return schema_of(value)[0]


def _choices(value: Any) -> tuple[str, ...]:
    """Take a list of texts that are not empty, as a tuple without repetitions."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise Unfit("a list of at least one text, none of which is empty")
    if len(value) > MAX_CHOICES:
        raise Unfit(f"at most {MAX_CHOICES} texts", got=f"{len(value)} texts")
    _text("choices", MAX_SCHEMA_BYTES)("\n".join(value))
    return tuple(dict.fromkeys(value))


def _only_true(value: Any) -> bool:
    if value is not True:
        raise Unfit("true", "leave it out to allow any output")
    return True


@described
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(
    CheckedFields, kind="parameter", error=InvalidRequestError, not_available=("structural_tag", "disable_fallback")
):
    """What an output must look like. Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is given.

    Raises InvalidRequestError, which names the field. Whether the engine can enforce a schema, an expression or a
    grammar is checked when a request is made; docs/structured_outputs.md lists what it can.
    """

    json: str | Mapping[str, Any] | None = checked(
        None, or_none(_schema_text), "the output is JSON that this schema allows (draft 2020-12), a mapping or its text"
    )
    regex: str | None = checked(
        None, or_none(_text("a regular expression", MAX_REGEX_BYTES)), "the whole output matches this expression"
    )
    choice: tuple[str, ...] | list[str] | None = checked(None, or_none(_choices), "the output is one of these texts")
    grammar: str | None = checked(
        None,
        or_none(_text("a grammar", MAX_SCHEMA_BYTES)),
        "the output follows this grammar: Lark as llguidance writes it, or GBNF",
    )
    json_object: bool | None = checked(None, or_none(_only_true), "true: the output is any JSON object")
    whitespace_pattern: str | None = checked(
        None,
        or_none(_text("a regular expression", MAX_REGEX_BYTES)),
        "the white space that JSON may have between two of its tokens; default: a space, or one or two line ends and "
        "an indent of at most 20",
    )
    disable_any_whitespace: bool = checked(False, boolean, "JSON without white space between its tokens")
    disable_additional_properties: bool = checked(
        False, boolean, "objects of the schema have no properties but those that it names, where it does not say"
    )

    def __post_init__(self) -> None:
        """Check each field by its own rule, then which ones are given together."""
        self._check_fields()
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            got, allowed = " and ".join(given) or "none of them", f"exactly one of {', '.join(KINDS)}"
            raise InvalidRequestError(f"structured_outputs: got {got}, allowed: {allowed}", param="structured_outputs")
        for name in JSON_OPTIONS:
            if getattr(self, name) and given[0] not in JSON_KINDS:
                self._refuse(name, f"nothing beside {given[0]}, which is no JSON", "leave it out")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            self._refuse("whitespace_pattern", "none with disable_any_whitespace", "leave one of them out")

    def __str__(self) -> str:
        """Return what is asked for in a few words, whatever the length of a schema."""
        value = getattr(self, self.kind)
        return self.kind if value is True else f"{self.kind} of {len(value)} {'texts' if self.choice else 'characters'}"

    @property
    def kind(self) -> str:
        """Return the one of KINDS that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def structured_outputs(value: Any) -> StructuredOutputsParams:
    """Take a StructuredOutputsParams, or a mapping of its fields, in which None counts as left out."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Unfit(f"an object with one of {', '.join(KINDS)}")
    with fields_of("structured_outputs"):
        return StructuredOutputsParams(**{name: one for name, one in value.items() if one is not None})
