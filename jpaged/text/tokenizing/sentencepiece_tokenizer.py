"""Builds a tokenizer from a file of SentencePiece, such as `tokenizer.model`, where a directory has no tokenizer.json.

    text ─▶ special and added tokens are split off ─▶ each text between them becomes pieces ─▶ ids
            (package tokenizers)                       (package sentencepiece)

So the ids are those of sentencepiece, whatever the file asks for: its algorithm (BPE, unigram, words, characters), the
normalizer, spaces, byte fallback and user-defined pieces. Converted to models of the package tokenizers, some would be
others: its unigram model sums scores in other floats, and it reads a normalizer's map by grapheme. That package holds
the vocabulary here, and turns ids into text. This module does not know how chats are rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, NormalizedString, PreTokenizedString, models

from ...checks import one_line
from ...errors import ModelLoadError
from ...models.fields import Fields
from .directory_tokenizer import class_name, sentence_piece_decoder, text_between
from .tokenizer_files import FETCH_AGAIN, OPTIONS_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SENTENCEPIECE_FILE, T5_FILE = "tokenizer.model", "spiece.model"
OTHER_FILES = (T5_FILE, "sentencepiece.bpe.model")
PLAIN_CLASSES = ("CodeLlamaTokenizer", "GemmaTokenizer", "LlamaTokenizer", "T5Tokenizer")
"""Classes of transformers that take a file of SentencePiece as it is."""
OTHER_SOURCE = f"add the model's {TOKENIZER_FILE}, or give --tokenizer DIR"
CHAT_MARKS = ("<start_of_turn>", "<end_of_turn>")
"""User-defined pieces of Gemma that transformers makes special tokens."""
# Numbers of the fields of ModelProto, TrainerSpec and NormalizerSpec in sentencepiece_model.proto.
TRAINER, NORMALIZER, DENORMALIZER = 2, 3, 5
WHITESPACE_AS_SUFFIX = 24
CHARACTER_MAP, ADDS_SPACE, DROPS_EXTRA_SPACES = 2, 3, 4
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


@dataclass(frozen=True)
class SentencePieces:
    """What splits texts into the pieces of a SentencePiece model: the file, and options of the tokenizer."""

    model: bytes
    """The whole file."""
    adds_space: bool
    """Whether a space is put before a text, whatever the file says."""
    adds_space_once: bool
    """Whether that is done only at the very start, and not behind special tokens too."""

    def attach(self, backend: tokenizers.Tokenizer) -> Splitter:
        """Let `backend`, whose ids are those of the file, split texts into these pieces; return what it does it with.

        JSON of the package `tokenizers` cannot hold that: `backend.to_str()` raises from now on.
        """
        splitter = Splitter(self, backend)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(splitter)
        return splitter


class Splitter:
    """A pre-tokenizer of the package `tokenizers`: each of its splits is one token. Threads may share it."""

    def __init__(self, pieces: SentencePieces, backend: tokenizers.Tokenizer):
        self._pieces = pieces
        self._processor = _load(pieces.model, adds_space=pieces.adds_space)
        # By their ids, since an option may have renamed a piece.
        self._tokens = [backend.id_to_token(token_id) for token_id in range(len(self._processor))]

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """Split each part of `text` that is no special or added token."""
        text.split(self._split)

    def behind(self, text: str) -> list[int]:
        """Return the ids of a text that stands behind another, so that no space is put before it."""
        return self._unspaced.encode(text, out_type=int)

    def _split(self, index: int, part: NormalizedString) -> list[NormalizedString]:
        """Return the tokens of a part of a text; `index` counts the parts and the special tokens in front of it."""
        processor = self._unspaced if index and self._pieces.adds_space_once else self._processor
        return [NormalizedString(self._tokens[token_id]) for token_id in processor.encode(str(part), out_type=int)]

    @cached_property
    def _unspaced(self) -> SentencePieceProcessor:
        return _load(self._pieces.model, adds_space=False) if self._pieces.adds_space else self._processor


def sentencepiece_file(path: Path, options: Mapping[str, Any]) -> Path | None:
    """Return the file of SentencePiece that the tokenizer of a directory is read from; None if it has none.

    `options` are the contents of tokenizer_config.json. A tokenizer.model may also be a file of tiktoken, as of Llama
    3, for which None is returned; so it is if the class's code comes with the model, since that may do more than
    SentencePiece. Raise ModelLoadError for files of other names: the classes of encoders that have them move the ids.
    """
    kind = class_name(path, options)
    if "auto_map" in options and kind not in PLAIN_CLASSES:
        return None
    file = path / (T5_FILE if kind == "T5Tokenizer" else SENTENCEPIECE_FILE)
    if not file.is_file():
        others = [name for name in OTHER_FILES if (path / name).is_file()]
        if others and not any((path / name).is_file() for name in ("vocab.json", "vocab.txt")):
            fault = f"is not read for {f'the class {kind}' if kind else 'a directory that names no class'}"
            allowed = f"wanted {SENTENCEPIECE_FILE}, or {T5_FILE} of the class T5Tokenizer"
            raise ModelLoadError(f"{path / others[0]}: {fault}, {allowed}: {OTHER_SOURCE}")
        return None
    try:
        with file.open("rb") as opened:
            return None if _TIKTOKEN_LINE.match(opened.read(1 << 12)) else file
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read ({one_line(error)}); fetch it again") from error


def read_sentencepiece(
    file: Path, options: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str], SentencePieces]:
    """Return a tokenizer with a SentencePiece file's vocabulary, its special tokens by name, and what splits texts.

    Control pieces and the unknown piece are special tokens. `options` are the contents of tokenizer_config.json. Of
    them `add_prefix_space` overrides whether the file puts a space before a text, and with `legacy` false none is put
    behind special tokens; `added_tokens_decoder` renames pieces. The result splits no text yet: see
    `SentencePieces.attach`. Raise ModelLoadError, one line that names the file, for one that is cut or corrupt, and for
    one by which the text of a token would depend on those behind it.
    """
    model, processor, normalizer = _read_model(file)
    fields = Fields(options, file.parent / OPTIONS_FILE)
    adds_space = fields.boolean("add_prefix_space", bool(normalizer.get(ADDS_SPACE, [True])[-1]))
    drops_space = adds_space or bool(normalizer.get(DROPS_EXTRA_SPACES, [True])[-1])
    adds_space_once = adds_space and not fields.boolean("legacy", True)

    ids = range(len(processor))
    tokens = _tokens(processor, fields)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    special = [tokens[token_id] for token_id in ids if processor.is_control(token_id) or processor.is_unknown(token_id)]
    special += [mark for mark in CHAT_MARKS if mark in vocabulary]
    is_t5 = file.name == T5_FILE
    # T5's extra tokens follow the pieces, the last one first.
    for index in reversed(range(fields.integer("extra_ids", 100, min=0))) if is_t5 else ():
        if (token := f"<extra_id_{index}>") not in vocabulary:
            vocabulary[token] = len(vocabulary)
            special.append(token)
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[processor.unk_id()]))
    backend.decoder = sentence_piece_decoder(adds_space=drops_space, has_bytes=any(map(processor.is_byte, ids)))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named_ids = {
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
    }
    names = {name: tokens[token_id] for name, token_id in named_ids.items() if token_id >= 0}
    if is_t5:
        backend.post_processor = text_between(backend, None, names.get("eos_token"))
    return backend, names, SentencePieces(model, adds_space, adds_space_once)


def _read_model(file: Path) -> tuple[bytes, SentencePieceProcessor, dict[int, list[Any]]]:
    """Return a file's bytes, sentencepiece's reader of them, and the fields of its normalizer_spec.

    Raise ModelLoadError as `read_sentencepiece` does, and if the package sentencepiece is not installed.
    """
    try:
        model = file.read_bytes()
        processor = _load(model)
    except ImportError as error:
        way_out = f"pip install sentencepiece, or {OTHER_SOURCE}"
        raise ModelLoadError(f"{file}: needs the package sentencepiece, which is not installed; {way_out}") from error
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read ({one_line(error)}); fetch it again") from error
    except Exception as error:  # sentencepiece raises errors of several types for a broken file.
        raise ModelLoadError(f"{file}: is no whole file of SentencePiece ({one_line(error)}); {FETCH_AGAIN}") from error
    parts = _read_fields(model)
    for number, name in (TRAINER, "trainer_spec"), (NORMALIZER, "normalizer_spec"):
        if number not in parts:  # They stand behind the pieces. sentencepiece would take defaults.
            raise ModelLoadError(f"{file}: is cut, it has no {name}; {FETCH_AGAIN}")
    trainer, normalizer, denormalizer = (
        _read_fields(b"".join(parts.get(number, []))) for number in (TRAINER, NORMALIZER, DENORMALIZER)
    )
    if any(trainer.get(WHITESPACE_AS_SUFFIX, ())):
        raise ModelLoadError(f"{file}: treat_whitespace_as_suffix is true, wanted false; {OTHER_SOURCE}")
    if any(denormalizer.get(CHARACTER_MAP, ())):
        raise ModelLoadError(f"{file}: has denormalization rules, wanted none; {OTHER_SOURCE}")
    return model, processor, normalizer


def _tokens(processor: SentencePieceProcessor, options: Fields) -> list[str]:
    """Return the texts of the tokens by id: the pieces, renamed as `added_tokens_decoder` says.

    Models put tokens of their own in the places of control pieces that were kept for that. A text that a piece has
    already renames no other one.
    """
    tokens = [processor.id_to_piece(token_id) for token_id in range(len(processor))]
    known = set(tokens)
    for key, value in options.mapping("added_tokens_decoder").data.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if not key.isdecimal() or not isinstance(text, str):
            raise options.wrong("added_tokens_decoder", "an object of token ids, each with a token's content")
        if int(key) < len(tokens) and text not in known:
            tokens[int(key)] = text
            known.add(text)
    return tokens


def _load(model: bytes, *, adds_space: bool | None = None) -> SentencePieceProcessor:
    """Return sentencepiece's reader of the file `model`; with `adds_space` not None, that decides and not the file.

    Raise ImportError if the package is not installed, and errors of the package for a file that is no whole one.
    """
    from sentencepiece import SentencePieceProcessor

    if adds_space is not None:
        # In protobuf's format a message that comes a second time overrides the fields that it has.
        model += bytes([NORMALIZER << 3 | 2, 2, ADDS_SPACE << 3, adds_space])
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def _read_fields(message: bytes) -> dict[int, list[Any]]:
    """Return the values by field number of a whole message in protobuf's wire format: integers, or else bytes.

    The bytes of a message that comes in several parts are to be joined; of other values the last one counts.
    """
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        """Read 7 bits of each byte, the lowest first; the last byte is below 128."""
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        value: int | bytes
        if (kind := key & 7) == 0:
            value = varint()
        else:
            num_bytes = varint() if kind == 2 else 8 if kind == 1 else 4
            value = message[at : at + num_bytes]
            at += num_bytes
        found.setdefault(key >> 3, []).append(value)
    return found
