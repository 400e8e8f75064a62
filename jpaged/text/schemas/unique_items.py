"""The values of an array's items, where they are few enough that a grammar can tell which ones were used.

A grammar has no memory of what stood before. Its rules may have a parameter of bits, one for each value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .schema_analysis import TYPES, SchemaAnalysis, are_equal, values_of
from .schema_numbers import NUMBERS, allows, number_range

MAX_VALUES = 8
"""Different values of the items of one array whose items all differ."""


def unique_values(schema: dict[str, Any], analysis: SchemaAnalysis) -> list[Any] | None:
    """Return the different values that the items of an array may have.

    None if they are more than MAX_VALUES, if they are no scalars, or if the first items have schemas of their own.
    """
    values = None if "prefixItems" in schema else _values(schema.get("items", True), analysis, 0)
    return None if values is None or len(values) > MAX_VALUES else values


def _values(schema: Any, analysis: SchemaAnalysis, depth: int) -> list[Any] | None:
    """Return the scalars that a schema allows if they are a few, without repetition; None if not."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_VALUES:
        return None
    if "$ref" in schema and schema.keys() <= {"$ref", "$defs", "definitions"}:
        return _values(analysis.target(schema["$ref"]), analysis, depth + 1)
    if "anyOf" in schema and schema.keys() <= {"anyOf", "$defs", "definitions"}:
        lists = [_values(option, analysis, depth + 1) for option in schema["anyOf"]]
        return None if None in lists else _different(value for values in lists for value in values or ())
    if schema.keys() - {"type", "const", "enum", *NUMBERS}:
        return None
    values = values_of(schema)
    if values is None:
        values = _values_of_types(schema)
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return _different(value for value in values if allows(schema, value))


def _values_of_types(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of a schema without constants if they are a few."""
    names = schema.get("type", TYPES)
    types = {names} if isinstance(names, str) else set(names)
    if not types <= {"null", "boolean", "integer"}:
        return None
    values: list[Any] = [None] * ("null" in types) + [False, True] * ("boolean" in types)
    if "integer" in types:
        numbers = number_range(schema, is_integer=True).tightened()
        if numbers is None:
            return values
        step = int(numbers.multiple or 1)
        if numbers.low is None or numbers.high is None or (numbers.high - numbers.low) / step > MAX_VALUES:
            return None
        values += range(int(numbers.low), int(numbers.high) + 1, step)
    return values


def _different(values: Iterable[Any]) -> list[Any]:
    """Return values without repetition."""
    found: list[Any] = []
    for value in values:
        if not any(are_equal(value, one) for one in found):
            found.append(value)
    return found
