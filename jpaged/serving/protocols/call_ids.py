"""Ids of tool calls, which clients return with the calls' results."""

from __future__ import annotations

import secrets

ID_BYTES = 12
"""Random bytes of an id: clients put calls of several responses into one conversation."""


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{secrets.token_hex(ID_BYTES)}"
