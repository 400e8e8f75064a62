"""Tools in OpenAI's form become one form, and what is wrong with them is refused by its path."""

import json

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.text.chat.tools import Tool, ToolChoice, definition, template_tools, tools_of

SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "default": None}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def custom(**format_):
    return {"type": "custom", "custom": {"name": "patch", "format": format_}}


def test_templates_see_one_form_of_the_same_tools():
    marked = {
        "cache_control": {"type": "ephemeral"},
        "function": {"strict": True, "parameters": SCHEMA, "description": "Tells it.", "name": "weather"},
        "type": "function",
        "custom": None,
    }
    nulls = {"type": "function", "function": {"name": "clock", "description": None, "parameters": None, "strict": None}}
    seen = template_tools(tools_of([WEATHER, CLOCK]))
    assert json.dumps(seen) == json.dumps(template_tools(tools_of([marked, nulls], "none", False)))
    assert json.dumps(seen[0]) == json.dumps(WEATHER), "a schema keeps its order and its nulls"
    assert seen[1]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_a_custom_tool_is_seen_as_a_function_of_one_text_that_tells_its_grammar():
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    plain, ruled = template_tools(tools_of([PATCH, {"type": "custom", "custom": {"name": "other", "format": lark}}]))
    assert plain["function"]["parameters"]["required"] == ["input"]
    assert plain["function"]["parameters"]["properties"]["input"]["type"] == "string"
    assert 'Lark grammar:\nstart: "a"' in ruled["function"]["parameters"]["properties"]["input"]["description"]
    (tool,) = tools_of([custom(**lark)]).tools
    assert tool == Tool("patch", kind="custom", grammar='start: "a"')
    (tool,) = tools_of([custom(type="grammar", grammar={"syntax": "regex", "definition": "a+"})]).tools
    assert (tool.grammar, tool.grammar_syntax) == ("a+", "regex")


def test_a_tool_that_is_not_listed_may_be_called_all_the_same():
    late = {**WEATHER, "function": {**WEATHER["function"], "defer_loading": True, "strict": True}}
    tools = tools_of([late, CLOCK], {"type": "function", "function": {"name": "weather"}})
    assert [one["function"]["name"] for one in template_tools(tools)] == ["clock"]
    assert [tool.name for tool in tools.callable_tools] == ["weather"]
    assert json.loads(definition(tools.tools[0])) == WEATHER, "a message shows it as the list would"
    assert template_tools(tools_of([late])) is None, "templates write a heading above an empty list"


def chosen(choice):
    tools = tools_of([WEATHER, CLOCK, PATCH], choice)
    return tools.choice, [tool.name for tool in tools.callable_tools], tools.must_call


def test_a_choice_says_which_tools_may_be_called_and_whether_one_must_be():
    every = ["weather", "clock", "patch"]
    assert chosen(None) == chosen("auto") == (ToolChoice(), every, False)
    assert chosen("none") == (ToolChoice("none"), [], False)
    assert chosen("required") == (ToolChoice("required"), every, True)
    named = {"type": "function", "function": {"name": "clock"}}
    assert chosen(named) == (ToolChoice("named", ("clock",)), ["clock"], True)
    assert chosen({"type": "custom", "custom": {"name": "patch"}})[1:] == (["patch"], True)
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "custom", "custom": {"name": "patch"}}, named, named]}
        kept = ToolChoice("allowed", ("patch", "clock"), is_required=mode == "required")
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        assert chosen(choice) == (kept, ["clock", "patch"], mode == "required")
    assert tools_of([CLOCK]).is_parallel
    assert not tools_of([CLOCK], None, False).is_parallel


def test_a_request_without_tools_has_none():
    for value in (None, [], ()):
        assert tools_of(value) is tools_of(value, "auto", True) is tools_of(value, "none", False) is None


