"""What the options in bodies come to: schemas, integers, the model's name, variables of the chat template.

No server runs: a parser makes requests of bodies.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from jpaged import Engine
from jpaged.errors import InvalidRequestError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.serving.protocols.fields import INTEGERS
from jpaged.serving.protocols.http_errors import HTTPError
from jpaged.serving.protocols.request_parser import RequestParser
from jpaged.serving.protocols.table import METHODS

S = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
USER = [{"role": "user", "content": "Hi"}]
NAMED = {"name": "answer", "description": "An answer.", "strict": True, "schema": S}


@pytest.fixture(scope="module")
def parser(engine: Engine) -> RequestParser:
    builder = RequestBuilder(
        replace(engine.builder.config, scheduling_policy="priority"), engine.builder.encoder, engine.builder.sizes, {}
    )
    return RequestParser(builder, ("tiny", "other"))


def parse(parser: RequestParser, method: str = "parse_chat", **fields: Any) -> Any:
    """Return what a parser makes of a body, which has a prompt of its route."""
    prompt = {} if method == "detokenize" else {"messages": USER} if "chat" in method else {"prompt": "Hi"}
    fields = fields if "messages" in fields else {**prompt, **fields}
    return METHODS[method](parser, bytearray(json.dumps(fields).encode()))


def param_of(parser: RequestParser, method: str = "parse_chat", **fields: Any) -> str | None:
    """Return what the error of a body names."""
    with pytest.raises((InvalidRequestError, HTTPError)) as caught:
        parse(parser, method, **fields)
    assert "\n" not in str(caught.value)
    return caught.value.param


TAKEN: list[tuple[dict[str, Any], tuple[str, Any] | None]] = [
    ({"type": "text"}, None),
    ({"type": "text", "schema": None, "json_schema": None}, None),
    ({"type": "json_object"}, ("json_object", True)),
    ({"type": "json_object", "schema": None}, ("json_object", True)),
    ({"type": "json_object", "schema": S}, ("json", S)),
    ({"type": "json_schema", "json_schema": {"schema": S}}, ("json", S)),
    ({"type": "json_schema", "json_schema": NAMED}, ("json", S)),
    (
        {"type": "json_schema", "json_schema": {**NAMED, "strict": None, "description": None}, "schema": None},
        ("json", S),
    ),
    ({"type": "json_schema", "json_schema": {"name": "any", "schema": {}, "strict": False}}, ("json", {})),
]


@pytest.mark.parametrize(("response_format", "wanted"), TAKEN, ids=str)
@pytest.mark.parametrize("method", ["parse_chat", "parse_completion"])
def test_a_schema_counts_where_clients_put_it(parser, method, response_format, wanted):
    request = parse(parser, method, response_format=response_format)
    structure = request.new_requests[0].params.structured_outputs
    if wanted is None:
        assert structure is None
    else:
        assert structure.kind == wanted[0]
        assert wanted[0] == "json_object" or json.loads(structure.json) == wanted[1]
    assert not request.warnings


DROPPED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": S}}, "response_format.json_schema.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "title": "x"}}},
     "response_format.json_schema.title"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schmea": S}}},
     "response_format.json_schema.schmea"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": [S]}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": S, "strict": "yes"}}},
     "response_format.json_schema.strict"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": S, "name": 5}}},
     "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "schema": S}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED, "schema": S}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schmea": S}}, "response_format.schmea"),
    ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
    ({"response_format": {"type": "text", "schema": S}}, "response_format.schema"),
    ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": None, "schema": S}}, "response_format"),
    ({"response_format": {"schema": S}}, "response_format"),
    ({"response_format": S}, "response_format.properties"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"json": S, "strict": True}}, "structured_outputs.strict"),
    ({"structured_outputs": {"schema": S}}, "structured_outputs.schema"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    *(({name: S}, name) for name in ("json", "json_schema", "schema", "format", "guided_json")),
    *(({name: "a"}, name) for name in ("regex", "choice", "grammar", "ebnf")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), DROPPED, ids=str)
def test_an_option_in_another_place_is_refused_by_its_key(parser, fields, param):
    for method in ("parse_chat", "parse_completion"):
        assert param_of(parser, method, **fields) == param


def test_what_is_null_in_an_object_of_options_counts_as_left_out(parser):
    fields = {"structured_outputs": {"json": S, "regex": None, "structural_tag": None, "disable_any_whitespace": None}}
    assert parse(parser, **fields).new_requests[0].params.structured_outputs.kind == "json"
    request = parse(parser, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None})
    assert (request.has_usage, request.has_continuous_usage) == (True, False)
    assert not parse(parser, a_field_of_another_server=None, grammar=None, json_object=False).warnings


WHOLE: dict[str, Any] = {
    "n": 2, "best_of": 1, "max_tokens": 4, "max_completion_tokens": 4, "min_tokens": 1, "top_k": 40, "seed": 1,
    "logprobs": 2, "top_logprobs": 2, "prompt_logprobs": 2, "priority": 3, "truncate_prompt_tokens": 1,
    "stream_interval": 1, "routed_experts_prompt_start": 0, "thinking_token_budget": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_a_whole_number_counts_as_an_integer_in_a_body(parser, name):
    is_of_chats = name in ("top_logprobs", "max_completion_tokens")
    method, beside = ("parse_chat", {"logprobs": True}) if is_of_chats else ("parse_completion", {})
    if name == "thinking_token_budget":  # It is only for models that think.
        parser = templated(parser, THINKS)
    found = [parse(parser, method, **beside, **{name: kind(WHOLE[name])}).new_requests[0] for kind in (int, float)]
    for one, other in zip(vars_of(found[0]), vars_of(found[1]), strict=True):
        assert (one, type(one)) == (other, type(other))
    for wrong in (WHOLE[name] + 0.5, 1e20, 1e300, True):
        assert param_of(parser, method, **beside, **{name: wrong}) == name


def vars_of(request: Any) -> list[Any]:
    """Return what a request holds, but for its time."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__ if name != "arrival_time"}
    return [*vars(fields.pop("params")).values(), *fields.values()]


