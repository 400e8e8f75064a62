"""Errors of the parser of bodies, without a server: their kind, and the field that they name."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.errors import ContextLengthError, InvalidRequestError
from jpaged.serving.protocols.chat.fields import CHAT_FIELDS
from jpaged.serving.protocols.completions.fields import COMPLETION_FIELDS
from jpaged.serving.protocols.completions.parser import parse_completion
from jpaged.serving.protocols.fields import BodyField, Use
from jpaged.serving.protocols.http_errors import HTTPError, http_error
from jpaged.serving.protocols.openai_errors import error_record
from jpaged.serving.protocols.request_parser import RequestParser
from jpaged.serving.protocols.table import METHODS
from jpaged.serving.protocols.tokens.fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from jpaged.serving.protocols.tokens.parser import tokenize

CONTEXT = 128
CHAT = [{"role": "user", "content": "Hi"}]
LONG_CHAT = [{"role": "user", "content": "x" * CONTEXT}]
TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text": ("parse_completion", {"prompt": "x" * CONTEXT}, "prompt"),
    "a text that is not tokenized": ("parse_completion", {"prompt": "x" * 100_000}, "prompt"),
    "token ids": ("parse_completion", {"prompt": [5] * CONTEXT}, "prompt"),
    "the second prompt": ("parse_completion", {"prompt": ["x", "x" * CONTEXT]}, "prompt"),
    "the second token ids": ("parse_completion", {"prompt": [[5], [5] * CONTEXT]}, "prompt"),
    "a prompt that is only scored": (
        "parse_completion", {"prompt": "x" * CONTEXT, "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"
    ),
    "what a cut has left": ("parse_completion", {"prompt": "x" * 300, "truncate_prompt_tokens": CONTEXT}, "prompt"),
    "a text that is never cut": ("parse_completion", {"prompt": "x" * 9000, "truncate_prompt_tokens": 5}, "prompt"),
    "with max_tokens": ("parse_completion", {"prompt": "x" * 100, "max_tokens": 29}, "prompt"),
    "token ids with max_tokens": ("parse_completion", {"prompt": [5] * 100, "max_tokens": 29}, "prompt"),
    "in a stream": ("parse_completion", {"prompt": "x" * 100, "max_tokens": 29, "stream": True}, "prompt"),
    "for beams": ("parse_completion", {"prompt": "x" * CONTEXT, "use_beam_search": True, "n": 2}, "prompt"),
    "messages": ("parse_chat", {"messages": LONG_CHAT}, "messages"),
    "messages that are not tokenized": ("parse_chat", {"messages": [LONG_CHAT[0]] * 100}, "messages"),
    "messages that no template may write": ("parse_chat", {"messages": [{"role": "user", "content": "x" * (9 << 20)}]},
                                            "messages"),
    "messages with max_tokens": ("parse_chat", {"messages": CHAT, "max_tokens": 200}, "messages"),
    "messages with max_completion_tokens": ("parse_chat", {"messages": CHAT, "max_completion_tokens": 200}, "messages"),
    "a text to count": ("tokenize", {"prompt": "x" * (64 * CONTEXT + 1)}, "prompt"),
    "messages to count": ("tokenize", {"messages": [LONG_CHAT[0]] * 100}, "messages"),
    "tokens to read": ("detokenize", {"tokens": [5] * (CONTEXT + 1)}, "tokens"),
}  # fmt: skip


def as_body(fields: Any) -> bytearray:
    return bytearray(json.dumps(fields).encode())


@pytest.mark.parametrize("case", TOO_LONG)
def test_what_exceeds_the_context_is_one_kind_of_error(parser: RequestParser, case: str):
    method, fields, param = TOO_LONG[case]
    with pytest.raises(ContextLengthError) as caught:
        METHODS[method](parser, as_body(fields))
    error = error_record(http_error(caught.value))
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens, but ")
    assert "prompt is too long" in error["message"]
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert error["code"] == "context_length_exceeded"
    if "max_completion_tokens" in fields:
        assert "and max_completion_tokens is 200" in error["message"]


def test_a_text_to_count_may_have_more_tokens_than_the_context(parser: RequestParser):
    found = json.loads(tokenize(parser, as_body({"prompt": "x" * 64 * CONTEXT})).body)
    assert (found["count"], found["max_model_len"]) == (64 * CONTEXT, CONTEXT)


def test_other_limits_than_the_context_are_no_such_error(parser: RequestParser):
    for fields in ({"prompt": ""}, {"prompt": [258]}, {"prompt": "Hi", "max_tokens": 0}):
        with pytest.raises(InvalidRequestError) as caught:
            parse_completion(parser, as_body(fields))
        assert error_record(http_error(caught.value))["code"] is None


# Which field an error names, and what it says of the value

MARK = "wild-badger"
"""A text that is sent in every place of every field, and that no error may repeat."""
WRONG_TYPES: list[Any] = [MARK, [MARK], {"a": MARK}, [{"a": MARK}], {"a": [MARK]}, True, -5, 10**30, 0.5]
"""Values of which most fields refuse some, and each field tells what it refuses in the same way."""


class Beside:
    """A value that is wrong beside other fields."""

    def __init__(self, value: Any, **others: Any):
        self.value, self.others = value, others


BEAMS: dict[str, Any] = {"use_beam_search": True}
HUGE = int("9" * 4300)
"""Python reads and writes no integer of more digits."""
SCHEMA = {"type": "object", "properties": {"a": {"not": {"const": MARK}}}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD_VALUES: dict[str, list[Any]] = {
    "add_generation_prompt": [1],
    "add_special_tokens": [1],
    "allowed_token_ids": [[], [258], ["5"], 5, Beside([0], min_tokens=1, max_tokens=2)],
    "bad_words": [[""], "a", [5], ["a"] * 129, ["x" * 600]],
    "cache_salt": ["", 5, "x" * 257, f"{MARK}\n"],
    "chat_template_kwargs": [5, [MARK]],
    "continue_final_message": [1, Beside(True, add_generation_prompt=True)],
    "echo": [1],
    "enable_thinking": [1, "false", Beside(False, chat_template_kwargs={"enable_thinking": True})],
    "frequency_penalty": [-2.1, "1"],
    "function_call": [
        5, "required", {}, Beside({"name": "g"}, functions=[{"name": "f"}]), Beside("auto", tools=[tool()]),
        Beside({"name": "f", "a": 1}, functions=[{"name": "f"}]),
    ],
    "functions": [
        MARK, {}, [5], [{}], [{"name": ""}], [{"name": "f", "parameters": MARK}], [{"name": "f"}, {"name": "f"}],
        Beside([{"name": "f"}], tools=[tool()]), [{"name": "f", "arguments": {}}],
    ],
    "ignore_eos": [1, Beside("x", **BEAMS)],
    "include_reasoning": [1],
    "include_stop_str_in_output": [1],
    "length_penalty": [0.5, Beside("x", **BEAMS), Beside(11, **BEAMS)],
    "logit_bias": [{MARK: 1}, {"258": 1}, {"1": 1e9}, {"1": MARK}, [1], {"1": 1, "01": 1}],
    "logprobs": [5.5, "1", 21],
    "max_completion_tokens": [0, "5", 2.5, HUGE],
    "max_tokens": [-1, "5", 2.5, HUGE],
    "messages": [
        [], MARK, [{}], [{"role": MARK, "content": MARK}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": MARK}}]}],
        [{"role": "user", "content": [{"type": MARK, MARK: MARK}]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [{"type": MARK}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'{{"{MARK}": '}}]}],
    ],
    "min_p": [-0.1, 1.1],
    "min_tokens": [-1, Beside(3, max_tokens=2)],
    "model": [5, [MARK]],
    "n": [0, 129, 9, "2", 1.5, Beside(9, **BEAMS), Beside(0, **BEAMS), Beside("x", **BEAMS)],
    "parallel_tool_calls": [1, Beside("x", tools=[tool()])],
    "presence_penalty": [2.1],
    "priority": [5, "x", 2**63],
    "prompt": [
        "", [], [[]], [""], 5, {}, [5, "a"], ["a", [5]], [-1], [258], [[1], [2.5]], [True], [None], [[[1]]], [MARK, ""],
        "x" * 128, [5] * 128, Beside("Hi", truncate_prompt_tokens=0), None,
    ],
    "prompt_logprobs": [-2, 21, "x", Beside(1, stream=True)],
    "reasoning_effort": [MARK, 5, ["high"]],
    "repetition_penalty": [0],
    "request_id": ["", 5, "x" * 129, "a b"],
    "response_format": [
        5, {}, {"type": MARK}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": MARK}}},
        {"type": "json_schema", "json_schema": {"schema": MARK}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA}, {"type": "json_object", "schema": MARK},
        {"type": "json_schema", "schema": SCHEMA}, {"type": "text", "schema": MARK}, {"type": "text", "a": MARK},
        Beside({"type": "json_object"}, structured_outputs={"regex": "a"}),
    ],
    "return_token_ids": [1],
    "return_token_strs": [1],
    "return_tokens_as_token_ids": [1],
    "seed": [2**63, "x", 1.5],
    "skip_special_tokens": [1],
    "spaces_between_special_tokens": [1],
    "stop": [[MARK] * 17, "", [5], [MARK * 100]],
    "stop_token_ids": [[258], [-1], "5"],
    "stream": [1],
    "stream_options": [
        Beside({"include_usage": True}, stream=False), Beside(5, stream=True), Beside({"x": True}, stream=True),
        Beside({"include_usage": MARK}, stream=True),
    ],
    "structured_outputs": [
        Beside({"json": SCHEMA}, response_format={"type": "text"}),
        {}, {"regex": f"{MARK}("}, {"regex": ""}, {"grammar": f"root ::= ({MARK}"}, {"grammar": f"start: {MARK}"},
        {"grammar": f"start: @{MARK}"},
        {"json": SCHEMA}, {"json": MARK}, {"choice": [""]}, {"choice": MARK}, {"regex": "a", "choice": ["a"]},
        {"regex": "a", "whitespace_pattern": MARK}, {"json_object": 1}, {"regx": "a"}, {"json": {"not": MARK}},
        {"json": {"pattern": f"{MARK}("}}, {"json": {"$ref": MARK}}, {"regex": "a" * 4097}, MARK,
        {"json": {"minLength": HUGE}}, {"grammar": f"root ::= '{MARK}\""}, {"grammar": f"start: @{MARK}"},
        {"grammar": f'start: %json {{"type": "{MARK}"}}'}, {"grammar": f'root ::= "\\{MARK}"'},
        Beside({"json": {"type": MARK}}, response_format={"type": "text"}),
        Beside(MARK, response_format={"type": "text"}),
    ],
    "temperature": [-0.1, 2.1, "1"],
    "thinking_token_budget": [-1, 5, "5", 1.5],
    "tokens": [5, [258], [MARK], [5] * 129, None],
    "tool_choice": [
        5, MARK, "required", named("f"), Beside(named("g"), tools=[tool()]), Beside({"type": "other"}, tools=[tool()]),
        Beside({"type": "function"}, tools=[tool()]), Beside("other", tools=[tool()]),
        Beside({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("g")]}}, tools=[tool()]),
    ],
    "tools": [
        MARK, {}, [5], [{}], [{"type": "other"}], [{"type": "function"}], [tool(name="")], [tool(name=MARK * 20)],
        [tool(parameters=MARK)], [tool(parameters={"type": "array"})], [tool(), tool()], [tool(strict=MARK)],
        [tool(name=f"f{index}") for index in range(129)], [tool(parameters={"description": "x" * 70_000})],
        [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}], Beside([tool()], **BEAMS),
    ],
    "top_k": [-2, 1.5],
    "top_logprobs": [Beside(2, logprobs=False), Beside(21, logprobs=True), Beside(-2, logprobs=True), "x"],
    "top_p": [-0.1, 1.1],
    "truncate_prompt_tokens": [-2, "5"],
    "use_beam_search": [1],
}  # fmt: skip
"""Values of each field that are refused. Fields that are taken without meaning, and those that are refused whatever
they hold, need none."""
OTHER_VALUES: dict[tuple[str, str], list[Any]] = {
    ("parse_completion", "min_tokens"): [17],
    ("parse_chat", "logprobs"): [1, "x", Beside(True, **BEAMS)],
    ("parse_chat", "max_tokens"): [0, Beside(5, max_completion_tokens=5)],
    ("parse_chat", "messages"): [LONG_CHAT, None],
    ("tokenize", "add_special_tokens"): [Beside(1, prompt="")],
    ("tokenize", "prompt"): [5, [5], [MARK], Beside(MARK, messages=CHAT)],
}
"""The same of one route, where it gives a field another meaning."""
ROUTES: dict[str, tuple[dict[str, Any], dict[str, BodyField]]] = {
    "parse_completion": ({"prompt": "Hi"}, COMPLETION_FIELDS),
    "parse_chat": ({"messages": CHAT}, CHAT_FIELDS),
    "tokenize": ({"messages": CHAT}, TOKENIZE_FIELDS),
    "detokenize": ({"tokens": [70]}, DETOKENIZE_FIELDS),
}


def error_of(parser: RequestParser, method: str, fields: Any) -> dict[str, Any] | None:
    """Return the error object of a body; None for one that is taken."""
    try:
        METHODS[method](parser, as_body(fields))
    except (HTTPError, InvalidRequestError) as error:
        return error_record(http_error(error))
    return None


def bodies(method: str, field: str, values: list[Any]) -> Iterator[dict[str, Any]]:
    plain, _ = ROUTES[method]
    for value in values:
        others = value.others if isinstance(value, Beside) else {}
        if method == "tokenize" and field in ("prompt", "messages", "add_special_tokens"):
            plain = {} if field != "add_special_tokens" else {"prompt": "Hi"}
        yield {**plain, **others, field: value.value if isinstance(value, Beside) else value}


def check_names(error: dict[str, Any] | None, field: str, body: Any) -> None:
    """Assert that a body is refused for a field, in words that tell no more of the value than its kind."""
    assert error is not None, body
    if error["code"] == "context_length_exceeded":
        assert error["param"] in ("messages", "prompt", "tokens"), (error, body)
        assert error["param"] in body
        return
    assert error["param"] is not None, (error, body)
    assert re.split(r"[.\[]", error["param"])[0] == field, (error, body)
    assert field in error["message"], (error, body)
    assert MARK not in error["message"], body
    for spelling in ("None", "True", "False", "{'", "['", "got [", "got {"):
        assert spelling not in error["message"], (error, body)


@pytest.mark.parametrize(
    ("method", "field"), [(method, field) for method, (_, table) in ROUTES.items() for field in table]
)
def test_an_error_names_the_field_that_was_sent_and_the_kind_of_its_value(
    parser: RequestParser, method: str, field: str
):
    """Each field of each table: with values that it refuses, and with a text in every place of a value."""
    known = ROUTES[method][1][field]
    refused = BAD_VALUES.get(field, []) + OTHER_VALUES.get((method, field), [])
    if (method, field) in (("parse_chat", "logprobs"), ("tokenize", "prompt")):
        refused = OTHER_VALUES[method, field]
    assert refused or known.use in (Use.IGNORED, Use.REFUSED), "a field needs values that it refuses"
    for body in bodies(method, field, refused):
        check_names(error_of(parser, method, body), field, body)
    for body in bodies(method, field, WRONG_TYPES):
        error = error_of(parser, method, body)
        is_taken = error is None or (field == "model" and error["code"] == "model_not_found")
        assert not is_taken or known.use is not Use.REFUSED or body[field] in known.neutral_values, body
        if not is_taken:
            check_names(error, field, body)


def test_an_error_of_two_fields_names_both_as_they_were_sent(parser: RequestParser):
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    for method, (plain, _) in list(ROUTES.items())[:2]:
        error = error_of(parser, method, {**plain, **both})
        assert error is not None
        assert error["message"].startswith("response_format: got it and structured_outputs, allowed: one of them")
