"""Writes the grammar of an answer that must call tools, or whose calls must follow their schemas.

The data of `answers/formats.py` says how a model writes a call; here is the text of a call as chat templates write it.
The arguments of each tool are a part of their own (`call_arguments.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...checks import refusal
from ..answers.formats import CallFormat, Channels, JsonCalls, NamedCalls, TaggedCalls, ThoughtFormat
from ..chat.thinking import Thinking
from ..schemas.lark_text import literal
from .call_arguments import Arguments, ArgumentWriter
from .call_rules import CallRules
from .compiler import GrammarCompiler, GrammarParts
from .compiler_errors import told
from .mark_texts import ANY_TEXT, MarkTexts
from .structured_grammar import StructuredGrammars
from .thought_grammar import ANSWER, ThoughtRules, free_lines

NOTHING = '""'
LINES = "\\n{1,2}"
"""What may stand between a thought and a call."""


@dataclass(frozen=True)
class CallGrammar:
    """A grammar, and what it does not enforce: a sentence for each such tool."""

    parts: GrammarParts
    warnings: tuple[str, ...] = ()


class CallGrammars:
    """Writes grammars of answers with calls. Threads may share it."""

    def __init__(self, compiler: GrammarCompiler, structured: StructuredGrammars):
        self._compiler, self._structured = compiler, structured

    def grammar_of(self, rules: CallRules) -> CallGrammar:
        """Return the grammar of an answer, which was not compiled.

        Raise InvalidRequestError for a strict schema that cannot be enforced.
        """
        return self._written(rules, self._arguments(rules, {}))

    def mended(self, rules: CallRules) -> CallGrammar:
        """Return the grammar of an answer without those schemas that cannot be compiled.

        Raise InvalidRequestError if one of them is strict, or is a grammar.
        """
        failing = self._failing(rules, self._arguments(rules, {}))
        return self._written(rules, self._arguments(rules, failing))

    def _written(self, rules: CallRules, arguments: Arguments) -> CallGrammar:
        return _Writer(rules, arguments, self._compiler, self._structured).grammar()

    def _arguments(self, rules: CallRules, failing: Mapping[str, str]) -> Arguments:
        """Return the arguments of the tools; `failing` are those that cannot be enforced, with the reasons."""
        writer = ArgumentWriter(rules.format, self._compiler, self._structured)
        tools = rules.callable
        for index, tool in enumerate(tools.tools if tools else ()):
            if tools and tool in tools.callable_tools:
                is_enforced = tools.must_call or tool.is_strict or tool.grammar is not None
                writer.add(index, tool, is_enforced=is_enforced, failure=failing.get(tool.name, ""))
        return writer.arguments

    def _failing(self, rules: CallRules, arguments: Arguments) -> dict[str, str]:
        """Return the tools whose arguments alone cannot be compiled, with the reasons.

        Raise InvalidRequestError for one whose schema or grammar must hold.
        """
        failing: dict[str, str] = {}
        for index, tool in enumerate(rules.callable.tools if rules.callable else ()):
            expression = arguments.expressions.get(tool.name)
            if expression is None:
                continue
            if error := self._error_of([{"lark_grammar": f"start: {expression}"}, *arguments.parts_of[tool.name]]):
                reason = told(error, is_from_grammar=tool.kind == "custom")
                if tool.parameters is not None and (tool.is_strict or not failing):  # Finding it takes many tries.
                    reason += f" at {self._structured.place_of_failure(tool.parameters)}"
                if tool.is_strict or tool.grammar is not None:
                    got = f"one that cannot be enforced: {reason}"
                    raise refusal(arguments.place_of(index, tool), got, "what docs/structured_outputs.md lists")
                failing[tool.name] = reason
        return failing

    def _error_of(self, parts: GrammarParts) -> str:
        error: str = self._compiler.compiled(parts).get_error()
        return error


class _Writer:
    """The rules of one answer around the arguments of its calls."""

    def __init__(
        self, rules: CallRules, arguments: Arguments, compiler: GrammarCompiler, structured: StructuredGrammars
    ):
        self._rules, self._arguments = rules, arguments
        self._compiler, self._structured = compiler, structured
        self._marks = MarkTexts.of_format(compiler, rules.format)
        has_thoughts = isinstance(rules.format.format.thought, ThoughtFormat)
        self._thoughts = ThoughtRules.of(rules.format, rules.thought_budget, compiler) if has_thoughts else None
        tools = rules.callable
        self._several = tools is not None and tools.is_parallel and tools.choice.kind != "named"
        self._is_free = not rules.must_call and rules.structured is None

    def grammar(self) -> CallGrammar:
        """Return the whole grammar."""
        format = self._rules.format.format
        if format.channels is not None:
            lines = self._channel_lines(format.channels)
        else:
            assert isinstance(format.calls, CallFormat), "tools for a model without calls"
            lines = self._lines(format.calls)
        parts: GrammarParts = [{"lark_grammar": "\n".join(lines)}]
        for own in self._arguments.parts_of.values():
            parts += own
        if self._has_answer:
            assert self._rules.structured is not None
            answer = self._structured.grammars_of(self._rules.structured, prefix=ANSWER)
            parts += [{**answer[0], "name": ANSWER}, *answer[1:]]
        return CallGrammar(parts, self._arguments.warnings)

    @property
    def _has_answer(self) -> bool:
        """Return whether an answer of a structure may stand in the place of calls."""
        return self._rules.structured is not None and not self._rules.must_call

    # Calls between marks in one text

    def _lines(self, calls: CallFormat) -> list[str]:
        """Return the rules of an answer in a format with marks.

        A `group` is what stands behind the mark of calls: one call, or several where the format has them so.
        """
        body, opening = self._arguments.body, self._marks.expression(calls.open)
        heads = [self._call(body, name, arguments) for name, arguments in self._arguments.expressions.items()]
        lines = [f"call: {' | '.join(heads)}", f"group: {self._group(calls, body)}"]
        lines += self._thoughts.lines() if self._thoughts else []
        if self._is_free:
            return [*self._free_lines(calls, body), *lines]
        choice = f"{opening} group"
        if isinstance(body, JsonCalls) and body.may_stand_alone and not self._has_answer:
            choice = "group"  # A JSON answer begins like such a call, which then needs its mark.
        elif self._several and not _has_several(body):
            choice += f" ({self._line_feed(calls, body)} {opening} group)*"
        if self._has_answer:
            choice = f"(@{ANSWER} | {choice})"
        before = self._thoughts.before_answer(self._rules.thinking, LINES) if self._thoughts else ""
        return [f"start: {before} {choice}", *lines]

    def _group(self, calls: CallFormat, body: JsonCalls | TaggedCalls | NamedCalls) -> str:
        """Return an expression of what stands behind the mark of calls, up to their end mark."""
        close = self._marks.expression(calls.close) if calls.close else ""
        if not _has_several(body):
            line = self._line_feed(calls, body)
            return f"{line} call {line} {close}"
        assert isinstance(body, JsonCalls)
        separator = "; " if body.may_stand_alone else ", "
        several = f"call ({literal(separator)} call)*" if self._several else "call"
        return f"{several} {close}" if body.may_stand_alone else f'"[" {several} "]" {close}'

    def _line_feed(self, calls: CallFormat, body: JsonCalls | TaggedCalls | NamedCalls) -> str:
        """Return an expression of the line feed around a call, and between two; empty if the format has none."""
        return "" if isinstance(body, NamedCalls) or not calls.close else '"\\n"?'

    def _free_lines(self, calls: CallFormat, body: JsonCalls | TaggedCalls | NamedCalls) -> list[str]:
        """Return the rules of free text with calls in it; a single call is the last part of the output."""
        first = "thought" if self._thoughts and self._rules.thinking is Thinking.OPEN else ""
        openings = [(self._thoughts.open, "thought")] if self._thoughts else []
        call = (calls.open, "group")
        if self._several:
            start, lines = "free*", free_lines([*openings, call], self._marks, self._compiler)
        else:
            start, lines = "free* last?", free_lines(openings, self._marks, self._compiler, last=call)
        if isinstance(body, JsonCalls) and body.may_stand_alone:  # Other text does not begin like a call.
            lines.append("FIRST: /\\s*[^{\\s](?s:.*)/")
            options = ["group", f"(marked | FIRST) {start}", *([] if self._several else ["last"])]
            start = f"({' | '.join(options)})?"
        return [f"start: {first} {start}", *lines]

    def _call(self, body: JsonCalls | TaggedCalls | NamedCalls, name: str, arguments: str) -> str:
        """Return an expression of one call."""
        marks = self._marks
        match body:
            case JsonCalls():
                key = "parameters" if body.may_stand_alone else "arguments"
                head = literal(f'{{"name": "{name}", "{key}": ')
                return f'{head} {arguments} "}}"'
            case TaggedCalls():
                close = f' {marks.expression(body.close)} "\\n"?' if body.close else ""
                return f'{marks.expression(body.open + name + body.name_end)} "\\n"? {arguments}{close}'
            case NamedCalls():
                head = marks.expression(body.before_name + name)
                if body.before_id and marks.is_token(body.before_id):
                    head += f" ({marks.expression(body.before_id)} /[0-9A-Za-z]{{9}}/)?"
                if body.before_arguments:
                    head += f" {marks.expression(body.before_arguments)}"
                return f"{head} {arguments}"

    # Calls as messages to channels

    def _channel_lines(self, channels: Channels) -> list[str]:
        """Return the rules of an answer that is a row of messages; the prompt has opened the first one."""
        marks = self._marks

        def header(channel: str) -> str:
            return marks.expression(f"{channels.channel}{channel}{channels.message}")

        end = channels.ends[0]
        thoughts = ThoughtRules(marks, self._rules.thought_budget, close=end)
        next_message = marks.expression(f"{channels.start}assistant")
        has_thoughts = self._rules.thought_budget != 0
        before = [f"{header(channels.thought)} thought {next_message}"] if has_thoughts else []
        lines = [*thoughts.lines(), f"text: {ANY_TEXT}"]
        if self._is_free:  # Beside an answer of a structure, such a text would be a part of it.
            before.append(f"{header('commentary')} text {marks.expression(end)} {next_message}")
        lines.append(f"before: {' | '.join(before) or NOTHING}")
        calls = []
        for name, arguments in self._arguments.expressions.items():
            is_custom = name in self._arguments.raw_tools
            constrained = "" if is_custom else f" {channels.constrain}json"
            text = f"{channels.channel}commentary to={channels.before_name}{name}{constrained}{channels.message}"
            calls.append(f"{marks.expression(text)} {arguments}")
        lines += [f"call: {' | '.join(calls)}"] if calls else []
        # The end of a call is a token that ends the output, where the model has it as one.
        end_of_call = channels.ends[1]
        choices = ["call"] if calls else []
        if self._several and marks.is_token(end_of_call) and not marks.is_end(end_of_call):
            more = marks.expression(f"{end_of_call}{channels.start}assistant")
            choices = [f"call ({more} before* call)*"]
        if self._has_answer:
            choices.append(f"{header('final')} @{ANSWER}")
        elif self._is_free:
            choices.append(f"{header('final')} text")
        open_thought = f"thought {next_message} " if self._rules.thinking is Thinking.OPEN else ""
        return [f"start: {open_thought}before* ({' | '.join(choices)})", *lines]


def _has_several(body: JsonCalls | TaggedCalls | NamedCalls) -> bool:
    """Return whether several calls stand behind one mark."""
    return isinstance(body, JsonCalls) and (body.in_array or body.may_stand_alone)
