"""Writes texts that hold marks, such as <tool_call>, as a grammar names them: by their id where they are one token."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..answers.bound_format import BoundFormat
from ..schemas.ecma_regex import literal_regex
from ..schemas.lark_text import literal, within_slashes
from .compiler import GrammarCompiler

ANY_TEXT = "/(?s:.*)/"
COUNT = re.compile(r"(?<!\\)\{[0-9]")
"""A bound on repetitions in a regular expression."""


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

    def text_without(self, *marks: str) -> str:
        """Return the terminal of texts without the beginning of any of some marks, its first two characters.

        They are fewer than those without whole marks. But to find that no text of a bounded length goes on behind a
        whole one, llguidance would look at each length, which may take more work than a step may.
        """
        beginnings = {self.written(mark)[:2] for mark in marks if mark}
        firsts = "".join(sorted({literal_regex(text[0]) for text in beginnings}))
        if len({text[0] for text in beginnings}) > 1 or any(len(set(text)) < 2 for text in beginnings):
            return f"/[^{within_slashes(firsts)}]*/"
        seconds = "".join(sorted(literal_regex(text[1]) for text in beginnings))
        return "/" + within_slashes(f"(?:[^{firsts}]|{firsts}+[^{firsts}{seconds}])*{firsts}*") + "/"

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
