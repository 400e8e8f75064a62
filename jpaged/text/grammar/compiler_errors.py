"""Says in words of its own what llguidance says of a grammar that it cannot compile or follow."""

from __future__ import annotations

import re

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\):?\s*")
"""Where in a Lark grammar the compiler found a fault: "at 1(14): …"."""
_GBNF_PLACE = re.compile(r"\s+at line (\d+), .*")
"""Where in a GBNF grammar its converter found a fault, and what stands there: "… at line 1, 'root ' ^ '= x'"."""
_TOLD = {
    "Unable to determine if regex is empty": "its patterns are too complex together",
    "too many": "it takes more work than a request may",
    "Too many": "it takes more work than a request may",
    "Current row has": "it takes more work than a request may",
    "NoExtensionBias": "no text satisfies it",
    "panic": "its compiler failed",
    "lookarounds not supported": "^ or $ stands within an expression",
    "too large": "it takes more work than a request may",
    "fuel": "it takes more work than a request may",
    "too complex": "it takes more work than a request may",
    "too big": "it takes more work than a request may",
    "Unsatisfiable schema": "nothing satisfies it",
    "oneOf constraints": "several options of a oneOf may hold at once: give anyOf",
    "min/maxProperties": "minProperties and maxProperties need that every named property is required",
    "not disjoint": "patterns of patternProperties overlap",
    "satisfy the grammar": "the tokenizer has no token for what must come next",
    "Invalid escape sequence": "an escape that GBNF does not have",
    "circular": "a $ref that leads back to itself has other keywords beside it",
}
"""What a message of llguidance holds → what is said of it."""


def told(message: str, *, is_from_grammar: bool = True) -> str:
    """Return an error of llguidance in words of its own, without what it quotes of a request.

    Its messages hold expressions and names of a schema, which a caller's error must not repeat. A line and a column are
    told only if the request gave a grammar: else they are those of a grammar that was written for its schema.
    """
    if "regex parse error" in message:
        message = message.rpartition("error:")[2] or message
    line = message.strip().partition("\n")[0]
    place = ""
    if (at := _PLACE.match(line)) is not None:
        place, line = f"line {at[1]}, column {at[2]}: " if is_from_grammar else "", line[at.end() :]
    elif (at := _GBNF_PLACE.search(line)) is not None:
        place, line = f"line {at[1]}: ", line[: at.start()]
    line = re.sub(r"(['\"`/]).*?\1|@\S+", "…", line)
    bare = re.sub(r"\(.*|:\s.*", "…", line).strip()
    known = next((known for part, known in _TOLD.items() if part in line), bare or "it is no grammar")
    return (place + known)[:200]
