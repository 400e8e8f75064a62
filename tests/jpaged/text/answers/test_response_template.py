"""`response_template`s of tokenizers: read as data, and answers parsed as transformers' own parser does."""

import json

import pytest
from transformers.utils.chat_parsing import parse_response

from jpaged.errors import ConfigError
from jpaged.messages import AnswerSpec
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.format_names import answer_format
from jpaged.text.answers.response_template import UnreadableTemplateError, read_response_template
from jpaged.text.answers.whole_answer import parse_answer

CALLED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": THOUGHT,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}
QWEN_XML = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": THOUGHT,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            },
            "transform": CALLED,
        },
        "content": {"content": "text"},
    },
}
GLM = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": THOUGHT,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>(?P<name>[^<\n]+)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": {"name": "text", "args": {"strip": False}},
            },
            "transform": CALLED,
        },
        "content": {"content": "text"},
    },
}
GEMMA_4 = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": CALLED,
        },
        "content": {"close": ["<turn|>", "<eos>"], "content": "text"},
    },
}
MISTRAL_NAMES = {
    "start_anchor": "[/INST]",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]",
            "close": "[END]",
            "repeats": True,
            "content": "json",
            "transform": CALLED,
        },
        "content": {},
    },
}
PARAMETERS = {"city": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PARAMETERS}}}]
TYPES = {"f": {"city": ("string",), "n": ("integer",), "o": ("object",)}}
XML = "<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
CASES = {
    "a thought, a text and two calls of Hermes": (
        HERMES,
        '<think>\nhm\n</think>\n\nHi\n<tool_call>\n{"name": "f", "arguments": {"n": 1, "o": {"a": [1.5, "x"]}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ),
    "a text alone": (HERMES, "Hi there"),
    "an open thought": (HERMES, "<think>\nhm"),
    "calls in XML": (
        QWEN_XML,
        f"<think>\nhm\n</think>\n\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call>",
    ),
    "calls of GLM": (
        GLM,
        "<think>hm</think>Hi<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>{}</arg_value>\n"
        "<arg_key>city</arg_key>\n<arg_value> Paris</arg_value>\n</tool_call>",
    ),
    "calls of Gemma 4": (
        GEMMA_4,
        '<|channel>thought\nhm\n<channel|><|tool_call>call:f{city:<|"|>a "b"<|"|>,o:{k:[1,<|"|>x<|"|>]}}<tool_call|>',
    ),
    "names and arguments": (
        MISTRAL_NAMES,
        '[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{"n": 2}[END][TOOL_CALLS]f[ARGS]{}[END]',
    ),
}


@pytest.mark.parametrize(("template", "text"), CASES.values(), ids=CASES.keys())
def test_answers_are_parsed_as_by_transformers(template, text):
    expected = parse_response(text, template, prefix="", tools=TOOLS)
    format = read_response_template(template, ())
    answer = parse_answer(text, bind_marks(format, {}), AnswerSpec(tools=TYPES))
    assert (answer.reasoning or "") == (expected.get("reasoning_content") or expected.get("thinking") or "")
    assert answer.content == expected.get("content", "")
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in expected.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (HERMES, ("hermes", "qwen3")),
        (QWEN_XML, ("qwen3_coder", "qwen3")),
        (GLM, ("glm47", "qwen3")),
        (GEMMA_4, ("gemma4", "gemma4")),
    ],
)
def test_a_template_says_what_the_known_format_says(template, names):
    """But for how a mark is cut: `<|tool_call>call:` is one here."""
    known = answer_format(*names)
    format = read_response_template(template, known.marks)
    assert format.thought == known.thought
    if template is not GEMMA_4:
        assert (format.calls.open, format.calls.close, format.calls.bodies) == (
            known.calls.open, known.calls.close, known.calls.bodies
        )  # fmt: skip
    assert set(format.marks) == set(known.marks)


def _with(template, field, **changes):
    fields = template["fields"]
    return {**template, "fields": {**fields, field: {**fields.get(field, {}), **changes}}}


UNREADABLE = {
    "a part that is not known": (_with(HERMES, "citations", open="<c>", close="</c>"), "citations: no part"),
    "a regular expression": (
        _with(HERMES, "tool_calls", open_pattern="<tool_call>(a+)+"),
        "tool_calls.open_pattern: it is more than literal text",
    ),
    "several marks": (_with(HERMES, "reasoning_content", close=["a", "b"]), "reasoning_content: its close is not one"),
    "Python calls": (_with(QWEN_XML, "tool_calls", content="python-call-list"), "tool_calls: its content is"),
    "another transform": (_with(HERMES, "tool_calls", transform={"name": "{content}"}), "tool_calls: its transform"),
    "a line feed as a mark": (_with(HERMES, "reasoning_content", open="\n"), "reasoning_content: its open is not one"),
    "quotes that are no text": (
        _with(GEMMA_4, "tool_calls", content_args={"string_delims": [[{}, {}]]}),
        "tool_calls.content_args.string_delims",
    ),
    "values that a line ends": (
        _with(QWEN_XML, "tool_calls", content_args={"tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)\n"}),
        "tool_calls.content_args.tag_pattern: a line feed alone",
    ),
    "lines of keys": (_with(HERMES, "tool_calls", content="kv-lines"), "tool_calls: without a name in open"),
}


@pytest.mark.parametrize(("template", "reason"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_no_format_can_say_is_told(template, reason):
    with pytest.raises(UnreadableTemplateError, match=reason):
        read_response_template(template, ())


BROKEN = {
    "no object": ([], "response_template: is list, allowed: an object"),
    "another version": ({**HERMES, "version": 2}, "response_template.version: is 2, allowed: 1"),
    "an unknown key": ({**HERMES, "field": {}}, "response_template: has the key 'field'"),
    "no fields": ({"fields": {}}, "response_template.fields: is missing or empty"),
    "an unknown key of a field": (_with(HERMES, "content", opens="x"), "fields.content: has the key 'opens'"),
    "no expression": (_with(HERMES, "content", close_pattern="("), "content.close_pattern: is no regular expression"),
    "two ways to open": (_with(HERMES, "tool_calls", open="x"), "tool_calls: has open and open_pattern, allowed: one"),
    "an empty mark": (_with(HERMES, "reasoning_content", open=""), "reasoning_content.open: is no text"),
    "an unknown content": (_with(HERMES, "content", content="yaml"), "content.content: is 'yaml', allowed: text, int"),
    "two fields without a mark": (
        {"fields": {"content": {}, "tool_calls": {}}},
        "response_template.fields: has several fields without open",
    ),
}


@pytest.mark.parametrize(("template", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_template_is_an_error(template, message):
    with pytest.raises(ConfigError, match=message):
        read_response_template(template, ())
