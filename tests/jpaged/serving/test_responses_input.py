"""What bodies of /v1/responses become: the prompt of chat completions for the same conversation, or an error."""

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.serving.protocols.chat.parser import parse_chat
from jpaged.serving.protocols.generation_request import GenerationRequest
from jpaged.serving.protocols.places import Places
from jpaged.serving.protocols.request_parser import RequestParser
from jpaged.serving.protocols.responses.input_items import Conversation
from jpaged.serving.protocols.responses.parser import parse_response
from jpaged.serving.protocols.responses.thoughts import sealed
from jpaged.serving.protocols.responses.tools import SentTools

WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": WEATHER_SCHEMA}
GRAMMAR = {"syntax": "lark", "definition": 'start: "a"+'}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", **GRAMMAR}}
WAIT = {"type": "function", "name": "wait"}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}
QUESTION = {"role": "user", "content": "How is it in Rome?"}


def responses(parser: RequestParser, **fields: Any) -> GenerationRequest:
    return parse_response(parser, bytearray(json.dumps(fields), "utf-8"))


def chat(parser: RequestParser, *messages: dict[str, Any], **fields: Any) -> GenerationRequest:
    return parse_chat(parser, bytearray(json.dumps({"messages": messages, **fields}), "utf-8"))


def text_of(request: GenerationRequest) -> str:
    (new,) = request.new_requests
    return new.prompt


def as_chat(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function in the form of chat completions."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CHAT_OUTPUT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
PATCHED = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a\nb"}
PATCH_OUTPUT = {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]}
CHAT_PATCHED = {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
ANSWER = {"role": "assistant", "content": "I look.", "reasoning": "Hm."}
NULLS = {"content": None, "encrypted_content": None, "status": "in_progress"}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def thought(*texts: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **fields}


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a text": ({"input": "How is it in Rome?"}, [QUESTION]),
    "instructions": (
        {"input": [QUESTION], "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, QUESTION]
    ),
    "parts": (
        {"input": [{"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"},
        ]}]},
        [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}],
    ),
    "system messages at their places": (
        {"input": [{"role": "system", "content": "A"}, QUESTION, said("B"), {"role": "system", "content": "C"}]},
        [{"role": "system", "content": "A"}, QUESTION, {"role": "assistant", "content": "B"},
         {"role": "system", "content": "C"}],
    ),
    "a refusal": (
        {"input": [QUESTION, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, QUESTION]},
        [QUESTION, {"role": "assistant", "content": "No."}, QUESTION],
    ),
    "an answer of several items": (
        {"input": [QUESTION, thought("Hm."), said("I look."), CALL, PATCHED, OUTPUT, PATCH_OUTPUT]},
        [QUESTION, {**ANSWER, "tool_calls": [CHAT_CALL, CHAT_PATCHED]}, CHAT_OUTPUT,
         {"role": "tool", "tool_call_id": "c2", "content": "done"}],
    ),
    "two thoughts, two calls and two texts of one answer": (
        {"input": [QUESTION, thought("Hm."), CALL, thought("Also."), said("A"), PATCHED, said(" B"), OUTPUT]},
        [QUESTION, {"role": "assistant", "content": "A B", "reasoning": "Hm.\nAlso.",
                    "tool_calls": [CHAT_CALL, CHAT_PATCHED]}, CHAT_OUTPUT],
    ),
    "two messages": (
        {"input": [QUESTION, said("A"), said("B"), QUESTION]},
        [QUESTION, {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}, QUESTION],
    ),
    "an answer in each of two turns": (
        {"input": [QUESTION, CALL, OUTPUT, thought("Hm."), said("I look."), QUESTION]},
        [QUESTION, {"role": "assistant", "tool_calls": [CHAT_CALL]}, CHAT_OUTPUT, ANSWER, QUESTION],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_a_conversation_has_the_prompt_of_chat_completions(chat_parser: RequestParser, case: str):
    fields, messages = CONVERSATIONS[case]
    tools = [as_chat(FUNCTION), {"type": "custom", "custom": {"name": "patch"}}]
    mine = responses(chat_parser, **fields, tools=[FUNCTION, {"type": "custom", "name": "patch"}])
    assert text_of(mine) == text_of(chat(chat_parser, *messages, tools=tools))


@pytest.mark.parametrize(
    "item",
    [
        thought("Hm."),
        thought(encrypted_content=sealed("Hm.")),
        thought(summary=[{"type": "summary_text", "text": "Hm."}]),
        thought(summary=[{"type": "summary_text", "text": "Short."}], encrypted_content=sealed("Hm.")),
        thought("Hm.", encrypted_content="of another server"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], **NULLS},
        thought(encrypted_content=sealed("Hm."), status="in_progress"),
        {"type": "reasoning", "summary": [], "content": [{"type": "output_text", "text": "Hm."}]},
    ],
)
def test_a_thought_comes_back_in_whatever_form_a_client_keeps_it(chat_parser: RequestParser, item: dict[str, Any]):
    mine = responses(chat_parser, input=[QUESTION, item, said("I look."), QUESTION])
    assert text_of(mine) == text_of(chat(chat_parser, QUESTION, ANSWER, QUESTION))


