"""Reads the files of a tokenizer's directory: `tokenizer.json`, the JSON files beside it, and the chat template.

This module does not know what the options in them mean.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ...checks import one_line
from ...errors import ModelLoadError
from ...models.fields import read_json_object

TOKENIZER_FILE, OPTIONS_FILE = "tokenizer.json", "tokenizer_config.json"
FETCH_AGAIN = "wanted the model's whole tokenizer: fetch its files again"


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in the file tokenizer.json of the directory `path`; the other files are not read.

    The file may begin with a byte-order mark. Raise ModelLoadError, one line that names the file, if it cannot be read.
    """
    try:
        raw = (path / TOKENIZER_FILE).read_bytes().removeprefix(codecs.BOM_UTF8)
        return tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # tokenizers raises errors of many types for a broken file.
        raise ModelLoadError(f"{path / TOKENIZER_FILE}: cannot be read ({one_line(error)}); {FETCH_AGAIN}") from error


TOOL_USE = "tool_use"
"""The name of the template for chats with tools, where a model has one of its own for them."""


def read_chat_template(path: Path, options: Mapping[str, Any], name: str = "default") -> str | None:
    """Return a chat template of a tokenizer directory; None if it has none of this name.

    The default one is in chat_template.jinja, in tokenizer_config.json (`options`), or in chat_template.json, which
    some models with images have instead; the first of these that has one counts. The JSON files may hold several
    templates, as a list of {name, template} or a mapping; others may be in additional_chat_templates. Raise
    ModelLoadError for a template that is no text and for a file that cannot be read.
    """
    file = path / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{file}: cannot be read ({one_line(error)}); fetch it again") from error
    files = (OPTIONS_FILE, options), ("chat_template.json", read_if_there(path / "chat_template.json"))
    for file_name, data in files:
        template = data.get("chat_template")
        if isinstance(template, list):
            if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
                fault = "chat_template is a list, wanted objects with the keys name and template in it"
                raise ModelLoadError(f"{path / file_name}: {fault}: fetch it again")
            template = {entry["name"]: entry.get("template") for entry in template}
        if isinstance(template, dict):
            template = template.get(name)
        elif name != "default":
            template = None
        if template is not None and not isinstance(template, str):
            fault = f"chat_template is a {type(template).__name__}, wanted a string"
            raise ModelLoadError(f"{path / file_name}: {fault}: fetch it again")
        if template is not None:
            return template
    return None


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no such file.

    Raise ModelLoadError, one line that names the file, if it is not JSON or its value is not an object.
    """
    return read_json_object(path) if path.is_file() else {}
