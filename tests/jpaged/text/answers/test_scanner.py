"""What the scanner makes of answers: the parts of them, whole and in any cuts."""

import pytest

from jpaged.messages import AnswerSpec
from jpaged.outputs import Mark
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.events import CallArguments, CallStart, Content
from jpaged.text.answers.scanner import AnswerScanner
from jpaged.text.answers.whole_answer import Answer, ToolCall, joined_events, parse_answer

from .whole_and_cut import HERMES, TOOLS, answer

HERMES_CASES = {
    "a thought, a text, a call": (
        '<think>\nhm\n</think>\n\nHi\n<tool_call>\n{"name": "f", "arguments": {"a": 1.50}}\n</tool_call>',
        Answer("hm", "Hi", (ToolCall("f", '{"a": 1.50}'),)),
    ),
    "two calls": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        Answer(None, "", (ToolCall("f", "{}"), ToolCall("g", "{}"))),
    ),
    "two objects under one mark, the arguments first": (
        '<tool_call>{"id": 7, "arguments": {"x": [1]}, "name": "f"}\n{"name": "g", "parameters": null}</tool_call>',
        Answer(None, "", (ToolCall("f", '{"x": [1]}'), ToolCall("g", "{}"))),
    ),
    "a nested function, arguments as text": (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\\"s\\": \\"\\\\n\\"}"}}</tool_call>',
        Answer(None, "", (ToolCall("f", '{"s": "\\n"}'),)),
    ),
    "the end mark within a string": (
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>',
        Answer(None, "", (ToolCall("f", '{"s": "</tool_call>"}'),)),
    ),
    "text between and behind calls": (
        'A\n<tool_call>{"name": "f"}</tool_call>\nB<tool_call>{"name": "g"}</tool_call> C',
        Answer(None, "A\nB C", (ToolCall("f", "{}"), ToolCall("g", "{}"))),
    ),
    "an unknown tool": (
        '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
        Answer(None, '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', ()),
    ),
    "no name": ("<tool_call>{}</tool_call>", Answer(None, "<tool_call>{}</tool_call>", ())),
    "bad JSON before the name": ("<tool_call>{name: f}", Answer(None, "<tool_call>{name: f}", ())),
    "bad JSON behind the name": (
        '<tool_call>{"name": "f", "arguments": {"a": 1, "b": nope}}</tool_call>tail',
        Answer(None, ', "b": nope}}tail', (ToolCall("f", '{"a": 1}'),)),
    ),
    "arguments that are no object": (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        Answer(None, "[1]}", (ToolCall("f", "{}"),)),
    ),
    "no end mark": ('<tool_call>{"name": "f", "arguments": {}}', Answer(None, "", (ToolCall("f", "{}"),))),
    "no end mark between calls": (
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}',
        Answer(None, "", (ToolCall("f", "{}"), ToolCall("g", "{}"))),
    ),
    "a thought that stays open": ("<think>a <tool_call> b", Answer("a <tool_call> b", "", ())),
    "two thoughts": ("<think>a</think>x<think>b</think>y", Answer("a\nb", "xy", ())),
    "half a mark": ("a <tool_ca", Answer(None, "a <tool_ca", ())),
    "whitespace alone": ("\n a \n", Answer(None, "\n a \n", ())),
    "a big number, odd escapes": (
        '<tool_call>{"name": "f", "arguments": {"n": 1e400, "s": "\\d\\u12 \\ud83d\\ude00 \\ud83d!\t"}}</tool_call>',
        Answer(None, "", (ToolCall("f", '{"n": 1e400, "s": "\\\\d\\\\u12 \\ud83d\\ude00 \\ufffd!\\t"}'),)),
    ),
}


@pytest.mark.parametrize(("text", "expected"), HERMES_CASES.values(), ids=HERMES_CASES.keys())
def test_hermes(text, expected):
    assert answer(text) == expected


CUTS = {
    '{"name": "f", "arguments": {"a": 12': "{}",
    '{"name": "f", "arguments": {"a": 12,': '{"a": 12}',
    '{"name": "f", "arguments": {"a": tru': "{}",
    '{"name": "f", "arguments": {"a": "x\\': '{"a": "x"}',
    '{"name": "f", "arguments": {"a": "x\\ud83d\\u': '{"a": "x"}',
    '{"name": "f", "arguments": {"a": [{"b': '{"a": [{}]}',
    '{"name": "f", "arg': "{}",
}


@pytest.mark.parametrize("text", CUTS)
def test_a_call_that_is_cut_is_closed(text):
    assert answer("<tool_call>" + text).tool_calls == (ToolCall("f", CUTS[text]),)


def test_a_call_is_announced_with_its_name_and_strings_come_as_they_are_written():
    scanner = AnswerScanner(bind_marks(HERMES, {}), AnswerSpec(tools=TOOLS))
    assert scanner.feed('A\n<tool_call>{"name": "f"') == [Content("A"), CallStart(0, "f")]
    assert scanner.feed(', "arguments": {"s": "a') == [CallArguments(0, '{"s": "a')]
    assert scanner.feed("b") == [CallArguments(0, "b")]


def test_a_mark_that_is_a_token_counts_by_its_id_alone():
    bound = bind_marks(HERMES, {"<tool_call>": 7, "<think>": 8}, special_ids=[7])
    spec = AnswerSpec(tools=TOOLS)
    text = 'a <tool_call> <think>hm</think>{"name": "f"}</tool_call>'
    assert parse_answer(text, bound, spec).content == text
    # The special token 7 has no characters in the text, 8 has its own.
    marks = [Mark(text.index("<think>"), 8), Mark(text.index("{"), 7)]
    expected = Answer("hm", "a <tool_call>", (ToolCall("f", "{}"),))
    assert parse_answer(text, bound, spec, marks) == expected
    # The characters of a mark may come later than the mark.
    scanner = AnswerScanner(bound, spec)
    events = scanner.feed("a <th", [Mark(2, 8)]) + scanner.feed('ink>b</think>{"name": "f"}', [Mark(13, 7)])
    assert joined_events(events + scanner.finish()) == Answer("b", "a", (ToolCall("f", "{}"),))


def test_what_the_prompt_has_opened_counts():
    assert answer("hm</think>\n\nHi", opening="<|im_start|>assistant\n<think>\n") == Answer("hm", "Hi", ())
    assert answer("\nHi", opening="<think>\n\n</think>\n\n") == Answer(None, "Hi", ())
    assert answer("\nHi", opening="Hello") == Answer(None, "\nHi", ())


def test_custom_tools_get_the_text_of_their_input():
    spec = {"tools": {"patch": {"input": ("string",)}}, "custom_tools": frozenset(["patch"])}
    texts = ['{"input": "a\\n\\"b\\""}', '{"why": 1, "input": "a\\n\\"b\\""}', '"a\\n\\"b\\""']
    for arguments in texts:
        text = f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'
        assert answer(text, **spec).tool_calls == (ToolCall("patch", 'a\n"b"', is_custom=True),)


def test_without_tools_marks_of_calls_are_text():
    assert answer('<tool_call>{"name": "f"}</tool_call>', tools={}).content == '<tool_call>{"name": "f"}</tool_call>'
