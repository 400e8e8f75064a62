"""What the scanner makes of answers: the parts of them, whole and in any cuts."""

import json
import time

import pytest

from jpaged.messages import AnswerSpec
from jpaged.outputs import Mark
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.events import CallArguments, CallStart, Content
from jpaged.text.answers.format_names import answer_format
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
    "a key without quotes": (
        '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call>tail',
        Answer(None, ", b: 2}}tail", (ToolCall("f", '{"a": 1}'),)),
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


def test_tokens_that_are_not_looked_for_stay_as_the_text_has_them():
    bound = bind_marks(HERMES, {"<tool_call>": 7, "</think>": 8}, special_ids=[7])
    marks = [Mark(1, 7), Mark(1, 8)]
    spec = AnswerSpec(has_thoughts=False)
    assert parse_answer("a</think>b", bound, spec, marks).content == "a</think>b"
    assert parse_answer("a</think>b", bound, AnswerSpec(tools=TOOLS), marks).content == "a<tool_call></think>b"


def test_a_lone_surrogate_is_no_mark():
    bound = bind_marks(HERMES, {"<tool_call>": 7})
    assert parse_answer('\ud800{"name": "f"}', bound, AnswerSpec(tools=TOOLS)).content == '\ufffd{"name": "f"}'


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


@pytest.mark.parametrize("arguments", ["", "{", "{}", "{ }}", '{"input', '{"input": ""}}'])
def test_a_custom_call_that_has_no_text_or_is_cut_before_it_has_an_empty_input(arguments: str):
    spec = {"tools": {"patch": {"input": ("string",)}}, "custom_tools": frozenset(["patch"])}
    text = f'<tool_call>{{"name": "patch", "arguments": {arguments}'
    assert answer(text, **spec).tool_calls == (ToolCall("patch", "", is_custom=True),)


def test_without_tools_marks_of_calls_are_text():
    assert answer('<tool_call>{"name": "f"}</tool_call>', tools={}).content == '<tool_call>{"name": "f"}</tool_call>'


def test_what_follows_a_quotation_mark_is_looked_for_near_it_alone():
    """As far in one piece as in many."""
    format = answer_format("gemma4", None)
    near, far = " " * 100, " " * 300
    text = '<|tool_call>call:f{{city:<|"|>a<|"|>{}}}<|"|>}}<tool_call|>'
    assert answer(text.format(near), format).tool_calls == (ToolCall("f", f'{{"city":"a"{near}}}'),)
    assert answer(text.format(far), format).tool_calls == (ToolCall("f", f'{{"city":"a\\"{far}}}"}}'),)


RAW = 'a\n"b" \\n </x>'
RAW_JSON = json.dumps({"input": RAW})
CUSTOM_CALLS = {
    "hermes": f'<tool_call>{{"name": "patch", "arguments": {RAW_JSON}}}</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function=patch>\n<parameter=input>\n{RAW}\n</parameter>\n</function>\n</tool_call>",
    "glm47": f"<tool_call>patch<arg_key>input</arg_key><arg_value>{RAW}</arg_value></tool_call>",
    "gemma4": f'<|tool_call>call:patch{{input:<|"|>{RAW}<|"|>}}<tool_call|>',
    "llama3_json": json.dumps({"name": "patch", "parameters": {"input": RAW}}),
    "mistral": f"[TOOL_CALLS]patch[ARGS]{RAW_JSON}",
    "openai": f"<|channel|>commentary to=functions.patch <|constrain|>json<|message|>{RAW_JSON}<|call|>",
    "openai, raw": f"<|channel|>commentary to=functions.patch<|message|>{RAW}<|call|>",
    "openai, raw in braces": "<|channel|>commentary to=functions.patch<|message|>{" + RAW + "}<|call|>",
}


@pytest.mark.parametrize("name", CUSTOM_CALLS)
def test_custom_tools_get_their_text_in_each_format(name):
    spec = {"tools": {"patch": {"input": ("string",)}}, "custom_tools": frozenset(["patch"])}
    format = answer_format(name.split(",")[0], None)
    expected = f"{{{RAW}}}" if "braces" in name else RAW
    assert answer(CUSTOM_CALLS[name], format, **spec).tool_calls == (ToolCall("patch", expected, is_custom=True),)


LONG = 8000
WAITS = {
    "line feeds before a mark": ("hermes", "", "\n"),
    "line feeds before a name": ("hermes", "<tool_call>", "\n"),
    "line feeds in arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {', "\n"),
    "arguments before the name": ("hermes", '<tool_call>{"arguments": {"city": "', "ab"),
    "a key": ("hermes", '<tool_call>{"name": "f", "arguments": {"', "ab"),
    "a number": ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1', "0"),
    "an unknown tool": ("hermes", '<tool_call>{"name": "h", "arguments": {"city": "', "ab"),
    "a value of a type": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n", "1"),
    "null or a string": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=note>\n", "\n"),
    "line feeds behind an end tag": ("qwen3_coder", "<function=f>\n<parameter=city>\na</parameter>", "\n"),
    "end tags": ("qwen3_coder", "<function=f>\n<parameter=city>\na", "</parameter>\n"),
    "quotes in a string": ("gemma4", '<|tool_call>call:f{city:<|"|>a', '<|"|>, '),
    "a header": ("openai", "<|channel|>final", " x"),
    "a custom input": ("mistral", '[TOOL_CALLS]patch[ARGS]{"why": "', "ab"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_long_wait_takes_linear_time(wait):
    """What is held is never read again: eight times as long takes about eight times as long, and no 64 times."""
    name, beginning, piece = WAITS[wait]
    tools = TOOLS | {"patch": {"input": ("string",)}}
    spec = AnswerSpec(tools=tools, custom_tools=frozenset(["patch"]))
    times = []
    for num_pieces in (LONG // 8, LONG):
        bound = bind_marks(answer_format(name, None), {})
        runs = []
        for _ in range(3):
            scanner = AnswerScanner(bound, spec)
            scanner.feed(beginning)
            start = time.process_time()
            for _ in range(num_pieces):
                scanner.feed(piece)
            scanner.finish()
            runs.append(time.process_time() - start)
        times.append(min(runs))
    assert times[1] < 24 * times[0]


WHOLE = {
    "numbers": ("gemma4", "<|tool_call>call:f{l:[", "1,"),
    "end tags": ("qwen3_coder", "<function=f>\n<parameter=city>\na", "</parameter>x"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_an_answer_in_one_piece_takes_linear_time(case):
    """No search for a mark that must stand at a place looks at all the text behind it."""
    name, beginning, piece = WHOLE[case]
    times = []
    for num_pieces in (LONG // 8, LONG):
        scanner = AnswerScanner(bind_marks(answer_format(name, None), {}), AnswerSpec(tools=TOOLS))
        start = time.process_time()
        scanner.feed(beginning + piece * num_pieces)
        scanner.finish()
        times.append(time.process_time() - start)
    assert times[1] < 24 * times[0]
