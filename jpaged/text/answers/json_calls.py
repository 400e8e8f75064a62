"""Reads calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from .answer_writer import AnswerWriter, Call
from .cursor import Cursor, PushReader, Reader
from .json_text import JsonText, read_json, read_string, unescaped

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", *ARGUMENT_KEYS, "id", "type", "function")
"""Keys that a call which stands alone may have."""


def read_json_calls(cursor: Cursor, writer: AnswerWriter, *, stands_alone: bool) -> Reader[bool]:
    """Read calls, one behind another or in an array; return whether any was announced.

    The cursor keeps a record from the mark before the calls on, or from the first brace if they stand alone. What is no
    call becomes content. What follows the calls, such as their end mark, is not taken.
    """
    is_announced = in_array = False
    separator = ""
    while True:
        yield from cursor.skip_whitespace()
        char = yield from cursor.peek()
        if char == "[" and not (separator or in_array or stands_alone):
            cursor.place += 1
            in_array = True
            continue
        if char != "{":
            break
        call = Call(writer)
        is_complete = yield from _CallObject(cursor, writer, call, stands_alone).read()
        if call.is_announced:
            is_announced = True
            call.end()
            if call.lost and (yield from cursor.peek()):
                writer.content.write(call.lost)
        else:
            writer.content.write(cursor.recorded())
        if not is_complete:
            return is_announced
        cursor.record()
        yield from cursor.skip_whitespace()
        separator = yield from cursor.peek()
        if separator in (",", ";"):
            cursor.place += 1
            continue
        if separator == "]" and in_array:
            cursor.place += 1
        if separator != "{":
            separator = ""
            break
    rest = cursor.recorded()
    # Separators belong to the format, unless something else than a call follows.
    if not is_announced or separator:
        writer.content.write(rest)
    return is_announced


class _CallObject:
    """One object of a call."""

    def __init__(self, cursor: Cursor, writer: AnswerWriter, call: Call, stands_alone: bool):
        self.cursor = cursor
        self.writer = writer
        self.call = call
        self.stands_alone = stands_alone
        self.name: str | None = None
        self.has_arguments = False

    def read(self) -> Reader[bool]:
        """Read the object; return whether it is complete. It is no call if it names no tool."""
        num_open = 1
        cursor = self.cursor
        cursor.place += 1
        is_first = True
        while True:
            yield from cursor.skip_whitespace()
            char = yield from cursor.peek()
            if char == "}" or (char == "," and not is_first):
                cursor.place += 1
                if char == "}":
                    num_open -= 1
                    if not num_open:
                        if not self.stands_alone:
                            self._announce()
                        return True
                    is_first = False
                    continue
                yield from cursor.skip_whitespace()
            elif not is_first:
                return False
            key = yield from self._read_text()
            if key is None or (self.stands_alone and key not in CALL_KEYS):
                return False
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) != ":":
                return False
            cursor.place += 1
            yield from cursor.skip_whitespace()
            char = yield from cursor.peek()
            is_first = key == "function" and char == "{"
            if is_first:
                cursor.place += 1
                num_open += 1
            elif not (yield from self._read_value(key, char)):
                return False

    def _read_value(self, key: str, char: str) -> Reader[bool]:
        """Read the value of `key`, which begins with `char`; return whether it is complete and what it must be."""
        if key in ("name", "function") and char == '"':
            name = yield from self._read_text()
            if name is None:
                return False
            if self.name is None:
                self.name = name
                # An answer in JSON may have a name too: a call that stands alone needs more to be one.
                if not self.stands_alone or self.has_arguments:
                    self._announce()
            return True
        if key not in ARGUMENT_KEYS:
            return (yield from read_json(self.cursor, JsonText(lambda _: None), {}))
        if self.has_arguments:
            return False
        self.has_arguments = True
        self._announce()
        if char == "{":
            out = JsonText(self.call.write)
            is_complete = yield from read_json(self.cursor, out, self.writer.mark_texts)
            if not is_complete:
                self.call.lost = "".join(out.held)
                out.close()
            return is_complete
        if char == '"':
            return (yield from self._read_text_of_arguments())
        nothing: list[str] = []
        out = JsonText(nothing.append)
        is_complete = yield from read_json(self.cursor, out, {})
        if nothing == ["null"]:
            return True
        self.call.lost = "".join(nothing + out.held)
        return False

    def _read_text_of_arguments(self) -> Reader[bool]:
        """Read an object that is written as JSON text in a string."""
        self.cursor.place += 1
        is_text = self.call.is_announced and self.call.is_custom
        out = JsonText(self.call.write)
        lost: list[str] = []
        inner = PushReader(lambda cursor: _read_object(cursor, out, self.writer.mark_texts))

        def keep(piece: str) -> None:
            text = unescaped(piece)
            if is_text:
                self.call.write(text)
            elif inner.result is None:
                inner.feed(text)
            elif not inner.result:
                lost.append(text)

        is_complete = yield from read_string(self.cursor, keep, self.writer.mark_texts, '"')
        if is_text:
            return is_complete
        if not inner.finish():
            self.call.lost = "".join([*out.held, inner.cursor.text[inner.cursor.place :], *lost])
            out.close()
        return is_complete

    def _announce(self) -> bool:
        """Announce the call if it is not and has a name; return whether it is announced."""
        if self.call.is_announced:
            return True
        if self.name is None or self.call.name is not None or not self.call.announce(self.name):
            return False
        self.cursor.forget()
        return True

    def _read_text(self) -> Reader[str | None]:
        """Read a string and return its text; return None if there is none."""
        pieces: list[str] = []
        if (yield from self.cursor.peek()) != '"':
            return None
        self.cursor.place += 1
        if not (yield from read_string(self.cursor, pieces.append, self.writer.mark_texts, '"')):
            return None
        return unescaped("".join(pieces))


def _read_object(cursor: Cursor, out: JsonText, mark_texts: dict[int, str]) -> Reader[bool]:
    """Read a value that must be an object; return whether it is, and is complete."""
    yield from cursor.skip_whitespace()
    if (yield from cursor.peek()) != "{":
        return False
    return (yield from read_json(cursor, out, mark_texts))
