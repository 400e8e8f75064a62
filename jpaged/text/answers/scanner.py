"""Tells thoughts, content and tool calls of an answer apart while the model writes it."""

from __future__ import annotations

from collections.abc import Sequence

from ...messages import AnswerSpec
from ...outputs import Mark
from .answer_writer import AnswerWriter
from .bound_format import BoundFormat
from .cursor import Cursor, Literals, Reader
from .events import Event
from .formats import CallFormat, ThoughtFormat
from .json_calls import read_json_calls
from .marked_text import MarkedText


class AnswerScanner:
    """The scanner of one answer.

    Joined over any cuts of the output, the events are the same as those of the whole output in one piece. Time and
    memory are linear in its length.
    """

    def __init__(self, format: BoundFormat, spec: AnswerSpec):
        """Begin an answer to a request of which `spec` tells; `format` is the model's."""
        has_calls = spec.tools is None or bool(spec.tools)
        self._thought: ThoughtFormat | None = format.format.thought if spec.has_thoughts else None
        self._calls: CallFormat | None = format.format.calls if has_calls else None
        self._writer = AnswerWriter(spec, format.mark_texts)
        self._cursor = Cursor()
        self._marked_text = MarkedText(format, skip_special_tokens=spec.skip_special_tokens)
        opens_thought = [self._thought.open] if self._thought else []
        opens_call = [self._calls.open] if self._calls else []
        close = [self._calls.close] if self._calls and self._calls.close else []
        self._marks = Literals(opens_thought + opens_call)
        self._marks_to_close = Literals(opens_thought + opens_call + close)
        self._marks_now = Literals(opens_thought)  # A call that the prompt has begun is text.
        self._reader = self._read_answer()
        next(self._reader)
        if spec.opening:
            self._cursor.feed(self._marked_text.shown(spec.opening))
            next(self._reader)
            self._cursor.drop()
            self._writer.start_anew()
        self._marks_now = self._marks

    def feed(self, text: str, marks: Sequence[Mark] = ()) -> list[Event]:
        """Read the next piece of the output, and return the events that it makes certain.

        `marks` are the tokens among `text` that are marks, as `SampleDelta` has them.
        """
        self._cursor.feed(self._marked_text.feed(text, marks))
        next(self._reader)
        return self._writer.take()

    def finish(self) -> list[Event]:
        """End the answer, wherever it is: return the events of what was held back, and close a call that is open."""
        self._cursor.feed(self._marked_text.finish())
        self._cursor.is_final = True
        next(self._reader, None)
        return self._writer.take()

    def _read_answer(self) -> Reader[None]:
        """Read the whole output."""
        cursor, content = self._cursor, self._writer.content
        while True:
            mark = yield from cursor.take_until(lambda: self._marks_now, content.write)
            if not mark:
                break
            if self._thought and mark == self._thought.open:
                cursor.place += len(mark)
                content.mark()
                yield from self._read_thought(self._thought)
            elif self._calls and mark == self._calls.open:
                yield from self._read_calls(self._calls)
            else:
                cursor.place += len(mark)
                content.mark()
                self._marks_now = self._marks
        content.finish()

    def _read_thought(self, thought: ThoughtFormat) -> Reader[None]:
        """Read a thought up to and with its end mark."""
        close = Literals([thought.close])
        reasoning = self._writer.reasoning
        reasoning.mark()
        mark = yield from self._cursor.take_until(lambda: close, reasoning.write)
        self._cursor.place += len(mark)

    def _read_calls(self, calls: CallFormat) -> Reader[None]:
        """Read calls from their mark on; what is left of them up to their end mark is content."""
        cursor = self._cursor
        cursor.record()
        cursor.place += len(calls.open)
        is_announced = yield from read_json_calls(cursor, self._writer, stands_alone=False)
        self._marks_now = self._marks_to_close if is_announced else self._marks
