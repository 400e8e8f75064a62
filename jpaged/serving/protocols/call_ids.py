"""Ids of tool calls, which clients return with the calls' results."""

from __future__ import annotations

import hashlib

ID_BYTES = 12
"""Bytes of an id: clients put calls of several responses into one conversation."""
SHORT_ID_CHARS = 9
"""Characters of an id where the chat template takes no others, as Mistral's do."""


def call_id(response_id: str, *place: int, prefix: str = "call_", is_short: bool = False) -> str:
    """Return the id of a call: that of no other one, and the same whenever the response is written.

    `place` tells it from the other calls of its response. The ids of responses differ also between servers, since a
    conversation may outlive one. A short id has no prefix.
    """
    name = ".".join([response_id, *map(str, place)])
    digits = hashlib.blake2b(name.encode(), digest_size=ID_BYTES).hexdigest()
    return digits[:SHORT_ID_CHARS] if is_short else prefix + digits
