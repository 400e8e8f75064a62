"""Writes the grammar of what stands before an answer: a thought, which may have a budget of tokens.

The mark that ends a thought is one token, or a text for which what was written is searched. A budget is llguidance's
`max_tokens` of a lexeme, which then ends wherever it is: behind so many tokens the mark must follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..answers.bound_format import BoundFormat
from ..answers.formats import ThoughtFormat
from ..chat.thinking import BEGIN, END, Thinking
from .compiler import GrammarCompiler, GrammarParts
from .mark_texts import ANY_TEXT, MarkTexts

ANSWER = "answer"
"""The grammar of the answer behind a thought."""
IMPOSSIBLE = "<[^*]>"
MAX_BUDGET = 1 << 30
"""No output has more tokens than this; llguidance counts in machine words."""


@dataclass(frozen=True)
class ThoughtRules:
    """How thoughts are written and how long they may be."""

    marks: MarkTexts
    budget: int | None = None
    """The most tokens of a thought; None: any number."""
    open: str = BEGIN
    close: str = END

    @classmethod
    def of(cls, format: BoundFormat | None, budget: int | None, compiler: GrammarCompiler) -> ThoughtRules:
        """Return the rules of a model with this format, with <think> where it says nothing of thoughts."""
        thought = None if format is None else format.format.thought
        if format is None or not isinstance(thought, ThoughtFormat):
            return cls(MarkTexts.of_texts(compiler, BEGIN, END), budget)
        return cls(MarkTexts.of_format(compiler, format), budget, thought.open, thought.close)

    def lines(self) -> list[str]:
        """Return the rules of the rest of a thought and the mark that ends it; the first one is `thought`."""
        end = self.marks.expression(self.close)
        if self.budget == 0:
            return [f"thought: {end}"]
        limit = "" if self.budget is None else f"max_tokens={min(self.budget, MAX_BUDGET)}"
        if self.marks.opening(self.close)[0]:
            return [f"thought: thought_text {end}", f"thought_text{f'[{limit}]' if limit else ''}: {ANY_TEXT}"]
        pattern = self.marks.regex(self.close)
        if self.budget is None:
            return [f"thought[lazy]: /(?s:.*){pattern}/"]
        # Where both lexemes reach the limit, llguidance ends the first one, `cut`. None of them may be lazy then.
        return [
            f"thought: cut {end} | whole",
            f"cut[{limit}]: CUT",
            f"whole[{limit}]: WHOLE",
            f"CUT: {ANY_TEXT} & ~/(?s:.*){pattern}(?s:.*)/",
            f"WHOLE: /(?s:.*){pattern}/ & ~/(?s:.*){pattern}(?s:.+)/",
        ]

    def before_answer(self, thinking: Thinking, separator: str) -> str:
        """Return an expression of what may stand before an answer; empty for nothing. It refers to `lines`.

        `separator`, an expression between slashes, may stand between a thought and the answer.
        """
        blank = f" (/{separator}/)?" if separator else ""
        match thinking:
            case Thinking.NONE:
                return ""
            case Thinking.OPEN:
                return f"thought{blank}"
            case Thinking.OPTIONAL:
                return f"({self.marks.expression(self.open)} thought{blank})?"


def with_thought(answer: GrammarParts, thinking: Thinking, rules: ThoughtRules, separator: str) -> GrammarParts:
    """Return the grammar of a thought and the answer behind it, with `separator` between them or not."""
    if thinking is Thinking.NONE:
        return answer
    lark = "\n".join([f"start: {rules.before_answer(thinking, separator)} @{ANSWER}", *rules.lines()])
    return [{"lark_grammar": lark}, {**answer[0], "name": ANSWER}, *answer[1:]]


def budgeted_thoughts(
    thinking: Thinking, budget: int, format: BoundFormat | None, compiler: GrammarCompiler
) -> GrammarParts:
    """Return the grammar of any output whose thoughts have at most `budget` tokens each."""
    first = "thought " if thinking is Thinking.OPEN else ""
    channels = None if format is None else format.format.channels
    if format is not None and channels is not None:
        marks = MarkTexts.of_format(compiler, format)
        rules = ThoughtRules(marks, budget, close=channels.ends[0])
        opening = channels.channel, f"({marks.expression(channels.thought + channels.message)} thought | OTHER)"
        lines = free_lines([opening], marks, compiler)
        lines.append(f"OTHER: /(?s:.+)/ & ~/\\s*{channels.thought}(?s:.*)/")
    else:
        rules = ThoughtRules.of(format, budget, compiler)
        lines = free_lines([(rules.open, "thought")], rules.marks, compiler)
    return [{"lark_grammar": "\n".join([f"start: {first}free*", *lines, *rules.lines()])}]


def free_lines(
    openings: list[tuple[str, str]],
    marks: MarkTexts,
    compiler: GrammarCompiler,
    last: tuple[str, str] | None = None,
) -> list[str]:
    """Return the rules of free text within which some texts must be followed by something.

    Each opening is such a text and the expression of what follows. The rule `free` is a piece of the output, either
    text or `marked`, which begins with a token apart. `last` is an opening that is no piece, but has a rule of that
    name.
    """
    lines, pieces, tokens = [], [], []
    for number, (text, following) in enumerate([*openings, *([last] if last else [])]):
        token, rest = marks.opening(text)
        if token:
            tokens.append(token)
            pieces.append(f"{token} {rest} {following}")
        else:
            # A lazy lexeme ends with the first mark, although FREE_TEXT could go on.
            lines.append(f"opening{number}[lazy]: /(?s:.*){marks.regex(text)}/")
            pieces.append(f"opening{number} {following}")
    if last:
        lines.append(f"last: {pieces.pop()}")
    pieces += [others] if (others := compiler.tokens_apart_but(tokens)) else []
    marked = f"marked: {' | '.join(pieces)}" if pieces else f"marked: {IMPOSSIBLE}"
    return ["free: marked | FREE_TEXT", marked, "FREE_TEXT: /(?s:.+)/", *lines]
