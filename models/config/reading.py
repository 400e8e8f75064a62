"""From the content of config.json to a family's config.

config.json is read directly, with the keys that transformers 4 and 5 write, because AutoConfig would import
transformers, which takes seconds. Keys that the family's transformers class does not know have no effect there, and
none here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError
from ..families.table import BY_ARCHITECTURE, BY_MODEL_TYPE, Family
from ..io.fields import Fields
from .decoder import DecoderConfig
from .quantization import read_quantization

COMMON_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of every transformers class that change nothing that is computed here."""
COMMON_FIXED_OPTIONS = {"is_causal": True}


def config_from_hf(
    data: Mapping[str, Any],
    path: Path,
    *,
    names: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DecoderConfig:
    """Return the config in `data`, the JSON object of config.json. Raises ModelLoadError, which names `path`.

    `names` says what the file calls a key, where `data` was made from another format. `overrides` replace values of
    `data`, and are merged into its nested objects; a key that is not read of this model is refused.
    """
    overrides = overrides or {}
    data = _merged(data, overrides)
    leaves = {key.rpartition(".")[2] for key in _paths(overrides)}
    names = {**(names or {}), **{key: f"{key} of hf_overrides" for key in leaves}}
    family = _family(Fields(data, path, names))
    model = family.load()
    fields = Fields({**_defaults(model.config_defaults, data), **data}, path, names)
    read_quantization(fields)  # Refuses what no checkpoint is read of.
    for key, wanted in {**COMMON_FIXED_OPTIONS, **model.fixed_options}.items():
        if fields.has(key) and fields.data[key] != wanted:
            raise fields.wrong(key, f"{wanted!r}: this version has nothing else")
    config = replace(model.read_config(fields), architecture=family.architecture, source=data)
    _check_overrides(overrides, fields.asked, COMMON_WITHOUT_EFFECT | model.without_effect, family)
    return config


def _defaults(defaults: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a class's defaults without token ids that a smaller vocabulary does not have: nothing draws them."""
    vocab_size = data.get("vocab_size", defaults.get("vocab_size"))
    has_size = type(vocab_size) is int
    return {
        key: value
        for key, value in defaults.items()
        if not (key.endswith("_token_id") and has_size and value >= vocab_size)
    }


def _family(fields: Fields) -> Family:
    names = fields.data.get("architectures")
    if not names:
        family = BY_MODEL_TYPE.get(str(fields.data.get("model_type")))
        names = [family.architecture] if family else names
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in BY_ARCHITECTURE:
        return BY_ARCHITECTURE[names[0]]
    wanted = f"one of {', '.join(BY_ARCHITECTURE)}: give a model of one of these families"
    raise fields.wrong("architectures", wanted)


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with values replaced; an object in both is merged in the same way."""
    merged = dict(data)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _check_overrides(
    overrides: Mapping[str, Any], asked: Collection[str], without_effect: Collection[str], family: Family
) -> None:
    """Refuse a key that the family's reader has not asked for, with the nearest known one."""
    for key in _paths(overrides):
        if key not in asked and key.partition(".")[0] not in without_effect:
            near = difflib.get_close_matches(key, [*asked, *without_effect], n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ModelLoadError(f"hf_overrides: unknown key {key!r} of this {family.architecture}; {hint}")


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield all keys, those of a nested object behind its own: "rope_parameters", "rope_parameters.factor"."""
    for key, value in values.items():
        yield (path := f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}.")
