"""From the content of config.json to a family's config.

config.json is read directly, with the keys that transformers 4 and 5 write, because AutoConfig would import
transformers, which takes seconds. Keys that the family's transformers class does not know have no effect there, and
none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError
from ..families.table import BY_ARCHITECTURE, BY_MODEL_TYPE, Family
from ..io.fields import Fields
from .decoder import DecoderConfig

COMMON_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of every transformers class that change nothing that is computed here."""
COMMON_FIXED_OPTIONS = {"is_causal": True}


def config_from_hf(data: Mapping[str, Any], path: Path, *, names: Mapping[str, str] | None = None) -> DecoderConfig:
    """Return the config in `data`, the JSON object of config.json. Raises ModelLoadError, which names `path`.

    `names` says what the file calls a key, where `data` was made from another format.
    """
    family = _family(Fields(data, path, names or {}))
    model = family.load()
    fields = Fields({**_defaults(model.config_defaults, data), **data}, path, names or {})
    for key in ("quantization_config", "compression_config"):
        if fields.has(key):
            raise ModelLoadError(
                f"{path}: {key} is set, wanted none: quantized safetensors are not supported; "
                "take the unquantized checkpoint or a .gguf file"
            )
    for key, wanted in {**COMMON_FIXED_OPTIONS, **model.fixed_options}.items():
        if fields.has(key) and fields.data[key] != wanted:
            raise fields.wrong(key, f"{wanted!r}: this version has nothing else")
    return replace(model.read_config(fields), architecture=family.architecture, source=dict(data))


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
