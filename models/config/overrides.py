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
"""Key of transformers 4, at the top level of config.json → the key of transformers 5, inside of the rotary embedding's
object, and the layer type whose object has it where each layer type has an object of its own."""


def override(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data`, the content of config.json, with the values of `overrides`; nested objects are merged by key.

    An override of the rotary embedding takes effect whether it and the file have the form of transformers 4
    (`rope_theta` beside an object `rope_scaling`) or of version 5 (all in `rope_parameters`). So an object under the
    one name is merged into the file's object under the other name, and values of the file that the readers would prefer
    to the override are removed. For example, a top-level `rope_theta` removes the `rope_theta` in the file's
    `rope_parameters`. Null under the file's own name removes its object, with a theta in it; null under the other name
    removes only the scaling. Raises ModelLoadError for a rotary embedding that is neither an object nor null.

    Example: a file with {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} and the override
    {"rope_theta": 1e6} give {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}.
    """
    # The name under which the file has its object; "" if it has none, or an empty one.
    file_key = next((key for key in ROPE_OBJECTS if data.get(key)), "")
    to_merge = dict(overrides)
    for key in ROPE_OBJECTS:
        if (scaling := overrides.get(key)) is None:
            continue
        if not isinstance(scaling, Mapping):
            raise ModelLoadError(f"hf_overrides: {key} is {reprlib.repr(scaling)}, wanted an object {{…}} or null")
        if ORIGINAL in scaling:
            # The readers prefer a top-level value to the one in the object, and the file may have one at its top level.
            to_merge.setdefault(ORIGINAL, scaling[ORIGINAL])
    if not isinstance(data.get(file_key), Mapping):
        return _merged(data, to_merge)
    parameters = dict(data[file_key])
    # Layer types that have an object of their own within the file's object, if any.
    layer_types = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    for top_key, (inner_key, layer_type) in INSIDE.items():
        if top_key in overrides:  # The readers would prefer the file's value inside of the object to this override.
            if layer_type in layer_types:
                inner = parameters[layer_type].items()
                parameters[layer_type] = {key: value for key, value in inner if key != inner_key}
            if layer_type == FULL:  # An object for all layers has the keys of full attention.
                parameters.pop(inner_key, None)
    for key in ROPE_OBJECTS:
        # An override under the other name; an object for all layers is not merged into objects per layer type.
        if key in overrides and key != file_key and not layer_types:
            scaling = to_merge.pop(key)
            if scaling is None:  # Null turns the scaling off; the embedding itself stays.
                parameters = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
            else:
                to_merge = _merged(to_merge, {file_key: scaling})
    if "type" in (to_merge.get(file_key) or {}):  # The older name of rope_type, which the readers prefer.
        parameters.pop("rope_type", None)
    return _merged({**data, file_key: parameters}, to_merge)


def check_overrides(
    overrides: Mapping[str, Any], asked: Collection[str], without_effect: Collection[str], architecture: str
) -> None:
    """Raise ModelLoadError for a key of `overrides` that has no meaning for the model; it names the nearest known key.

    `asked` are the keys that the family's reader has looked up, nested ones as "rope_parameters.factor".
    `without_effect` are top-level keys that the model class has but that change nothing here; they are accepted.
    `architecture` is the name of the class, for the error. A key of the rotary embedding is known under either name of
    its object: "rope_scaling.factor" passes if the reader has looked up "rope_parameters.factor".
    """
    for key in paths(overrides):
        first, dot, rest = key.partition(".")
        spellings = [f"{name}{dot}{rest}" for name in ROPE_OBJECTS] if first in ROPE_OBJECTS else [key]
        if first not in without_effect and not any(spelling in asked for spelling in spellings):
            near = difflib.get_close_matches(key, [*asked, *without_effect], n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ModelLoadError(f"hf_overrides: unknown key {key!r} of this {architecture}; {hint}")


def paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield all keys of nested objects as dotted paths, an object before its content.

    Example: {"rope_parameters": {"factor": 2}} gives "rope_parameters" and "rope_parameters.factor". `prefix` is put in
    front of each path.
    """
    for key, value in values.items():
        yield (path := f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from paths(value, f"{path}.")


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with the values of `overrides`; an object that both have under a key is merged in the same way."""
    merged = dict(data)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
