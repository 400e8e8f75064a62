"""The formats of thoughts and tool calls that models write, as data.

A mark of a format is written here as text. `bound_format.py` finds out which of them are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from .json_text import JSON, Dialect


@dataclass(frozen=True)
class ThoughtFormat:
    """A thought stands between two texts; whitespace at its ends belongs to the format."""

    open: str
    close: str


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects with a name and arguments, one or several behind another or in an array."""

    may_stand_alone: bool = False
    """An answer that begins with such an object is a call without any mark."""


@dataclass(frozen=True)
class TaggedCalls:
    """A call as a name and tags with a key and a value each, such as <parameter=city>\\nParis\\n</parameter>."""

    open: str
    """The text before the name; a call may begin with it where the mark of the call is missing. Empty if there is
    none, and the name follows the mark."""
    close: str
    """The text behind the last value; empty if there is none."""
    name_end: str
    """The text behind the name; empty if a line's end or the next tag ends it."""
    key_open: str
    key_close: str
    value_open: str
    """Between a key and its value; empty if `key_close` is all."""
    value_close: str
    has_lines: bool
    """A value stands on lines of its own, so that a line feed at each of its ends does not belong to it."""


@dataclass(frozen=True)
class NamedCalls:
    """A call as a name and the arguments as JSON behind it."""

    before_name: str = ""
    before_id: str = ""
    """The text before a call's id, which stands behind the name; empty if there are no ids."""
    before_arguments: str = ""
    dialect: Dialect = JSON


@dataclass(frozen=True)
class CallFormat:
    """Calls begin with the mark `open`; `bodies` says what may follow it, and `close` ends them, empty if nothing does.

    Where several bodies are allowed, JsonCalls is the one that begins with a brace or a bracket.
    """

    open: str
    close: str
    bodies: tuple[JsonCalls | TaggedCalls | NamedCalls, ...]


@dataclass(frozen=True)
class AnswerFormat:
    """How a model marks the parts of its answers. None: it has no such parts, or they are not to be told apart."""

    thought: ThoughtFormat | None = None
    calls: CallFormat | None = None
    marks: tuple[str, ...] = ()
    """Marks within the texts above that may be single tokens."""


THINK = ThoughtFormat(open="<think>", close="</think>")
HERMES = AnswerFormat(
    thought=THINK,
    calls=CallFormat(open="<tool_call>", close="</tool_call>", bodies=(JsonCalls(),)),
    marks=("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
