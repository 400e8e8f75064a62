"""The parser of /v1/messages, without a server: what the options of a body become, and how errors name its places."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jpaged import SamplingParams
from jpaged.errors import ContextLengthError, InvalidRequestError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.messages import NewRequest
from jpaged.serving.protocols.chat.parser import parse_chat
from jpaged.serving.protocols.http_errors import HTTPError
from jpaged.serving.protocols.messages.encoder import MessagesEncoder
from jpaged.serving.protocols.messages.parser import count_tokens, parse_messages
from jpaged.serving.protocols.request_parser import RequestParser

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def with_template(parser: RequestParser, template: str) -> RequestParser:
    """Return a parser of the same model with another chat template."""
    builder = parser.builder
    encoder = replace(builder.encoder, chat_template=template)
    return RequestParser(RequestBuilder(builder.config, encoder, builder.sizes, {}), ("tiny",))


def as_body(fields: Any) -> bytearray:
    return bytearray(json.dumps(fields).encode())


def new_request(parser: RequestParser, **more: Any) -> tuple[NewRequest, SamplingParams]:
    """Return the request of a body, and its parameters."""
    (new,) = parse_messages(parser, as_body(ASKED | more)).new_requests
    assert isinstance(new.params, SamplingParams)
    return new, new.params


def test_options_become_sampling_parameters(parser: RequestParser):
    more = {"stop_sequences": ["x", "yz"], "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stream": True}
    new, params = new_request(parser, **more)
    assert (params.stop, params.temperature, params.top_p, params.top_k) == (("x", "yz"), 0.5, 0.9, 7)
    assert (params.max_tokens, new.max_tokens) == (20, 20)
    new, params = new_request(parser, max_tokens=10**30)
    assert new.max_tokens == 128 - new.num_prompt_tokens


def test_what_means_nothing_here_is_taken_without_a_word(parser: RequestParser):
    """Claude Code sends most of it, and cannot do without its budget and its effort."""
    ignored = {
        "metadata": {"user_id": "{}"}, "service_tier": "auto", "container": "c", "betas": ["x"], "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "enabled", "budget_tokens": 31999, "display": "updates"}, "cache_control": None,
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 5}}, "tools": [],
        "tool_choice": {"type": "auto"},
    }  # fmt: skip
    request = parse_messages(RequestParser(parser.builder, ("tiny",), is_strict=True), as_body(ASKED | ignored))
    assert request.warnings == ()
    assert request.new_requests[0].prompt_token_ids == new_request(parser)[0].prompt_token_ids


def test_thoughts_have_a_budget_and_disabled_ones_none(thinker: RequestParser):
    plain, params = new_request(thinker)
    assert params.thinking_token_budget is None
    for thinking, budget in (
        ({"type": "disabled"}, 0),
        ({"type": "enabled", "budget_tokens": 50}, 50),
        ({"type": "adaptive", "display": "omitted"}, None),
        ({"type": "between_tools"}, None),
    ):
        new, params = new_request(thinker, thinking=thinking)
        assert params.thinking_token_budget == budget
        assert new.prompt_token_ids == plain.prompt_token_ids, "a prompt that changed would be computed anew"


def test_an_effort_is_one_for_the_template(thinker: RequestParser):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }} {{ enable_thinking }}"
    parser = with_template(thinker, template)
    new, _ = new_request(parser, output_config={"effort": "low"})
    assert (
        new.prompt_token_ids
        == new_request(parser, chat_template_kwargs={"reasoning_effort": "low", "enable_thinking": True})[
            0
        ].prompt_token_ids
    )
    new, _ = new_request(parser, thinking={"type": "enabled", "budget_tokens": 5})
    assert (
        new.prompt_token_ids == new_request(parser, chat_template_kwargs={"enable_thinking": True})[0].prompt_token_ids
    )


def test_a_format_is_enforced(parser: RequestParser):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    new, _ = new_request(parser, output_config={"format": {"type": "json_schema", "schema": schema}})
    chat = parse_chat(parser, as_body(ASKED | {"structured_outputs": {"json": schema}}))
    assert new.grammar == chat.new_requests[0].grammar != ""
    with pytest.raises(InvalidRequestError, match=r"^output_config\.format\.schema"):
        new_request(parser, output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}})


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto": ({"type": "auto"}, {"tool_choice": "auto"}),
    "strict": ({"type": "auto"}, {"tool_choice": "auto"}),
    "none": ({"type": "none"}, {"tool_choice": "none"}),
    "any": ({"type": "any"}, {"tool_choice": "required"}),
    "one of any": (
        {"type": "any", "disable_parallel_tool_use": True},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "a tool": (
        {"type": "tool", "name": "weather"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_calls_are_enforced_and_read_as_those_of_a_chat(thinker: RequestParser, case: str):
    choice, options = CHOICES[case]
    strict = {"strict": True} if case == "strict" else {}
    new, _ = new_request(thinker, tools=[WEATHER | strict], tool_choice=choice, thinking={"type": "disabled"})
    function = {"name": "weather", "parameters": WEATHER["input_schema"], **strict}
    chat = ASKED | options | {"tools": [{"type": "function", "function": function}], "thinking_token_budget": 0}
    (wanted,) = parse_chat(thinker, as_body(chat)).new_requests
    names = ("prompt_token_ids", "grammar", "answer", "mark_ids")
    assert [getattr(new, name) for name in names] == [getattr(wanted, name) for name in names]
    assert bool(new.grammar)


def test_a_body_is_counted_as_its_usage_tells(thinker: RequestParser, parser: RequestParser):
    body = {**ASKED, "system": "S", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    new, _ = new_request(thinker, **body)
    del body["max_tokens"]
    assert json.loads(count_tokens(thinker, as_body(body)).body) == {"input_tokens": new.num_prompt_tokens}
    long = json.loads(count_tokens(parser, as_body({"messages": [{"role": "user", "content": "x" * 1000}]})).body)
    assert long["input_tokens"] > 1000, "more than the context"


@pytest.mark.parametrize(("num_chars", "num_tokens"), [(200, "220"), (500_000, "7814")])
def test_too_long_a_prompt_is_told_in_anthropics_words(parser: RequestParser, num_chars: int, num_tokens: str):
    """Claude Code finds the numbers by these words, and compacts the conversation."""
    with pytest.raises(ContextLengthError) as caught:
        new_request(parser, messages=[{"role": "user", "content": "x" * num_chars}])
    assert str(caught.value) == f"prompt is too long: {num_tokens} tokens > 127 maximum"
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


LEFT_OUT = {"type": "web_search_20250305", "name": "web_search"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens: got none, allowed: an integer ≥ 1"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens: got 0"),
    "no messages": ({"messages": None}, "messages: got none"),
    "a budget below 0": ({"thinking": {"type": "enabled", "budget_tokens": -1}}, r"thinking\.budget_tokens: got -1"),
    "no budget": ({"thinking": {"type": "enabled"}}, r"thinking\.budget_tokens: got none"),
    "an unknown thought": ({"thinking": {"type": "deep"}}, r"thinking\.type: got a string"),
    "an unknown effort": ({"output_config": {"effort": "none"}}, r"output_config\.effort: got a string"),
    "an unknown format": ({"output_config": {"format": {"type": "text"}}}, r"output_config\.format\.type: "),
    "an unknown key": ({"output_config": {"schema": {}}}, r"output_config\.schema: unknown field"),
    "a stop that is text": ({"stop_sequences": "x"}, "stop_sequences: got a string"),
    "too many stops": ({"stop_sequences": ["x"] * 40}, "stop_sequences: got an array of 40"),
    "a temperature": ({"temperature": 3}, "temperature: got 3"),
    "a tool twice": ({"tools": [LEFT_OUT, WEATHER, WEATHER]}, r"tools\[2\]\.name: got weather, .* tools\[1\] too"),
    "a schema of no object": ({"tools": [LEFT_OUT, {**WEATHER, "input_schema": {"type": "string"}}]},
                              r"tools\[1\]\.input_schema\.type: "),
    "an unknown choice": ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "none"}},
                          r"tool_choice\.name: got none"),
    "a system message that is a number": ({"system": 5}, "system: got 5"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_as_the_body_has_it(parser: RequestParser, case: str):
    more, message = REFUSED[case]
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        new_request(parser, **more)


def test_a_failure_in_a_stream_is_an_event_of_its_own(parser: RequestParser):
    request = parse_messages(parser, as_body(ASKED | {"stream": True}))
    encoder = MessagesEncoder(request, ["5"], parser.tokenizer, created=0, fingerprint="", http_id="r5")
    name, data = encoder.failure(HTTPError(503, "gone")).decode().splitlines()[:2]
    error = {"type": "overloaded_error", "message": "gone"}
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error, "request_id": "r5"}
    assert encoder.keepalive == b'event: ping\ndata: {"type":"ping"}\n\n'
