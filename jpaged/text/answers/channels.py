"""Reads answers that are messages to channels, as gpt-oss writes them (OpenAI's format harmony).

A message is a header, a mark, a text and an end mark. The header names the channel, which says what the text is, and
for a call the recipient, before or behind the channel:
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.
"""

from __future__ import annotations

import re

from .answer_writer import AnswerWriter, Call, TextRun
from .cursor import Cursor, Literals, Reader
from .formats import Channels
from .json_text import JsonText, read_json

_RECIPIENT = re.compile(r"to=([^\s\ud800-\udfff<]+)")


class ChannelReader:
    """The reader of one answer."""

    def __init__(self, cursor: Cursor, writer: AnswerWriter, channels: Channels):
        self._cursor = cursor
        self._writer = writer
        self._channels = channels
        self._header_marks = Literals((channels.start, channels.channel, channels.message))
        self._message = Literals((channels.message, *channels.ends))
        self._ends = Literals((*channels.ends, channels.start))
        self._channel = re.compile(re.escape(channels.channel) + r"\s*(\w+)")

    def read(self) -> Reader[None]:
        """Read the whole output."""
        cursor, content = self._cursor, self._writer.content
        while True:
            mark = yield from cursor.take_until(self._header_marks, content.write)
            if not mark:
                break
            yield from self._read_message()
        content.finish()

    def _read_message(self) -> Reader[None]:
        """Read a message from the first mark of its header on."""
        cursor, writer, channels = self._cursor, self._writer, self._channels
        cursor.record()
        header: list[str] = []
        mark = yield from cursor.take_until(self._message, header.append)
        cursor.place += len(mark)
        if mark != channels.message:
            writer.content.write(cursor.recorded())
            return
        text = "".join(header)
        channel = self._channel.search(text)
        recipient = _RECIPIENT.search(text)
        if recipient is not None and writer.has_calls:
            yield from self._read_call(recipient[1].removeprefix(channels.before_name))
            return
        if recipient is None:
            cursor.forget()
        is_thought = channel is not None and channel[1] == channels.thought
        if recipient is None and is_thought and writer.has_thoughts:
            writer.content.mark()
            writer.reasoning.mark()
            writer.num_thought_edges += 1
            mark = yield from self._read_text(writer.reasoning)
            writer.num_thought_edges += bool(mark)
        else:
            if recipient is not None:
                writer.content.write(cursor.recorded())
            else:
                writer.content.mark()
            yield from self._read_text(writer.content)

    def _read_text(self, run: TextRun) -> Reader[str]:
        """Read a text up to and with its end mark; return the mark, "" if there is none."""
        mark = yield from self._cursor.take_until(self._ends, run.write)
        if mark in self._channels.ends:
            self._cursor.place += len(mark)
        return mark

    def _read_call(self, name: str) -> Reader[None]:
        """Read the arguments of a call, and what stands behind them up to the end mark."""
        cursor, writer = self._cursor, self._writer
        call = Call(writer)
        if not call.announce(name):
            writer.content.write(cursor.recorded())
            mark = yield from cursor.take_until(self._ends, writer.content.write)
            if mark in self._channels.ends:
                writer.content.write(mark)
                cursor.place += len(mark)
            return
        cursor.forget()
        lost = ""
        if call.is_custom:
            yield from cursor.take_until(self._ends, lambda text: call.write(text.translate(writer.mark_texts)))
        else:
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) == "{":
                out = JsonText(call.write)
                if not (yield from read_json(cursor, out, writer.mark_texts)):
                    lost = "".join(out.held)
                    out.close()
        call.end()
        if lost and (yield from cursor.peek()):
            writer.content.write(lost)
        yield from self._read_text(writer.content)
