"""The parts of a model's answer, as a stream of small records; protocols write them in their own words.

A call is `CallStart`, `CallArguments` any number of times, `CallEnd`; other events may not stand between them. Joined
over any cuts of one output, the texts are those of the whole output.
"""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of a thought."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the user sees."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. Calls of an answer are numbered from 0."""

    index: int
    name: str
    is_custom: bool = False


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments: of the text of a JSON object, or of a custom tool's input.

    The pieces of a function's call up to `CallEnd` are one valid JSON object, however the answer ended.
    """

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A tool call ends; no more arguments come."""

    index: int
    is_cut: bool = False
    """The answer has ended before the call, whose arguments were closed."""


Event = Reasoning | Content | CallStart | CallArguments | CallEnd
