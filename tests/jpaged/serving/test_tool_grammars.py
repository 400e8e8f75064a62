"""Tools in a body: what their calls must follow, and what is told where that cannot be enforced."""

import json
from typing import Any

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.serving.protocols.chat.parser import parse_chat
from jpaged.serving.protocols.request_parser import RequestParser

PLAIN = {"name": "now", "parameters": {"type": "object", "properties": {}}}
UNENFORCEABLE = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"const": 1}}}}}


def parsed(parser: RequestParser, *functions: dict[str, Any], **fields: Any) -> Any:
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, **fields}
    return parse_chat(parser, bytearray(json.dumps(body).encode()))


def strict(parser: RequestParser) -> RequestParser:
    return RequestParser(parser.builder, parser.names, is_strict=True)


def test_calls_that_are_asked_for_have_a_grammar_and_others_none(chat_parser: RequestParser) -> None:
    (free,) = parsed(chat_parser, PLAIN).new_requests
    assert free.grammar == ""
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        (forced,) = parsed(chat_parser, PLAIN, **fields).new_requests
        assert "now" in forced.grammar
    (none,) = parsed(chat_parser, {**PLAIN, "strict": True}, tool_choice="none").new_requests
    assert none.grammar == ""


def test_a_schema_that_cannot_be_enforced_is_a_warning_and_an_error_where_something_is_strict(
    chat_parser: RequestParser,
) -> None:
    assert parsed(chat_parser, UNENFORCEABLE).warnings == ()
    (warning,) = parsed(chat_parser, PLAIN, UNENFORCEABLE, tool_choice="required").warnings
    assert warning.startswith("tools[1].function.parameters is not enforced: not, which")
    with pytest.raises(InvalidRequestError, match=r"^tools\[1\]\.function\.parameters: got not, "):
        parsed(strict(chat_parser), PLAIN, UNENFORCEABLE, tool_choice="required")
    with pytest.raises(InvalidRequestError, match="#/properties/a/not") as caught:
        parsed(chat_parser, {**UNENFORCEABLE, "strict": True})
    assert caught.value.param == "tools[0].function.parameters"
