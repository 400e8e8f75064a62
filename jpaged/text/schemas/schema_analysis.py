"""What follows from a JSON schema as a whole: where references lead, and what can hold of one value at once.

Knows schemas of the keywords that `json_schema.py` has checked, and raises nothing of its own.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ...checks import shown

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties")
"""Keywords whose values are schemas: by name, in a list, and a single one."""
_PLAIN_NAME = re.compile("[A-Za-z0-9_$-]{1,40}")
"""Keys that stand in a place as they are."""
MAX_REF_DEPTH = 32
MAX_COMPARISONS = 2_000
"""Pairs of schemas that are compared to find the options of one `oneOf` disjoint."""


class SchemaAnalysis:
    """One schema whose keywords were checked, with its definitions."""

    def __init__(self, root: Any):
        self.root = root
        self._num_comparisons = 0

    def overlapping_options(self, options: list[Any], required: tuple[str, ...] = ()) -> tuple[int, int] | None:
        """Return the indices of the first two options of a `oneOf` that may hold of one value; None if no two may.

        Objects have the properties `required`, whatever the options say.
        """
        self._num_comparisons = 0
        if self._differ_by_values(options, required):
            return None
        for index, option in enumerate(options):
            for other_index in range(index):
                if not self._are_disjoint(options[other_index], option, MAX_REF_DEPTH, required):
                    return other_index, index
        return None

    def most_joined(self, *keywords: str) -> tuple[str, int]:
        """Return where the most of these keywords may have to hold of one value together, and their number."""
        counts: dict[str, int] = {}

        def count(schema: Any) -> int:
            """Return how many of the keywords may meet at one place of a value, at most."""
            if not isinstance(schema, dict):
                return 0
            own = sum(name in schema for name in keywords)
            by_name = [max(map(count, schema.get(name, {}).values()), default=0) for name in SCHEMAS_BY_NAME[:2]]
            inner = [*schema.get("prefixItems", ()), *(schema.get(name, True) for name in SCHEMAS)]
            most = max(own, sum(by_name), max(map(count, inner)))
            most += sum(map(count, schema.get("allOf", ())))
            most += sum(max(map(count, schema.get(name, ())), default=0) for name in ("anyOf", "oneOf"))
            return most + (count_ref(schema["$ref"]) if "$ref" in schema else 0)

        def count_ref(reference: str) -> int:
            """Return `count` of what a reference leads to, computed once for each reference."""
            if reference not in counts:
                counts[reference] = 0  # A reference that leads back here adds nothing.
                counts[reference] = count(self.target(reference))
            return counts[reference]

        def counts_within(schema: Any, path: str) -> Iterator[tuple[str, int]]:
            if isinstance(schema, dict):
                if "allOf" in schema or "$ref" in schema:
                    yield path, count(schema)
                for inner_path, inner in inner_schemas(schema, path):
                    yield from counts_within(inner, inner_path)

        return max(counts_within(self.root, "#"), key=lambda found: found[1], default=("#", 0))

    def target(self, reference: str) -> Any:
        """Return what a reference leads to in the checked schema; None if it leads nowhere."""
        target: Any = self.root
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
            schema = self.target(schema["$ref"])
        return schema

    def _differ_by_values(self, options: list[Any], required: tuple[str, ...]) -> bool:
        """Return whether options list values that no other one has: their own, or those of a property they all require.

        True for 700 constants, or for objects that each require a `kind` of their own. It looks at each option once;
        comparing the pairs of some hundred options would take more than MAX_COMPARISONS.
        """
        options = [self._resolved(option) for option in options]
        if not all(isinstance(option, dict) for option in options):
            return False
        if self._share_no_value(options):
            return True
        if any(types_of(option) != {"object"} for option in options):
            return False
        names = set.intersection(*({*required, *option.get("required", ())} for option in options))
        return any(self._share_no_value([_property_of(option, name) for option in options]) for name in names)

    def _share_no_value(self, schemas: list[Any]) -> bool:
        """Return whether all schemas have a `const` or an `enum`, and each value stands in one of them only."""
        seen: set[Hashable] = set()
        for schema in map(self._resolved, schemas):
            values = values_of(schema) if isinstance(schema, dict) else None
            keys = None if values is None else set(map(_set_key, values))
            if keys is None or keys & seen:
                return False
            seen |= keys
        return True

    def _are_disjoint(self, one: Any, other: Any, depth: int, required: tuple[str, ...] = ()) -> bool:
        """Return whether it is certain that no value satisfies both schemas, within a bounded number of comparisons."""
        self._num_comparisons += 1
        if self._num_comparisons > MAX_COMPARISONS:
            return False
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
        types = types_of(one) & types_of(other)
        if not types:
            return True
        values, other_values = values_of(one), values_of(other)
        if values is not None and other_values is not None:
            return not any(are_equal(value, another) for value in values for another in other_values)
        if types != {"object"}:
            return False
        names = dict.fromkeys([*required, *one.get("required", ()), *other.get("required", ())])
        pairs = [(_property_of(one, name), _property_of(other, name)) for name in names]
        # Those that tell options apart are mostly constants, and quick to compare; others may lead on without an end.
        pairs.sort(key=lambda pair: any(isinstance(part, dict) and values_of(part) is None for part in pair))
        return any(self._are_disjoint(*pair, depth - 1) for pair in pairs)

    def endless_references(self, references: set[str]) -> set[str] | None:
        """Return the references to schemas each value of which would hold another one of the same kind, without an end.

        None says that the whole schema is such a one. `references` are all of its references. Starting from none, they
        are found to have a value as long as new ones are found (a least fixed point). Apart from references, every
        schema counts as satisfiable.
        """
        finite: set[str] = set()

        def has_value(schema: Any) -> bool:
            """Return whether a value satisfies the schema, if of the references only those in `finite` have one."""
            if not isinstance(schema, dict):
                return True
            if "$ref" in schema and schema["$ref"] not in finite:
                return False
            if not all(map(has_value, schema.get("allOf", ()))):
                return False
            if not all(any(map(has_value, schema[name])) for name in ("anyOf", "oneOf") if name in schema):
                return False
            types = types_of(schema)
            if types == {"object"}:
                named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
                return all(has_value(named.get(name, others)) for name in schema.get("required", ()))
            if types == {"array"}:
                first, others = schema.get("prefixItems", []), schema.get("items", True)
                num_items = schema.get("minItems", 0)
                return all(map(has_value, first[:num_items])) and (num_items <= len(first) or has_value(others))
            return True

        num_before = -1
        while num_before < len(finite):
            num_before = len(finite)
            finite |= {reference for reference in references - finite if has_value(self.target(reference))}
        return references - finite if has_value(self.root) else None


def inner_schemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each schema that stands directly in another one."""
    for name, value in schema.items():
        here = f"{path}/{escaped(name)}"
        if name in SCHEMAS_BY_NAME:
            yield from ((f"{here}/{escaped(key)}", inner) for key, inner in value.items())
        elif name in SCHEMA_LISTS:
            yield from ((f"{here}/{index}", inner) for index, inner in enumerate(value))
        elif name in SCHEMAS:
            yield here, value


