"""Adds to a tokenizer the special and added tokens that the files beside its `tokenizer.json` declare.

Their rules are those of transformers. This module does not know what else the options of a tokenizer mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ...models.fields import Fields
from .tokenizer_files import OPTIONS_FILE, read_if_there

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Options that name a special token, under the names that chat templates use."""
EXTRA_NAMES = ("additional_special_tokens", "extra_special_tokens")
"""Options that hold further special tokens, in lists or under names of the model's own."""
FETCH_FILE = "fetch the file again"


def add_tokens(
    backend: tokenizers.Tokenizer,
    path: Path,
    options: Mapping[str, Any],
    *,
    defaults: Mapping[str, str],
    more_defaults: Mapping[str, str] | None = None,
    without_flags: Collection[str] = (),
) -> dict[str, str]:
    """Add the tokens that the files beside tokenizer.json declare to `backend`; return name → text of special tokens.

    The files are in the directory `path`. `added_tokens_decoder` among the `options` of tokenizer_config.json, if it is
    there, replaces the older files special_tokens_map.json and added_tokens.json. For a special token that no file
    names, the default of the tokenizer class is used if the vocabulary has it: transformers 4.57 would give any other
    one an id that the model has no row for. `defaults` are those of SPECIAL_NAMES, and `more_defaults` those of further
    options that name a special token, which are not part of the result. Declared tokens are added in the order of their
    ids. Those that `backend` has with the same text and flags are not added again. A token whose text is in the
    vocabulary keeps its id. Example: `eos_token` "</s>", a plain entry of the vocabulary, becomes a special token with
    the same id. Tokens of the options `without_flags` strip no spaces and are found wherever they stand, whatever flags
    are declared.
    """
    named, declared = _declarations(backend, path, checked_tokens(options, path / OPTIONS_FILE))
    more_defaults = more_defaults or {}
    for name, text in {**defaults, **more_defaults}.items():
        if name not in named and backend.token_to_id(text) is not None:
            named[name] = text
    special_values = _special_values(named, *more_defaults)
    present = backend.get_added_tokens_decoder().values()
    present_forms = {repr(token) for token in present}  # The text and all flags.
    to_add = [token for _, token in sorted(declared.items()) if repr(token) not in present_forms]
    present_texts = {token.content for token in (*present, *to_add)}
    by_text = {token.content: token for token in declared.values()}
    for value in special_values:
        token = by_text.get(_content(value)) or _token(value)
        # A token that exists already keeps its flags if an option names only its text and no file declares it.
        if isinstance(value, Mapping) or token.content in by_text or token.content not in present_texts:
            to_add.append(token)
    special_texts = {_content(value) for value in special_values}
    for token in to_add:
        token.special = token.special or token.content in special_texts
    backend.add_tokens(to_add)
    flagless = _special_values({name: named.get(name) for name in without_flags})
    backend.add_special_tokens([_token(_content(value)) for value in flagless])
    names = {name: _content(named[name]) for name in SPECIAL_NAMES if named.get(name) is not None}
    own_names = named.get("extra_special_tokens")  # The model's own names for tokens, or a list of nameless ones.
    return names | (
        {name: _content(value) for name, value in own_names.items()} if isinstance(own_names, Mapping) else {}
    )


def checked_tokens(data: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return `data`, the contents of `file`, if the tokens that it names are what transformers writes.

    Raise ModelLoadError, which names the option, for a token that is neither text nor an object of its text and flags.
    """
    fields = Fields(data, file, way_out=FETCH_FILE)
    token = "a string or an object with the string content and flags that are true or false"
    for name in SPECIAL_NAMES:
        if fields.has(name) and not is_token(data[name]):
            raise fields.wrong(name, token)
    for name in EXTRA_NAMES:
        more = data[name] if fields.has(name) else []
        tokens = list(more.values()) if isinstance(more, Mapping) else more
        if not (isinstance(tokens, list) and all(map(is_token, tokens))):
            raise fields.wrong(name, f"a list or an object of tokens, each {token}")
    by_id = fields.mapping("added_tokens_decoder").data
    if not all(token_id.isdecimal() and is_token(value) for token_id, value in by_id.items()):
        raise fields.wrong("added_tokens_decoder", f"an object of tokens by their ids, each {token}")
    return data


def is_token(value: Any) -> bool:
    """Return whether `value` is a token as transformers writes it: its text, or an object of text and flags."""
    if not isinstance(value, Mapping):
        return isinstance(value, str)
    flags = [value.get(name, False) for name in ("special", "lstrip", "rstrip", "normalized", "single_word")]
    return isinstance(value.get("content"), str) and all(isinstance(flag, bool) for flag in flags)


def _declarations(
    backend: tokenizers.Tokenizer, path: Path, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """Return the options with the special tokens that other files name, and the declared tokens by their ids.

    If the options have `added_tokens_decoder`, no other file is read, and its entries are the declared tokens.
    Otherwise special_tokens_map.json overrides the special tokens that the options name; only the lists
    `additional_special_tokens` of both are joined. The declared tokens are then those of added_tokens.json and the
    added tokens of `backend`, which win for an id that both have. A missing file counts as an empty one.
    """
    named = dict(options)
    if options.get("added_tokens_decoder") is not None:
        return named, {int(index): _token(value) for index, value in options["added_tokens_decoder"].items()}
    map_file, added_file = path / "special_tokens_map.json", path / "added_tokens.json"
    named |= checked_tokens(read_if_there(map_file), map_file)
    if extra := options.get("additional_special_tokens"):
        named["additional_special_tokens"] = [*extra, *(named.get("additional_special_tokens") or ())]
    special_texts = {_content(value) for value in _special_values(named)}
    added = Fields(read_if_there(added_file), added_file, way_out=FETCH_FILE)
    declared = {
        added.integer(text, min=0): AddedToken(
            text, normalized=text not in special_texts, special=text in special_texts
        )
        for text in added.data
    }
    return named, declared | backend.get_added_tokens_decoder()


def _special_values(named: Mapping[str, Any], *more_names: str) -> list[Any]:
    """Return the special tokens that options name, as they stand there: strings, or mappings of a token's flags."""
    values = [named.get(name) for name in (*SPECIAL_NAMES, *more_names)]
    for name in EXTRA_NAMES:
        more = named.get(name) or ()
        values += more.values() if isinstance(more, Mapping) else more
    return [value for value in values if value is not None]


def _content(value: Any) -> str:
    return str(value["content"] if isinstance(value, Mapping) else value)


def _token(value: Any) -> AddedToken:
    """Return the token of an option: a string is a special token, a mapping has flags.

    The keys `__type` and `id`, which some files put among the flags, are dropped.
    """
    if isinstance(value, Mapping):
        return AddedToken(**{name: flag for name, flag in value.items() if name not in ("__type", "id")})
    return AddedToken(str(value), special=True, normalized=False)
