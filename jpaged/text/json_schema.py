"""Checks that a JSON schema can be enforced, keyword by keyword, and names the place of what cannot.

A grammar allows a text token by token, so a keyword that compares distant parts of a value (`uniqueItems`, `not`) has
none. Such a keyword is refused, never dropped. What is left is a schema of those keywords that the grammar enforces,
with the meaning of draft 2020-12. docs/structured_outputs.md has the table. Knows no tokenizer and no llguidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ..checks import nearest, refusal, shown
from ..errors import JpagedError
from .ecma_regex import portable_regex

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06")
"""Of `$schema`: their keywords that are enforced mean the same in all of them."""
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ENFORCED = (
    "type", "const", "enum", "required", "pattern", "format", "$ref", *SCHEMAS_BY_NAME, *SCHEMA_LISTS, *SCHEMAS,
    *COUNTS, *NUMBERS,
)  # fmt: skip
ANNOTATIONS = (
    "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding",
    "contentMediaType", "contentSchema", "discriminator", "example", "externalDocs", "xml",
)  # fmt: skip
"""Keywords that say nothing of what is valid; the last four are OpenAPI's."""
REFUSED = {
    "not": "",
    "if": "give anyOf",
    "then": "give anyOf",
    "else": "give anyOf",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "propertyNames": "give patternProperties and additionalProperties: false",
    "dependentRequired": "give anyOf",
    "dependentSchemas": "give anyOf",
    "dependencies": "give anyOf",
    "unevaluatedItems": "give items",
    "unevaluatedProperties": "give additionalProperties",
    "additionalItems": "give prefixItems and items",
    "$anchor": "refer by #/$defs/…",
    "$dynamicAnchor": "refer by #/$defs/…",
    "$dynamicRef": "give $ref",
    "$recursiveAnchor": "give $ref",
    "$recursiveRef": "give $ref",
    "$vocabulary": "",
    "id": "give $defs",
    "nullable": 'give type: ["string", "null"]',
    "x-guidance": "",
}
"""Keywords that are not enforced → the way out, where there is one."""
MAX_EXACT = 1 << 53
"""Integers beyond it are not exact as a float64, in which bounds are computed."""
MAX_COUNT = 1_000_000
MAX_JOINED_PATTERNS = 6
"""Patterns that must hold of one text together: what compiling them takes is exponential in their number."""
MAX_REF_DEPTH = 32
SEE_DOCS = "the keywords in docs/structured_outputs.md"


def enforced_schema(schema: Any, *, closes_objects: bool) -> dict[str, Any]:
    """Return a schema that means the same and has only keywords that are enforced.

    `closes_objects` adds `additionalProperties: false` to each object that names properties and says nothing of others.
    Raise InvalidRequestError, with the place in the schema, for what cannot be enforced or is no schema.
    """
    checked = _Schema(schema, closes_objects).checked()
    if checked is False:
        raise _refused("#", "false", "a schema that some value satisfies")
    return {} if checked is True else checked


