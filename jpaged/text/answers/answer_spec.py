"""Finds out what a scanner must know of a request's tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...messages import AnswerSpec
from ..chat.tools import CUSTOM_ARGUMENT, ToolSet

MAX_SCHEMAS = 10_000
"""Schemas within a tool's that are looked at; parameters behind them have no types."""
MAX_REFERENCES = 10
"""References that are followed from a tool's schema to the one with its parameters."""


def spec_of_tools(tools: ToolSet | None, *, opening: str = "", skip_special_tokens: bool = True) -> AnswerSpec:
    """Return the spec of a request that offers `tools`; a call of one that its choice forbids is a text."""
    allowed = () if tools is None else tools.callable_tools
    types = {tool.name: parameter_types(tool.parameters or {}) for tool in allowed}
    custom = frozenset(tool.name for tool in allowed if tool.kind == "custom")
    return AnswerSpec(
        tools=types | {name: {CUSTOM_ARGUMENT: ("string",)} for name in custom},
        custom_tools=custom,
        opening=opening,
        skip_special_tokens=skip_special_tokens,
    )


def parameter_types(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the types that a tool's schema allows for each of its parameters, in the schema's order."""
    holder: Any = schema
    for _ in range(MAX_REFERENCES):
        if not isinstance(holder, Mapping) or not isinstance(holder.get("$ref"), str):
            break
        holder = _referred(holder["$ref"], schema)
    properties = holder.get("properties") if isinstance(holder, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    steps = iter(range(MAX_SCHEMAS))
    return {name: tuple(dict.fromkeys(_types(one, schema, steps))) for name, one in properties.items()}


def _types(schema: Any, root: Mapping[str, Any], steps: Iterator[int]) -> Iterator[str]:
    """Yield the types that a schema allows, some perhaps twice; none if it names none.

    Its references are to `root`. Each schema that is looked at takes one of `steps`.
    """
    pending = [schema]
    followed: set[str] = set()
    for _ in steps:
        if not pending:
            return
        one = pending.pop()
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        if isinstance(kind, str):
            yield kind
        elif isinstance(kind, list):
            yield from (name for name in kind if isinstance(name, str))
        else:
            values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
            yield from (_type_of(value) for value in values)
            for keyword in ("anyOf", "oneOf", "allOf"):
                pending += reversed(one[keyword]) if isinstance(one.get(keyword), list) else ()
            if isinstance(one.get("$ref"), str) and one["$ref"] not in followed:
                followed.add(one["$ref"])
                pending.append(_referred(one["$ref"], root))
        if one.get("nullable") is True:
            yield "null"


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema at a JSON pointer into `root`, None if there is none."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found if reference.startswith("#") else None


def _type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
