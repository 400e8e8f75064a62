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

from ..config.decoder import DecoderConfig
from ..config.overrides import check_overrides, override, paths
from ..families.table import BY_ARCHITECTURE, BY_MODEL_TYPE, LANGUAGE_MODELS, Family
from ..fields import Fields
from ..formats.quantization import CONFIG_KEYS, read_quantization
from ..formats.unread_quantizers import MLX_KEY

COMMON_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of every transformers class that change nothing that is computed here."""
COMMON_FIXED_OPTIONS = {"is_causal": True}
WAY_OUT = "correct it there or by hf_overrides, or take another model"
"""What a user can do about a value of config.json that is wrong or not supported."""
TEXT_CONFIG = "text_config"
"""The key under which a model with images has the config of its language model."""
DTYPE_KEYS = ("dtype", "torch_dtype")
SHARED_KEYS = (*DTYPE_KEYS, "bos_token_id", "eos_token_id", "tie_word_embeddings", MLX_KEY, *CONFIG_KEYS)
"""Keys of a model with images that count for its language model."""


def config_from_hf(
    data: Mapping[str, Any],
    path: Path,
    *,
    names: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DecoderConfig:
    """Return the config in `data`, the JSON object of config.json in the file `path`.

    `names` maps a key of `data` to the file's name for it, if `data` was made from another format. `overrides` replace
    values of `data`, and nested objects are merged by key. Of a model with images, the config is that of its language
    model. Raises ModelLoadError, which names `path` and the key, for a value that is wrong or not supported, for an
    unknown family, and for an override that the family does not know.
    """
    overrides, data = overrides or {}, _with_named_dtype(data)
    if (model_type := _wrapped_model_type(data)) is not None:
        data, names = _language_model(Fields(data, path, names or {}), model_type)
        # Overrides may stand inside of text_config, as in the file, or at the top level; those inside win.
        text_overrides = Fields(overrides, Path("hf_overrides")).mapping(TEXT_CONFIG).data
        overrides = {key: value for key, value in overrides.items() if key != TEXT_CONFIG} | dict(text_overrides)
    data = _with_named_dtype(override(data, overrides))
    # An error about a value that an override replaced says where the value came from. Names of nested values are the
    # last parts of their dotted paths.
    overridden = {key.rpartition(".")[2] for key in paths(overrides)}
    names = {**(names or {}), **{key: f"{key} of hf_overrides" for key in overridden}}
    family = _family(Fields(data, path, names))
    model = family.load()
    fields = Fields(_with_defaults(data, model.config_defaults), path, names, way_out=WAY_OUT)
    # It raises for a quantization that is not supported, and names a way out itself; its result is not needed here.
    read_quantization(replace(fields, way_out=""))
    for key, wanted in {**COMMON_FIXED_OPTIONS, **model.fixed_options}.items():
        if fields.has(key) and fields.data[key] != wanted:
            raise fields.wrong(key, f"{wanted!r}: this version has nothing else")
    config = replace(model.read_config(fields), architecture=family.architecture, source=data)
    check_overrides(overrides, fields.asked, COMMON_WITHOUT_EFFECT | model.without_effect, family.architecture)
    return config


def _with_named_dtype(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with the dtype by its plain name: "torch.bfloat16" is bfloat16, and "auto" counts as absent."""
    named = dict(data)
    for key in DTYPE_KEYS:
        if named.get(key) == "auto":
            del named[key]
        elif isinstance(named.get(key), str):
            named[key] = named[key].removeprefix("torch.")
    return named


def _wrapped_model_type(data: Mapping[str, Any]) -> str | None:
    """Return the model type of the language model within a model with images; None for any other model."""
    return LANGUAGE_MODELS.get(_known_name(data))


def _known_name(data: Mapping[str, Any]) -> str:
    """Return the first name in `architectures` of config.json that the table has, and "" if there is none.

    If the table has several of the names, the one whose family has the `model_type` of `data` comes first: transformers
    goes by that.
    """
    names = data.get("architectures")
    known = [
        name
        for name in (names if isinstance(names, list) else [])
        if isinstance(name, str) and (name in BY_ARCHITECTURE or name in LANGUAGE_MODELS)
    ]
    by_model_type = BY_MODEL_TYPE.get(str(data.get("model_type")))
    if by_model_type is not None and by_model_type.architecture in known:
        return by_model_type.architecture
    return known[0] if known else ""


def _language_model(fields: Fields, model_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of the language model within a model with images, and the file's names of its keys.

    `model_type` is the only language model that this kind of model is known to have; it counts if `text_config` names
    none. The config is the object `text_config`, with the class name of its family added. Token ids, dtype and
    quantization at the top level win over those inside; a key is then named "dtype" in errors and not
    "text_config.dtype". Only the top level says whether the head is tied, and it is if that says nothing: the inner
    key has no effect in transformers. Raises ModelLoadError if `text_config` is missing or has another model type.
    """
    if not fields.has(TEXT_CONFIG):
        raise fields.wrong(TEXT_CONFIG, "the config of the language model")
    text_config = {"model_type": model_type, **_with_named_dtype(fields.mapping(TEXT_CONFIG).data)}
    names = {key: f"{TEXT_CONFIG}.{key}" for key in text_config}
    if any(map(fields.has, DTYPE_KEYS)):  # The key inside may have the other one of the two names.
        text_config = {key: value for key, value in text_config.items() if key not in DTYPE_KEYS}
    text_config["tie_word_embeddings"] = True  # Unless the top level has the key, which replaces it below.
    for key in SHARED_KEYS:
        if fields.has(key):
            text_config[key], names[key] = fields.data[key], key
    family = BY_MODEL_TYPE[Fields(text_config, fields.path, names).choice("model_type", (model_type,))]
    return text_config | {"architectures": [family.architecture]}, names


def _with_defaults(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data`, the values of a file, with `defaults` of its transformers class for absent keys.

    A default token id that is not below the file's vocabulary size is left out, also if the file repeats it: the model
    cannot produce it, and the family's reader would refuse it. Example: with the default {"eos_token_id": 2} and a file
    with a vocabulary of 2, `eos_token_id` is absent. Another id beyond the vocabulary stays, and the reader refuses it.
    """
    merged = {**defaults, **data}
    vocab_size = merged.get("vocab_size")
    out_of_range = {
        key
        for key, value in defaults.items()
        if key.endswith("_token_id") and type(vocab_size) is int and value >= vocab_size
    }
    return {key: value for key, value in merged.items() if not (key in out_of_range and value == defaults[key])}


def _family(fields: Fields) -> Family:
    """Return the family that `architectures` of config.json names or, if that is absent, `model_type`.

    The first name that the table has counts: see `_known_name`. Raises ModelLoadError, which lists the known
    architectures, for a list without one, and if neither key names a family.
    """
    if not fields.data.get("architectures") and (family := BY_MODEL_TYPE.get(str(fields.data.get("model_type")))):
        return family
    if (name := _known_name(fields.data)) in BY_ARCHITECTURE:
        return BY_ARCHITECTURE[name]
    wanted = f"one of {', '.join([*BY_ARCHITECTURE, *LANGUAGE_MODELS])}: give a model of one of these families"
    raise fields.wrong("architectures", wanted)
