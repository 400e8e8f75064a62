"""Reads answers whole and in single characters, which must give the same."""

import json

from jpaged.messages import AnswerSpec
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.formats import HERMES_CALLS, THINK, AnswerFormat
from jpaged.text.answers.scanner import AnswerScanner
from jpaged.text.answers.whole_answer import Answer, joined_events, parse_answer

HERMES = AnswerFormat(THINK, HERMES_CALLS)
TOOLS = {
    "f": {
        "city": ("string",),
        "n": ("integer",),
        "x": ("number",),
        "on": ("boolean",),
        "o": ("object",),
        "l": ("array", "null"),
        "note": ("string", "null"),
        "any": ("string", "integer"),
    },
    "g": {},
}


def answer(text: str, format: AnswerFormat = HERMES, **spec: object) -> Answer:
    """Return the parts of a text in which no mark is a token."""
    answer_spec = AnswerSpec(**{"tools": TOOLS} | spec)
    bound = bind_marks(format, {})
    whole = parse_answer(text, bound, answer_spec)
    scanner = AnswerScanner(bound, answer_spec)
    assert joined_events([event for char in text for event in scanner.feed(char)] + scanner.finish()) == whole
    for call in whole.tool_calls:
        assert call.is_custom or isinstance(json.loads(call.arguments), dict)
    return whole
