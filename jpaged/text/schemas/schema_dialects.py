"""Writes keywords of other dialects of JSON Schema as draft 2020-12 has them, and drops definitions without a use.

What is rewritten allows the same values. Knows nothing of what is enforced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

TUPLE_DRAFTS = ("draft/2019-09", "draft-07", "draft-06", "draft-04")
"""Drafts in which a list of `items` is what `prefixItems` is, and `additionalItems` what `items` is."""


def has_tuples(root: Any) -> bool:
    """Return whether a schema says that it is of a draft that writes tuples as a list of `items`."""
    draft = root.get("$schema") if isinstance(root, dict) else None
    return isinstance(draft, str) and any(name in draft for name in TUPLE_DRAFTS)


def with_prefix_items(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of such a draft with `prefixItems`. Beside a single schema, `additionalItems` means nothing."""
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "items" and isinstance(value, list):
            if value:  # An empty list says nothing of any item.
                result["prefixItems"] = value
            if "additionalItems" in schema:
                result["items"] = schema["additionalItems"]
        elif name != "additionalItems":
            result[name] = value
    return result


def with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows null too, as OpenAPI 3.0 says by `nullable: true`.

    OpenAPI wants null in an `enum` as well. Generators leave it out, and mean that null is allowed.
    """
    rest = {name: value for name, value in schema.items() if name != "nullable"}
    if any(name in rest for name in ("allOf", "oneOf", "$ref", "const")):
        result = {name: rest.pop(name) for name in list(rest) if name in ("$defs", "definitions", "$schema", "$id")}
        return {**result, "anyOf": [rest, {"type": "null"}]}
    if "type" in rest:
        names = [rest["type"]] if isinstance(rest["type"], str) else rest["type"]
        rest["type"] = names if "null" in names else [*names, "null"]
    if isinstance(rest.get("enum"), list) and None not in rest["enum"]:
        rest["enum"] = [*rest["enum"], None]
    if isinstance(rest.get("anyOf"), list):
        rest["anyOf"] = [*rest["anyOf"], {"type": "null"}]
    return rest


def with_open_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose excluded bounds are numbers; draft-04 and OpenAPI 3.0 say true beside the bound."""
    result = dict(schema)
    for name, bound in ("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"):
        if isinstance(schema.get(name), bool):
            del result[name]
            if schema[name] and bound in schema:
                result[name] = result.pop(bound)
    return result


def without_unused_definitions(root: Any) -> Any:
    """Return a schema without those definitions at its root to which no reference leads, since they say nothing.

    Servers of tools send all of their definitions with each tool.
    """
    kinds = [kind for kind in ("$defs", "definitions") if isinstance(root, dict) and isinstance(root.get(kind), dict)]
    if not kinds:
        return root
    used: set[tuple[str, ...]] = set()
    """(kind, name) of each definition that a reference leads to or into; (kind,) where one leads to all of them."""
    waiting: list[Any] = [{name: value for name, value in root.items() if name not in kinds}]
    while waiting:
        for reference in _all_references(waiting.pop()):
            kind, *names = (part.replace("~1", "/").replace("~0", "~") for part in unquote(reference[2:]).split("/"))
            target = kind, *names[:1]
            if kind in kinds and target not in used:
                used.add(target)
                waiting.append(root[kind].get(names[0]) if names else root[kind])
    kept = dict(root)
    for kind in kinds:
        if (kind,) not in used:
            kept[kind] = {name: inner for name, inner in root[kind].items() if (kind, name) in used}
    return kept


def _all_references(value: Any) -> Iterator[str]:
    """Yield each text that stands under the key `$ref` in a JSON value, also where it is a name or a constant."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _all_references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _all_references(inner)
