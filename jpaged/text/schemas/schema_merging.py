"""One schema that means what two schemas mean together, keyword by keyword.

Knows schemas of the keywords that `json_schema.py` has checked, without references.
"""

from __future__ import annotations

from typing import Any

from .number_texts import decimal_places
from .schema_analysis import are_equal, values_of
from .schema_numbers import NUMBERS, number_range

LARGEST = ("minItems", "minLength", "minProperties")
SMALLEST = ("maxItems", "maxLength", "maxProperties")
"""Counts of which the larger one, or the smaller one, holds of both schemas."""
ARRAY = ("items", "prefixItems")
OBJECT = ("properties", "patternProperties", "additionalProperties")
"""Keywords that say together which schema an item or a property has."""
MAX_OPTIONS = 64
"""Options that two `anyOf` may make together: each of one with each of the other."""


class UnmergeableError(Exception):
    """Two schemas that cannot be written as one."""


def merged(one: Any, other: Any) -> Any:
    """Return a schema that allows what both schemas allow. Raise UnmergeableError if that cannot be written.

    Neither has `$ref` or `allOf` itself; schemas within it may, and are joined by `allOf`.
    """
    if one is False or other is False:
        return False
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other if one is True else one
    if "anyOf" in one and "anyOf" in other:
        if len(one["anyOf"]) * len(other["anyOf"]) > MAX_OPTIONS:
            raise UnmergeableError
        options = [_both(first, second) for first in one["anyOf"] for second in other["anyOf"]]
        rest = merged(*({name: value for name, value in each.items() if name != "anyOf"} for each in (one, other)))
        return False if rest is False else {**rest, "anyOf": options}
    result = {**one, **other}
    for name in one.keys() & other.keys() - set(NUMBERS):
        if name == "type":
            result["type"] = _types(one["type"], other["type"])
        elif name in LARGEST or name in SMALLEST:
            result[name] = (max if name in LARGEST else min)(one[name], other[name])
        elif name == "required":
            result[name] = list(dict.fromkeys([*one[name], *other[name]]))
        elif name == "uniqueItems":
            result[name] = one[name] or other[name]
        elif name not in (*ARRAY, *OBJECT, "const", "enum") and one[name] != other[name]:
            raise UnmergeableError
    if set(NUMBERS) & one.keys() & other.keys():
        result |= _numbers(one, other)
    if values_of(one) is not None or values_of(other) is not None:
        result.pop("const", None)
        result["enum"] = _values(values_of(one), values_of(other))
        if not result["enum"]:
            return False
    if set(ARRAY) & one.keys() and set(ARRAY) & other.keys():
        _join_items(one, other, result)
    if set(OBJECT) & one.keys() and set(OBJECT) & other.keys():
        _join_properties(one, other, result)
    return result if result.get("type") != [] else False


def _both(one: Any, other: Any) -> Any:
    """Return a schema within a schema that means two together."""
    if one is False or other is False:
        return False
    if one is True or one == other:
        return other
    return one if other is True else {"allOf": [one, other]}


def _types(one: str | list[str], other: str | list[str]) -> list[str]:
    """Return the types that two values of `type` allow both. An integer is a number too."""
    first, second = ([names] if isinstance(names, str) else names for names in (one, other))
    both = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return both + [name for name in second if name == "integer" and "number" in first and name not in both]


def _numbers(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords about numbers that allow what those of both schemas allow."""
    first, second = number_range(one, is_integer=False), number_range(other, is_integer=False)
    pairs = {name: (one.get(name), other.get(name)) for name in NUMBERS}
    both = {name: [value for value in pair if value is not None] for name, pair in pairs.items()}
    result = {}
    for name, values in both.items():
        if values and name != "multipleOf":
            result[name] = max(values) if "inimum" in name else min(values)
        elif values:
            step = first if second.multiple is None else second if first.multiple is None else None
            multiple = (step or first.multiples_of(second.multiple)).multiple  # type: ignore[arg-type]
            assert multiple is not None
            places, digits = decimal_places(multiple)
            result[name] = digits if not places else float(f"{digits}e-{places}")
    return result


def _values(one: list[Any] | None, other: list[Any] | None) -> list[Any]:
    """Return the constants that two schemas list both; None stands for a schema that lists none."""
    if one is None or other is None:
        return (one or []) if other is None else other
    return [value for value in one if any(are_equal(value, another) for another in other)]


def _join_items(one: dict[str, Any], other: dict[str, Any], result: dict[str, Any]) -> None:
    """Write into `result` the schema of each item that both schemas allow: the first ones by place, then the rest."""
    num_first = max(len(each.get("prefixItems", ())) for each in (one, other))
    firsts = []
    for each in one, other:
        prefix = each.get("prefixItems", [])
        firsts.append(prefix + [each.get("items", True)] * (num_first - len(prefix)))
    if num_first:
        result["prefixItems"] = list(map(_both, *firsts))
    result["items"] = _both(one.get("items", True), other.get("items", True))


def _join_properties(one: dict[str, Any], other: dict[str, Any], result: dict[str, Any]) -> None:
    """Write into `result` the schema of each property that both schemas allow, named or not."""
    if "patternProperties" in one or "patternProperties" in other:
        raise UnmergeableError

    def property_of(schema: dict[str, Any], name: str) -> Any:
        return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))

    names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
    result["properties"] = {name: _both(property_of(one, name), property_of(other, name)) for name in names}
    result["additionalProperties"] = _both(
        one.get("additionalProperties", True), other.get("additionalProperties", True)
    )