LONG = {"type": "object", "description": "x" * (64 << 10)}
DEEP = json.loads('{"items":' * 99 + "{}" + "}" * 99)
NAMED = {"type": "function", "function": {"name": "weathr"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
REFUSED = {
    "no list": (({"tools": 1}, None, None), "tools"),
    "a text": (("weather", None, None), "tools"),
    "too many": (([function(name=f"f{index}") for index in range(129)], None, None), "tools"),
    "no object": (([WEATHER, "weather"], None, None), "tools[1]"),
    "no type": (([{"function": {"name": "f"}}], None, None), "tools[0].type"),
    "a hosted tool": (([{"type": "web_search"}], None, None), "tools[0].type"),
    "no function": (([{"type": "function"}], None, None), "tools[0].function"),
    "two kinds": (([{**WEATHER, "custom": {"name": "f"}}], None, None), "tools[0].custom"),
    "the flat form": (([{"type": "function", "name": "f"}], None, None), "tools[0].name"),
    "an unknown field": (([function(paramters={})], None, None), "tools[0].function.paramters"),
    "no name": (([{"type": "function", "function": {}}], None, None), "tools[0].function.name"),
    **{
        f"the name {name!r}"[:20]: (([function(name=name)], None, None), "tools[0].function.name")
        for name in ("", 5, "a b", "a\n", "ä", "f" * 129, "<f>", ["f"])
    },
    "a name twice": (([WEATHER, CLOCK, WEATHER], None, None), "tools[2].function.name"),
    "a name of two kinds": (([PATCH, function(name="patch")], None, None), "tools[1].function.name"),
    "a description": (([function(description=5)], None, None), "tools[0].function.description"),
    "half a character": (([function(description="\ud800")], None, None), "tools[0].function.description"),
    "strict": (([function(strict="yes")], None, None), "tools[0].function.strict"),
    "parameters": (([function(parameters="{}")], None, None), "tools[0].function.parameters"),
    "a list of parameters": (([function(parameters=[])], None, None), "tools[0].function.parameters"),
    "no JSON": (([function(parameters={"a": float("nan")})], None, None), "tools[0].function.parameters"),
    "an object of Python": (([function(parameters={"a": object()})], None, None), "tools[0].function.parameters"),
    "a deep schema": (([function(parameters=DEEP)], None, None), "tools[0].function.parameters"),
    "a long schema": (([CLOCK, function(parameters=LONG)], None, None), "tools[1].function.parameters"),
    "a text as arguments": (
        ([function(parameters={"type": "string"})], None, None),
        "tools[0].function.parameters.type",
    ),
    "a list of properties": (
        ([function(parameters={"properties": []})], None, None),
        "tools[0].function.parameters.properties",
    ),
    "required": (([function(parameters={"required": True})], None, None), "tools[0].function.parameters.required"),
    "a format": (([custom(type="json")], None, None), "tools[0].custom.format.type"),
    "a text's grammar": (([custom(type="text", grammar={})], None, None), "tools[0].custom.format.grammar"),
    "no grammar": (([custom(type="grammar")], None, None), "tools[0].custom.format.grammar"),
    "a syntax": (
        ([custom(type="grammar", grammar={"syntax": "gbnf", "definition": "x"})], None, None),
        "tools[0].custom.format.grammar.syntax",
    ),
    "an empty grammar": (
        ([custom(type="grammar", grammar={"syntax": "lark", "definition": " "})], None, None),
        "tools[0].custom.format.grammar.definition",
    ),
    "a long grammar": (
        ([custom(type="grammar", grammar={"syntax": "lark", "definition": "x" * 65537})], None, None),
        "tools[0].custom.format.grammar.definition",
    ),
    "a choice's word": (([WEATHER], "any", None), "tool_choice"),
    "a choice without tools": ((None, "required", None), "tool_choice"),
    "a named choice without tools": (([], NAMED, None), "tool_choice"),
    "a choice's type": (([WEATHER], {"type": "tool", "name": "weather"}, None), "tool_choice.name"),
    "an unknown tool": (([WEATHER], NAMED, None), "tool_choice.function.name"),
    "a tool of the other kind": (
        ([WEATHER, PATCH], {"type": "function", "function": {"name": "patch"}}, None),
        "tool_choice.function.name",
    ),
    "an unknown allowed tool": (([WEATHER], ALLOWED, None), "tool_choice.allowed_tools.tools[0].function.name"),
    "no allowed tool": (
        ([WEATHER], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, None),
        "tool_choice.allowed_tools.tools",
    ),
    "a mode": (
        ([WEATHER], {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}, None),
        "tool_choice.allowed_tools.mode",
    ),
    "parallel": (([WEATHER], None, 1), "parallel_tool_calls"),
}


@pytest.mark.parametrize(("given", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_tools_are_refused_by_their_path_in_one_line(given, param):
    with pytest.raises(InvalidRequestError) as caught:
        tools_of(*given)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_lowered_limit_holds_for_tools():
    limits = {"tools": 1, "schema_bytes": 20}
    with pytest.raises(InvalidRequestError, match=r"^tools: got 2 tools, allowed: at most 1"):
        tools_of([WEATHER, CLOCK], limits=limits)
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\].function.parameters: got .* at most 20"):
        tools_of([WEATHER], limits=limits)
