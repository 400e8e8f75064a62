"""Converts text to token ids and back.

The package `tokenizers` does the work, with the package sentencepiece for its files. transformers is imported only for
a Hugging Face directory with a vocabulary in another format alone, such as `vocab.json`: transformers 5 rebuilds some
classes (GPT-2) from it and then splits numbers and leading spaces differently. This module knows nothing of requests;
`detokenizer.py` turns a stream of ids into a stream of text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from ...checks import one_line, refusal, told
from ...errors import ModelLoadError
from ...models.formats.gguf import GGUFFile, read_gguf
from .byte_level import bytes_by_char
from .directory_tokenizer import apply_options
from .gguf_tokenizer import KEY as GGUF_KEY
from .gguf_tokenizer import build_gguf_backend
from .saved_tokenizer import apply_saved_options, is_saved_by_transformers_5
from .sentencepiece_tokenizer import SentencePieces, read_sentencepiece, sentencepiece_file
from .tekken_tokenizer import TEKKEN_FILE, read_tekken
from .tokenizer_files import (
    FETCH_AGAIN,
    OPTIONS_FILE,
    TOKENIZER_FILE,
    TOOL_USE,
    read_chat_template,
    read_if_there,
    read_tokenizer_json,
)

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tekken.json", "tokenizer.model", "spiece.model", "vocab.json",
    "vocab.txt",
)  # fmt: skip
"""Files of which a directory with a tokenizer has at least one."""
VOCABULARY_FILES = (
    "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken",
    "tiktoken.model", "tekken.json",
)  # fmt: skip
"""Files of which a directory without tokenizer.json has at least one if it has a tokenizer."""
MORE_FILES = (
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt",
    "sentencepiece.bpe.model", "qwen.tiktoken", "tiktoken.model", "additional_chat_templates",
)  # fmt: skip
"""Files, and a folder of files, that are read beside them where they are there."""
PART_CHARS = 1 << 20
"""Characters of the parts by which `Tokenizer.num_tokens_at_least` counts."""
CUT_TOKENS = 64
"""More tokens than a part can have for the reason alone that it begins and ends amid a text."""
# Decoders for which the text of a token depends only on whether any token comes before it.
_STREAMABLE_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


class Tokenizer:
    """The tokenizer of one model: encodes and decodes text. Threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        sentence_pieces: SentencePieces | None = None,
        response_template: Any = None,
        base_vocab_size: int | None = None,
    ):
        """Wrap `backend`, a tokenizer of the package `tokenizers`, whose truncation and padding are switched off.

        `special_tokens` maps the names that templates use (bos_token, eos_token, …) to the texts of tokens.
        `tool_template` is the chat template for chats with tools, None if `chat_template` is. `sentence_pieces`, if it
        is not None, is attached to `backend`. `response_template` is what the model's files hold under that name,
        unread. `base_vocab_size` is one more than the largest id of the vocabulary without its added tokens, or None if
        it is to be found here, for which the vocabulary is listed. Raise ModelLoadError if the decoder has a step by
        which a token's text depends on more than whether it comes first: its text could not be streamed.
        """
        # A tokenizer file may set a length limit, which would silently truncate prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.sentence_pieces = sentence_pieces
        self._splitter = None if sentence_pieces is None else sentence_pieces.attach(backend)
        self.special_tokens = dict(special_tokens)
        self.chat_template, self.tool_template = chat_template, tool_template
        self.response_template = response_template
        added = backend.get_added_tokens_decoder()
        if base_vocab_size is None:
            base_vocab_size = max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        self.base_vocab_size = base_vocab_size
        """One more than the largest id of the vocabulary without its added tokens."""
        self.vocab_size = max(self.base_vocab_size, max(added, default=-1) + 1)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = _decoder_kinds(backend)
        if unknown := sorted(kinds - _STREAMABLE_DECODERS):
            supported = f"supported are {', '.join(sorted(_STREAMABLE_DECODERS))}"
            way_out = "give a model with a byte-level or SentencePiece tokenizer"
            fault = f"the tokenizer's decoder {', '.join(unknown)} cannot be streamed"
            raise ModelLoadError(f"{fault}, {supported}; {way_out}")
        self.has_byte_fallback = "ByteFallback" in kinds
        self._byte_of_char = bytes_by_char() if "ByteLevel" in kinds else None
        self._pieces: dict[int, bytes] = {}
        self._anchor, self._anchor_len = self._find_anchor()

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} ids, bos {self.bos_token_id}, eos {self.eos_token_id})"

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template, so that a chat needs none from the caller."""
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; a special token that is written in the text becomes its id.

        With `add_special_tokens` the model's own start and end tokens are added. Raise InvalidRequestError for text
        with a lone surrogate, which is not valid Unicode.
        """
        return self.encoding(text, add_special_tokens=add_special_tokens).ids

    def encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Return the tokens of `text` as `encode` does, as an object that knows their number before it makes a list."""
        try:
            # A batch of one: `encode` would hold Python's global lock, for seconds where a text has megabytes.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:
            got, allowed = f"{told(text)} with a lone surrogate", "valid Unicode text"
            raise refusal("prompt", got, allowed, "replace lone surrogates") from error

    def encode_behind(self, text: str) -> list[int]:
        """Return the token ids of `text` as they are behind another one, where SentencePiece puts no space before it.

        A special token that is written in the text may be plain text.
        """
        return self.encode(text, add_special_tokens=False) if self._splitter is None else self._splitter.behind(text)

    def num_tokens_at_least(self, text: str, limit: int) -> int:
        """Return a number of tokens that `text` has at least, counted until it is above `limit`.

        So a text that is far too long is found out by its beginning, where all of it would take a minute. It is 0, and
        nothing is counted, for a text of at most two parts; and no more than the first part is counted if as many
        tokens in every other one would not exceed `limit`.
        """
        starts = range(0, len(text), PART_CHARS)
        num_tokens = 0
        for start in starts if len(starts) > 2 else ():
            part = self.encoding(text[start : start + PART_CHARS], add_special_tokens=False)
            num_tokens += max(len(part) - CUT_TOKENS, 0)
            if num_tokens > limit or num_tokens * len(starts) <= limit:
                break
        return num_tokens

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, decoded by the package `tokenizers` without any clean-up of spaces.

        With `skip_special_tokens` special tokens are left out. Ids without a token add nothing. Bytes that are not
        valid UTF-8 become U+FFFD. No ids give "".
        """
        # The backend cannot be trusted to skip: tokenizers 0.23 shows special tokens that were declared `normalized`.
        shown = [i for i in ids if i not in self.special_ids] if skip_special_tokens else list(ids)
        return self.backend.decode(shown, skip_special_tokens=False)

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text; b"" for an id without a token.

        The bytes may be a part of a character whose other bytes come from neighbouring tokens. With `is_first` the
        token is the first of its text, where SentencePiece drops a leading space: its token "▁a" adds b" a", and with
        `is_first` b"a". The bytes without `is_first` are cached by token.
        """
        # Threads may make the same piece twice, which is harmless.
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        # Byte-level tokenizers drop no space, and a single byte of a longer character cannot be decoded alone.
        if not is_first or self._byte_of_char or (len(piece) == 1 and piece >= b"\x80"):
            return piece
        return self.decode([token_id], skip_special_tokens=False).encode()

    def special_bytes(self, token_id: int) -> bytes:
        """Return a special token's own characters in UTF-8, without a space that the decoder may put before it."""
        return (self.backend.id_to_token(token_id) or "").encode()

    def to_json(self) -> str:
        """Return the backend as JSON of the package `tokenizers`, which gives each token the same id when it is read.

        `sentence_pieces` is not part of it, nor is `backend.encode_special_tokens`.
        """
        added = self.backend.get_added_tokens_decoder()
        if self.sentence_pieces is not None:
            backend = tokenizers.Tokenizer(self.backend.model)
            backend.decoder, backend.post_processor = self.backend.decoder, self.backend.post_processor
            backend.add_tokens([token for _, token in sorted(added.items())])
            return backend.to_str()
        new_ids = {t.content: index for index, t in added.items() if self.backend.model.token_to_id(t.content) is None}
        next_id = self.backend.get_vocab_size(with_added_tokens=False)
        if sorted(new_ids.values()) == list(range(next_id, next_id + len(new_ids))):
            return self.backend.to_str()
        # `tokenizers` counts added tokens anew when it reads a file, and ignores their ids there, unless they are
        # entries of the model too. They are found in a text before the model sees it, so that this changes no other id.
        file = json.loads(self.backend.to_str())
        file["model"]["vocab"] |= new_ids
        return json.dumps(file)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _find_anchor(self) -> tuple[int, int]:
        """Return the id of an ordinary token, the anchor, and the length of its text in characters.

        A token that is decoded after the anchor shows the text that it adds anywhere but at the start of a text: the
        decoded text without the anchor's characters. Example: anchor "a" and token "▁b" decode to "a b", so the token
        adds " b". (0, 0) for a byte-level tokenizer, which needs no anchor, and for a vocabulary whose only texts are
        special tokens.
        """
        if self._byte_of_char is None:
            likely = [self.backend.token_to_id(letter) for letter in ("a", "A", "0", "▁a")]
            for token_id in (*likely, *range(self.base_vocab_size)):
                # A byte token may be part of a character: not an anchor.
                is_ordinary = token_id is not None and not _BYTE_TOKEN.fullmatch(
                    self.backend.id_to_token(token_id) or ""
                )
                if is_ordinary and (text := self.decode([token_id])):
                    return token_id, len(text)
        return 0, 0

    def _make_piece(self, token_id: int) -> bytes:
        """Compute the bytes that a token adds anywhere but at the start of a text; `token_bytes` caches them.

        An id without a token adds b"". Byte-level characters and byte tokens such as <0xE2> are read as bytes; any
        other token is decoded after the anchor of `_find_anchor`.
        """
        token: str | None = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_char is not None:
            try:
                return bytes([self._byte_of_char[char] for char in token])
            except KeyError:  # An added token is stored as plain text, not in the byte-level alphabet.
                return token.encode()
        if self.has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self.decode([self._anchor, token_id], skip_special_tokens=False)[self._anchor_len :].encode()