def test_ids_of_tokens_are_written_as_integers(parser):
    for prompt in ([1.0, 2], [[1.0]]):
        assert param_of(parser, "parse_completion", prompt=prompt) == "prompt"
    for name in ("stop_token_ids", "allowed_token_ids"):
        assert param_of(parser, **{name: [5.0]}) == name
    assert param_of(parser, "detokenize", tokens=[70.0]) == "tokens"
    assert param_of(parser, "parse_chat", logprobs=1.0) == "logprobs"


@pytest.mark.parametrize("method", ["parse_chat", "parse_completion"])
def test_an_empty_name_is_the_model_that_is_served(parser, method):
    for fields in ({"model": ""}, {"model": None}, {}):
        assert parse(parser, method, **fields).model == "tiny"
    assert parse(parser, method, model="other").model == "other"
    assert parse(parser, "tokenize", model="").body
    for wrong in (0, False, [], {}, " "):
        assert param_of(parser, method, model=wrong) == "model"


THINKS = "{{ messages[0].content }}{# </think> #}"
TEMPLATE = (
    "{% if level is not defined %}{% set level = 1 %}{% endif %}"
    "{% if enable_thinking is defined and false %}{{ deep }}{% endif %}"
    "{% macro said(m) %}{{ prefix }}{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{% set turn = loop.index %}{{ said(m) }}{% endfor %}"
)


def templated(parser: RequestParser, template: str, *, is_strict: bool = False) -> RequestParser:
    """Return a parser whose chats have another template."""
    builder = parser.builder
    encoder = replace(builder.encoder, chat_template=template)
    builder = RequestBuilder(builder.config, encoder, builder.sizes, builder.sampling_defaults)
    return RequestParser(builder, parser.names, is_strict=is_strict)


