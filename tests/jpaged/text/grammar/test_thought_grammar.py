"""A budget of thoughts: so many tokens and no more, whether their marks are tokens or text; all else stays free.

A mark that is text has tokens of its own, which count while it is not complete.
"""

import numpy as np
import pytest

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.chat.thinking import Thinking

from ..tokenizing.published_tokenizers import byte_tokenizer
from .grammar_walks import grammars_of
from .test_grammar import QWEN3, thinking_tokenizer

TOKENIZERS = {
    "special tokens": lambda: thinking_tokenizer(QWEN3, is_special=True),
    "tokens": lambda: thinking_tokenizer(QWEN3, is_special=False),
    "text": byte_tokenizer,
}
OPEN, OPTIONAL = Thinking.OPEN, Thinking.OPTIONAL
YES = StructuredOutputsParams(choice=["yes"])
# What may stand before the answer, the budget, the structure, what a model wants to write, and what it has written when
# it has to close its thought; None: all of it may be written.
CASES = [
    (OPEN, 0, None, "abc", ""),
    (OPEN, 3, None, "abcdef</think>", "abc"),
    (OPEN, 11, None, "ab</think>long answer", None),
    (OPEN, 14, None, "12345</think>" + "x" * 50, None),
    (OPTIONAL, 0, None, "a long answer", None),
    (OPTIONAL, 0, None, "<think>abc", "<think>"),
    (OPTIONAL, 3, None, "<think>abcdef", "<think>abc"),
    (OPTIONAL, 3, None, "x<think></think>y<think>abcdef", "x<think></think>y<think>abc"),
    (OPTIONAL, 3, None, "1 < 2, </think> and <thin", None),
    (OPTIONAL, 10**30, None, "<think>" + "x" * 90 + "</think>y", None),
    (Thinking.NONE, 3, None, "x<think>abcdef", "x<think>abc"),
    (OPEN, 0, YES, "abc", ""),
    (OPEN, 3, YES, "abcdef", "abc"),
    (OPEN, 3, YES, "</think>yes", None),
    (OPTIONAL, 3, YES, "<think>abcdef", "<think>abc"),
    (OPTIONAL, 3, YES, "yes", None),
    (Thinking.NONE, 3, YES, "yes", None),
]


def token_ids(tokenizer, text):
    """Return the marks in a text as tokens where the tokenizer has them, and the rest byte by byte."""
    ids = []
    while text:
        mark = next((mark for mark in ("<think>", "</think>") if text.startswith(mark)), "")
        token_id = tokenizer.backend.token_to_id(mark) if mark else None
        part = mark if token_id is not None else text[0]
        ids += [token_id] if token_id is not None else list(part.encode())
        text = text[len(part) :]
    return ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("thinking", "budget", "structure", "text", "cut"), CASES, ids=str)
def test_a_thought_ends_behind_its_budget(kind, thinking, budget, structure, text, cut):
    tokenizer = TOKENIZERS[kind]()
    grammars = grammars_of(tokenizer)
    key = grammars.grammar_of(structure, thinking, budget) if structure else grammars.thoughts_within(budget, thinking)
    matcher, written = grammars.matcher(key), b""
    for token_id in token_ids(tokenizer, text):
        bits = np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little")
        if not bits[token_id]:
            break
        matcher.advance(token_id)
        written += tokenizer.token_bytes(token_id)
    if cut is None:
        assert written.decode() == text
        assert matcher.parser.is_accepting()
        return
    assert written.decode() == cut
    allowed = np.flatnonzero(np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little")).tolist()
    assert allowed == token_ids(tokenizer, "</think>")[:1], "nothing but the end"
