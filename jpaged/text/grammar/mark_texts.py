"""Writes texts that hold marks, such as <tool_call>, as a grammar names them: by their id where they are one token."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..answers.bound_format import BoundFormat
from .compiler import GrammarCompiler
from .ecma_regex import literal_regex
from .lark_text import literal, within_slashes

ANY_TEXT = "/(?s:.*)/"


class MarkTexts:
    """The marks of one format, for one tokenizer."""

    def __init__(self, compiler: GrammarCompiler, ids: Mapping[str, int], texts: Mapping[int, str] | None = None):
        """`ids` are the marks that are tokens, each as texts of the format hold it: its text, or a character for it.

        `texts` are what such characters stand for, as for `str.translate`.
        """
        self._compiler, self._ids, self._texts = compiler, ids, texts or {}
        longest_first = sorted(ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None

    @classmethod
    def of_texts(cls, compiler: GrammarCompiler, *marks: str) -> MarkTexts:
        """Return those of some texts that are single tokens."""
        token_id = compiler.tokenizer.backend.token_to_id
        return cls(compiler, {mark: one for mark in marks if (one := token_id(mark)) is not None})

    @classmethod
    def of_format(cls, compiler: GrammarCompiler, format: BoundFormat) -> MarkTexts:
        """Return the marks of a format, whose texts hold characters for them."""
        return cls(compiler, {char: token_id for token_id, char in format.chars.items()}, format.mark_texts)

    def regex(self, text: str) -> str:
        """Return an expression, as it stands between slashes, that matches a text, its marks written out."""
        return within_slashes(literal_regex(self.written(text)))

    def written(self, text: str) -> str:
        """Return a text with its marks written out."""
        return text.translate(self._texts)

    def is_token(self, mark: str) -> bool:
        """Return whether a text is a mark of one token."""
        return mark in self._ids

    def is_apart(self, mark: str) -> bool:
        """Return whether a mark is a token that no text can write, so that texts need not avoid it."""
        return mark in self._ids and self._compiler.is_apart(self._ids[mark])

    def is_end(self, mark: str) -> bool:
        """Return whether a mark is a token that ends an output."""
        return self._ids.get(mark) in self._compiler.eos_token_ids

    def expression(self, text: str) -> str:
        """Return an expression of a text, which is not empty."""
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else literal(part) for part in parts if part)

    def opening(self, text: str) -> tuple[str, str]:
        """Return the token that a text begins with and the expression of the rest; ("", …) if it begins with none."""
        first = self._split.split(text)[:2] if self._split is not None else [text]
        if first[0] or len(first) < 2:
            return "", self.expression(text)
        rest = text.removeprefix(first[1])
        return f"<[{self._ids[first[1]]}]>", self.expression(rest) if rest else ""
