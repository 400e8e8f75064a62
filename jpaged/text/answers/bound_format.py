"""A format of answers as one tokenizer writes it: which of its marks are tokens.

A mark that is one token counts by its id alone; its characters written by other tokens are plain text. Within this
package such a token is one character of its own, a lone surrogate, which no text of a model can hold. So texts and
marks are searched alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from ..tokenizing.tokenizer import Tokenizer
from .formats import AnswerFormat, ThoughtFormat

FIRST_MARK_CHAR = 0xD800
T = TypeVar("T")


@dataclass(frozen=True)
class BoundFormat:
    """A format whose texts hold a character of its own for each mark that is a token."""

    format: AnswerFormat
    chars: dict[int, str]
    """Token id → the character that stands for it."""
    mark_texts: dict[int, str]
    """Code point of such a character → the mark's text, as `str.translate` takes it."""
    special_ids: frozenset[int]
    """Marks that are special tokens, so that the text may leave them out."""

    @property
    def mark_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that are marks."""
        return frozenset(self.chars)

    @property
    def thought_marks(self) -> tuple[str, str]:
        """Return the texts before and behind a thought, written out. The format has thoughts."""
        thought = self.format.thought
        assert thought is not None, "a format without thoughts"
        if isinstance(thought, ThoughtFormat):
            texts = thought.open, thought.close
        else:
            texts = f"{thought.channel}{thought.thought}{thought.message}", thought.ends[0]
        return texts[0].translate(self.mark_texts), texts[1].translate(self.mark_texts)

    def with_chars(self, text: str) -> str:
        """Return a text in which all marks are written out with the character of each mark that is a token."""
        for code, mark in self.mark_texts.items():
            text = text.replace(mark, chr(code))
        return text


def bind_format(format: AnswerFormat, tokenizer: Tokenizer) -> BoundFormat:
    """Return `format` as `tokenizer` writes it."""
    ids = {mark: tokenizer.backend.token_to_id(mark) for mark in format.marks}
    return bind_marks(format, {mark: id for mark, id in ids.items() if id is not None}, tokenizer.special_ids)


def bind_marks(format: AnswerFormat, ids: dict[str, int], special_ids: Iterable[int] = ()) -> BoundFormat:
    """Return `format` where the marks of `ids` are tokens, those in `special_ids` special ones."""
    # The longest first: a mark may be a part of another one.
    marks = sorted(ids, key=len, reverse=True)
    chars = {mark: chr(FIRST_MARK_CHAR + index) for index, mark in enumerate(marks)}
    return BoundFormat(
        format=_with_chars(format, chars),
        chars={ids[mark]: char for mark, char in chars.items()},
        mark_texts={ord(char): mark for mark, char in chars.items()},
        special_ids=frozenset(ids.values()) & frozenset(special_ids),
    )


def _with_chars(value: T, chars: dict[str, str]) -> T:
    """Return a copy of a record in which each mark in any of its texts is the character that stands for it."""
    if isinstance(value, str):
        text: Any = value
        for mark, char in chars.items():
            text = text.replace(mark, char)
        return text
    if isinstance(value, tuple):
        parts: Any = tuple(_with_chars(part, chars) for part in value)
        return parts
    if is_dataclass(value) and not isinstance(value, type):
        record: Any = replace(
            value, **{one.name: _with_chars(getattr(value, one.name), chars) for one in fields(value)}
        )
        return record
    return value
