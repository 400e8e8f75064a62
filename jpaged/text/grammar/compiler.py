"""Compiles grammars as text into parsers, for one model's tokenizer. The package llguidance does the work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...checks import refusal
from ..tokenizing.tokenizer import Tokenizer
from .compiler_errors import told
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 70_000,
    "step_max_items": 100_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""The work and the memory that one parser may take, in llguidance's units: some tens of milliseconds to compile it,
five to fifteen for a mask, and about 100 MB. A string of JSON with a maximum length has about four states for each
character."""
GrammarParts = list[dict[str, Any]]
"""A grammar as llguidance reads it: parts, of which the first one begins and refers to others by their `name`."""
NAME = "structured_outputs"
"""The field that a refusal names."""


def grammar_text(grammars: GrammarParts) -> str:
    """Return a grammar as the text that llguidance reads."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Threads may share it.

    llguidance is imported, and its tables of the vocabulary are made, when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        """`vocab_size` is the width of the model's logits, and a model's `eos_token_ids` end an output."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        """Guards the first use of llguidance."""

    def compiled(self, grammars: GrammarParts | str) -> LLMatcher:
        """Return a new parser, which may be in an error. Other threads run meanwhile."""
        text = grammars if isinstance(grammars, str) else grammar_text(grammars)
        llguidance, tokenizer = self.llguidance, self.ll_tokenizer
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        return llguidance.LLMatcher(tokenizer, text, limits=limits, log_level=0)

    def is_apart(self, token_id: int) -> bool:
        """Return whether a token is apart from text for llguidance, such as Qwen3's </think>, though it is shown."""
        return bool(self.ll_tokenizer.is_special_token(token_id))

    def tokens_apart_but(self, tokens: Iterable[str]) -> str:
        """Return an expression of one token that is apart from text and none of `tokens`; empty if there is none.

        Each of `tokens` is an expression <[id]>. Tokens that end an output are not among the others.
        """
        excluded = {int(token.strip("<[]>")) for token in tokens}
        ranges: list[list[int]] = []
        for token_id in self._ids_apart:
            if token_id in excluded:
                continue
            if ranges and ranges[-1][1] == token_id - 1:
                ranges[-1][1] = token_id
            else:
                ranges.append([token_id, token_id])
        return f"<[{','.join(f'{first}-{last}' for first, last in ranges)}]>" if ranges else ""

    @cached_property
    def _ids_apart(self) -> list[int]:
        ends = set(self.eos_token_ids)
        return [one for one in range(self.num_ids) if one not in ends and self.is_apart(one)]

    @cached_property
    def llguidance(self) -> Any:
        try:
            import llguidance
        except ImportError:
            way_out = "install it: pip install 'jpaged[structured]'"
            raise refusal(NAME, "a request with them", "none without the package llguidance", way_out) from None
        return llguidance

    @property
    def num_ids(self) -> int:
        """Return the ids that a mask has bits for: those of the tokenizer and of the logits."""
        return max(self.vocab_size, self.tokenizer.vocab_size)

    @property
    def ll_tokenizer(self) -> LLTokenizer:
        """Return llguidance's tables of the vocabulary, which the first caller waits for."""
        with self._lock:
            return self._made_tokenizer

    @cached_property
    def _made_tokenizer(self) -> LLTokenizer:
        """Return llguidance's tables of the vocabulary, which take up to some seconds to make.

        The package `tokenizers` is asked first. What llguidance cannot read of it, it gets as the bytes of each token.
        """
        make = self.llguidance.LLTokenizer
        options: dict[str, Any] = {"n_vocab": self.num_ids}
        if self.eos_token_ids:
            options["eos_token"] = self.eos_token_ids
        if self.tokenizer.sentence_pieces is None:
            with suppress(Exception):  # llguidance has no class of errors of its own.
                return make(self.tokenizer.to_json(), **options)
        try:
            return make(
                self.llguidance.TokenizerWrapper(Vocabulary(self.tokenizer, self.num_ids, self.eos_token_ids)),
                **options,
            )
        except Exception as error:
            allowed = f"a tokenizer that llguidance can read ({told(str(error))})"
            raise refusal(NAME, "a request with them", allowed, "leave them out") from None