def test_thoughts_before_the_last_turn_are_dropped_if_the_client_says_so(chat_parser: RequestParser):
    items = [QUESTION, thought("Old."), said("A"), QUESTION, thought("New."), CALL, OUTPUT]
    kept = {context: text_of(responses(chat_parser, input=items, tools=[FUNCTION], reasoning={"context": context}))
            for context in ("auto", "all_turns", "current_turn")}  # fmt: skip
    assert kept["auto"] == kept["all_turns"]
    assert "Old." in kept["auto"]
    assert "Old." not in kept["current_turn"]
    assert "New." in kept["current_turn"]


def test_what_another_server_has_encrypted_is_left_out_with_a_warning(chat_parser: RequestParser):
    items = [{"type": "compaction", "id": "cmp_1", "encrypted_content": "x"}, QUESTION]
    items += [thought(encrypted_content="gAAAA"), said("A"), QUESTION]
    request = responses(chat_parser, input=items)
    assert text_of(request) == text_of(chat(chat_parser, QUESTION, {"role": "assistant", "content": "A"}, QUESTION))
    assert [warning.split(" ")[0] for warning in request.warnings] == ["items", "thoughts"]


@pytest.mark.parametrize("item", [{"encrypted_content": sealed("So far.")}, {"summary": "So far."}], ids=str)
def test_a_compacted_conversation_begins_with_its_text(chat_parser: RequestParser, item: dict[str, Any]):
    mine = responses(chat_parser, input=[{"type": "compaction", **item}, QUESTION])
    assert text_of(mine) == text_of(chat(chat_parser, {"role": "user", "content": "So far."}, QUESTION))


def test_tools_have_the_form_of_chat_completions_and_names_that_can_be_told_apart(chat_parser: RequestParser):
    team = {"type": "namespace", "name": "team", "description": "Others.", "tools": [WAIT, {**CUSTOM, "name": "tell"}]}
    request = responses(chat_parser, input=[QUESTION], tools=[FUNCTION, CUSTOM, team, SEARCH])
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}}
    tools = [as_chat(FUNCTION), custom, as_chat({**WAIT, "name": "team__wait"})]
    tools += [{**custom, "custom": {**custom["custom"], "name": "team__tell"}}]
    tools += [{"type": "function", "function": {"name": "tool_search", "description": "Finds.",
                                                "parameters": SEARCH["parameters"]}}]  # fmt: skip
    assert text_of(request) == text_of(chat(chat_parser, QUESTION, tools=tools))
    assert request.details["names"] == {"team__wait": ("team", "wait"), "team__tell": ("team", "tell")}
    assert request.details["has_search"]


def test_calls_of_a_namespace_come_back_under_the_name_that_the_model_saw(chat_parser: RequestParser):
    item = {"type": "function_call", "call_id": "c1", "name": "wait", "namespace": "team", "arguments": "{}"}
    team = {"type": "namespace", "name": "team", "tools": [WAIT]}
    mine = responses(chat_parser, input=[QUESTION, item, OUTPUT], tools=[team])
    called = {"id": "c1", "type": "function", "function": {"name": "team__wait", "arguments": "{}"}}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [called]}, CHAT_OUTPUT]
    assert text_of(mine) == text_of(chat(chat_parser, *messages, tools=[as_chat({**WAIT, "name": "team__wait"})]))


