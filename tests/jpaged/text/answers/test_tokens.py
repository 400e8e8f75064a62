"""Answers that come as tokens of published tokenizers, through the detokenizer."""

import pytest

from jpaged.messages import AnswerSpec
from jpaged.text.answers.bound_format import bind_format
from jpaged.text.answers.format_names import answer_format
from jpaged.text.answers.scanner import AnswerScanner
from jpaged.text.answers.whole_answer import Answer, ToolCall, joined_events, parse_answer
from jpaged.text.tokenizing.detokenizer import Detokenizer

from ..tokenizing.published_tokenizers import load_family

CALL = ToolCall("f", '{"city": "Köln 😀</tool_call>"}')
ANSWERS = {
    "qwen": (
        ("hermes", "qwen3"),
        "<think>\nhm\n</think>\n\nHi\n"
        '<tool_call>\n{"name": "f", "arguments": {"city": "Köln 😀</tool_call>"}}\n</tool_call>',
        Answer("hm", "Hi", (CALL,)),
    ),
    "llama3": (
        ("llama3_json", None),
        '<|python_tag|>{"name": "f", "parameters": {"city": "Köln 😀</tool_call>"}}',
        Answer(None, "", (CALL,)),
    ),
    "mistral": (
        ("mistral", None),
        'Hi[TOOL_CALLS][{"name": "f", "arguments": {"city": "Köln 😀</tool_call>"}}]',
        Answer(None, "Hi", (CALL,)),
    ),
}


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("family", ANSWERS)
def test_marks_are_found_among_tokens(family, skips):
    names, text, expected = ANSWERS[family]
    tokenizer = load_family(family)
    format = bind_format(answer_format(*names), tokenizer)
    assert format.mark_ids
    spec = AnswerSpec(tools={"f": {}}, skip_special_tokens=skips)
    detokenizer = Detokenizer(tokenizer, [], mark_ids=format.mark_ids, skip_special_tokens=skips)
    scanner = AnswerScanner(format, spec)
    events, num_chars, num_marks = [], 0, 0
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.append([token_id])
        delta = detokenizer.delta()
        marks = detokenizer.marks(num_marks, num_chars + len(delta))
        shifted = [type(mark)(mark.place - num_chars, mark.token_id) for mark in marks]
        events += scanner.feed(delta, shifted)
        num_chars, num_marks = num_chars + len(delta), num_marks + len(marks)
    events += scanner.finish()
    assert joined_events(events) == expected
    whole = detokenizer.text
    assert parse_answer(whole, format, spec, detokenizer.marks(0, len(whole))) == expected
