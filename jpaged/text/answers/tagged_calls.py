"""Reads calls whose arguments are tags with a key and a text each.

A value may hold anything, the texts of tags too. So an end tag counts only where what must come next follows, and a
value whose end tag is missing ends at the next tag that fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from .answer_writer import AnswerWriter, Call
from .cursor import WHITESPACE, Chars, Cursor, Literals, Reader
from .formats import CallFormat, TaggedCalls
from .json_text import JsonText, escaped
from .typed_text import NULLS, is_text, is_text_or_null, json_of_text

_NAME_CHARS = Chars(r'^<>"\s\ud800-\udfff')
_KEY_CHARS = Chars(r'^<>"\n\ud800-\udfff')


def read_tagged_calls(cursor: Cursor, writer: AnswerWriter, body: TaggedCalls, calls: CallFormat) -> Reader[bool]:
    """Read calls, one behind another; return whether what follows up to the end mark belongs to them.

    The cursor keeps a record from the mark before the calls on. What is no call becomes content.
    """
    is_announced = False
    begins = Literals([body.open]) if body.open else None
    while True:
        yield from cursor.skip_whitespace()
        if begins is not None and not (yield from cursor.begins(begins)):
            break
        cursor.place += len(body.open)
        tagged = _TaggedCall(cursor, writer, body, calls)
        is_complete = yield from tagged.read()
        if tagged.call.is_announced:
            is_announced = True
            tagged.call.end()
        else:
            writer.content.write(cursor.recorded())
        if not is_complete or tagged.has_taken_end_mark:
            return is_announced and not tagged.has_taken_end_mark
        cursor.record()
        if begins is None:
            break
    rest = cursor.recorded()
    if not is_announced:
        writer.content.write(rest)
    return is_announced


class _TaggedCall:
    """One call."""

    def __init__(self, cursor: Cursor, writer: AnswerWriter, body: TaggedCalls, calls: CallFormat):
        self.cursor = cursor
        self.body = body
        self.calls = calls
        self.call = Call(writer)
        self.out = JsonText(self.call.write)
        self.keys: set[str] = set()
        self.has_taken_end_mark = False
        self._is_over = False
        """All of the call has come, as far as it must."""
        self._mark_texts = writer.mark_texts
        # What may come behind a value, behind the last one, and behind a call.
        self._next_tags = _literals(body.key_open, body.close, calls.close, calls.open)
        self._behind_call = _literals(calls.close, calls.open)
        self._may_end_value = _literals(body.value_close, body.key_open, body.close, calls.close)

    def read(self) -> Reader[bool]:
        """Read a call from its name on; return whether it is complete."""
        if not (yield from self._read_name()):
            return False
        self.out.open("{", "}")
        key = yield from self._read_next_key()
        while key is not None:
            key = yield from self._read_value(key)
        self.out.close()
        return self._is_over

    def _read_name(self) -> Reader[bool]:
        """Read the name and what ends it, and announce the call; return False if there is none."""
        cursor, body = self.cursor, self.body
        pieces: list[str] = []
        yield from cursor.take(_NAME_CHARS, pieces.append)
        if body.name_end:
            if not (yield from cursor.begins(Literals([body.name_end]))):
                return False
            cursor.place += len(body.name_end)
        else:
            # The name ends where the first tag or the end mark begins.
            yield from cursor.skip_whitespace()
            if not (yield from cursor.begins(self._next_tags)):
                return False
        if self.call.announce("".join(pieces)):
            cursor.forget()
        return bool(pieces)

    def _read_next_key(self) -> Reader[str | None]:
        """Read the key of the next tag; return None if the call is over or breaks off."""
        yield from self.cursor.skip_whitespace()
        tag = yield from self.cursor.begins(self._next_tags)
        if tag == self.body.key_open:
            self.cursor.place += len(tag)
            return (yield from self._read_key(lambda _: None))
        self._is_over = bool(tag)
        if tag and tag == self.body.close:
            self.cursor.place += len(tag)
        return None

    def _read_key(self, keep: Callable[[str], None]) -> Reader[str | None]:
        """Read a key and what must stand before its value, giving all to `keep`; return None if it does not."""
        cursor, body = self.cursor, self.body
        pieces: list[str] = []
        yield from cursor.take(_KEY_CHARS, pieces.append)
        key = "".join(pieces)
        keep(key)
        for text in filter(None, (body.key_close, body.value_open)):
            if text == body.value_open:
                yield from cursor.skip_whitespace(keep)
            if not (yield from cursor.begins(Literals([text]))):
                return None
            cursor.place += len(text)
            keep(text)
        return key.strip() or None

    def _read_value(self, key: str) -> Reader[str | None]:
        """Read the value of `key` and what ends it; return the next key, None if the call is over or breaks off."""
        value = _Value(self, key)
        self.keys.add(key)
        while True:
            tag = yield from self.cursor.take_until(self._may_end_value, value.write)
            if not tag:
                return None
            held: list[str] = [tag]
            self.cursor.place += len(tag)
            next_key = yield from self._read_end(tag, held)
            if next_key or self._is_over:
                value.end()
                return next_key
            value.write("".join(held))

    def _read_end(self, tag: str, held: list[str]) -> Reader[str | None]:
        """Decide whether `tag`, which has been taken, ends a value: return the next key, or set `_is_over`.

        If it does not, what was taken is in `held`.
        """
        cursor, body = self.cursor, self.body
        if tag == body.key_open:
            key = yield from self._read_key(held.append)
            return key if key is not None and self._may_follow(key) else None
        yield from cursor.skip_whitespace(held.append)
        if tag == self.calls.close:
            # End tags before it are missing. The end of the output tells that it is no part of the value, and where
            # only the value's own end tag is missing, the mark of the next call.
            is_last = not (yield from cursor.peek())
            begins_next = not body.close and (yield from cursor.begins(Literals([self.calls.open])))
            self._is_over = self.has_taken_end_mark = is_last or bool(begins_next)
            return None
        expected = self._next_tags if tag == body.value_close else self._behind_call
        follows = yield from cursor.begins(expected)
        if not follows:
            # At the end of the output, a part of what must follow is enough.
            rest = cursor.text[cursor.place :]
            self._is_over = cursor.is_final and any(text.startswith(rest) for text in expected.texts)
            cursor.place += len(rest) * self._is_over
        elif follows == body.key_open:
            held.append(follows)
            cursor.place += len(follows)
            key = yield from self._read_key(held.append)
            rest = cursor.text[cursor.place :]
            is_cut = body.key_close.startswith(rest) or body.value_open.startswith(rest)
            self._is_over = key is None and cursor.is_final and is_cut
            return key
        else:
            self._is_over = True
            if tag == body.value_close and follows == body.close:
                cursor.place += len(follows)
        return None

    def _may_follow(self, key: str) -> bool:
        """Return whether a tag with `key` ends a value that has no end tag: it is the tool's, and has not come yet."""
        return key not in self.keys and (key in self.call.types or not self.call.types)