def test_variables_that_the_template_does_not_read_are_left_out_with_a_warning(parser):
    variables = {"level": 2, "enable_thinking": False, "deep": 1, "prefix": "> "}
    others = {"enable_thnking": False, "turn": 5, "messages": [], "bos_token": "x", "add_generation_prompt": False}
    lenient, strict = (templated(parser, TEMPLATE, is_strict=is_strict) for is_strict in (False, True))
    read = parse(lenient, chat_template_kwargs=variables)
    assert read.new_requests[0].prompt == "> Hi"
    assert not read.warnings
    assert parse(strict, chat_template_kwargs=variables).new_requests[0].prompt == "> Hi"
    for name, value in others.items():
        fields = {"chat_template_kwargs": {**variables, name: value}}
        request = parse(lenient, **fields)
        assert request.new_requests[0].prompt == "> Hi"
        (warning,) = request.warnings
        assert warning == f"the chat template does not read {name}, left out; it reads: " + ", ".join(sorted(variables))
        tokenized = parse(lenient, "tokenize", messages=USER, **fields)
        assert (json.loads(tokenized.body)["count"], tokenized.warnings) == (4, (warning,))
        for method in ("parse_chat", "tokenize"):
            assert param_of(strict, method, messages=USER, **fields) == "chat_template_kwargs"
    assert not parse(strict, chat_template_kwargs={"unread": None}).warnings
    assert param_of(lenient, chat_template_kwargs=5) == "chat_template_kwargs"
    assert param_of(lenient, "tokenize", messages=USER, chat_template_kwargs=[1]) == "chat_template_kwargs"


def test_an_effort_goes_to_the_template_or_into_a_warning(parser):
    reads = templated(parser, "{{ reasoning_effort }}: {{ messages[0].content }}")
    assert parse(reads, reasoning_effort="high").new_requests[0].prompt == "high: Hi"
    assert parse(reads, reasoning_effort="none").new_requests[0].prompt == "none: Hi"
    plain = "{{ messages[0].content }}"
    for template, effort, is_taken in ((plain, "none", True), (plain, "high", False), (THINKS, "high", False)):
        request = parse(templated(parser, template), reasoning_effort=effort)
        assert request.new_requests[0].prompt == "Hi"
        assert bool(request.warnings) is not is_taken
        assert all("does not read reasoning_effort" in warning for warning in request.warnings)
        strict = templated(parser, template, is_strict=True)
        if is_taken:
            assert not parse(strict, reasoning_effort=effort).warnings
        else:
            assert param_of(strict, reasoning_effort=effort) == "reasoning_effort"
    assert param_of(parser, reasoning_effort="huge") is not None
    for other in ({"reasoning_effort": "high"}, {"reasoning_effort": None}):
        assert param_of(parser, reasoning_effort="low", chat_template_kwargs=other) == "reasoning_effort"


SWITCH = (
    "{{ messages[0].content }}{% if enable_thinking is true %} think{% elif enable_thinking is false %} no{% endif %}"
)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("template", "fields", "prompt", "budget"),
    [
        (SWITCH, {"enable_thinking": False}, "Hi no", None),
        (SWITCH, {"enable_thinking": True}, "Hi think", None),
        (SWITCH, {"reasoning_effort": "none"}, "Hi no", None),
        (SWITCH, {"reasoning_effort": "none", "enable_thinking": True}, "Hi think", None),
        (SWITCH.replace("enable_", ""), {"enable_thinking": False}, "Hi no", None),
        (SWITCH.replace("enable_", ""), {"reasoning_effort": "none"}, "Hi no", None),
        (THINKS, {"reasoning_effort": "none"}, "Hi", 0),
        (THINKS, {"enable_thinking": False}, "Hi", 0),
        (THINKS, {"chat_template_kwargs": {"enable_thinking": False}}, "Hi", 0),
        (THINKS, {"enable_thinking": False, "thinking_token_budget": 5}, "Hi", 5),
        (THINKS, {"enable_thinking": True}, "Hi", None),
        (THINKS.replace("</think>", "[THINK][/THINK]"), {"reasoning_effort": "none"}, "Hi", 0),
        ("{{ messages[0].content }}", {"enable_thinking": False}, "Hi", None),
    ],
)
def test_thoughts_are_switched_by_whatever_the_model_has(parser, template, fields, prompt, budget, is_strict):
    """By a variable of the template, else by an empty thought; a model that does not think needs neither."""
    request = parse(templated(parser, template, is_strict=is_strict), **fields)
    (new,) = request.new_requests
    assert (new.prompt, new.params.thinking_token_budget, request.warnings) == (prompt, budget, ())