def direct_schemas(schema: Mapping[str, Any], *, with_definitions: bool = True) -> Iterator[Any]:
    """Yield each schema that stands directly in another one, like `inner_schemas` without the places."""
    for name, value in schema.items():
        if name in SCHEMAS_BY_NAME:
            if with_definitions or name not in ("$defs", "definitions"):
                yield from value.values()
        elif name in SCHEMA_LISTS:
            yield from value
        elif name in SCHEMAS:
            yield value


def _property_of(schema: dict[str, Any], name: str) -> Any:
    """Return the schema that an object schema has for a property, as far as that is easily said; True allows all."""
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return schema.get("properties", {}).get(name, others)


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the types of JSON values that a schema may allow; "integer" counts as "number"."""
    names = schema.get("type", TYPES)
    types = {"number" if name == "integer" else name for name in ([names] if isinstance(names, str) else names)}
    values = values_of(schema)
    return types if values is None else types & {type_of(value) for value in values}


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that a `const` or an `enum` allows; None for a schema without one."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1 and true are not, unlike in Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def _set_key(value: Any) -> Hashable:
    """Return what stands for a JSON value in a set: the same for two values just if `are_equal` holds of them."""
    if isinstance(value, list):
        return tuple(map(_set_key, value))
    if isinstance(value, dict):
        return frozenset((name, _set_key(inner)) for name, inner in value.items())
    return type_of(value), value


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def is_json_number(value: Any) -> bool:
    """Return whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def escaped(name: str) -> str:
    """Return a key as a part of a JSON pointer, cut to what fits into a message."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return shown(name)[1:-1].replace("~", "~0").replace("/", "~1")
