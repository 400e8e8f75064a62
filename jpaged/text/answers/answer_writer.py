"""Makes the events of an answer from the texts and calls that readers find in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...messages import AnswerSpec
from .bound_format import BoundFormat
from .cursor import WHITESPACE
from .custom_input import CustomInput
from .events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning


class TextRun:
    """Pieces of content or of thoughts, without the whitespace that stands beside marks."""

    __slots__ = ("_default_separator", "_held", "_kind", "_separator", "_writer", "has_text", "is_at_mark")

    def __init__(self, writer: AnswerWriter, kind: type[Content] | type[Reasoning], default_separator: str = ""):
        """`default_separator` stands between two texts where the model wrote no whitespace beside the mark."""
        self._writer = writer
        self._kind = kind
        self._default_separator = default_separator
        self._held: list[str] = []
        self._separator = ""
        self.is_at_mark = False
        """A mark was the last thing: whitespace is dropped."""
        self.has_text = False

    def write(self, text: str) -> None:
        """Add a piece of text. What costs most tokens of an answer is done in few steps."""
        written = text.rstrip(WHITESPACE)
        if not written:
            if text:
                self._held.append(text)
            return
        num_written = len(written)
        if self.is_at_mark:
            stripped = written.lstrip(WHITESPACE)
            before = "".join(self._held) + written[: num_written - len(stripped)]
            written = (self._separator or before or self._default_separator) + stripped if self.has_text else stripped
            self.is_at_mark = False
            self._held.clear()
        elif self._held:
            written = "".join(self._held) + written
            self._held.clear()
        self.has_text = True
        if num_written < len(text):
            self._held.append(text[num_written:])
        writer = self._writer
        if not written.isascii():  # No mark's character is ASCII.
            written = written.translate(writer.mark_texts)
        writer.events.append(self._kind(written))

    def mark(self) -> None:
        """Note a mark: whitespace before it and behind it is dropped, unless text stands on both sides."""
        if not self.is_at_mark:
            self._separator = "".join(self._held)
        self.is_at_mark = True
        self._held.clear()

    def start_anew(self) -> None:
        """Forget what was written, but not that a mark was the last thing."""
        self._held.clear()
        self.has_text = False

    def finish(self) -> None:
        """Emit whitespace at the end, unless a mark stands before it."""
        if self._held and not self.is_at_mark:
            self._writer.events.append(self._kind("".join(self._held)))
        self._held.clear()


class Call:
    """One call while it is read. It is announced as soon as it has the name of a tool."""

    def __init__(self, writer: AnswerWriter):
        self.name: str | None = None
        self.index = -1
        """Its number among the answer's calls; -1 until it is announced."""
        self.lost = ""
        """What was read for the arguments and is none, since the text broke off."""
        self._writer = writer
        self._held: list[str] = []
        self._has_arguments = False
        self._custom: CustomInput | None = None

    @property
    def is_announced(self) -> bool:
        """Return whether the call's start has been emitted."""
        return self.index >= 0

    @property
    def is_custom(self) -> bool:
        """Return whether it is an announced call of a custom tool."""
        return self._custom is not None

    @property
    def types(self) -> Mapping[str, tuple[str, ...]]:
        """Return the types of the tool's parameters, empty if they are not known."""
        return (self._writer.spec.tools or {}).get(self.name or "", {})

    def announce(self, name: str) -> bool:
        """Give the call its name, and announce it if a tool has it; return whether it has been."""
        assert not self.is_announced
        self.name = name
        writer = self._writer
        if not name or (writer.spec.tools is not None and name not in writer.spec.tools):
            return False
        self.index = writer.num_calls
        writer.num_calls += 1
        writer.content.mark()
        is_custom = name in writer.spec.custom_tools
        writer.events.append(CallStart(self.index, name, is_custom))
        if is_custom:
            self._custom = CustomInput(self._emit)
        if self._held:
            self.write("".join(self._held))
            self._held.clear()
        return True

    def write(self, text: str) -> None:
        """Add a piece of the arguments: of JSON, or of a custom tool's input."""
        self._has_arguments = True
        if self.index < 0:
            self._held.append(text)
        elif self._custom is None:
            self._emit(text)
        else:
            self._custom.write(text)

    def end(self) -> None:
        """End an announced call."""
        if not self._has_arguments:
            self.write("{}")
        if self._custom is not None:
            self._custom.finish()
        self._writer.content.mark()
        self._writer.events.append(CallEnd(self.index, is_cut=self._writer.is_final))

    def _emit(self, text: str) -> None:
        if text:
            self._writer.events.append(CallArguments(self.index, text))


class AnswerWriter:
    """The events of one answer."""

    def __init__(self, spec: AnswerSpec, format: BoundFormat):
        self.spec = spec
        self.has_calls = format.format.calls is not None and (spec.tools is None or bool(spec.tools))
        """Calls are looked for."""
        self.has_thoughts = format.format.thought is not None and spec.has_thoughts
        """Thoughts are told apart."""
        self.mark_texts = format.mark_texts
        self.events: list[Event] = []
        """What has not been taken yet."""
        # Messages to channels are texts of their own; other marks stand within one text.
        between = "\n" if format.format.channels else ""
        self.content = TextRun(self, Content, default_separator=between)
        self.reasoning = TextRun(self, Reasoning, default_separator="\n")
        self.reasoning.mark()
        self.is_final = False
        """The output has ended: what is still read is what was held back."""
        self.num_thought_edges = 0
        """Beginnings and ends of thoughts so far, the prompt's beginning included: odd within a thought."""
        self.num_calls = 0

    def start_anew(self) -> None:
        """Take what was written for a part of the prompt: it makes no events, but the marks in it count."""
        self.events = []
        self.content.start_anew()
        self.reasoning.start_anew()

    def take(self) -> list[Event]:
        """Return the events since the last call, pieces of one text joined."""
        events, self.events = self.events, []
        return events if len(events) < 2 else list(_joined(events))


def _joined(events: list[Event]) -> Iterator[Event]:
    """Yield events with neighbouring pieces of one text joined; pieces of two calls are never neighbours."""
    for kind, run in itertools.groupby(events, type):
        if kind is CallStart or kind is CallEnd:
            yield from run
            continue
        pieces: list[Any] = list(run)
        yield (
            pieces[0] if len(pieces) == 1 else msgspec.structs.replace(pieces[0], text="".join(p.text for p in pieces))
        )