class _Value:
    """The text of one value on its way to the JSON of a call's arguments."""

    def __init__(self, call: _TaggedCall, key: str):
        self._out = call.out
        self._types = call.call.types.get(key, ())
        self._mark_texts = call._mark_texts
        self._has_lines = call.body.has_lines
        self._out.hold(", " if call.keys else "")
        self._out.hold(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._is_text = is_text(self._types)
        self._is_open = False
        self._is_first = True
        self._line_feed = ""
        """A line feed at the end of the text so far, which may belong to the end tag."""
        self._held: list[str] = []
        self._beginning = ""
        """The text so far while it may be null, without leading whitespace; whitespace at its end is one space."""

    def write(self, text: str) -> None:
        """Add a piece of the text, which is not empty."""
        if self._has_lines:
            if self._is_first and text[0] == "\n":
                text = text[1:]
            self._is_first = False
            text = self._line_feed + text
            self._line_feed = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if not self._is_text:
            self._held.append(text)
            if not is_text_or_null(self._types):
                return
            bare = (self._beginning + text).lstrip(WHITESPACE)
            word = bare.rstrip(WHITESPACE)
            if any(null.startswith(word) for null in NULLS):
                self._beginning = word if word == bare else f"{word} "
                return
            self._is_text = True
            text = "".join(self._held)
        if text:
            self._write_text(text)

    def end(self) -> None:
        """End a value that is complete."""
        if self._is_text:
            self._write_text("")
            self._out.close_one()
        else:
            text = "".join(self._held).translate(self._mark_texts)
            self._out.write(json_of_text(text, self._types))

    def _write_text(self, text: str) -> None:
        if not self._is_open:
            self._is_open = True
            self._out.open('"', '"')
        if text:
            self._out.write(escaped(text.translate(self._mark_texts)))


def _literals(*texts: str) -> Literals:
    """Return the texts that are not empty."""
    return Literals(text for text in texts if text)
