"""Takes a whole answer apart: what the scanner finds, put together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from ...messages import AnswerSpec
from ...outputs import Mark
from .bound_format import BoundFormat
from .events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from .scanner import AnswerScanner

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool: `arguments` is the text of a JSON object, or the input of a custom tool."""

    name: str
    arguments: str
    is_custom: bool = False


class Answer(msgspec.Struct, frozen=True):
    """An answer's parts."""

    reasoning: str | None
    """The thoughts; None if there are none."""
    content: str
    tool_calls: tuple[ToolCall, ...]


def parse_answer(text: str, format: BoundFormat, spec: AnswerSpec, marks: Sequence[Mark] = ()) -> Answer:
    """Return the parts of an answer's whole text; `marks` are the tokens among it that are marks of `format`.

    A lone surrogate in the text becomes U+FFFD.
    """
    scanner = AnswerScanner(format, spec)
    text = _LONE_SURROGATE.sub("\ufffd", text)
    return joined_events([*scanner.feed(text, marks), *scanner.finish()])


def joined_events(events: Iterable[Event]) -> Answer:
    """Return the answer of which `events` are all events."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    starts: list[CallStart] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case Reasoning(text=text):
                reasoning.append(text)
            case Content(text=text):
                content.append(text)
            case CallStart():
                starts.append(event)
                arguments = []
            case CallArguments(text=text):
                arguments.append(text)
            case CallEnd():
                calls.append(ToolCall(starts[-1].name, "".join(arguments), starts[-1].is_custom))
    return Answer("".join(reasoning) if reasoning else None, "".join(content), tuple(calls))