def test_thoughts_that_a_model_does_not_have_are_a_warning(parser):
    plain, wanted = "{{ messages[0].content }}", {"enable_thinking": True}
    (warning,) = parse(templated(parser, plain), **wanted).warnings
    assert "does not read enable_thinking" in warning
    assert param_of(templated(parser, plain, is_strict=True), **wanted) == "enable_thinking"


def test_a_template_that_takes_short_ids_alone_gets_short_ones(parser):
    """As Mistral's: it raises for others."""
    calls = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% if IS_LONG %}'
        "{{ raise_exception('long') }}{% endif %}{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t }}{% endfor %}"
        "{# <tool_call></tool_call> XML tags #}"
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    for condition, is_short in (("false", False), ("c.id | length != 9", True)):
        found = parse(templated(parser, calls.replace("IS_LONG", condition)), tools=tools)
        assert found.has_short_call_ids is is_short


def test_a_template_that_is_not_valid_is_told_of_the_messages_that_were_sent(parser):
    broken = templated(parser, "{% if %}")
    for method in ("parse_chat", "tokenize"):
        assert param_of(broken, method, messages=USER) == "messages"


def test_stop_strings_are_refused_by_their_name_where_no_tokenizer_is(parser):
    builder = parser.builder
    encoder = replace(builder.encoder, tokenizer=None, grammars=None)
    bare = RequestParser(RequestBuilder(builder.config, encoder, builder.sizes, {}), parser.names)
    assert not parse(bare, "parse_completion", prompt=[70], stop=[]).new_requests[0].params.stop
    for stop in ("x", ["x"]):
        with pytest.raises(InvalidRequestError, match=r"^stop: got .*, allowed: none, since .*; give stop_token_ids$"):
            parse(bare, "parse_completion", prompt=[70], stop=stop)


def test_tools_are_refused_also_where_no_tool_may_be_called(parser):
    """They belong in the prompt, which has no place for them yet."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert param_of(parser, tools=tools, tool_choice="none") == "tools"


def test_formats_that_are_not_known_are_a_warning_and_a_strict_server_refuses_them(parser):
    schema = {"type": "object", "properties": {"id": {"type": "string", "format": "cuid", "pattern": "^c"}}}
    strict = RequestParser(parser.builder, parser.names, is_strict=True)
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    places = ("response_format.json_schema.schema", "structured_outputs.json")
    for fields, place in zip((asked, {"structured_outputs": {"json": schema}}), places, strict=True):
        for method, prompt in (("parse_chat", {"messages": USER}), ("parse_completion", {})):
            (warning,) = parse(parser, method, **prompt, **fields).warnings
            assert warning == "formats that are not known are not enforced: cuid at #/properties/id/format"
            assert param_of(strict, method, **prompt, **fields) == place
    schema["properties"]["id"]["format"] = "uuid"
    assert not parse(strict, **asked).warnings


def test_unknown_fields_of_every_route_are_a_warning(parser):
    for method in ("parse_completion", "parse_chat", "tokenize"):
        (warning,) = parse(parser, method, temprature=1, **({"messages": USER} if "chat" in method else {})).warnings
        assert warning.startswith("unknown fields are ignored: temprature")
    assert parse(parser, "detokenize", tokens=[70], x_field=1).warnings
