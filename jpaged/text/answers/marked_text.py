"""Puts the marks that are tokens into the text of an output, one character for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...outputs import Mark
from .bound_format import BoundFormat


class MarkedText:
    """The text of one output on its way to the scanner."""

    def __init__(self, format: BoundFormat, marks: Collection[str], *, skip_special_tokens: bool):
        """Look for those of the format's tokens whose characters are among `marks`; others stay as the text has them.

        With `skip_special_tokens`, marks that are special tokens have no characters in the text.
        """
        self._chars = {token_id: char for token_id, char in format.chars.items() if char in marks}
        self._mark_texts = format.mark_texts
        self._hidden = format.special_ids if skip_special_tokens else frozenset[int]()
        self._text = ""
        self.mark: Mark | None = None
        """A mark of which `_text` is the beginning; its other characters may come later, or be cut by a stop string."""

    def feed(self, text: str, marks: Sequence[Mark]) -> str:
        """Return the next piece of the text with a character for each mark."""
        if self.mark is not None:
            shift = len(self._text)
            marks = (self.mark, *(Mark(mark.place + shift, mark.token_id) for mark in marks))
            text = self._text + text
            self._text, self.mark = "", None
        pieces: list[str] = []
        end = 0
        for mark in marks:
            char = self._chars.get(mark.token_id)
            if char is None:
                continue
            pieces.append(text[end : mark.place])
            end = mark.place
            if mark.token_id not in self._hidden:
                shown = self._mark_texts[ord(char)]
                rest = text[end : end + len(shown)]
                if rest != shown:
                    if len(rest) == len(text) - end and shown.startswith(rest):
                        self._text, self.mark = rest, Mark(0, mark.token_id)
                        return "".join(pieces)
                    continue
                end += len(shown)
            pieces.append(char)
        pieces.append(text[end:])
        return "".join(pieces)

    def finish(self) -> str:
        """Return text that was held: a mark whose text a stop string has cut is plain text."""
        text, self._text, self.mark = self._text, "", None
        return text
