"""What the encoder of /v1/responses must know of a body, beside the internal form of a request."""

from __future__ import annotations

import msgspec


class ResponseDetails(msgspec.Struct, frozen=True, kw_only=True):
    """It travels as plain data, since bodies are also parsed in another process."""

    repeated: str
    """JSON of an object: the fields of a response that only repeat what was asked for."""
    names: dict[str, tuple[str, str]] = {}
    """Name of a tool of a namespace as the model sees it → namespace, name."""
    has_search: bool = False
    """Whether a call of the tool `tool_search` is an item of the type tool_search_call."""
    has_encrypted: bool = False
    """Whether thoughts have `encrypted_content`."""
