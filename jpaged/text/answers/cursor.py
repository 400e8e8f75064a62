"""Reads a text that is still being written, in order and only once.

A reader is a generator on a `Cursor`. It yields where it needs more text than there is, and is resumed once more has
come or the text has ended. A reader takes what it has seen, so that the cursor keeps no more than the beginning of a
mark: text that awaits a decision lies in lists of pieces, and a long wait costs no more per character than a short one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
WHITESPACE = " \t\n\r"


class Chars:
    """A set of characters."""

    def __init__(self, chars: str):
        """`chars` is what stands between the brackets of a character class."""
        inverse = chars[1:] if chars.startswith("^") else f"^{chars}"
        self.run = re.compile(f"[{chars}]*")
        self.other = re.compile(f"[{inverse}]")


_WHITESPACE = Chars(WHITESPACE)


class Literals:
    """A set of texts to look for at once."""

    def __init__(self, texts: Iterable[str]):
        """Take texts that are not empty. Where two begin at one place, the longer counts."""
        self.texts = tuple(sorted(dict.fromkeys(texts), key=len, reverse=True))
        self._max_prefix = max(map(len, self.texts), default=1) - 1
        first = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self.first_char = re.compile(f"[{first}]") if self.texts else re.compile(r"(?!)")
        self._any = re.compile("|".join(map(re.escape, self.texts))) if self.texts else re.compile(r"(?!)")
        prefixes = {text[:size] for text in self.texts for size in range(1, len(text))}
        self._prefixes = frozenset(prefixes)

    def find(self, text: str, place: int) -> tuple[int, str]:
        """Return (place, literal) of the first literal in `text` from `place` on.

        Without one, return (place of the beginning of a literal that the end of `text` may be, ""). That is the end of
        `text` if it is no such beginning. A literal is found only where no literal can still begin before it.
        """
        if self.first_char.search(text, place) is None:
            return len(text), ""
        found = self._any.search(text, place)
        end = len(text) if found is None else found.start()
        for start in range(max(place, len(text) - self._max_prefix), end + 1 if found else end):
            if text[start:] in self._prefixes:
                return start, ""
        return (end, "") if found is None else (end, found.group())

    def at(self, text: str, place: int) -> str | None:
        """Return the literal that begins at `place`, "" if none does, None if it depends on text that is to come.

        Only as many characters are looked at as the longest literal has.
        """
        found = self._any.match(text, place)
        if len(text) - place <= self._max_prefix:
            rest = text[place:]
            if not rest or rest in self._prefixes:
                return None
        return "" if found is None else found.group()


class Cursor:
    """A text that grows at its end, and the place up to which it has been read."""

    __slots__ = ("_record", "_record_start", "is_final", "place", "run", "text")

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_final = False
        """No more text comes."""
        self.run: tuple[re.Pattern[str], Callable[[str], Any]] | None = None
        """While a reader has taken everything and waits for more of the same: the characters at which it looks, and
        what it gives the text to. Text without such a character may be given to it directly."""
        self._record: list[str] | None = None
        self._record_start = 0

    def feed(self, text: str) -> None:
        """Add text at the end, and drop what has been read."""
        if self._record is not None:
            self._record.append(self.text[self._record_start : self.place])
            self._record_start = 0
        self.text = self.text[self.place :] + text if self.place < len(self.text) else text
        self.place = 0

    def drop(self) -> None:
        """Take all there is."""
        self.place = len(self.text)

    def start_anew(self) -> None:
        """Forget the text so far."""
        self.drop()
        if self._record is not None:
            self.record()

    def record(self) -> None:
        """Keep what is read from here on, for `recorded`."""
        self._record, self._record_start = [], self.place

    def recorded(self) -> str:
        """Return what has been read since `record`, and keep no more."""
        assert self._record is not None
        self._record.append(self.text[self._record_start : self.place])
        text, self._record = "".join(self._record), None
        return text

    def forget(self) -> None:
        """Keep nothing of what is read."""
        self._record = None

    def more(self) -> Reader[bool]:
        """Wait for more text; return False if the text has ended."""
        if not self.is_final:
            yield
        return not self.is_final

    def peek(self) -> Reader[str]:
        """Return the next character without taking it, "" at the end."""
        while self.place == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.place]

    def take(self, chars: Chars, keep: Callable[[str], Any] | None = None) -> Reader[None]:
        """Take all characters up to the first that is none of `chars`; each piece is given to `keep`."""
        while True:
            found = chars.run.match(self.text, self.place)
            assert found is not None
            if found.end() > self.place:
                if keep is not None:
                    keep(found.group())
                self.place = found.end()
            if self.place < len(self.text):
                return
            if keep is not None and self._record is None:
                self.run = chars.other, keep
            is_more = yield from self.more()
            self.run = None
            if not is_more:
                return

    def skip_whitespace(self, keep: Callable[[str], Any] | None = None) -> Reader[None]:
        """Take JSON's whitespace; each piece is given to `keep`."""
        yield from self.take(_WHITESPACE, keep)

    def begins(self, literals: Literals) -> Reader[str]:
        """Return the literal that begins here, the longest if there are several, "" if none does. Nothing is taken."""
        while (literal := literals.at(self.text, self.place)) is None:
            if not (yield from self.more()):
                whole = [text for text in literals.texts if self.text.startswith(text, self.place)]
                return whole[0] if whole else ""
        return literal

    def take_until(self, literals: Literals, keep: Callable[[str], Any]) -> Reader[str]:
        """Take the text before the first literal, giving its pieces to `keep`; return the literal, "" at the end.

        The literal itself is not taken.
        """
        while True:
            place, literal = literals.find(self.text, self.place)
            if place > self.place:
                keep(self.text[self.place : place])
                self.place = place
            if literal:
                return literal
            if self.place == len(self.text) and self._record is None:
                self.run = literals.first_char, keep
            is_more = yield from self.more()
            self.run = None
            if not is_more:
                found = yield from self.begins(literals)
                if found:
                    return found
                if self.place == len(self.text):
                    return ""
                # A half literal at the end is text, and so is its first character even if another may begin in it.
                keep(self.text[self.place])
                self.place += 1


class PushReader(Generic[T]):
    """A reader on a cursor of its own, which is given the text piece by piece."""

    def __init__(self, reader: Callable[[Cursor], Reader[T]]):
        self.cursor = Cursor()
        self.result: T | None = None
        """What the reader has returned; None as long as it reads."""
        self._reader = reader(self.cursor)
        self._resume()

    def feed(self, text: str) -> None:
        """Let the reader read `text` too; what comes after it has returned is left unread."""
        self.cursor.feed(text)
        if self.result is None:
            self._resume()

    def finish(self) -> T:
        """End the text, and return what the reader returns."""
        self.cursor.is_final = True
        if self.result is None:
            self._resume()
        assert self.result is not None, "a reader returns at the end of its text"
        return self.result

    def _resume(self) -> None:
        try:
            next(self._reader)
        except StopIteration as end:
            self.result = end.value
