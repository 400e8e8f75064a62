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
    marks: tuple[str, ...]
    """Marks within the two that may be single tokens."""
    dropped: tuple[str, ...] = ()
    """Marks around the answer behind the thought."""


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects with a name and arguments, one or several behind another or in an array."""

    may_stand_alone: bool = False
    """An answer that begins with such an object is a call without any mark."""
    in_array: bool = False
    """Models write calls in an array, also a single one; both forms are read."""


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
    marks: tuple[str, ...]
    """Marks within all these texts that may be single tokens."""


@dataclass(frozen=True)
class Channels:
    """An answer is a row of messages to channels, each a header, `message`, a text and one of `ends`."""

    start: str
    channel: str
    constrain: str
    """The mark before the name of a text's format."""
    message: str
    ends: tuple[str, ...]
    thought: str
    """The channel of thoughts."""
    before_name: str
    """The text before a tool's name in a message's recipient."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that may be single tokens."""
        return self.start, self.channel, self.constrain, self.message, *self.ends


@dataclass(frozen=True)
class AnswerFormat:
    """How a model marks the parts of its answers. None: it has no such parts, or they are not to be told apart."""

    thought: ThoughtFormat | Channels | None = None
    calls: CallFormat | Channels | None = None
    """If either is a `Channels`, the other is the same or None."""

    @property
    def channels(self) -> Channels | None:
        """Return the channels of the format if it has them."""
        return next((part for part in (self.thought, self.calls) if isinstance(part, Channels)), None)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that may be single tokens."""
        return tuple(dict.fromkeys(mark for part in (self.thought, self.calls) if part for mark in part.marks))


THINK = ThoughtFormat(open="<think>", close="</think>", marks=("<think>", "</think>"))
GRANITE_THOUGHT = ThoughtFormat(
    open="<think>",
    close="</think>",
    marks=("<think>", "</think>", "<response>", "</response>"),
    dropped=("<response>", "</response>"),
)
SEED_THOUGHT = ThoughtFormat(open="<seed:think>", close="</seed:think>", marks=("<seed:think>", "</seed:think>"))
MISTRAL_THOUGHT = ThoughtFormat(open="[THINK]", close="[/THINK]", marks=("[THINK]", "[/THINK]"))
GEMMA_4_THOUGHT = ThoughtFormat(open="<|channel>thought", close="<channel|>", marks=("<|channel>", "<channel|>"))
COHERE_THOUGHT = ThoughtFormat(
    open="<|START_THINKING|>",
    close="<|END_THINKING|>",
    marks=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)

HERMES_CALLS = CallFormat(
    open="<tool_call>", close="</tool_call>", bodies=(JsonCalls(),), marks=("<tool_call>", "</tool_call>")
)
MINIMAX_CALLS = CallFormat(
    open="<tool_calls>", close="</tool_calls>", bodies=(JsonCalls(),), marks=("<tool_calls>", "</tool_calls>")
)
NEMOTRON_CALLS = CallFormat(
    open="<TOOLCALL>", close="</TOOLCALL>", bodies=(JsonCalls(in_array=True),), marks=("<TOOLCALL>", "</TOOLCALL>")
)
GRANITE_CALLS = CallFormat(open="<|tool_call|>", close="", bodies=(JsonCalls(in_array=True),), marks=("<|tool_call|>",))
LLAMA_3_CALLS = CallFormat(
    open="<|python_tag|>", close="", bodies=(JsonCalls(may_stand_alone=True),), marks=("<|python_tag|>",)
)
MISTRAL_CALLS = CallFormat(
    open="[TOOL_CALLS]",
    close="",
    bodies=(JsonCalls(in_array=True), NamedCalls(before_id="[CALL_ID]", before_arguments="[ARGS]")),
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
GEMMA_4_CALLS = CallFormat(
    open="<|tool_call>",
    close="<tool_call|>",
    bodies=(NamedCalls(before_name="call:", dialect=Dialect(quote='<|"|>', has_bare_keys=True)),),
    marks=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
_FUNCTION_TAGS = TaggedCalls(
    open="<function=",
    close="</function>",
    name_end=">",
    key_open="<parameter=",
    key_close=">",
    value_open="",
    value_close="</parameter>",
    has_lines=True,
)
QWEN_3_CODER_CALLS = CallFormat(
    open="<tool_call>", close="</tool_call>", bodies=(_FUNCTION_TAGS,), marks=("<tool_call>", "</tool_call>")
)
SEED_CALLS = CallFormat(
    open="<seed:tool_call>",
    close="</seed:tool_call>",
    bodies=(_FUNCTION_TAGS,),
    marks=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX_M2_CALLS = CallFormat(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    bodies=(
        TaggedCalls(
            open='<invoke name="',
            close="</invoke>",
            name_end='">',
            key_open='<parameter name="',
            key_close='">',
            value_open="",
            value_close="</parameter>",
            has_lines=False,
        ),
    ),
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM_4_CALLS = CallFormat(
    open="<tool_call>",
    close="</tool_call>",
    bodies=(
        TaggedCalls(
            open="",
            close="",
            name_end="",
            key_open="<arg_key>",
            key_close="</arg_key>",
            value_open="<arg_value>",
            value_close="</arg_value>",
            has_lines=False,
        ),
    ),
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
HARMONY = Channels(
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    thought="analysis",
    before_name="functions.",
)
