"""Makes of a directory that transformers 5 saved the tokenizer that transformers 5.24 makes of it.

The `tokenizer_config.json` of such a directory has the key `backend`, and its `tokenizer.json` has every step of the
tokenizer. transformers 5 takes this file as it is for the class `TokenizersBackend`. For a class with steps of its own,
such as Llama's, it takes the vocabulary, the merges, the added tokens and the post-processor, and builds the other
steps anew. These are the saved ones unless the tokenizer was changed before: `LlamaTokenizer(legacy=True)` saves steps
that it does not build when it is opened. This module holds these classes as data and needs no transformers. Options
that 4.57 applied and 5 ignores beside a `tokenizer.json`, such as `add_bos_token`, are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from ...checks import one_line
from ...errors import ModelLoadError
from ...models.fields import Fields
from ...models.formats.files import CONFIG_FILE
from .declared_tokens import EXTRA_NAMES, SPECIAL_NAMES, add_tokens, checked_tokens, is_token
from .directory_tokenizer import class_name, default_tokens, sentence_piece_decoder, text_between
from .tokenizer_files import FETCH_AGAIN, OPTIONS_FILE, TOKENIZER_FILE, read_if_there

WHOLE_CLASS = "TokenizersBackend"
"""The class of transformers 5 that takes tokenizer.json as it is."""
_WHOLE_MODEL_TYPES = (
    "flex_olmo", "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "ministral",
    "ministral3", "mistral", "mistral3", "mixtral", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3", "phimoe",
    "pixtral", "stablelm", "voxtral",
)  # fmt: skip
"""Values of `model_type` in config.json for which transformers 5.24 opens that class, whatever the files name."""
_LETTERS = {"Qwen2Tokenizer": r"\p{L}", "Qwen3_5Tokenizer": r"\p{L}\p{M}"}
"""What Qwen's generations count as the letters of a word: in the newer one its combining marks too."""
_DECLARED_ANEW = {"CohereTokenizer": EXTRA_NAMES, "Qwen2Tokenizer": (*SPECIAL_NAMES, *EXTRA_NAMES)}
"""Class → the options whose tokens it declares anew, without the flags that tokenizer.json has for them."""


@dataclass(frozen=True)
class _Steps:
    """The steps that a class of transformers 5.24 builds around a vocabulary."""

    pre_tokenizer: Any
    decoder: Any
    normalizer: Any = None
    model: str = "BPE"
    """Type of the model in tokenizer.json on which the class can be built."""
    has_byte_fallback: bool = False
    """Whether a BPE model writes unknown characters as byte tokens, and joins unknown ones to a single token."""
    has_unk_token: bool = False
    """Whether unknown characters become the special token `unk_token`."""


def is_saved_by_transformers_5(options: Mapping[str, Any]) -> bool:
    """Return whether transformers 5 wrote the tokenizer_config.json whose contents are `options`.

    transformers 4.57 writes no key `backend` and does not know the class TokenizersBackend.
    """
    return "backend" in options or options.get("tokenizer_class") == WHOLE_CLASS


