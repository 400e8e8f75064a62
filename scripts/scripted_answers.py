"""How the scripted model of `tool_turns.py` writes thoughts and calls."""

from __future__ import annotations

import json
from typing import Any

END = "<|end|>"
THOUGHT = "<think>\nWhat is there to do?\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    """Return a call of a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
