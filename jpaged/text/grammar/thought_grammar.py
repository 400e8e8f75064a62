"""Writes the grammar of what stands before an answer: a thought, which may have a budget of tokens.

The mark that ends a thought is one token, or a text for which what was written is searched. A budget is llguidance's
`max_tokens` of a lexeme, which then ends wherever it is: behind so many tokens the mark must follow.
"""

from __future__ import annotations

import json
import re

from ..chat.thinking import BEGIN, END, Thinking
from .compiler import GrammarCompiler, GrammarParts
from .lark_text import within_slashes

ANSWER = "answer"
"""The grammar of the answer behind a thought."""
MAX_BUDGET = 1 << 30
"""No output has more tokens than this; llguidance counts in machine words."""
ANY_TEXT = "/(?s:.*)/"


def with_thought(
    answer: GrammarParts, thinking: Thinking, budget: int | None, compiler: GrammarCompiler, *, separator: str = ""
) -> GrammarParts:
    """Return the grammar of a thought and the answer behind it.

    The thought is any text of at most `budget` tokens, None for no bound, up to its end; `separator`, an expression,
    may stand between it and the answer.
    """
    if thinking is Thinking.NONE:
        return answer
    blank = f" (/{separator}/)?" if separator else ""
    start = f"thought{blank}" if thinking is Thinking.OPEN else f"({_mark(BEGIN, compiler)} thought{blank})?"
    lark = "\n".join([f"start: {start} @{ANSWER}", *_thought(budget, compiler)])
    return [{"lark_grammar": lark}, {**answer[0], "name": ANSWER}, *answer[1:]]


def budgeted_thoughts(thinking: Thinking, budget: int, compiler: GrammarCompiler) -> GrammarParts:
    """Return the grammar of any output whose thoughts have at most `budget` tokens each."""
    begin = _mark(BEGIN, compiler)
    first = "thought " if thinking is Thinking.OPEN else ""
    if begin.startswith("<["):
        parts = [f"start: {first}({other_than(begin)} | {begin} thought)*"]
    else:
        # A lazy lexeme ends with the first mark, although `REST` could go on.
        others = f" | {compiler.tokens_apart}" if compiler.tokens_apart else ""
        parts = [
            f"start: {first}(opening thought | REST{others})*",
            f"opening[lazy]: /(?s:.*){within_slashes(re.escape(BEGIN))}/",
            "REST: /(?s:.+)/",
        ]
    return [{"lark_grammar": "\n".join([*parts, *_thought(budget, compiler)])}]


def _thought(budget: int | None, compiler: GrammarCompiler) -> list[str]:
    """Return the rules of the rest of a thought with the mark that ends it; the first one is `thought`."""
    end = _mark(END, compiler)
    if budget == 0:
        return [f"thought: {end}"]
    limit = "" if budget is None else f"max_tokens={min(budget, MAX_BUDGET)}"
    if end.startswith("<["):
        return [f"thought: text {end}", f"text{f'[{limit}]' if limit else ''}: {ANY_TEXT}"]
    pattern = within_slashes(re.escape(END))
    if budget is None:
        return [f"thought[lazy]: /(?s:.*){pattern}/"]
    # Where both lexemes reach the limit, llguidance ends the first one, `cut`. None of them may be lazy then.
    return [
        f"thought: cut {end} | whole",
        f"cut[{limit}]: CUT",
        f"whole[{limit}]: WHOLE",
        f"CUT: {ANY_TEXT} & ~/(?s:.*){pattern}(?s:.*)/",
        f"WHOLE: /(?s:.*){pattern}/ & ~/(?s:.*){pattern}(?s:.+)/",
    ]


def other_than(token: str) -> str:
    """Return an expression of any one token but this one, whose expression is <[id]>."""
    return f"<[^{token.removeprefix('<[')}"


def _mark(text: str, compiler: GrammarCompiler) -> str:
    """Return how a grammar names a mark: by its id if it is a token apart from text, else as text."""
    token_id = compiler.tokenizer.backend.token_to_id(text)
    return f"<[{token_id}]>" if token_id is not None and compiler.is_apart(token_id) else json.dumps(text)