def apply_saved_options(backend: tokenizers.Tokenizer, path: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Make of the tokenizer in tokenizer.json, `backend`, the one that transformers 5.24 makes of it.

    `path` is the directory, and `options` are the contents of its tokenizer_config.json. Return name → text of the
    special tokens, among them the model's own ones such as image_token. Raise ModelLoadError, one line that names the
    file, for an option of a wrong type, for one that does not fit the vocabulary, and for a class that cannot be built
    on the model in tokenizer.json.
    """
    fields = Fields(checked_tokens(options, path / OPTIONS_FILE), path / OPTIONS_FILE)
    if fields.has("backend") and not isinstance(options["backend"], str):
        raise fields.wrong("backend", "the name of a backend of transformers, such as tokenizers: fetch the file again")
    name = _opened_class(path, options)
    steps = _steps_of(name, backend, fields)
    if steps is not None and (model := type(backend.model).__name__) != steps.model:
        fault = f"tokenizer_class {name} is for models of the type {steps.model}, {TOKENIZER_FILE} has {model}"
        raise ModelLoadError(f"{fields.path}: {fault}: name {WHOLE_CLASS} instead, which takes the file as it is")
    try:
        special_tokens = add_tokens(
            backend,
            path,
            _named_tokens(fields),
            defaults=default_tokens(name),
            without_flags=_DECLARED_ANEW.get(name, ()),
        )
        if steps is not None:
            _build(backend, steps, special_tokens)
            _set_ends(backend, name, special_tokens)
        backend.encode_special_tokens = fields.boolean("split_special_tokens", False)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises errors of many types.
        fault = f"does not fit the vocabulary ({one_line(error)}); {FETCH_AGAIN}"
        raise ModelLoadError(f"{fields.path}: {fault}") from error
    return special_tokens


def _opened_class(path: Path, options: Mapping[str, Any]) -> str:
    """Return the class, without `Fast` at its end, that transformers 5.24 opens a directory with.

    The `model_type` of config.json decides for some models. Otherwise it is the class that the files name, but
    TokenizersBackend for Llama's class if tokenizer.json has a byte-level step, as Llama 3's has.
    """
    model_type = read_if_there(path / CONFIG_FILE).get("model_type")
    if model_type in _WHOLE_MODEL_TYPES:
        return WHOLE_CLASS
    if model_type == "qwen2":
        return "Qwen2Tokenizer"
    name = class_name(path, options)
    is_byte_level = name == "LlamaTokenizer" and b'"ByteLevel"' in (path / TOKENIZER_FILE).read_bytes()
    return WHOLE_CLASS if is_byte_level else name


def _steps_of(name: str, backend: tokenizers.Tokenizer, fields: Fields) -> _Steps | None:
    """Return the steps that the class `name` builds, as the options say; None for one that takes tokenizer.json whole.

    `backend` is the tokenizer in tokenizer.json, from whose normalizer T5's class takes the table of characters.
    """
    adds_space = fields.boolean("add_prefix_space", name in ("LlamaTokenizer", "CodeLlamaTokenizer"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    match name:
        case "LlamaTokenizer":
            scheme = "always" if fields.boolean("legacy", False) else "first"
            return _Steps(
                pre_tokenizer=pre_tokenizers.Metaspace("▁", scheme if adds_space else "never", split=False),
                decoder=sentence_piece_decoder(adds_space=adds_space),
                has_byte_fallback=True,
            )
        case "CodeLlamaTokenizer":
            return _Steps(
                pre_tokenizer=pre_tokenizers.Metaspace("▁", "first" if adds_space else "never", split=False),
                decoder=sentence_piece_decoder(adds_space=True),
                has_byte_fallback=True,
                has_unk_token=True,
            )
        case "GemmaTokenizer":
            return _Steps(
                normalizer=normalizers.Replace(" ", "▁"),
                pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
                decoder=sentence_piece_decoder(adds_space=False),
                has_byte_fallback=True,
                has_unk_token=True,
            )
        case "GPT2Tokenizer":
            return _Steps(pre_tokenizer=byte_level, decoder=decoders.ByteLevel())
        case "GPTNeoXTokenizer":
            return _Steps(normalizer=normalizers.NFC(), pre_tokenizer=byte_level, decoder=decoders.ByteLevel())
        case "CohereTokenizer":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return _Steps(
                normalizer=normalizers.NFC(),
                pre_tokenizer=pre_tokenizers.Sequence([digits, byte_level]),
                decoder=decoders.ByteLevel(),
            )
        case "Qwen2Tokenizer" | "Qwen3_5Tokenizer":
            words = pre_tokenizers.Split(Regex(_qwen_words(_LETTERS[name])), "isolated")
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)
            return _Steps(
                normalizer=normalizers.NFC(),
                pre_tokenizer=pre_tokenizers.Sequence([words, to_bytes]),
                decoder=decoders.ByteLevel(),
            )
        case "BertTokenizer":
            normalizer = normalizers.BertNormalizer(
                lowercase=fields.boolean("do_lower_case", True),
                strip_accents=fields.boolean("strip_accents", False) if fields.has("strip_accents") else None,
                handle_chinese_chars=fields.boolean("tokenize_chinese_chars", True),
            )
            return _Steps(
                model="WordPiece",
                normalizer=normalizer,
                pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
                decoder=decoders.WordPiece(),
                has_unk_token=True,
            )
        case "T5Tokenizer":
            bars = pre_tokenizers.Metaspace("▁", "always")
            return _Steps(
                model="Unigram",
                normalizer=_table_of_characters(backend),
                pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), bars]),
                decoder=decoders.Metaspace("▁", "always"),
            )
    return None


def _qwen_words(letters: str) -> str:
    """Return the expression that matches each word of a text, where `letters` are classes of characters in words."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _table_of_characters(backend: tokenizers.Tokenizer) -> Any:
    """Return the first step of the normalizer that replaces characters by SentencePiece's table; None without one."""
    if backend.normalizer is None:
        return None
    state = json.loads(backend.normalizer.__getstate__())
    steps = state.get("normalizers", [state])  # Of a sequence its steps; any other normalizer is one step.
    kinds = [step["type"] for step in steps]
    if "Precompiled" not in kinds:
        return None
    is_sequence = "normalizers" in state
    return backend.normalizer[kinds.index("Precompiled")] if is_sequence else backend.normalizer


def _named_tokens(fields: Fields) -> dict[str, Any]:
    """Return the options with special tokens of the model's own under the names that transformers 4.57 has for them.

    Own names, such as image_token, are options that end in _token, and keys of `model_specific_special_tokens` or of an
    object `extra_special_tokens`. The result has them in `extra_special_tokens`, and tokens without names, for which
    transformers 5 has a list of that name, in `additional_special_tokens`.
    """
    own = {
        name: value
        for name, value in fields.data.items()
        if name.endswith("_token") and name not in SPECIAL_NAMES and is_token(value)
    }
    own |= fields.mapping("model_specific_special_tokens").data
    extra = fields.data.get("extra_special_tokens") or fields.data.get("additional_special_tokens") or []
    named, nameless = (extra, []) if isinstance(extra, Mapping) else ({}, extra)
    return {**fields.data, "extra_special_tokens": {**own, **named}, "additional_special_tokens": nameless}


def _build(backend: tokenizers.Tokenizer, steps: _Steps, special_tokens: Mapping[str, str]) -> None:
    """Put `steps` around the vocabulary, the merges and the added tokens of `backend`."""
    unk_token = special_tokens.get("unk_token") if steps.has_unk_token else None
    if steps.model == "BPE":
        backend.model.dropout = None
        backend.model.ignore_merges = False
        backend.model.fuse_unk = backend.model.byte_fallback = steps.has_byte_fallback
        backend.model.unk_token = unk_token
    elif unk_token is not None:
        backend.model.unk_token = unk_token
    backend.normalizer, backend.pre_tokenizer, backend.decoder = steps.normalizer, steps.pre_tokenizer, steps.decoder


def _set_ends(backend: tokenizers.Tokenizer, name: str, special_tokens: Mapping[str, str]) -> None:
    """Set what is put around each text for the classes that do not take it from tokenizer.json."""
    match name:
        case "GPTNeoXTokenizer":
            backend.post_processor = text_between(backend, None, None)
        case "CodeLlamaTokenizer":
            backend.post_processor = text_between(backend, special_tokens.get("bos_token"), None)
        case "BertTokenizer":
            first, last = special_tokens.get("cls_token"), special_tokens.get("sep_token")
            backend.post_processor = text_between(backend, first, last)
        case "T5Tokenizer":
            backend.post_processor = text_between(backend, None, "</s>")
