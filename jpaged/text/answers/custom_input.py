"""Takes the input of a custom tool, which is text, out of the arguments that a model writes for it.

A model is shown a custom tool as a function with the parameter `input`. It writes {"input": "…"}, or where its format
allows it, the text alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..chat.tools import CUSTOM_ARGUMENT
from .cursor import Cursor, PushReader, Reader
from .json_text import JsonText, read_json, read_string, unescaped


class CustomInput:
    """The arguments of one call on their way to the text of its input."""

    def __init__(self, emit: Callable[[str], None]):
        self._emit = emit
        self._reader = PushReader(self._read)

    def write(self, text: str) -> None:
        """Add a piece of the arguments."""
        self._reader.feed(text)

    def finish(self) -> None:
        """Emit what is held: arguments that are no object with an input are the input themselves."""
        self._reader.finish()

    def _read(self, cursor: Cursor) -> Reader[bool]:
        """Emit the value of `input` if the text is an object that has it, and any other text as it is."""
        cursor.record()
        if (yield from self._read_object(cursor)):
            return True
        self._emit(cursor.recorded())
        while (yield from cursor.peek()):
            self._emit(cursor.text[cursor.place :])
            cursor.drop()
        return True

    def _read_object(self, cursor: Cursor) -> Reader[bool]:
        """Emit the value of `input` in an object, and take the rest; return False if there is none.

        An empty object, which also stands for a call that ends before its arguments, is an input without text.
        """
        yield from cursor.skip_whitespace()
        separator = "{"
        while (yield from cursor.peek()) == separator:
            cursor.place += 1
            yield from cursor.skip_whitespace()
            key: list[str] = []
            char = yield from cursor.peek()
            if char == "}" and separator == "{":
                cursor.place += 1
                yield from cursor.skip_whitespace()
                return not (yield from cursor.peek())
            if char != '"':
                return False
            cursor.place += 1
            if not (yield from read_string(cursor, key.append, {}, '"')):
                return False
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) != ":":
                return False
            cursor.place += 1
            yield from cursor.skip_whitespace()
            if unescaped("".join(key)) == CUSTOM_ARGUMENT and (yield from cursor.peek()) == '"':
                cursor.forget()
                cursor.place += 1
                yield from read_string(cursor, lambda piece: self._emit(unescaped(piece)), {}, '"')
                while (yield from cursor.peek()):
                    cursor.drop()
                return True
            if not (yield from read_json(cursor, JsonText(lambda _: None), {})):
                return False
            yield from cursor.skip_whitespace()
            separator = ","
        return False