def test_tools_in_front_of_the_conversation_are_listed(chat_parser: RequestParser):
    """As Codex sends all tools to some models."""
    front = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [
        {"type": "namespace", "name": "functions", "description": "", "tools": [FUNCTION]}, CUSTOM,
    ]}  # fmt: skip
    mine = responses(chat_parser, input=[front, {"role": "system", "content": "A"}, QUESTION])
    tools = [{"type": "namespace", "name": "functions", "tools": [FUNCTION]}, CUSTOM]
    listed = responses(chat_parser, input=[{"role": "system", "content": "A"}, QUESTION], tools=tools)
    assert text_of(mine) == text_of(listed)
    assert mine.details["names"] == {"functions__weather": ("functions", "weather")}


def test_tools_that_the_conversation_brings_change_no_text_before_them(chat_parser: RequestParser):
    """So the pages of the prompt before stay of use."""
    search = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "wait"}}
    found = [{"type": "namespace", "name": "team", "tools": [WAIT]}, FUNCTION]
    output = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": found}
    later = {"type": "additional_tools", "role": "developer", "tools": [CUSTOM, FUNCTION]}
    before = responses(chat_parser, input=[QUESTION, search], tools=[FUNCTION, SEARCH])
    request = responses(chat_parser, input=[QUESTION, search, output, later], tools=[FUNCTION, SEARCH])
    shared = text_of(before).removesuffix("<|start|>assistant: ")
    assert text_of(request).startswith(shared)
    assert '"name": "team__wait"' in text_of(request).removeprefix(shared)
    assert '"name": "patch"' in text_of(request).removeprefix(shared)
    spec = request.new_requests[0].answer
    assert set(spec.tools) == {"weather", "tool_search", "team__wait", "patch"}
    assert request.details["names"] == {"team__wait": ("team", "wait")}


@pytest.mark.parametrize(
    "kind",
    ["web_search", "file_search", "mcp", "image_generation", "local_shell", "shell", "apply_patch", "tool_search"],
)
def test_tools_that_only_openai_runs_are_left_out_with_a_warning(chat_parser: RequestParser, kind: str):
    request = responses(chat_parser, input=[QUESTION], tools=[{"type": kind, "server_label": "x"}, FUNCTION])
    assert text_of(request) == text_of(chat(chat_parser, QUESTION, tools=[as_chat(FUNCTION)]))
    assert request.warnings == (f"tools that this server does not run are left out: {kind}",)
    strict = RequestParser(chat_parser.builder, ("m",), is_strict=True)
    with pytest.raises(InvalidRequestError, match=kind):
        responses(strict, input=[QUESTION], tools=[{"type": kind}])


def test_a_warning_names_its_place_in_the_body(chat_parser: RequestParser):
    """This format writes texts of tools as JSON, in which no grammar of theirs can be enforced."""
    team = {"type": "namespace", "name": "team", "tools": [WAIT, CUSTOM]}
    (warning,) = responses(chat_parser, input=[QUESTION], tools=[FUNCTION, team]).warnings
    assert warning.startswith("tools[1].tools[1].format is not enforced: ")


def test_keys_that_a_tool_does_not_have_are_left_out_with_a_warning(chat_parser: RequestParser):
    tool = {**FUNCTION, "paramters": {}, "defer_loading": True, "async": False, "allowed_callers": ["direct"]}
    request = responses(
        chat_parser, input=[QUESTION], tools=[CUSTOM, {"type": "namespace", "name": "a", "tools": [tool]}]
    )
    assert request.warnings[0] == "keys of tools are left out: tools[1].tools[0].paramters"
    strict = RequestParser(chat_parser.builder, ("m",), is_strict=True)
    with pytest.raises(InvalidRequestError, match="paramters"):
        responses(strict, input=[QUESTION], tools=[tool])


def test_many_items_take_linear_time():
    places = Places()
    conversation = Conversation(places, SentTools(places))
    front = ({"role": "developer", "content": "x"}, {"type": "additional_tools", "tools": []})
    answer = (thought("x" * 50), {**CALL, "call_id": "c"}, said("y" * 50))
    items = [item for pair in (front, answer) for _ in range(20_000) for item in pair]
    start = time.process_time()
    conversation.read(items)
    assert time.process_time() - start < 2, "0.2 s; copies of what was read before take 20 s"
    assert len(conversation.messages[-1]["content"]) == 1_000_000