def has_tokenizer(path: Path) -> bool:
    """Return whether a model's directory has any file of a tokenizer; a `.gguf` file always has its own."""
    return not path.is_dir() or any((path / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(path: Path, gguf: GGUFFile | None = None) -> Tokenizer:
    """Return the tokenizer of a Hugging Face directory or of a `.gguf` file, with its chat template if it has one.

    `gguf` is that file if it is open already, so that it is not read twice. Code that comes with a model is never run.
    Raise ModelLoadError, one line that names the file, for a file that is missing or corrupt and for a tokenizer that
    is not supported.
    """
    sentence_pieces, response_template, tool_template, num_tokens = None, None, None, None
    if path.is_dir():
        backend, special_tokens, template, sentence_pieces = _read_directory(path)
        options = read_if_there(path / OPTIONS_FILE)
        response_template = options.get("response_template")
        tool_template = read_chat_template(path, options, TOOL_USE)
    elif path.is_file():
        metadata = (gguf or read_gguf(path)).metadata
        template, tool_template = _gguf_template(path, metadata), _gguf_template(path, metadata, f".{TOOL_USE}")
        backend, special_tokens = build_gguf_backend(path, metadata)
        num_tokens = len(metadata[f"{GGUF_KEY}tokens"])
    else:
        way_out = "wanted a Hugging Face directory or a GGUF file: correct the path"
        raise ModelLoadError(f"{path}: does not exist; {way_out}")
    try:
        return Tokenizer(
            backend,
            special_tokens,
            chat_template=template,
            tool_template=tool_template,
            sentence_pieces=sentence_pieces,
            response_template=response_template,
            base_vocab_size=num_tokens,
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _gguf_template(path: Path, metadata: Mapping[str, Any], suffix: str = "") -> str | None:
    """Return a chat template of a GGUF file, None if it has none; `suffix` is a dot and the name of a further one."""
    key = f"tokenizer.chat_template{suffix}"
    template = metadata.get(key)
    if not isinstance(template, str | None):
        raise ModelLoadError(f"{path}: {key} is not a string; the file is corrupt, fetch it again")
    return template


def _read_directory(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None, SentencePieces | None]:
    """Return the tokenizer of a Hugging Face directory, its special tokens by name, and its chat template or None.

    The last value is what splits texts if the vocabulary is a file of SentencePiece, else None. The options of
    tokenizer_config.json are applied to the tokenizer. It is read from tokenizer.json, or else from tekken.json, or
    else from a file of SentencePiece; transformers converts other files. Special tokens that are declared `normalized`
    are declared anew without that, unless transformers 5 saved the directory. Raise ModelLoadError for a file that is
    corrupt, for a model that drops merges at random, and for a tokenizer that has only special and added tokens.
    """
    options = read_if_there(path / OPTIONS_FILE)
    names: dict[str, str] = {}
    sentence_pieces, is_saved = None, False
    if (path / TOKENIZER_FILE).is_file():
        backend = read_tokenizer_json(path)
        is_saved = is_saved_by_transformers_5(options)
    elif (path / TEKKEN_FILE).is_file():
        backend, names = read_tekken(path)
    elif (file := sentencepiece_file(path, options)) is not None:
        backend, names, sentence_pieces = read_sentencepiece(file, options)
    else:
        backend = _convert_vocabulary(path, options)
    if is_saved:
        special_tokens = apply_saved_options(backend, path, options)
    else:  # The options override the special tokens that the vocabulary's file names.
        special_tokens = apply_options(backend, path, {**names, **options})
    if dropout := getattr(backend.model, "dropout", None):
        fault = f"the model's dropout is {dropout:g}, by which the ids of a text are random, wanted null"
        raise ModelLoadError(f"{path / TOKENIZER_FILE}: {fault}: set it to null there, as after training")
    # Counted first, since listing a large vocabulary takes time; only a small one can consist of added tokens alone.
    if backend.get_vocab_size(with_added_tokens=False) <= len(backend.get_added_tokens_decoder()):
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if not backend.get_vocab(with_added_tokens=False).keys() - added:
            fault = "the tokenizer has no vocabulary beside its special and added tokens"
            raise ModelLoadError(f"{path}: {fault}; {FETCH_AGAIN}, or give --tokenizer DIR")
    # A special token must be found wherever it is written. One that is declared `normalized`, as in Llama 2, is
    # searched for only after spaces became ▁: "</s><s>" between two turns of a chat would become eight other tokens,
    # as it does in transformers.
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(
                t.content, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False, special=True
            )
            for t in backend.get_added_tokens_decoder().values()
            if t.special and t.normalized and not is_saved
        ]
    )
    return backend, special_tokens, read_chat_template(path, options), sentence_pieces


def _convert_vocabulary(path: Path, options: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer that transformers makes of a directory without tokenizer.json, from its vocabulary files.

    `options` are the contents of tokenizer_config.json. Raise ModelLoadError if no vocabulary file is there: for most
    classes transformers 5 would then make up a tokenizer of a few special tokens. Raise it too if the tokenizer needs
    code of the model, which is never run, or if transformers cannot make it or has no fast version of it.
    """
    needs_code = "auto_map" in options
    if not needs_code and not any((path / name).is_file() for name in VOCABULARY_FILES):
        raise _no_vocabulary(path, f"it or one of {', '.join(VOCABULARY_FILES)}")
    with _quiet_transformers():
        import transformers

        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        try:
            wrapped = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
            backend = getattr(wrapped, "backend_tokenizer", None)
        except Exception as error:  # transformers raises errors of many types.
            reason = "it needs code of the model, which is never run" if needs_code else one_line(error)
            way_out = f"{FETCH_AGAIN}, or give --tokenizer DIR"
            raise ModelLoadError(f"{path / TOKENIZER_FILE}: is missing ({reason}); {way_out}") from error
        finally:
            transformers.logging.set_verbosity(verbosity)
    # A class that names only tokenizer.json is Gemma's, which reads a SentencePiece model too.
    files = [name for key, name in wrapped.vocab_files_names.items() if key != "tokenizer_file"] or ["tokenizer.model"]
    if missing := [name for name in files if not (path / name).is_file()]:
        wanted = f"it or {' and '.join(files)}, of which {' and '.join(missing)} is not there"
        raise _no_vocabulary(path, wanted)
    if backend is None:
        raise ModelLoadError(f"{path}: {type(wrapped).__name__} has no fast version; add the model's {TOKENIZER_FILE}")
    return backend


def _no_vocabulary(path: Path, wanted: str) -> ModelLoadError:
    fault = f"is missing, and so is any other vocabulary of a tokenizer; wanted {wanted}"
    way_out = "put the files there, give --tokenizer DIR, or --skip-tokenizer-init to send token ids"
    return ModelLoadError(f"{path / TOKENIZER_FILE}: {fault}: {way_out}")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress the notice that PyTorch is missing, for an import of transformers in the `with` block.

    It sets an environment variable, and restores its old value, or its absence, afterwards.
    """
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Return the types of the decoder's steps, such as {"Replace", "ByteFallback", "Fuse"}; empty without a decoder.

    Text cannot be streamed from a step that changes the end of a text (`stop` of Strip), nor from ByteLevel among other
    steps. These get names that are not in `_STREAMABLE_DECODERS`, such as "Strip at the end", so that the caller
    refuses them.
    """
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])  # Of a sequence its steps; any other decoder is one step.
    kinds = {f"{step['type']} at the end" if step.get("stop") else step["type"] for step in steps}
    return {"ByteLevel among others"} if "ByteLevel" in kinds and len(kinds) > 1 else kinds
