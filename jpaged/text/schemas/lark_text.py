"""Pieces of a Lark grammar as text: strings, repeats, lists with commas."""

from __future__ import annotations

import json
import re
from typing import Any

COMMA = '"," '
NAME = r"""/"(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/"""
"""The text of any name of an object of JSON, with the escapes that `json_allowed_escapes` leaves."""


def json_text(value: Any) -> str:
    """Return the text of a JSON value, as the grammar has constants and names."""
    return json.dumps(value, ensure_ascii=False)


def literal(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def repeated(text: str, least: int, most: int | None) -> str:
    """Return an expression repeated from `least` to `most` times; None is no bound."""
    if most == 0:
        return ""
    if least == 0 and most is None:
        return f"({text})*"
    return f"({text}){{{least},{'' if most is None else most}}}"


def listed(text: str, least: int, most: int | None) -> str:
    """Return an expression of at least one and at least `least` of what another one allows, with commas between."""
    return f"{text} {repeated(COMMA + text, max(0, least - 1), None if most is None else most - 1)}"


def within_slashes(regex: str) -> str:
    """Return an expression as it stands between slashes in Lark."""
    text = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
    return text.replace("\n", r"\n").replace("\r", r"\r")