CHOICES: dict[str, tuple[Any, Any]] = {
    "none": ("none", "none"),
    "required": ("required", "required"),
    "a function": ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    "a custom tool": ({"type": "custom", "name": "patch"}, {"type": "custom", "custom": {"name": "patch"}}),
    "some": (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"},
                                                                 {"type": "web_search"}]},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "weather"}}]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_a_choice_of_tools_means_what_it_does_in_chat_completions(chat_parser: RequestParser, case: str):
    mine, theirs = CHOICES[case]
    tools = [as_chat(FUNCTION), {"type": "custom", "custom": {"name": "patch"}}]
    request = responses(chat_parser, input=[QUESTION], tools=[FUNCTION, {"type": "custom", "name": "patch"}],
                        tool_choice=mine, parallel_tool_calls=False)  # fmt: skip
    other = chat(chat_parser, QUESTION, tools=tools, tool_choice=theirs, parallel_tool_calls=False)
    assert request.new_requests[0].grammar == other.new_requests[0].grammar
    assert request.new_requests[0].answer == other.new_requests[0].answer


def test_a_format_of_text_is_a_response_format(chat_parser: RequestParser):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    request = responses(chat_parser, input=[QUESTION], text={"format": {
        "type": "json_schema", "name": "x", "strict": True, "schema": schema}})  # fmt: skip
    other = chat(chat_parser, QUESTION, response_format={"type": "json_schema", "json_schema": {
        "name": "x", "schema": schema}})  # fmt: skip
    assert request.new_requests[0].grammar == other.new_requests[0].grammar != ""
    as_object = responses(chat_parser, input=[QUESTION], text={"format": {"type": "json_object"}})
    assert as_object.new_requests[0].grammar != ""
    assert responses(chat_parser, input=[QUESTION], text={"format": {"type": "text"}}).new_requests[0].grammar == ""


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({}, "input"),
    "no item": ({"input": []}, "input"),
    "an item that is a text": ({"input": ["x"]}, "input[0]"),
    "an item without a type": ({"input": [{"id": "x"}]}, "input[0].type"),
    "an unknown type": ({"input": [QUESTION, {"type": "web_search_call", "id": "x"}]}, "input[1].type"),
    "a reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    "an unknown role": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, IMAGE]}]},
                 "input[0].content[1]"),
    "an image of a tool": ({"input": [QUESTION, CALL, {**OUTPUT, "output": [IMAGE]}], "tools": [FUNCTION]},
                           "input[2].output[0]"),
    "a part without text": ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
    "arguments that are no JSON": ({"input": [QUESTION, {**CALL, "arguments": "{x"}], "tools": [FUNCTION]},
                                   "input[1].arguments"),
    "arguments that are no object": ({"input": [QUESTION, {**CALL, "arguments": "[1]"}], "tools": [FUNCTION]},
                                     "input[1].arguments"),
    "arguments that are no text": ({"input": [QUESTION, {**CALL, "arguments": {}}]}, "input[1].arguments"),
    "a call without an id": ({"input": [QUESTION, {**CALL, "call_id": None}]}, "input[1].call_id"),
    "a call without a name": ({"input": [QUESTION, {**CALL, "name": ""}]}, "input[1].name"),
    "a search whose arguments are a text": (
        {"input": [{"type": "tool_search_call", "call_id": "c", "arguments": "{}"}]}, "input[0].arguments"
    ),
    "a result without its call": ({"input": [QUESTION, OUTPUT], "tools": [FUNCTION]}, "input[1]"),
    "a tool twice": ({"input": "x", "tools": [FUNCTION, CUSTOM, FUNCTION]}, "tools[2].name"),
    "a tool of a namespace twice": (
        {"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": [WAIT, WAIT]}]}, "tools[0].tools[1].name"
    ),
    "a tool without a name": ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    "a tool without a type": ({"input": "x", "tools": [{"name": "x"}]}, "tools[0].type"),
    "an unknown kind of tool": ({"input": "x", "tools": [FUNCTION, {"type": "magic"}]}, "tools[1].type"),
    "tools of an item": ({"input": [{"type": "additional_tools", "tools": [FUNCTION, {"type": "function"}]}]},
                         "input[0].tools[1].name"),
    "a hosted tool in a namespace": ({"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": [
        {"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    "a schema that is none": ({"input": "x", "tools": [{**FUNCTION, "parameters": {"type": "array"}}]},
                              "tools[0].parameters.type"),
    "a grammar that is none": ({"input": "x", "tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "ebnf"}}]},
                               "tools[0].format.syntax"),
    "tools that are none": ({"input": "x", "tools": {}}, "tools"),
    "a tool that is not among them": ({"input": "x", "tools": [FUNCTION], "tool_choice": {
        "type": "function", "name": "x"}}, "tool_choice.name"),
    "a choice of a hosted tool": ({"input": "x", "tools": [FUNCTION], "tool_choice": {"type": "file_search"}},
                                  "tool_choice.type"),
    "some tools that are not among them": ({"input": "x", "tools": [FUNCTION], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
        "tool_choice.tools[0].name"),
    "required without tools": ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    "background": ({"input": "x", "background": True}, "background"),
    "an earlier response": ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"input": "x", "conversation": "conv_1"}, "conversation"),
    "a stored prompt": ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    "max_tokens": ({"input": "x", "max_tokens": 5}, "max_tokens"),
    "max_output_tokens": ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    "too many tokens": ({"input": "x", "max_output_tokens": 5000}, "input"),
    "an effort": ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "a mode": ({"input": "x", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
    "a key of reasoning": ({"input": "x", "reasoning": {"budget": 5}}, "reasoning.budget"),
    "a format without a schema": (
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"
    ),
    "a format without a type": ({"input": "x", "text": {"format": {"schema": {}}}}, "text.format.schema"),
    "a format of no type": ({"input": "x", "text": {"format": {}}}, "text.format.type"),
    "a schema in another place": (
        {"input": "x", "text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"
    ),
    "a format that is a text": ({"input": "x", "text": {"format": "json"}}, "text.format"),
    "a key of text": ({"input": "x", "text": {"formats": {}}}, "text.formats"),
    "a type of format": ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    "a schema of the format": ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {
        "type": "x"}}}}, "text.format.schema"),
    "include": ({"input": "x", "include": ["everything"]}, "include[0]"),
    "metadata": ({"input": "x", "metadata": {"a": 1}}, "metadata"),
    "truncation": ({"input": "x", "truncation": "middle"}, "truncation"),
    "temperature": ({"input": "x", "temperature": -1}, "temperature"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_by_its_place_in_the_body(chat_parser: RequestParser, case: str):
    fields, path = BAD[case]
    with pytest.raises(InvalidRequestError) as caught:
        responses(chat_parser, **fields)
    assert caught.value.param == path
    message = str(caught.value)
    assert message.startswith(path) or case == "too many tokens"
    assert not any(word in message for word in ("messages[", "tool_calls", "function.", "\n", "custom.")), message


NO_CALLS = """\
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}<tool_call>{{ tools | tojson }}</tool_call>"""
ONE_CALL = """\
{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}<tool_call>
{{ m.tool_calls[0].function | tojson }}
</tool_call>{% else %}{{ m.content }}{% endif %}
{% endfor %}{{ tools | tojson }}"""


def test_what_the_template_does_not_show_is_named_by_its_item(chat_parser: RequestParser):
    builder = chat_parser.builder
    conversations = [
        ("input[2]", NO_CALLS, [QUESTION, thought("Hm."), CALL]),
        ("input[2]", ONE_CALL, [QUESTION, CALL, {**CALL, "call_id": "c2"}]),
        ("input[2].content", ONE_CALL, [QUESTION, thought("Hm."), said("I look."), CALL]),
    ]
    for path, template, items in conversations:
        encoder = replace(builder.encoder, chat_template=template)
        parser = RequestParser(RequestBuilder(builder.config, encoder, builder.sizes, {}), ("tiny",))
        with pytest.raises(
            InvalidRequestError, match=f"^{re.escape(path)}: got .*chat template does not show"
        ) as caught:
            responses(parser, input=items)
        assert caught.value.param == path
