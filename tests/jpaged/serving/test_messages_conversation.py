"""Conversations and tools in Anthropic's form become the shared form, whatever form they are sent in."""

import json
from typing import Any

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.limits import DEFAULT_LIMITS
from jpaged.serving.protocols.messages.conversation import Conversation, conversation_of
from jpaged.serving.protocols.messages.left_out import LeftOut
from jpaged.serving.protocols.messages.tools import SentTools, sent_tools

MARK = {"cache_control": {"type": "ephemeral"}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": CITY}
LATE = {**WEATHER, "name": "late", "defer_loading": True}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": arguments}


def result(call_id: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def translated(*messages: Any, system: Any = None, tools: Any = (WEATHER, LATE)) -> Conversation:
    left_out = LeftOut(is_strict=True)
    return conversation_of(system, list(messages), sent_tools(list(tools), None, left_out, DEFAULT_LIMITS), left_out)


def test_a_turn_with_calls_is_that_of_a_chat():
    found = translated(
        turn("user", text("Look."), text("Now.")),
        turn(
            "assistant",
            {"type": "thinking", "thinking": "Two", "signature": ""},
            {"type": "redacted_thinking", "data": "xx"},
            {"type": "thinking", "thinking": " calls.", "signature": "never checked", "extra": None},
            text("I "),
            text("look."),
            use("a", city="Oslo"),
            use("b", __unparsedToolInput={"raw": '{"ci', "len": 4}),
        ),
        turn(
            "user",
            result("b", [text("rain"), text("wind")], is_error=False),
            text("Go on."),
            result("a", "sun", **MARK),
        ),
        turn("assistant", use("c")),
        turn("user", result("c", None, is_error=True)),
        turn("assistant", "Done."),
        turn("user", "Thanks."),
        system="Be brief.",
    )
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look.\nNow."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Two calls.",
            "tool_calls": [call("a", city="Oslo"), call("b", __unparsedToolInput={"raw": '{"ci', "len": 4})],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": "rain\nwind"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": None, "tool_calls": [call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "The tool has failed."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]
    assert found.paths[:5] == [
        "system",
        *("messages[0]", "messages[1]", "messages[2].content[2]", "messages[2].content[0]"),
    ]
    assert not found.is_prefilled


HISTORY = [turn("user", "A"), turn("assistant", use("a")), turn("user", result("a", "sun")), turn("assistant", "B")]
SAME: dict[str, tuple[Any, list[Any]]] = {
    "texts as blocks": (
        [text("S")],
        [
            turn("user", text("A")),
            turn("assistant", use("a")),
            turn("user", result("a", [text("sun")])),
            turn("assistant", text("B")),
        ],
    ),
    "rolling marks": (
        [text("S", **MARK)],
        [
            turn("user", text("A", citations=None, **MARK)),
            turn("assistant", {**use("a"), **MARK, "caller": {"type": "direct"}}),
            turn("user", result("a", [text("sun", **MARK)], **MARK)),
            turn("assistant", text("B", **MARK)),
        ],
    ),
    "a changing header": ([text("x-anthropic-billing-header: cc_version=2.1;"), text("S")], HISTORY),
    "turns in pieces": (
        "S", [*HISTORY[:1], turn("assistant", {"type": "redacted_thinking", "data": ""}), *HISTORY[1:]]
    ),
    "an empty piece of a turn": ("S", [*HISTORY[:3], turn("assistant", ""), turn("assistant", "B")]),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_forms_that_mean_the_same_become_the_same_messages(case: str):
    system, messages = SAME[case]
    assert json.dumps(translated(*messages, system=system).messages) == json.dumps(
        translated(*HISTORY, system="S").messages
    )


def test_system_messages_stay_at_their_places_in_both_of_their_forms():
    listed = [turn("user", "A"), turn("system", text("late", **MARK))]
    later = [
        turn("user", "A"),
        turn("system", "late"),
        turn("assistant", "B"),
        turn("system", "again"),
        turn("user", "C"),
    ]
    found = translated(*later).messages
    assert [one["role"] for one in found] == ["user", "system", "assistant", "system", "user"]
    assert translated(*listed).messages == found[:2]
    assert translated(turn("system", text("")), turn("user", "A"), system="").messages == [
        {"role": "user", "content": "A"}
    ]


def test_an_answer_that_was_begun_is_continued_and_an_empty_one_is_none():
    assert translated(turn("user", "A"), turn("assistant", "B")).is_prefilled
    for empty in ([], "", [text(" ")], [{"type": "redacted_thinking", "data": ""}]):
        found = translated(turn("user", "A"), {"role": "assistant", "content": empty})
        assert (len(found.messages), len(found.paths), found.is_prefilled) == (1, 1, False)


def names(tools: SentTools) -> list[str]:
    return [form["function"]["name"] for form in tools.prompt_options.get("tools", [])]


def test_a_deferred_tool_is_told_of_where_a_result_refers_to_it():
    left_out = LeftOut(is_strict=True)
    tools = sent_tools([LATE, WEATHER], None, left_out, DEFAULT_LIMITS)
    found = conversation_of(None, HISTORY[:3], tools, left_out)
    assert names(tools.shown_in(found.brought_in)) == ["weather"]
    reference = {"type": "tool_reference", "tool_name": "late", **MARK}
    found = conversation_of(None, [*HISTORY[:2], turn("user", result("a", [reference]))], tools, left_out)
    assert json.loads(found.messages[-1]["content"])["function"]["name"] == "late"
    assert names(tools.shown_in(found.brought_in)) == ["late", "weather"]


def test_choices_are_those_of_a_chat():
    def options(choice: Any, tools: Any = (WEATHER,)) -> dict[str, Any]:
        return sent_tools(list(tools), choice, LeftOut(is_strict=True), DEFAULT_LIMITS).prompt_options

    (form,) = options(None)["tools"]
    assert form == {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
    assert (options(None)["tool_choice"], options(None)["parallel_tool_calls"]) == ("auto", True)
    assert options({"type": "any"})["tool_choice"] == "required"
    assert options({"type": "none"})["tool_choice"] == "none"
    assert options({"type": "tool", "name": "weather"})["tool_choice"] == {
        "type": "function", "function": {"name": "weather"}
    }  # fmt: skip
    assert options({"type": "auto", "disable_parallel_tool_use": True})["parallel_tool_calls"] is False
    assert options({"type": "auto"}, []) == {}


def test_what_only_another_server_runs_is_left_out_with_a_warning():
    from jpaged.serving.protocols.fields import TakenFields

    left_out, fields = LeftOut(is_strict=False), TakenFields()
    typed = [{"type": "web_search_20990101", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    tools = sent_tools([*typed, {**WEATHER, "type": "custom"}], None, left_out, DEFAULT_LIMITS)
    assert (names(tools), tools.indices) == (["weather"], [2])
    searched = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, text("Found.")]
    found = conversation_of(None, [turn("user", "A"), turn("assistant", *searched), turn("user", "B")], tools, left_out)
    assert found.messages[1] == {"role": "assistant", "content": "Found."}
    left_out.warn(fields)
    (warning,) = fields.warnings
    assert all(
        part in warning for part in ("tools[0] (web_search_20990101)", "messages[1].content[0] (server_tool_use)")
    )
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\]: got web_search_20990101, allowed: .*--strict"):
        sent_tools(typed, None, LeftOut(is_strict=True), DEFAULT_LIMITS)


BAD: dict[str, tuple[list[Any], str]] = {
    "no message": ([], "messages: got an array of 0 items"),
    "a string": (["A"], r"messages\[0\]: got a string"),
    "no role": ([{"content": "A"}], r"messages\[0\]\.role: got null, allowed: user, assistant, system"),
    "another role": ([{"role": "tool", "content": "A"}], r"messages\[0\]\.role: "),
    "no content": ([{"role": "user"}], r"messages\[0\]\.content: got null"),
    "an empty content": ([{"role": "user", "content": []}], r"messages\[0\]\.content: got an array of 0"),
    "a number": ([{"role": "user", "content": 5}], r"messages\[0\]\.content: got 5"),
    "no block": ([{"role": "user", "content": ["A"]}], r"messages\[0\]\.content\[0\]: got a string"),
    "no type": ([turn("user", {"text": "A"})], r"messages\[0\]\.content\[0\]\.type: got null"),
    "an unknown type": ([turn("user", {"type": "txt"})], r"messages\[0\]\.content\[0\]\.type: got txt"),
    "no text": ([turn("user", text(5))], r"messages\[0\]\.content\[0\]\.text: got 5"),  # type: ignore[arg-type]
    "an image": ([turn("user", text("A"), {"type": "image"})], r"\.content\[1\]\.type: got image, which is not avail"),
    "a document in a result": (
        [*HISTORY[:2], turn("user", result("a", [{"type": "document"}]))],
        r"messages\[2\]\.content\[0\]\.content\[0\]\.type: got document, which is not available",
    ),
    "a call of the user": ([turn("user", use("a"))], r"messages\[0\]\.content\[0\]\.type: got tool_use in the content"),
    "a call of the system": ([turn("user", "A"), turn("system", use("a"))], r"messages\[1\]\.content\[0\]\.type"),
    "input that is text": (
        [turn("user", "A"), turn("assistant", {**use("a"), "input": "{}"})], r"messages\[1\]\.content\[0\]\.input: got"
    ),
    "a call without an id": (
        [turn("user", "A"), turn("assistant", {**use("a"), "id": None})], r"messages\[1\]\.content\[0\]\.id: got null"
    ),
    "an id twice": ([turn("user", "A"), turn("assistant", use("a"), use("a"))], r"messages\[1\]\.content\[1\]\.id: "),
    "a result without its call": ([*HISTORY, turn("user", result("a"))], r"messages\[4\]\.content\[0\]\.tool_use_id: "),
    "a result twice": (
        [*HISTORY[:2], turn("user", result("a")), turn("user", result("a"))], r"messages\[3\]\.content\[0\]\.tool_use"
    ),
    "an error that is text": ([*HISTORY[:2], turn("user", result("a", is_error="no"))], r"\.is_error: got a string"),
    "an unknown reference": (
        [*HISTORY[:2], turn("user", result("a", [{"type": "tool_reference", "tool_name": "none"}]))],
        r"messages\[2\]\.content\[0\]\.content\[0\]\.tool_name: got none, allowed: the name of one of tools",
    ),
    "a call at the end": (HISTORY[:2], r"messages\[1\]: got tool_use in the last message"),
    "thoughts at the end": (
        [turn("user", "A"), turn("assistant", {"type": "thinking", "thinking": "B"})], r"messages\[1\]: got a last mes"
    ),
    "a message for a while": ([turn("user", "A"), {**turn("system", "B"), "clear_at": "next_user_message"}],
                              r"messages\[1\]\.clear_at: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_conversation_is_refused_by_its_place(case: str):
    messages, message = BAD[case]
    with pytest.raises(InvalidRequestError, match=message):
        translated(*messages)


BAD_TOOLS: dict[str, tuple[Any, Any, str]] = {
    "no list": ({}, None, "tools: got an object"),
    "no object": (["weather"], None, r"tools\[0\]: got a string"),
    "no schema": ([{"name": "weather"}], None, r"tools\[0\]\.input_schema: got none"),
    "an unknown type": ([{**WEATHER, "type": "function"}], None, r"tools\[0\]\.type: got function"),
    "a type that is empty": ([{**WEATHER, "type": ""}], None, r"tools\[0\]\.type: got "),
    "a name that is none": ([{**LATE, "name": {}}], None, r"tools\[0\]\.name: got an object"),
    "loading that is text": ([{**LATE, "defer_loading": "yes"}], None, r"tools\[0\]\.defer_loading: got a string"),
    "an unknown field": ([{**WEATHER, "parameters": {}}], None, r"tools\[0\]\.parameters: unknown field"),
    "a choice that is text": ([WEATHER], "auto", "tool_choice: got a string"),
    "an unknown choice": ([WEATHER], {"type": "required"}, "tool_choice.type: got a string"),
    "a choice without tools": ([], {"type": "any"}, "tool_choice: got a tool to call without tools"),
    "no boolean": ([WEATHER], {"type": "auto", "disable_parallel_tool_use": 1}, "tool_choice.disable_parall"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TOOLS)
def test_malformed_tools_are_refused_by_their_place(case: str):
    tools, choice, message = BAD_TOOLS[case]
    with pytest.raises(InvalidRequestError, match=message):
        assert sent_tools(tools, choice, LeftOut(is_strict=False), DEFAULT_LIMITS).prompt_options
