"""Changes the tokenizer in a directory's `tokenizer.json` as the options in its `tokenizer_config.json` say.

The ids are those of transformers 4.57, which most published directories were written for and tested with. There the
class that `tokenizer_config.json` names decides what the options mean: Llama's class puts BOS in front of a text unless
`add_bos_token` is false, whatever `tokenizer.json` says, and Qwen2's class does not know that option. transformers 5
ignores it beside a `tokenizer.json`. This module needs neither version: it holds the rules of each class as data. It
does not know how chats are rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from ...checks import one_line
from ...errors import ModelLoadError
from ...models.fields import Fields
from ...models.formats.files import CONFIG_FILE
from .declared_tokens import add_tokens
from .tokenizer_files import FETCH_AGAIN, OPTIONS_FILE, read_if_there


@dataclass(frozen=True)
class _Rules:
    """What the options of `tokenizer_config.json` mean to one tokenizer class of transformers 4.57."""

    default_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens of a file that does not name its own."""
    extra_tokens: Mapping[str, str] = field(default_factory=dict)
    """More options that name a special token, and the defaults of these."""
    adds_bos: bool | None = None
    """Default of `add_bos_token`. None: the class leaves BOS and EOS to `tokenizer.json` and ignores both options."""
    converts_prefix_space: bool = False
    """Whether `add_prefix_space` makes the class build its own normalizer, which depends on `legacy` too."""
    keeps_prefix_space: bool = False
    """Whether `tokenizer.json` decides on the space where `add_prefix_space` is not there."""
    nests_prefix_space: bool = False
    """Whether `add_prefix_space` true also reaches a byte-level step inside of a sequence."""
    has_bert_options: bool = False
    """Whether `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` set the normalizer."""


_LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT2_TOKENS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_BERT_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_RULES = {
    "BertTokenizer": _Rules(_BERT_TOKENS, has_bert_options=True),
    "BloomTokenizer": _Rules({**_LLAMA_TOKENS, "pad_token": "<pad>"}, nests_prefix_space=True),
    "CodeLlamaTokenizer": _Rules(
        _LLAMA_TOKENS,
        {"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>"},
        adds_bos=True,
    ),
    "CohereTokenizer": _Rules(
        {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        adds_bos=True,
        nests_prefix_space=True,
    ),
    "GPT2Tokenizer": _Rules(_GPT2_TOKENS),
    "GPTNeoXTokenizer": _Rules(_GPT2_TOKENS, adds_bos=False),
    "GemmaTokenizer": _Rules(
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, adds_bos=True
    ),
    "LlamaTokenizer": _Rules(_LLAMA_TOKENS, adds_bos=True, converts_prefix_space=True, keeps_prefix_space=True),
    "Qwen2Tokenizer": _Rules(dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")),
    "T5Tokenizer": _Rules({"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, keeps_prefix_space=True),
}
"""The classes that differ from PreTrainedTokenizerFast, without the `Fast` at the end of their names."""

_CLASS_OF_MODEL_TYPE = {
    "LlamaTokenizer": (
        "arcee", "deepseek_v2", "deepseek_v3", "llama", "llama4", "llama4_text", "ministral", "mistral", "mistral3",
        "mixtral", "phi3", "phimoe",
    ),
    "GemmaTokenizer": ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
    "CodeLlamaTokenizer": ("code_llama",),
    "CohereTokenizer": ("cohere", "cohere2"),
    "GPTNeoXTokenizer": ("gpt_neox", "mamba", "mpt", "olmo", "olmo2", "olmoe", "stablelm"),
    "GPT2Tokenizer": (
        "exaone4", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "granite", "granitemoe", "olmo3", "opt", "starcoder2",
    ),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next"),
    "BertTokenizer": ("bert",),
    "BloomTokenizer": ("bloom",),
    "T5Tokenizer": ("t5",),
}  # fmt: skip
"""Class → the `model_type`s of config.json that have it where no file names a class."""


def apply_options(backend: tokenizers.Tokenizer, path: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Change `backend` as the options of a tokenizer directory say, and return the special tokens by name.

    `path` is the directory, and `options` are the contents of its tokenizer_config.json. Set are the added and special
    tokens, the space before a text, BERT's normalizer, and the tokens that are put around a text. What an option means
    depends on the tokenizer class, see `_Rules`. Raise ModelLoadError, one line that names the file, for an option of a
    wrong type or one that does not fit the vocabulary.
    """
    fields = Fields(options, path / OPTIONS_FILE)
    rules = _RULES.get(class_name(path, options), _Rules())
    try:
        special_tokens = add_tokens(
            backend, path, options, defaults=rules.default_tokens, more_defaults=rules.extra_tokens
        )
        _apply_prefix_space(backend, fields, rules)
        if rules.has_bert_options:
            _apply_bert_options(backend, fields)
        if rules.adds_bos is not None:
            _apply_bos_and_eos(backend, fields, special_tokens, adds_bos=rules.adds_bos)
        backend.encode_special_tokens = fields.boolean("split_special_tokens", False)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises errors of many types.
        raise ModelLoadError(
            f"{path / OPTIONS_FILE}: does not fit the vocabulary ({one_line(error)}); {FETCH_AGAIN}"
        ) from error
    return special_tokens


def class_name(path: Path, options: Mapping[str, Any]) -> str:
    """Return the name of the tokenizer's class in transformers, without `Fast` at its end; "" if no file tells it.

    The class is named in tokenizer_config.json (`options`) or in config.json, or follows from config.json's
    `model_type`; the first of these counts. "LlamaTokenizerFast" gives "LlamaTokenizer". Raise ModelLoadError, which
    names the file, for a name that is no string.
    """
    for fields in (Fields(options, path / OPTIONS_FILE), Fields(read_if_there(path / CONFIG_FILE), path / CONFIG_FILE)):
        if fields.has("tokenizer_class"):
            name = fields.data["tokenizer_class"]
            if not isinstance(name, str):
                raise fields.wrong("tokenizer_class", "a string: name the tokenizer's class, or fetch the file again")
            return name.removesuffix("Fast")
    model_type = fields.data.get("model_type")
    return next((name for name, types in _CLASS_OF_MODEL_TYPE.items() if model_type in types), "")


def default_tokens(name: str) -> Mapping[str, str]:
    """Return name → text of the special tokens that the class `name` has where no file names them."""
    return _RULES.get(name, _Rules()).default_tokens


def _apply_prefix_space(backend: tokenizers.Tokenizer, fields: Fields, rules: _Rules) -> None:
    """Set whether the tokenizer puts a space before a text, as the option `add_prefix_space` says.

    A pre-tokenizer of a single step that has this flag gets the option's value. A missing option counts as false for
    most classes; for the others, and if the option is null, the flag stays as it is. For Cohere and Bloom, true is also
    set in each step of a pre-tokenizer with several steps. For Llama's class the normalizer, the pre-tokenizer and the
    decoder of a SentencePiece model are replaced if the option is set.
    """
    adds_space = fields.boolean("add_prefix_space", False)
    is_set = fields.has("add_prefix_space")
    state = None if backend.pre_tokenizer is None else json.loads(backend.pre_tokenizer.__getstate__())
    # `is_set` is false for an option that is missing, and for one that is null, which is still a key of the data.
    is_left_alone = not is_set and (rules.keeps_prefix_space or "add_prefix_space" in fields.data)
    if state is not None and not is_left_alone and state.get("add_prefix_space", adds_space) != adds_space:
        kind = getattr(pre_tokenizers, state.pop("type"))
        backend.pre_tokenizer = kind(**{**state, "add_prefix_space": adds_space})
    elif state is not None and adds_space and rules.nests_prefix_space:
        # The package `tokenizers` cannot change a step inside of a sequence, so the file is edited.
        file = json.loads(backend.to_str())
        for step in file["pre_tokenizer"].get("pretokenizers", ()):
            step |= {"add_prefix_space": True} if "add_prefix_space" in step else {}
        backend.pre_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(file)).pre_tokenizer
    if rules.converts_prefix_space and is_set and getattr(backend.model, "byte_fallback", False):
        _convert_prefix_space(backend, adds_space=adds_space, is_legacy=fields.boolean("legacy", True))


def _convert_prefix_space(backend: tokenizers.Tokenizer, *, adds_space: bool, is_legacy: bool) -> None:
    """Replace the normalizer, pre-tokenizer and decoder of a SentencePiece model by those of transformers 4.57.

    They are what its class makes of a tokenizer.model. `adds_space` puts a space, which is ▁ in the vocabulary, before
    a text. If `is_legacy`, that happens after every special token too; otherwise only at the start of the whole text.
    """
    if is_legacy:
        to_bar = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if adds_space else []), to_bar])
        backend.pre_tokenizer = None
    else:
        backend.normalizer = None
        scheme = "first" if adds_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.decoder = sentence_piece_decoder(adds_space=adds_space)


def sentence_piece_decoder(*, adds_space: bool, has_bytes: bool = True) -> decoders.Sequence:
    """Return the decoder of a SentencePiece model: ▁ becomes a space, and byte tokens such as <0x0A> their characters.

    If `adds_space` is true, the tokenizer puts a space before each text, and the decoder drops one at the start. If
    `has_bytes` is false, no token stands for a byte.
    """
    bytes_to_chars = [decoders.ByteFallback()] if has_bytes else []
    steps: list[Any] = [decoders.Replace("▁", " "), *bytes_to_chars, decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if adds_space else [])])


def _apply_bert_options(backend: tokenizers.Tokenizer, fields: Fields) -> None:
    """Set what BERT's normalizer does about case, accents and Chinese characters, as the options say.

    Missing options have the defaults of BERT's class: text is lower-cased, and spaces are put around Chinese
    characters. Accents are stripped if text is lower-cased, for which the normalizer's own value is None. A tokenizer
    without a normalizer stays without one.
    """
    wanted = {
        "lowercase": fields.boolean("do_lower_case", True),
        "strip_accents": fields.boolean("strip_accents", False) if fields.has("strip_accents") else None,
        "handle_chinese_chars": fields.boolean("tokenize_chinese_chars", True),
    }
    state = {} if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
    # Only a normalizer that has one of these settings with another value is replaced: other kinds have none of them.
    if any(state.get(name, value) != value for name, value in wanted.items()):
        kind = getattr(normalizers, state.pop("type"))
        backend.normalizer = kind(**{**state, **wanted})


def _apply_bos_and_eos(
    backend: tokenizers.Tokenizer, fields: Fields, special_tokens: Mapping[str, str], *, adds_bos: bool
) -> None:
    """Put BOS before and EOS after each text as the options say, instead of what tokenizer.json says.

    `adds_bos` is the class's default of `add_bos_token`; EOS is added only if `add_eos_token` is true. Raise
    ModelLoadError if an option is true and the tokenizer has no such token.
    """
    for name in ("bos", "eos"):
        if fields.boolean(f"add_{name}_token", False) and f"{name}_token" not in special_tokens:
            fault = f"add_{name}_token is true, and the tokenizer has no {name}_token"
            raise ModelLoadError(f"{fields.path}: {fault}: name one that tokenizer.json has, or set it to false")
    adds_bos = adds_bos and "add_bos_token" not in fields.data  # An option that is null counts as false.
    first = special_tokens.get("bos_token") if fields.boolean("add_bos_token", adds_bos) else None
    last = special_tokens.get("eos_token") if fields.boolean("add_eos_token", False) else None
    backend.post_processor = text_between(backend, first, last)


def text_between(backend: tokenizers.Tokenizer, first: str | None, last: str | None) -> processors.TemplateProcessing:
    """Return the post-processor that puts the token `first` before and the token `last` after each text.

    None stands for no token: with both None it adds nothing. The tokens must be in the vocabulary of `backend`. In the
    template, "$A" stands for the text.
    """
    before, after = ([token] if token else [] for token in (first, last))
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
