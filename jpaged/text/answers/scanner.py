"""Tells thoughts, content and tool calls of an answer apart while the model writes it."""

from __future__ import annotations

from collections.abc import Sequence

from ...messages import AnswerSpec
from ...outputs import Mark
from .answer_writer import AnswerWriter
from .bound_format import BoundFormat
from .channels import ChannelReader
from .cursor import WHITESPACE, Cursor, Literals, Reader
from .events import Event
from .formats import AnswerFormat, CallFormat, Channels, JsonCalls, TaggedCalls
from .json_calls import read_json_calls
from .marked_text import MarkedText
from .named_calls import read_named_call
from .tagged_calls import read_tagged_calls


class AnswerScanner:
    """The scanner of one answer.

    Joined over any cuts of the output, the events are the same as those of the whole output in one piece. Time and
    memory are linear in its length.
    """

    def __init__(self, format: BoundFormat, spec: AnswerSpec):
        """Begin an answer to a request of which `spec` tells; `format` is the model's."""
        self._cursor = Cursor()
        self._writer = AnswerWriter(spec, format)
        channels, writer = format.format.channels, self._writer
        thought = format.format.thought if writer.has_thoughts else None
        calls = format.format.calls if writer.has_calls else None
        marks = [mark for part in (thought, calls, channels) if part is not None for mark in part.marks]
        self._marked_text = MarkedText(format, marks, skip_special_tokens=spec.skip_special_tokens)
        opening = format.with_chars(spec.opening)
        if channels is None:
            self._reader = _Reader(self._cursor, self._writer, format.format, opening).read()
            next(self._reader)
        else:
            self._reader = ChannelReader(self._cursor, self._writer, channels).read()
            next(self._reader)
            # What the prompt has written is read too, and makes no events.
            self._cursor.feed(opening)
            next(self._reader)
            self._cursor.start_anew()
            self._writer.start_anew()

    @property
    def num_thought_edges(self) -> int:
        """Return the number of beginnings and ends of thoughts so far, the prompt's included: odd within a thought."""
        return self._writer.num_thought_edges

    def feed(self, text: str, marks: Sequence[Mark] = ()) -> list[Event]:
        """Read the next piece of the output, and return the events that it makes certain.

        `marks` are the tokens among `text` that are marks, as `SampleDelta` has them.
        """
        if marks or self._marked_text.mark is not None:
            text = self._marked_text.feed(text, marks)
        run = self._cursor.run
        if run is not None and run[0].search(text) is None:  # As for most tokens: the reader would do the same.
            run[1](text)
        else:
            self._cursor.feed(text)
            next(self._reader)
        return self._writer.take()

    def finish(self) -> list[Event]:
        """End the answer, wherever it is: return the events of what was held back, and close a call that is open."""
        self._cursor.feed(self._marked_text.finish())
        self._cursor.is_final = self._writer.is_final = True
        next(self._reader, None)
        return self._writer.take()


class _Reader:
    """The reader of an answer that is one text with marks in it."""

    def __init__(self, cursor: Cursor, writer: AnswerWriter, format: AnswerFormat, opening: str):
        self._cursor = cursor
        self._writer = writer
        calls, thought = format.calls, format.thought
        assert not isinstance(calls, Channels)
        assert not isinstance(thought, Channels)
        self._calls = calls if writer.has_calls else None
        self._thought = thought if writer.has_thoughts else None
        self._opening = opening
        others = [self._thought.open, *self._thought.dropped] if self._thought else []
        begins = _begins(self._calls) if self._calls else ()
        end = [self._calls.close] if self._calls and self._calls.close else []
        self._marks = Literals([*others, *begins])
        self._marks_with_end = Literals([*others, *begins, *end])

    def read(self) -> Reader[None]:
        """Read the whole output."""
        cursor, content, thought, calls = self._cursor, self._writer.content, self._thought, self._calls
        if thought is not None:
            opening = self._opening.rstrip(WHITESPACE)
            if opening.rfind(thought.open) > opening.rfind(thought.close):
                yield from self._read_thought(thought.close, is_begun=not opening.endswith(thought.open))
            elif opening.endswith(thought.close):
                content.mark()
        may_stand_alone = calls is not None and JsonCalls(may_stand_alone=True) in calls.bodies
        marks = self._marks
        while True:
            if may_stand_alone and not content.has_text:
                yield from cursor.skip_whitespace(content.write)
                if (yield from cursor.peek()) == "{":
                    cursor.record()
                    yield from read_json_calls(cursor, self._writer, stands_alone=True)
            mark = yield from cursor.take_until(marks, content.write)
            if not mark:
                break
            if calls is not None and mark in _begins(calls):
                is_announced = yield from self._read_calls(calls, mark)
                marks = self._marks_with_end if is_announced else self._marks
                continue
            cursor.place += len(mark)
            content.mark()
            if thought is not None and mark == thought.open:
                yield from self._read_thought(thought.close, is_begun=False)
            else:
                marks = self._marks
        content.finish()

    def _read_thought(self, close: str, *, is_begun: bool) -> Reader[None]:
        """Read a thought, of which the prompt has begun the text if `is_begun`, up to and with its end mark."""
        cursor, reasoning = self._cursor, self._writer.reasoning
        if not is_begun:
            reasoning.mark()
        self._writer.num_thought_edges += 1
        mark = yield from cursor.take_until(Literals([close]), reasoning.write)
        self._writer.num_thought_edges += bool(mark)
        cursor.place += len(mark)
        self._writer.content.mark()

    def _read_calls(self, calls: CallFormat, mark: str) -> Reader[bool]:
        """Read calls from `mark` on; return whether the rest up to their end mark belongs to them."""
        cursor = self._cursor
        cursor.record()
        body = calls.bodies[0]
        if mark == calls.open:
            cursor.place += len(mark)
            if len(calls.bodies) > 1:
                yield from cursor.skip_whitespace()
                is_json = (yield from cursor.peek()) in ("{", "[")
                body = next(body for body in calls.bodies if isinstance(body, JsonCalls) == is_json)
        if isinstance(body, JsonCalls):
            return (yield from read_json_calls(cursor, self._writer, stands_alone=False))
        if isinstance(body, TaggedCalls):
            return (yield from read_tagged_calls(cursor, self._writer, body, calls))
        return (yield from read_named_call(cursor, self._writer, body))


def _begins(calls: CallFormat) -> tuple[str, ...]:
    """Return the mark before calls, and the texts by which calls may begin where it is missing."""
    return calls.open, *(body.open for body in calls.bodies if isinstance(body, TaggedCalls) and body.open)
