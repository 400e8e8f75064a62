"""Builds a tokenizer from the metadata of a GGUF file.

`tokenizer.ggml.model` names the algorithm, and `tokenizer.ggml.pre` how text is split before the algorithm runs. A
wrong split gives tokens that look plausible and are wrong. Therefore only those names are accepted whose tokens were
compared with published ones; any other name is an error. This module knows nothing of chats, streams or models.

A GGUF file lacks two things: added tokens that also match the white space after them (Phi-3), which are lost, and the
normalizer, which is chosen by the `pre` name instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ...checks import shorten
from ...errors import ModelLoadError
from ...models.fields import Fields
from .directory_tokenizer import sentence_piece_decoder, text_between

KEY = "tokenizer.ggml."
OTHER_SOURCE = "use the model's Hugging Face directory instead"
CORRUPT = "the file is corrupt, fetch it again"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # Values of tokenizer.ggml.token_type; also 5 unused, 6 byte.

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The cased letters in the regular expression of DeepSeek's first tokenizers, by the Unicode version of that time.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True)
class _PreTokenizer:
    """The behaviour that one `tokenizer.ggml.pre` name selects."""

    splits: tuple[str, ...]
    """Regular expressions. Each match and each text between matches is a piece, which the next one splits further."""
    nfc: bool = False
    """Whether text is normalized to Unicode NFC first."""
    ignore_merges: bool = False
    """Whether a piece that is a token as a whole is taken as it is, without merges."""
    add_bos: bool = False
    """Whether prompts begin with the BOS token, if the file does not say so itself."""


def _splits(*patterns: str, **options: bool) -> _PreTokenizer:
    """Return the behaviour with these regular expressions; `options` are the other fields."""
    return _PreTokenizer(patterns, **options)


_DIGITS = _splits(_DIGIT, _WORDS)
_LLAMA3 = _splits(_SUFFIX + _LETTERS + r"\p{N}{1,3}" + _PUNCTUATION + _TAIL, ignore_merges=True, add_bos=True)
_QWEN2 = _splits(_SUFFIX + _LETTERS + _DIGIT + _PUNCTUATION + _TAIL, nfc=True)
_PRE_TOKENIZERS = {
    "command-r": _splits(_DIGIT, _WORDS, nfc=True),
    "deepseek-coder": _splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT),
    "deepseek-llm": _splits(
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        _DIGIT,
    ),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _splits(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
    ),
    "falcon": _splits(r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]"),
    "gpt-2": _splits(_WORDS),
    "gpt-4o": _splits(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
    ),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mpt": _splits(_WORDS, nfc=True),
    "qwen2": _QWEN2,
    "qwen35": _splits(_SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL),
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": _splits(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,
        ignore_merges=True,
        add_bos=True,
    ),
}


def build_gguf_backend(path: Path, metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer that a GGUF file's metadata describe, and its special tokens by name (bos_token, …).

    Control tokens and the unknown token become special tokens, and user-defined tokens are found in a text before it is
    split. BOS is added before a text as the file says, or by default as is usual for the kind of tokenizer; EOS is
    added after it only if the file says so. BERT always has its CLS and SEP tokens around a text. `path` is only named
    in errors. Raise ModelLoadError for an unknown model or `pre` name, and for lists that are missing or differ in
    length.
    """
    fields = Fields(metadata, path)
    model = fields.data.get(KEY + "model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece, "bert": _word_piece, "gemma4": _gemma4}
    if model not in builders:  # Also if the file names none.
        raise fields.wrong(KEY + "model", f"one of {', '.join(builders)}: {OTHER_SOURCE}")
    vocabulary = _Vocabulary(fields)
    backend, adds_bos = builders[model](vocabulary)
    kinds = [pair for pair in zip(vocabulary.tokens, vocabulary.types, strict=True) if pair[1] != NORMAL]
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind in (UNKNOWN, CONTROL)]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    names = vocabulary.special_names
    first = names.get("bos_token") if fields.boolean(KEY + "add_bos_token", adds_bos) else None
    last = names.get("eos_token") if fields.boolean(KEY + "add_eos_token", False) else None
    if model == "bert":
        first, last = names.get("cls_token"), names.get("sep_token")
    if first or last:
        backend.post_processor = text_between(backend, first, last)
    return backend, names


SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",  # The GGUF format spells it so.
    "mask_token": "mask_token_id",
}
"""Name of a special token in chat templates → key of its id under `tokenizer.ggml`."""


class _Vocabulary:
    """The tokens of a GGUF file, their ids, types and special names, checked. `fields` has the other metadata.

    Every failed check raises ModelLoadError.
    """

    def __init__(self, fields: Fields):
        """Read and check the lists of tokens and of their types, and the ids of special tokens.

        Without a list of types all tokens are NORMAL. `ids` maps each token to its index in the list; of equal tokens
        the last one counts. `special_names` has the special tokens that the file names, such as {"bos_token": "<s>"}.
        """
        self.fields = fields
        self.tokens = self.strings("tokens")
        self.types: list[int] = self.per_token("token_type", int, [NORMAL] * len(self.tokens))
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        self.special_names = {
            name: self.tokens[fields.integer(KEY + key, min=0, max=len(self.tokens) - 1)]
            for name, key in SPECIAL_TOKENS.items()
            if fields.has(KEY + key)
        }

    def strings(self, key: str) -> list[str]:
        """Return the list of strings under `key`; ModelLoadError if one of them is not UTF-8 in the file.

        Bytes that are not UTF-8 have been read as lone surrogates, which cannot be encoded.
        """
        values = self.fields.items(KEY + key, str)
        try:
            "".join(values).encode()
        except UnicodeEncodeError as error:
            raise self.fields.wrong(KEY + key, f"UTF-8 text ({shorten(error)}): {CORRUPT}") from error
        return values

    def per_token(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """Return the list under `key`, which has one value of the type `kind` for each token, or `default`."""
        values, num_tokens = self.fields.items(KEY + key, kind, default), len(self.tokens)
        if len(values) != num_tokens:
            raise self.fields.wrong(KEY + key, f"{num_tokens} values, one per token, not {len(values)}: {CORRUPT}")
        return values

    def merges(self) -> list[tuple[str, str]]:
        """Return the BPE merges as pairs of tokens, the highest priority (lowest rank) first.

        The file has each pair as one string, with a space between the tokens: "th e" gives ("th", "e"). Raise
        ModelLoadError for a pair whose tokens, or whose joined token, are not in the vocabulary.
        """
        lines, ids = self.strings("merges"), self.ids
        # The Rust code of `tokenizers` panics on a merge whose concatenation is not in the vocabulary.
        if (pairs := _pairs_at_once(lines, ids)) is not None:
            return pairs
        pairs = []
        for line in lines:
            # The left token may itself begin with a space, so the first character is never the separator.
            index = line.find(" ", 1)
            left, right = line[:index], line[index + 1 :]
            if index < 0 or not ids.keys() >= {left, right, left + right}:
                requirement = "two tokens with a space between them, and their join a token too"
                fault = f"{KEY}merges holds {shorten(line)}, wanted {requirement}"
                raise ModelLoadError(f"{self.fields.path}: {fault}: {CORRUPT}")
            pairs.append((left, right))
        return pairs


def _pairs_at_once(lines: list[str], ids: Mapping[str, int]) -> list[tuple[str, str]] | None:
    """Return the pairs of tokens of merges, if each has one space and all tokens and joined ones have `ids`; else None.

    A vocabulary has 100,000 merges: this takes a tenth of the time of looking at one after the other.
    """
    text = "\n".join(lines)
    tokens, joined = text.replace(" ", "\n").split("\n"), text.replace(" ", "").split("\n")
    has_pairs = len(joined) == len(lines) and len(tokens) == 2 * len(lines) and all(" " in line for line in lines)
    if not has_pairs or not all(map(ids.__contains__, tokens)) or not all(map(ids.__contains__, joined)):
        return None
    return list(zip(tokens[::2], tokens[1::2], strict=True))


# Each builder returns a tokenizer, and whether its prompts begin with BOS if the file does not say so itself.


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, as GPT-2's, and whether its prompts begin with BOS by default.

    The file's `pre` name selects the regular expressions that split a text before BPE merges its bytes, and whether the
    text is normalized to Unicode NFC first. Raise ModelLoadError for an unknown or missing name.
    """
    name = vocabulary.fields.data.get(KEY + "pre")
    pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise vocabulary.fields.wrong(KEY + "pre", f"one of {', '.join(_PRE_TOKENIZERS)}: {OTHER_SOURCE}")
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    # "isolated": a match is a piece of its own, beside the text before and after it.
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # It need not split once more.
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a SentencePiece tokenizer (Llama 2, Gemma 2 and 3), and True: its prompts begin with BOS by default.

    It is built as BPE: the scores of the tokens become an order of merges. Spaces become ▁, and one ▁ is put before a
    text unless the file's `add_space_prefix` is false.
    """
    adds_space = vocabulary.fields.boolean(KEY + "add_space_prefix", True)
    backend = _byte_fallback_bpe(vocabulary, _merges_from_scores(vocabulary), adds_space=adds_space)
    to_bar = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_bar]) if adds_space else to_bar
    return backend, True


