"""Ids of tool calls, which clients return with the calls' results."""

from __future__ import annotations

import hashlib

ID_BYTES = 12
"""Bytes of an id: clients put calls of several responses into one conversation."""


def call_id(response_id: str, *place: int, prefix: str = "call_") -> str:
    """Return the id of a call: that of no other one, and the same whenever the response is written.

    `place` tells it from the other calls of its response. The ids of responses differ also between servers, since a
    conversation may outlive one.
    """
    name = ".".join([response_id, *map(str, place)])
    return prefix + hashlib.blake2b(name.encode(), digest_size=ID_BYTES).hexdigest()
