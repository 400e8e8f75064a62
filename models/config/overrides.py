"""`hf_overrides`: values that replace those of config.json before a family reads it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..errors import ModelLoadError
from .hf import FULL, ROPE_OBJECTS, SLIDING
from .rope import ORIGINAL

INNER_KEYS = {
    "rope_theta": ("rope_theta", FULL),
    "rotary_emb_base": ("rope_theta", FULL),
    "rope_local_base_freq": ("rope_theta", SLIDING),
    "partial_rotary_factor": ("partial_rotary_factor", FULL),
    "rotary_pct": ("partial_rotary_factor", FULL),
}
"""Top-level key of config.json in the form of transformers 4 → (the key that replaces it inside `rope_parameters`, in
the form of transformers 5; the type of the layers that it is for, FULL = "full_attention" or SLIDING =
"sliding_attention")."""


def override(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data`, the content of config.json, with the values of `overrides`; nested objects are merged by key.

    Only the rotary embedding needs more than a merge, because config.json has two forms of it. transformers 4 has
    `rope_theta` at the top level, beside an object `rope_scaling`; transformers 5 has all in an object
    `rope_parameters`. Either form may override the other:

    - An object under the name that the file does not use is merged into the file's object.
    - The readers (`rope_fields`) prefer a value in the object to the same value at the top level. Therefore a top-level
      override removes the file's value from the object. Example: {"rope_parameters": {"factor": 2.0, "rope_theta":
      1e4}} and the override {"rope_theta": 1e6} give {"rope_parameters": {"factor": 2.0}, "rope_theta": 1e6}.
    - They prefer `original_max_position_embeddings` (ORIGINAL) at the top level, so an override of it in the object is
      copied there. They prefer `rope_type` to its older name `type`, so an override of `type` removes `rope_type`.
    - Null under the file's own name removes the whole object. Null under the other name only turns scaling off:
      `rope_theta` and `partial_rotary_factor` stay.

    The file's object may hold an object for each layer type: {"full_attention": {…}, "sliding_attention": {…}}. A
    top-level override then changes the layer type that INNER_KEYS names, and an object under the other name is not
    merged in. Raises ModelLoadError for an override of the object that is neither an object nor null.
    """
    to_merge = dict(overrides)
    for key in ROPE_OBJECTS:
        if (rope_object := overrides.get(key)) is None:
            continue
        if not isinstance(rope_object, Mapping):
            raise ModelLoadError(f"hf_overrides: {key} is {reprlib.repr(rope_object)}, wanted an object {{…}} or null")
        if ORIGINAL in rope_object:
            to_merge.setdefault(ORIGINAL, rope_object[ORIGINAL])
    # The name under which the file has its object; "" if it has none, or an empty one.
    file_key = next((key for key in ROPE_OBJECTS if data.get(key)), "")
    file_object = data.get(file_key)
    if not isinstance(file_object, Mapping):
        return _merged(data, to_merge)
    parameters = _without_overridden(file_object, overrides)
    has_layer_types = any(isinstance(value, Mapping) for value in file_object.values())
    for other_key in ROPE_OBJECTS:
        # An object for all layers is not merged into objects per layer type.
        if other_key == file_key or other_key not in overrides or has_layer_types:
            continue
        rope_object = to_merge.pop(other_key)
        if rope_object is None:  # Null turns the scaling off; the embedding itself stays.
            parameters = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
        else:
            to_merge = _merged(to_merge, {file_key: rope_object})
    if "type" in (to_merge.get(file_key) or {}):
        parameters.pop("rope_type", None)
    return _merged({**data, file_key: parameters}, to_merge)


def _without_overridden(file_object: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's object of the rotary embedding without the values that `overrides` has at its top level.

    Example: {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}} and an override of
    `rope_local_base_freq` give {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}.
    """
    kept = dict(file_object)
    for top_key, (inner_key, layer_type) in INNER_KEYS.items():
        if top_key not in overrides:
            continue
        if isinstance(file_object.get(layer_type), Mapping):
            kept[layer_type] = {key: value for key, value in kept[layer_type].items() if key != inner_key}
        if layer_type == FULL:  # An object for all layers has the keys of full attention.
            kept.pop(inner_key, None)
    return kept


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