def _gemma4(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return Gemma 4's tokenizer, and True: its prompts begin with BOS by default.

    It is BPE with the merges of the file. Spaces become ▁, and a run of newlines is split from the text beside it.
    """
    backend = _byte_fallback_bpe(vocabulary, vocabulary.merges(), adds_space=False)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return backend, True


def _byte_fallback_bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], *, adds_space: bool) -> Tokenizer:
    """Return a BPE tokenizer that encodes a character without a token as the tokens of its UTF-8 bytes.

    `merges` are pairs of tokens, the highest priority first. If `adds_space` is true, the decoder drops the space that
    the normalizer has put before the text; the caller sets that normalizer. The unknown token, which stands for a
    character without any of these, is the one that the file names, or else the first token of the type UNKNOWN.
    """
    unknown = vocabulary.special_names.get("unk_token")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.decoder = sentence_piece_decoder(adds_space=adds_space)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return BPE merges, best first, that give the same tokens as SentencePiece's scores.

    SentencePiece joins the neighbouring pair whose joined token has the highest score. So every split of a normal token
    into two tokens is a merge, ordered by the score of the whole token, and by the ids of its parts among equal scores.
    Example: the token "the" gives the merges ("t", "he") and ("th", "e"), if all these parts are tokens.
    """
    ids, types, scores = vocabulary.ids, vocabulary.types, vocabulary.per_token("scores", float)
    merges = [
        (-scores[index], ids[left], ids[right], (left, right))
        for token, index in ids.items()
        if types[index] == NORMAL
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in ids and right in ids
    ]
    return [pair for *_, pair in sorted(merges)]


def _word_piece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return BERT's WordPiece tokenizer, which lower-cases text, and True.

    The second value, whether prompts begin with BOS by default, has no effect: the caller puts CLS and SEP around a
    text. Normal tokens are renamed as WordPiece has them: "▁run" becomes "run", and "ning" becomes "##ning". Raise
    ModelLoadError if the file does not name the unknown, CLS and SEP tokens.
    """
    names = vocabulary.special_names
    for name in ("unk_token", "cls_token", "sep_token"):
        if name not in names:
            raise vocabulary.fields.wrong(KEY + SPECIAL_TOKENS[name], f"the id of a bert tokenizer's {name}: {CORRUPT}")
    # The file marks tokens that start a word with ▁; WordPiece marks tokens that continue one with ##.
    ids = {}
    for token, index in vocabulary.ids.items():
        # Tokens such as [MASK] keep their form, even if the file gives them the type NORMAL.
        if vocabulary.types[index] == NORMAL and not (token.startswith("[") and token.endswith("]")):
            token = token[1:] if token.startswith("▁") else "##" + token
        ids[token] = index
    # 100 is BERT's own limit: a longer word becomes the unknown token.
    backend = Tokenizer(models.WordPiece(vocab=ids, unk_token=names["unk_token"], max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, True
