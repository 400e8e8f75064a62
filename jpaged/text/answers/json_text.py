"""JSON that a model writes, passed on while it is written so that it can be closed at any time.

What `JsonText` has passed on becomes valid JSON by its closing quotes, brackets and braces alone. So a key is passed on
together with its colon and the first character of its value, a number or a literal as a whole, and an escape as a
whole. Numbers and whitespace stay as they were written. Strings are mended, never refused: a control character becomes
its escape, a backslash that begins no escape is doubled, and half a surrogate pair becomes U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from string import hexdigits

from .cursor import Chars, Cursor, Literals, Reader

MAX_DEPTH = 500
"""JSON nested deeper is refused: Python's own parser cannot read it."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERAL_CHARS = Chars(r"-+.0-9A-Za-z")
_PLAIN_CHARS = Chars(r"""^"'\\\x00-\x1f\ud800-\udfff""")
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')
_SPECIAL_CHAR = re.compile(r"""["'\x00-\x1f\ud800-\udfff]""")
_BARE_KEY_CHARS = Chars(r'^":=,{}\[\]\s\ud800-\udfff')
_HIGH_ESCAPE, _LOW_ESCAPE = re.compile(r"\\u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F]")
_BACKSLASH = r"\\"
_LONE = r"\ufffd"
"""What half a surrogate pair becomes."""
KEY = "key"
MAX_AHEAD = 200
"""Characters behind a mark that may end a string at which is looked to tell whether it does."""


@dataclass(frozen=True)
class StringEnd:
    """What follows a string's end, and of what a part may still become it."""

    whole: re.Pattern[str]
    part: re.Pattern[str]

    def follows(self, cursor: Cursor, start: int) -> Reader[bool]:
        """Return whether it stands `start` characters behind the cursor's place; nothing is taken.

        At the end of the text a part is enough.
        """
        while True:
            place = cursor.place + start
            end = min(len(cursor.text), place + MAX_AHEAD)
            if self.whole.match(cursor.text, place, end):
                return True
            if end == place + MAX_AHEAD or not self.part.fullmatch(cursor.text, place, end):
                return False
            if not (yield from cursor.more()):
                return True


def _prefixes(text: str) -> str:
    """Return a pattern of the beginnings of `text`."""
    return "|".join(re.escape(text[:size]) for size in range(1, len(text))) or "(?!)"


@dataclass(frozen=True)
class Dialect:
    """How a format writes JSON where it differs."""

    quote: str = ""
    """A mark that begins and ends strings without escapes, besides JSON's own strings; empty if there is none. Within a
    string it stands for a quotation mark: it is the end only where what may follow a string does."""
    has_bare_keys: bool = False
    """Keys may stand without quotes. Models that write so slip into Python: strings in single quotes, and = for a
    colon, are read too."""

    @cached_property
    def quotes(self) -> Literals:
        """Return what may begin a string."""
        return Literals(filter(None, ('"', self.quote, "'" if self.has_bare_keys else "")))

    @cached_property
    def ends(self) -> dict[str, StringEnd]:
        """Return what may follow a string's end: of a key, of a value in an object, and of one in an array."""
        key = rf"\s*(?:[\w.$-]+\s*[:=]|{re.escape(self.quote)}|\")"
        half_key = rf"\s*(?:[\w.$-]*\s*|{_prefixes(self.quote)})?"
        return {
            KEY: StringEnd(re.compile(r"\s*[:=]"), re.compile(r"\s*")),
            "}": StringEnd(re.compile(rf"\s*(?:\}}|,{key})"), re.compile(rf"\s*(?:,{half_key})?")),
            "]": StringEnd(re.compile(r"\s*[\],]"), re.compile(r"\s*")),
        }


JSON = Dialect()


@dataclass
class JsonText:
    """JSON on its way to `emit`: what has been passed on can be closed by `closers`."""

    emit: Callable[[str], None]
    closers: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Text that is passed on with the next value's first character."""

    def hold(self, text: str) -> None:
        """Keep text that must not be the last."""
        self.held.append(text)

    def write(self, text: str) -> None:
        """Pass on text that may be the last, after what is held."""
        if self.held:
            text = "".join(self.held) + text
            self.held.clear()
        self.emit(text)

    def open(self, text: str, closer: str) -> None:
        """Pass on the first character of a string, an array or an object."""
        self.write(text)
        self.closers.append(closer)

    def close_one(self) -> None:
        """Close the innermost string, array or object."""
        self.write(self.closers.pop())

    def close(self) -> None:
        """Make what was passed on valid JSON; what is held is dropped."""
        self.held.clear()
        if self.closers:
            self.emit("".join(reversed(self.closers)))
            self.closers.clear()


