"""The text that goes to clients and back as `encrypted_content`, for clients that return nothing else of a thought.

It is not secret: base64 of {"thought": "…"}. The name of the field is OpenAI's.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec


class _Sealed(msgspec.Struct, frozen=True):
    thought: str


def sealed(thought: str) -> str:
    """Return a thought as `encrypted_content`."""
    return base64.b64encode(msgspec.json.encode(_Sealed(thought))).decode()


def unsealed(content: Any) -> str | None:
    """Return the text of an `encrypted_content`; None for what `sealed` has not made, such as another server's."""
    if not isinstance(content, str):
        return None
    try:
        return msgspec.json.decode(base64.b64decode(content, validate=True), type=_Sealed).thought
    except (binascii.Error, ValueError):
        return None
