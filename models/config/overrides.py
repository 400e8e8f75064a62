"""`hf_overrides`: values that replace those of config.json before a family reads it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..errors import ModelLoadError
from .hf import FULL, ROPE_OBJECTS, SLIDING
from .rope import ORIGINAL

INSIDE = {
    "rope_theta": ("rope_theta", FULL),
    "rotary_emb_base": ("rope_theta", FULL),
    "rope_local_base_freq": ("rope_theta", SLIDING),
    "partial_rotary_factor": ("partial_rotary_factor", FULL),
    "rotary_pct": ("partial_rotary_factor", FULL),
}
"""Key of transformers 4, beside that object → the key of version 5 inside of it, and the layer type whose object that
is where each type has one."""


def override(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data`, the content of config.json, with values replaced; an object in both is merged in the same way.

    What describes the rotary embedding counts wherever the file has it, in the form of transformers 4 or 5. Raises
    ModelLoadError for such a value that is no object.
    """
    in_force = next((key for key in ROPE_OBJECTS if data.get(key)), "")
    moved = dict(overrides)
    for key in ROPE_OBJECTS:
        if (scaling := overrides.get(key)) is None:
            continue
        if not isinstance(scaling, Mapping):
            raise ModelLoadError(f"hf_overrides: {key} is {reprlib.repr(scaling)}, wanted an object {{…}} or null")
        if ORIGINAL in scaling:
            moved.setdefault(ORIGINAL, scaling[ORIGINAL])  # One that the file has beside the object would count first.
    if not isinstance(data.get(in_force), Mapping):
        return _merged(data, moved)
    parameters = dict(data[in_force])
    by_type = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    for outer, (inner, layer_type) in INSIDE.items():
        if outer in overrides:  # A value inside of the object would count before it.
            if layer_type in by_type:
                parameters[layer_type] = {k: v for k, v in parameters[layer_type].items() if k != inner}
            if layer_type == FULL:
                parameters.pop(inner, None)
    for key in ROPE_OBJECTS:
        if key in overrides and key != in_force and not by_type:
            scaling = moved.pop(key)
            if scaling is None:  # No scaling.
                parameters = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
            else:
                moved = _merged(moved, {in_force: scaling})
    if "type" in (moved.get(in_force) or {}):  # The older name of what the file may have as rope_type.
        parameters.pop("rope_type", None)
    return _merged({**data, in_force: parameters}, moved)


def check_overrides(
    overrides: Mapping[str, Any], asked: Collection[str], without_effect: Collection[str], architecture: str
) -> None:
    """Refuse a key that is neither `asked` for nor known to be `without_effect`, and name the nearest known one."""
    for key in paths(overrides):
        first, dot, rest = key.partition(".")
        spellings = [f"{name}{dot}{rest}" for name in ROPE_OBJECTS] if first in ROPE_OBJECTS else [key]
        if first not in without_effect and not any(spelling in asked for spelling in spellings):
            near = difflib.get_close_matches(key, [*asked, *without_effect], n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ModelLoadError(f"hf_overrides: unknown key {key!r} of this {architecture}; {hint}")


def paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield all keys, those of a nested object behind its own: "rope_parameters", "rope_parameters.factor"."""
    for key, value in values.items():
        yield (path := f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from paths(value, f"{path}.")


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