def located(schema: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> str:
    """Return the place of the innermost part of a schema that fails by itself as the whole does.

    The place is empty if only the whole schema fails. `error_of` gives the error of a schema, empty if it has none.
    Definitions go with each part.
    """
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, part, error = "#", schema, error_of(schema)
    num_tries = 0
    while True:
        for path, inner in _inner_schemas(part, place):
            num_tries += 1
            if num_tries > MAX_TRIES or not isinstance(inner, dict):
                continue
            if error_of({**definitions, **inner}) == error:
                place, part = path, inner
                break
        else:
            return "" if place == "#" else place


MAX_TRIES = 100
"""Parts of a schema that `located` tries."""


def _inner_schemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each schema that stands directly in another one."""
    for name, value in schema.items():
        here = f"{path}/{_escaped(name)}"
        if name in SCHEMAS_BY_NAME:
            yield from ((f"{here}/{_escaped(key)}", inner) for key, inner in value.items())
        elif name in SCHEMA_LISTS:
            yield from ((f"{here}/{index}", inner) for index, inner in enumerate(value))
        elif name in SCHEMAS:
            yield here, value


class _Schema:
    """One schema of a caller, with its definitions."""

    def __init__(self, root: Any, closes_objects: bool):
        self._root, self._closes_objects = root, closes_objects
        self._refs: list[tuple[str, str]] = []
        """(place, reference) of each `$ref`."""
        self._one_ofs: list[tuple[str, dict[str, Any]]] = []
        """(place, schema) of each schema with a `oneOf`."""
        self._checked: Schema = True

    def checked(self) -> Schema:
        """Return the schema with its enforced keywords alone."""
        self._checked = self._visit(self._root, "#")
        for path, reference in self._refs:
            if not isinstance(self._target(reference), dict | bool):
                allowed = "#, or #/… to a schema within this one"
                raise _refused(path, f"a $ref to {'another document' if reference[:1] != '#' else 'nothing'}", allowed)
        for path, schema in self._one_ofs:
            self._check_one_of(path, schema)
        self._check_patterns()
        if not self._has_finite_value(self._checked):
            raise _refused("#", "a schema that leads back to itself without an end", "one that some value satisfies")
        for _, schema in self._one_ofs:  # After the checks above, since references may go through a oneOf.
            schema["anyOf"] = schema.pop("oneOf")
        return self._checked

    def _visit(self, schema: Any, path: str) -> Schema:
        """Return a schema with its enforced keywords alone, and note its references."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refused(path, f"a JSON {_type_of(schema)}", "a schema: an object, true or false")
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            here = f"{path}/{_escaped(name)}"
            if name in ENFORCED:
                kept[name] = self._keyword(name, value, here)
            else:
                self._check_other(name, value, here)
        self._check_together(kept, path)
        if self._closes_objects and "properties" in kept and "patternProperties" not in kept:
            kept.setdefault("additionalProperties", False)
        if "oneOf" in kept:
            self._one_ofs.append((path, kept))
        return kept

    def _keyword(self, name: str, value: Any, path: str) -> Any:
        """Return the value of an enforced keyword, checked."""
        if name in SCHEMAS_BY_NAME:
            if not isinstance(value, dict):
                raise _refused(path, f"a JSON {_type_of(value)}", "an object with a schema for each name")
            named = {key: self._visit(inner, f"{path}/{_escaped(key)}") for key, inner in value.items()}
            is_pattern = name == "patternProperties"
            return {portable_regex(key): inner for key, inner in named.items()} if is_pattern else named
        if name in SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise _refused(path, f"a JSON {_type_of(value)}", "a list with at least one schema")
            return [self._visit(inner, f"{path}/{index}") for index, inner in enumerate(value)]
        if name in SCHEMAS:
            if isinstance(value, list):
                raise _refused(path, "a list of schemas", "one schema", "give the list as prefixItems")
            return self._visit(value, path)
        if name in COUNTS:
            if not _is_integer(value) or not 0 <= value <= MAX_COUNT:
                raise _refused(path, _number_shown(value), f"an integer from 0 to {MAX_COUNT}")
            return int(value)
        if name in NUMBERS:
            if not _is_number(value) or (name == "multipleOf" and value <= 0):
                raise _refused(path, _number_shown(value), "a number > 0" if name == "multipleOf" else "a number")
            _check_exact(value, path)
            return value
        if name in ("const", "enum"):
            if name == "enum" and (not isinstance(value, list) or not value):
                raise _refused(path, f"a JSON {_type_of(value)}", "a list with at least one value")
            _check_exact(value, path)
            return value
        return self._text(name, value, path)

    def _text(self, name: str, value: Any, path: str) -> Any:
        """Return the value of `type`, `required`, `pattern`, `format` or `$ref`, checked."""
        if name in ("type", "required"):
            names = [value] if name == "type" and isinstance(value, str) else value
            is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
            if not is_list or (name == "type" and not names):
                raise _refused(path, f"a JSON {_type_of(value)}", "a list of names")
            if name == "type" and (unknown := [one for one in names if one not in TYPES]):
                raise _refused(path, f"the type {shown(unknown[0])}", ", ".join(TYPES))
            return value
        if not isinstance(value, str):
            raise _refused(path, f"a JSON {_type_of(value)}", "a string")
        if name == "pattern":
            return portable_regex(value)
        if name == "format":
            if value not in FORMATS:
                way_out = "leave it out, or give a pattern"
                raise _refused(path, f"the format {shown(value)}", ", ".join(FORMATS), way_out)
            return value
        self._refs.append((path, value))
        return value

    def _check_other(self, name: str, value: Any, path: str) -> None:
        """Raise InvalidRequestError for a keyword that is not enforced, unless it says nothing of what is valid."""
        if name in ANNOTATIONS or (name == "$id" and path == "#/$id") or (name == "uniqueItems" and value is False):
            return
        if name == "$schema":
            if not isinstance(value, str) or not any(draft in value for draft in DRAFTS):
                raise _refused(path, "another draft", ", ".join(DRAFTS))
            return
        if name.startswith("x-") and name not in REFUSED:
            return
        if name in REFUSED or name in ("uniqueItems", "$id"):
            raise _refused(path, f"{name}, which is not enforced", SEE_DOCS, REFUSED.get(name, ""))
        near = nearest(name[:60], ENFORCED)
        raise _refused(path, "an unknown keyword", SEE_DOCS, f"did you mean {near}?" if near else "")

    def _check_together(self, schema: dict[str, Any], path: str) -> None:
        """Raise InvalidRequestError for keywords that are enforced alone, and not beside each other."""
        # Names that the schema does not list may come twice, and then count once.
        num_free = schema.get("minProperties", 0) - len(set(schema.get("required", ())))
        is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        if num_free > 1 and is_open:
            allowed = "at most one property more than the required ones, since a name could come twice"
            raise _refused(f"{path}/minProperties", schema["minProperties"], allowed, "list them as required")

    def _target(self, reference: str) -> Any:
        """Return what a reference leads to in the checked schema; None if it leads nowhere."""
        target: Any = self._checked
        if reference == "#":
            return target
        if not reference.startswith("#/"):
            return None
        for part in unquote(reference[2:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isascii() and key.isdigit() and int(key[:6]) < len(target):
                target = target[int(key)]
            else:
                return None
        return target

    def _resolved(self, schema: Any) -> Any:
        """Return the schema that a schema which is nothing but a reference leads to, and any other schema as it is."""
        for _ in range(MAX_REF_DEPTH):
            is_reference = isinstance(schema, dict) and "$ref" in schema
            if not is_reference or schema.keys() - {"$ref", "$defs", "definitions"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    def _check_one_of(self, path: str, schema: dict[str, Any]) -> None:
        """Raise InvalidRequestError unless no value can satisfy two options of a `oneOf`: it then means `anyOf`."""
        options = schema["oneOf"]
        if "anyOf" in schema:
            raise _refused(f"{path}/oneOf", "oneOf beside anyOf", "one of them", "put one of them into allOf")
        for index, option in enumerate(options):
            for other_index in range(index):
                if not self._are_disjoint(options[other_index], option, MAX_REF_DEPTH):
                    got = f"options {other_index} and {index}, which may hold at once"
                    allowed = "options that differ by type, or by the const of a required property"
                    raise _refused(f"{path}/oneOf", got, allowed, "give anyOf")

    def _are_disjoint(self, one: Any, other: Any, depth: int) -> bool:
        """Return whether it is certain that no value satisfies both schemas."""
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not depth or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        for first, second in (one, other), (other, one):
            for name in ("anyOf", "oneOf"):
                if name in first and all(self._are_disjoint(part, second, depth - 1) for part in first[name]):
                    return True
            if any(self._are_disjoint(part, second, depth - 1) for part in first.get("allOf", ())):
                return True
        types = _types_of(one) & _types_of(other)
        if not types:
            return True
        values, other_values = _values_of(one), _values_of(other)
        if values is not None and other_values is not None:
            return not any(_are_equal(value, another) for value in values for another in other_values)
        if types != {"object"}:
            return False
        required = {*one.get("required", ()), *other.get("required", ())}
        properties, other_properties = one.get("properties", {}), other.get("properties", {})
        return any(
            self._are_disjoint(properties[name], other_properties[name], depth - 1)
            for name in required
            if name in properties and name in other_properties
        )

    def _has_finite_value(self, root: Any) -> bool:
        """Return false if each value of a schema would hold another one of the same kind, without an end.

        Starting from none, references are found to have a value as long as new ones are found (a least fixed point).
        Apart from references, every schema counts as satisfiable.
        """
        finite: set[str] = set()

        def has_value(schema: Any) -> bool:
            if not isinstance(schema, dict):
                return True
            if "$ref" in schema and schema["$ref"] not in finite:
                return False
            if not all(map(has_value, schema.get("allOf", ()))):
                return False
            if not all(any(map(has_value, schema[name])) for name in ("anyOf", "oneOf") if name in schema):
                return False
            types = _types_of(schema)
            if types == {"object"}:
                named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
                return all(has_value(named.get(name, others)) for name in schema.get("required", ()))
            if types == {"array"}:
                first, others = schema.get("prefixItems", []), schema.get("items", True)
                num_items = schema.get("minItems", 0)
                return all(map(has_value, first[:num_items])) and (num_items <= len(first) or has_value(others))
            return True

        references, num_before = {reference for _, reference in self._refs}, -1
        while num_before < len(finite):
            num_before = len(finite)
            finite |= {reference for reference in references - finite if has_value(self._target(reference))}
        return has_value(root)

    def _check_patterns(self) -> None:
        """Raise InvalidRequestError if more than MAX_JOINED_PATTERNS patterns may have to hold of one text."""
        counts: dict[str, int] = {}

        def count(schema: Any) -> int:
            """Return how many patterns may meet at one place of a value, at most."""
            if not isinstance(schema, dict):
                return 0
            own = ("pattern" in schema) + ("format" in schema)
            by_name = [max(map(count, schema.get(name, {}).values()), default=0) for name in SCHEMAS_BY_NAME[:2]]
            inner = [*schema.get("prefixItems", ()), *(schema.get(name, True) for name in SCHEMAS)]
            most = max(own, sum(by_name), max(map(count, inner)))
            most += sum(map(count, schema.get("allOf", ())))
            most += sum(max(map(count, schema.get(name, ())), default=0) for name in ("anyOf", "oneOf"))
            return most + (count_ref(schema["$ref"]) if "$ref" in schema else 0)

        def count_ref(reference: str) -> int:
            if reference not in counts:
                counts[reference] = 0  # A reference that leads back here adds nothing.
                counts[reference] = count(self._target(reference))
            return counts[reference]

        def check(schema: Any, path: str) -> None:
            if not isinstance(schema, dict):
                return
            if ("allOf" in schema or "$ref" in schema) and (number := count(schema)) > MAX_JOINED_PATTERNS:
                allowed = f"at most {MAX_JOINED_PATTERNS}"
                raise _refused(path, f"{number} patterns that must hold of one text together", allowed)
            for inner_path, inner in _inner_schemas(schema, path):
                check(inner, inner_path)

        check(self._checked, "#")


def _types_of(schema: dict[str, Any]) -> set[str]:
    """Return the types of JSON values that a schema may allow; "integer" counts as "number"."""
    names = schema.get("type", TYPES)
    types = {"number" if name == "integer" else name for name in ([names] if isinstance(names, str) else names)}
    values = _values_of(schema)
    return types if values is None else types & {_type_of(value) for value in values}


def _values_of(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that a `const` or an `enum` allows; None for a schema without one."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1 and true are not, unlike in Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other if not (_is_number(one) and _is_number(other)) else one == other


def _check_exact(value: Any, path: str) -> None:
    """Raise InvalidRequestError if a JSON value holds a number that a float64 does not hold exactly."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_exact(inner, f"{path}/{_escaped(key)}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_exact(inner, f"{path}/{index}")
    elif _is_number(value) and (abs(value) > MAX_EXACT if isinstance(value, int) else not math.isfinite(value)):
        raise _refused(path, _number_shown(value), "a number that a float64 holds exactly: integers up to 2^53")


def _type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer; 2.0 is one."""
    return _is_number(value) and math.isfinite(value) and value == int(value)


def _number_shown(value: Any) -> str:
    return shown(value) if _is_number(value) else f"a JSON {_type_of(value)}"


def _escaped(name: str) -> str:
    """Return a key as a part of a JSON pointer, cut to what fits into a message."""
    return shown(name)[1:-1].replace("~", "~0").replace("/", "~1")


def _refused(path: str, got: object, allowed: str, way_out: str = "") -> JpagedError:
    """Return the error for a part of a schema."""
    return refusal("json", f"{got} at {path[:500]}", allowed, way_out)
