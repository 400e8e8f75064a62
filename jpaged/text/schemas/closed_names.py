"""Closes the objects of a schema whose patterns of names leave no name but those that are listed.

llguidance allows a comma behind the last listed property as long as there are patterns of names, also where every name
of theirs is listed. Nothing can follow such a comma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .schema_analysis import direct_schemas

MAX_PROBES = 100
"""Pairs of a pattern and a name, and objects, that are compiled to see which names they allow."""


def with_closed_objects(
    schema: Any, has_other_names: Callable[[dict[str, Any]], bool], matches: Callable[[str, str], bool]
) -> Any:
    """Return a checked schema in which an object has patterns of names only if some name that is not listed fits.

    `has_other_names` says of a schema of an object whether it allows a name that is none of its `properties`, and
    `matches` whether a pattern matches a name. Such a pattern then stands in the properties that it matches.
    """
    num_probes = 0

    def close(part: Any) -> None:
        """Close a schema, and all schemas within it, in place; after MAX_PROBES probes the rest stay as they are."""
        nonlocal num_probes
        if not isinstance(part, dict):
            return
        for inner in direct_schemas(part):
            close(inner)
        patterns = part.get("patternProperties", {})
        names = list(dict.fromkeys([*part.get("properties", ()), *part.get("required", ())]))
        num_probes += 1 + len(patterns) * len(names)
        if not patterns or not names or num_probes > MAX_PROBES:
            return
        probe = {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": dict.fromkeys(patterns, True),
            "additionalProperties": part.get("additionalProperties", True) is not False,
        }
        if has_other_names(probe):
            return
        named = part.setdefault("properties", {})
        others = part.get("additionalProperties", True)
        for name in names:
            fitting = [inner for pattern, inner in patterns.items() if matches(pattern, name)]
            own = [named[name]] if name in named else [] if fitting else [others]
            named[name] = own[0] if own and not fitting else {"allOf": [*own, *fitting]}
        del part["patternProperties"]
        part["additionalProperties"] = False

    close(schema)
    return schema