def escaped(text: str) -> str:
    """Return text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1] if _TO_ESCAPE.search(text) else text


def unescaped(text: str) -> str:
    """Return the text of a piece of a JSON string in which no escape is cut."""
    return str(json.loads(f'"{text}"')) if "\\" in text else text


def read_json(cursor: Cursor, out: JsonText, mark_texts: dict[int, str], dialect: Dialect = JSON) -> Reader[bool]:
    """Read one value into `out`; return whether it is complete.

    Return False where the text ends or is no JSON. `out` then holds what was taken and not passed on, and is open.
    `mark_texts` are the texts of characters that stand for marks, as for `str.translate`.
    """
    bottom = len(out.closers)
    is_first = False  # Directly behind the opening of an array or object.
    while True:
        # A value, or the end of an empty array or object.
        yield from cursor.skip_whitespace(out.hold)
        in_object = len(out.closers) > bottom and out.closers[-1] == "}"
        char = yield from cursor.peek()
        if is_first and char == out.closers[-1]:
            cursor.place += 1
            out.close_one()
        else:
            if in_object:
                if not (yield from _read_key(cursor, out, mark_texts, dialect)):
                    return False
                yield from cursor.skip_whitespace(out.hold)
                char = yield from cursor.peek()
            if char and char in "{[":
                if len(out.closers) >= MAX_DEPTH:
                    return False
                cursor.place += 1
                out.open(char, "}" if char == "{" else "]")
                is_first = True
                continue
            quote = yield from cursor.begins(dialect.quotes)
            if quote:
                cursor.place += len(quote)
                end = dialect.ends[out.closers[-1]] if quote == dialect.quote and out.closers else None
                out.open('"', '"')  # Nothing is held behind it.
                if not (yield from read_string(cursor, out.emit, mark_texts, quote, end)):
                    return False
                out.close_one()
            elif not (yield from _read_literal(cursor, out)):
                return False
        # Behind a value: closers and commas up to the next value.
        while len(out.closers) > bottom:
            yield from cursor.skip_whitespace(out.hold)
            char = yield from cursor.peek()
            if char == ",":
                cursor.place += 1
                out.hold(",")
                break
            if char != out.closers[-1]:
                return False
            cursor.place += 1
            out.close_one()
        else:
            return True
        is_first = False


def read_string(
    cursor: Cursor,
    keep: Callable[[str], None],
    mark_texts: dict[int, str],
    quote: str = '"',
    end: StringEnd | None = None,
) -> Reader[bool]:
    """Read a string up to and with its closing `quote`; return False if the text ends before.

    The pieces given to `keep` are valid within a JSON string. With `end`, the string has no escapes, and a `quote` that
    `end` does not follow is a quotation mark.
    """
    if end is not None:
        return (yield from _read_marked_string(cursor, keep, mark_texts, quote, end))
    high = ""  # The escape of a high surrogate, which waits for the low one.
    while True:
        char = yield from cursor.peek()
        if not char:
            return False
        if high and char != "\\":
            keep(_LONE)
            high = ""
        if char == "\\":
            escape = yield from _read_escape(cursor, quote)
            if not escape:
                return False
            if high and _LOW_ESCAPE.match(escape):
                keep(high + escape)
                high = ""
                continue
            if high:
                keep(_LONE)
            high = escape if _HIGH_ESCAPE.match(escape) else ""
            if not high:
                keep(_LONE if _LOW_ESCAPE.match(escape) else escape)
        elif char == quote:
            cursor.place += 1
            return True
        elif _SPECIAL_CHAR.match(char):
            cursor.place += 1
            keep(escaped(char.translate(mark_texts)))
        else:
            yield from cursor.take(_PLAIN_CHARS, keep)


def _read_marked_string(
    cursor: Cursor, keep: Callable[[str], None], mark_texts: dict[int, str], quote: str, end: StringEnd
) -> Reader[bool]:
    """Read a string that ends at a `quote` which `end` follows."""
    marks = Literals([quote])
    while (yield from cursor.take_until(marks, lambda text: keep(escaped(text.translate(mark_texts))))):
        if (yield from end.follows(cursor, len(quote))):
            cursor.place += len(quote)
            return True
        cursor.place += len(quote)
        keep('\\"')
    return False


def _read_escape(cursor: Cursor, quote: str) -> Reader[str]:
    """Read an escape and return it, mended if it is none; return "" if the text ends before it is complete."""
    cursor.place += 1
    char = yield from cursor.peek()
    if char and char in '"\\/bfnrt':
        cursor.place += 1
        return "\\" + char
    if char and char == quote:  # Python's escape of a single quote.
        cursor.place += 1
        return char
    if char != "u":
        return char and _BACKSLASH
    cursor.place += 1
    digits = ""
    while len(digits) < 4:
        char = yield from cursor.peek()
        if not char:
            return ""
        if char not in hexdigits:
            return f"{_BACKSLASH}u{digits}"
        digits += char
        cursor.place += 1
    return f"\\u{digits}"


def _read_key(cursor: Cursor, out: JsonText, mark_texts: dict[int, str], dialect: Dialect) -> Reader[bool]:
    """Read a key and its colon, which wait for the value; return whether they are complete."""
    quote = yield from cursor.begins(dialect.quotes)
    if quote:
        cursor.place += len(quote)
        out.hold('"')
        end = dialect.ends[KEY] if quote == dialect.quote else None
        if not (yield from read_string(cursor, out.hold, mark_texts, quote, end)):
            return False
    else:
        key: list[str] = []
        if dialect.has_bare_keys:
            yield from cursor.take(_BARE_KEY_CHARS, lambda text: key.append(escaped(text)))
        if not key:
            return False
        out.hold('"' + "".join(key))
    out.hold('"')
    yield from cursor.skip_whitespace(out.hold)
    char = yield from cursor.peek()
    if char != ":" and not (char == "=" and dialect.has_bare_keys):
        return False
    cursor.place += 1
    out.hold(":")
    return True


def _read_literal(cursor: Cursor, out: JsonText) -> Reader[bool]:
    """Read a number, true, false or null; return False, and hold it, if it is none of them.

    A number at the end of the text may be a part of a longer one, and is not complete within an array or object.
    """
    pieces: list[str] = []
    yield from cursor.take(_LITERAL_CHARS, pieces.append)
    text = "".join(pieces)
    is_cut = bool(out.closers) and not (yield from cursor.peek())
    if is_cut or (text not in ("true", "false", "null") and not _NUMBER.fullmatch(text)):
        out.hold(text)
        return False
    out.write(text)
    return True
