"""Builds a tokenizer from `tekken.json`, the format of Mistral's newer models.

The file has byte-level BPE as tiktoken has it: tokens by rank, and the expression that splits a text. The ids are those
of the package mistral-common: the special tokens come first, and the id of any other token is its rank behind them.
Special tokens that a text spells out become their ids, as transformers has it, where mistral-common reads plain text.
The format has no chat template. This module knows nothing of the other files of a directory.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ...checks import shorten
from ...errors import ModelLoadError
from ...models.fields import Fields, read_json_object
from .byte_level import bytes_by_char
from .directory_tokenizer import text_between

TEKKEN_FILE = "tekken.json"
SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The first special tokens of a file that does not list its own, by their ids."""
VERSIONS_WITHOUT_LIST = ("v1", "v2", "v3", "v7")
"""Versions of the format whose files need not list their special tokens."""
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
"""Name of a special token in chat templates → its text, which is the same in all files."""


def read_tekken(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer in the file tekken.json of the directory `path`, and its special tokens by name.

    BOS is put before each text. Only as many tokens are read as the vocabulary that the file declares has; files list
    more. Raise ModelLoadError, one line that names the file, for a file that is incomplete or contradicts itself.
    """
    path = path / TEKKEN_FILE
    fields = Fields(read_json_object(path), path, way_out="the file is incomplete or corrupt, fetch it again")
    config = fields.mapping("config")
    num_special = config.integer("default_num_special_tokens")
    # The 256 single bytes come first, so that any text has tokens.
    num_tokens = config.integer("default_vocab_size", min=num_special + 256) - num_special
    special_tokens = _special_tokens(fields, config, num_special)
    tokens = _tokens(fields, num_tokens)
    pattern = config.text("pattern")

    ids = {token: num_special + rank for rank, token in enumerate(tokens)} | special_tokens
    if len(ids) < num_special + num_tokens:
        repeated = special_tokens.keys() & set(tokens)
        raise fields.wrong("special_tokens", f"texts that are not in vocab too, as {shorten(min(repeated))} is")
    backend = Tokenizer(models.BPE(ids, _merges(tokens), ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:
        raise config.wrong("pattern", f"a regular expression ({shorten(error)})") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    by_id = sorted(special_tokens, key=special_tokens.__getitem__)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in by_id])
    names = {name: token for name, token in NAMES.items() if token in special_tokens}
    if "bos_token" in names:
        backend.post_processor = text_between(backend, names["bos_token"], None)
    return backend, names


def _special_tokens(fields: Fields, config: Fields, num_special: int) -> dict[str, int]:
    """Return text → id of the special tokens. Ids that the file does not name get texts such as "<SPECIAL_20>"."""
    if fields.has("special_tokens"):
        entries = fields.items("special_tokens", dict)
        ids = {entry.get("token_str"): entry.get("rank") for entry in entries}
    else:
        version = config.text("version")
        if version not in VERSIONS_WITHOUT_LIST:
            raise fields.wrong("special_tokens", f"a list of them, which files of the version {version} have")
        entries = list(SPECIAL_TOKENS)
        ids = {text: rank for rank, text in enumerate(SPECIAL_TOKENS)}
    is_right = sorted(ids.values(), key=str) == sorted(range(len(entries)), key=str) and len(entries) <= num_special
    if not is_right or not all(isinstance(text, str) and text for text in ids):
        wanted = f"at most {num_special} objects, each with its own token_str, of the ranks 0, 1, 2, …"
        raise fields.wrong("special_tokens", wanted)
    return ids | {f"<SPECIAL_{rank}>": rank for rank in range(len(entries), num_special)}


def _tokens(fields: Fields, num_tokens: int) -> list[str]:
    """Return the first `num_tokens` tokens by rank, in the byte-level alphabet."""
    entries = fields.items("vocab", dict)
    if len(entries) < num_tokens:
        raise fields.wrong("vocab", f"the {num_tokens} tokens that config declares, not {len(entries)}")
    char_of_byte = {byte: char for char, byte in bytes_by_char().items()}
    tokens = []
    for rank, entry in enumerate(entries[:num_tokens]):
        data = _token_bytes(entry)
        if entry.get("rank") != rank or not data or (rank < 256 and data != bytes([rank])):
            wanted = "an entry of each rank from 0 on, its bytes as base64, the 256 single bytes first"
            fault = f"vocab[{rank}] is {shorten(entry)}, wanted {wanted}"
            raise ModelLoadError(f"{fields.path}: {fault}; {fields.way_out}")
        tokens.append("".join([char_of_byte[byte] for byte in data]))
    if len(set(tokens)) < num_tokens:
        raise fields.wrong("vocab", "tokens that all differ")
    return tokens


def _token_bytes(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry of the vocabulary; b"" if they are not in base64."""
    try:
        return base64.b64decode(entry.get("token_bytes") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        return b""


def _merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Return BPE merges, best first, by which neighbours are joined as tiktoken joins them.

    It joins the neighbouring pair whose joined token has the lowest rank. So every split of a token into two tokens is
    a merge, ordered by the rank of the whole token.
    """
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
