"""Reads the objects of a body that hold options of their own. A key that an object does not have is refused: dropped,
it would change what the client gets, and not say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checks import Rule, Unfit, boolean, check, check_name, one_of, refusal, told

SCHEMA_FORM = 'json_schema: {"name": …, "schema": …}'


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit("a text")
    return value


def _anything(value: Any) -> Any:
    return value


KEYS_OF_TYPE = {"text": None, "json_object": "schema", "json_schema": "json_schema"}
"""Type of a `response_format` → the key that may stand beside it."""
RESPONSE_FORMAT: dict[str, Rule] = {"type": one_of(*KEYS_OF_TYPE), "json_schema": _anything, "schema": _anything}
JSON_SCHEMA: dict[str, Rule] = {"name": _string, "schema": _anything, "strict": boolean, "description": _string}
STREAM_OPTIONS: dict[str, Rule] = {
    "include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": boolean,
}  # fmt: skip
"""Keys of an object → the rules of their values."""


def take_object(name: str, value: Any, rules: Mapping[str, Rule], *, way_out: str = "") -> dict[str, Any]:
    """Return an object of a body, each of its values as the rule of its key keeps it; a null counts as left out.

    `name` is the object's place in the body, such as "response_format.json_schema". Raise InvalidRequestError, with
    the place, for a value that is no object, for a key without a rule, and for a value that its rule refuses. `way_out`
    ends the message about a key unless a known one is near.
    """
    if not isinstance(value, dict):
        raise refusal(name, told(value), f"an object with {', '.join(rules)}", way_out)
    given = {key: one for key, one in value.items() if one is not None}
    for key in given:
        check_name(key, rules, "key", place=f"{name}.", way_out=way_out)
    return {key: check(f"{name}.{key}", one, rules[key]) for key, one in given.items()}


def structure_of(response_format: Any) -> dict[str, Any] | None:
    """Return the structured output that a `response_format` asks for; None for plain text, and where it is None.

    A schema stands where OpenAI has it, in `json_schema`, or beside the type json_object, as llama.cpp and Together
    have it. Raise InvalidRequestError, with the key, for a schema in any other place.
    """
    if response_format is None:
        return None
    given = take_object("response_format", response_format, RESPONSE_FORMAT)
    if "type" not in given:
        raise refusal("response_format", "an object without a type", f"one with the type {' or '.join(KEYS_OF_TYPE)}")
    kind = given.pop("type")
    for key in given:
        if key != KEYS_OF_TYPE[kind]:
            way_out = "give the type json_schema" if key == "json_schema" else f"give {SCHEMA_FORM}"
            raise refusal(f"response_format.{key}", f"it beside the type {kind}", "no such key there", way_out)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": given["schema"]} if "schema" in given else {"json_object": True}
    if "json_schema" not in given:
        raise refusal("response_format", "the type json_schema alone", f"beside it {SCHEMA_FORM}")
    place, way_out = "response_format.json_schema", f"give {SCHEMA_FORM}"
    described = take_object(place, given["json_schema"], JSON_SCHEMA, way_out=way_out)
    if "schema" not in described:
        raise refusal(place, "an object without schema", "one with the schema", way_out)
    return {"json": described["schema"]}


def schema_place(response_format: Any) -> str:
    """Return where a `response_format` holds its schema, as errors about the schema call it."""
    is_beside = isinstance(response_format, dict) and response_format.get("type") == "json_object"
    return "response_format.schema" if is_beside else "response_format.json_schema.schema"


def usage_of(stream_options: Any, *, is_stream: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether each event has it, as `stream_options` say.

    Raise InvalidRequestError for options without a stream, and for a wrong key or value.
    """
    if stream_options is None:
        return False, False
    if not is_stream:
        raise refusal("stream_options", "it without stream", "none", "give stream: true, or leave it out")
    given = take_object("stream_options", stream_options, STREAM_OPTIONS)
    has_usage = given.get("include_usage", False)
    return has_usage, has_usage and given.get("continuous_usage_stats", False)
