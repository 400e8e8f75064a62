"""Anthropic's own client against the server: answers whole and in pieces, turns as it returns them, its exceptions."""

from typing import Any

import anthropic
import openai
import pytest

from .scripted import Scripted

THOUGHT = "<think>\nTwo cities.\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1.50}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome é"}}\n</tool_call>'
)
SCRIPTS = {
    "Ask two.": f"{THOUGHT}I ask.\n\n{CALLS}",
    "Ask none.": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "sunny": "<think>\nBoth are known.\n</think>\n\nSun in both.",
    "Thanks.": "Any time.",
    "Say STOP": "One, two STOP three",
    "assistant: on": "e, two, three",
    "Nothing": "",
    "Forever": "x" * 200,
    "Cut the call": CALLS,
}
CITY = {"city": {"type": "string"}, "days": {"type": "number"}}
SCHEMA = {"type": "object", "properties": CITY, "required": ["city"]}
TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 1000}
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "thoughts, text and parallel calls": ({"messages": "Ask two.", "tools": TOOLS}, "tool_use"),
    "a call without arguments": ({"messages": "Ask none.", "tools": TOOLS}, "tool_use"),
    "a text": ({"messages": "Thanks."}, "end_turn"),
    "nothing": ({"messages": "Nothing"}, "end_turn"),
    "a stop sequence": ({"messages": "Say STOP", "stop_sequences": ["STOP"]}, "stop_sequence"),
    "too few tokens": ({"messages": "Forever", "max_tokens": 5}, "max_tokens"),
    "a call that is cut": ({"messages": "Cut the call", "tools": TOOLS, "max_tokens": 60}, "max_tokens"),
    "the end of the context": (
        {"messages": f"{'y' * 3900} Forever", "max_tokens": 128_000},
        "model_context_window_exceeded",
    ),
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


@pytest.fixture(scope="module")
def url(scripted: Scripted) -> str:
    scripted.scripts.update(SCRIPTS)
    return scripted.url


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def shown(message: Any) -> dict[str, Any]:
    """Return what two answers to the same request share."""
    fields = message.model_dump(mode="json", exclude={"id"})
    fields["usage"] = {key: value for key, value in fields["usage"].items() if "token" in key and "cache" not in key}
    fields["usage"].pop("input_tokens")  # Without those of the cache.
    for block in fields["content"]:
        block.pop("id", None)
    return fields


@pytest.mark.parametrize("case", WAYS)
def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic, case: str):
    more, reason = WAYS[case]
    asked = ASKED | more | {"messages": [user(more["messages"])]}
    messages = client.beta.messages if case.startswith("thoughts") else client.messages
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert shown(streamed) == shown(whole)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, "STOP" if reason == "stop_sequence" else None)
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert whole.id.startswith("msg_")
    assert whole.id != streamed.id
    total = streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens
    assert total == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counted = {key: value for key, value in asked.items() if key in ("model", "messages", "tools")}
    assert messages.count_tokens(**counted).input_tokens == total


def test_an_answer_has_its_parts_in_blocks(client: anthropic.Anthropic):
    answer = client.messages.create(**ASKED, messages=[user("Ask two.")], tools=TOOLS)
    thought, prose, first, second = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Two cities.")
    assert thought.signature
    assert (prose.type, prose.text) == ("text", "I ask.")
    assert (first.name, first.input) == ("weather", {"city": "Oslo", "days": 1.5})
    assert (second.name, second.input) == ("weather", {"city": "Rome é"})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    raw = client.messages.with_raw_response.create(**ASKED, messages=[user("Ask two.")], tools=TOOLS)
    assert '"days": 1.50}' in raw.text(), "a number stays as the model wrote it"
    assert raw.headers["request-id"]


def test_an_answer_goes_on_where_the_client_has_begun_it(client: anthropic.Anthropic):
    begun = [user("Go on:"), {"role": "assistant", "content": [text("on ")]}]
    answer = client.messages.create(**ASKED, messages=begun)
    assert [block.text for block in answer.content] == ["e, two, three"]


def test_the_packages_own_loop_of_tools_runs_to_its_end(client: anthropic.Anthropic):
    """It asks for a stored thread, and goes on without one where the error says that there is none."""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str, days: float = 1) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(**ASKED, tools=[weather], messages=[user("Ask two.")])
    *_, last = [message.content[-1].text for message in runner if message.stop_reason == "end_turn"]
    assert (asked, last) == (["Oslo", "Rome é"], "Sun in both.")


def chat_turns(url: str) -> list[int]:
    """Hold three turns by chat completions, as OpenAI's client returns them; return the tokens of each prompt."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    named = [{"parameters": tool["input_schema"], **tool} for tool in TOOLS]
    functions = [{key: tool[key] for key in ("name", "description", "parameters") if key in tool} for tool in named]
    tools = [{"type": "function", "function": function} for function in functions]
    messages: list[Any] = [{"role": "system", "content": "Three turns."}, user("Ask two.")]
    counts = []
    for results in (["sunny", "rain"], None, None):
        completion = client.chat.completions.create(model="scripted", messages=messages, tools=tools)
        counts.append(completion.usage.prompt_tokens)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call, result in zip(message.tool_calls or (), results or (), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if results is None:
            messages.append(user("Thanks."))
    return counts


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_three_turns_have_the_prompts_of_a_chat(url: str, client: anthropic.Anthropic, is_stream: bool):
    """They are found in the cache but for the last page, and results come in the order in which the tools ended."""
    counts = chat_turns(url)
    messages: list[Any] = [user([text("Ask two.")])]
    for results, count in zip((["sunny", "rain"], None, None), counts, strict=True):
        asked = ASKED | {"system": "Three turns.", "messages": messages, "tools": TOOLS}
        if is_stream:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == count
        assert usage.cache_read_input_tokens == (count - 1) // 16 * 16
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if uses:
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": [text(result)]}
                for use, result in zip(uses, results, strict=True)
            ]
            messages.append(user(results[::-1]))
        else:
            messages.append(user("Thanks."))


def test_what_a_turn_repeats_is_found_in_the_cache(client: anthropic.Anthropic):
    """With marks that roll, a header that changes, and a system message each turn, which is a text afterwards."""
    mark = {"cache_control": {"type": "ephemeral"}}
    rules = "Rules of another session. " * 20
    messages: list[Any] = []
    num_repeated = 0
    for turn in range(4):
        late = f"It is {turn} o'clock. Thanks."
        system = [
            text(f"x-anthropic-billing-header: cc_version=2.1.{turn};"),
            text(rules, **mark),
        ]
        now = [user([text(f"Turn {turn}")]), {"role": "system", "content": [text(late, **mark)]}]
        answer = client.beta.messages.create(**ASKED, system=system, messages=[*messages, *now], tools=TOOLS)
        assert answer.usage.cache_read_input_tokens >= 0.9 * num_repeated
        num_repeated = answer.usage.input_tokens + answer.usage.cache_read_input_tokens + answer.usage.output_tokens
        messages += [user(f"Turn {turn}"), {"role": "system", "content": late}]
        messages.append({"role": "assistant", "content": answer.content})


REFUSED: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = {
    "no max_tokens": ({"max_tokens": anthropic.omit}, anthropic.BadRequestError, "invalid_request_error"),
    "an image": (
        {"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]},
        anthropic.BadRequestError,
        "invalid_request_error",
    ),
    "too long a prompt": ({"messages": [user("x" * 5000)]}, anthropic.BadRequestError, "invalid_request_error"),
    "another model": ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_errors_raise_the_clients_exceptions(client: anthropic.Anthropic, case: str, is_stream: bool):
    more, kind, word = REFUSED[case]
    with pytest.raises(kind) as caught:
        client.messages.create(**ASKED | {"messages": [user("Thanks.")]} | more, stream=is_stream)
    assert caught.value.type == word
    assert caught.value.request_id
    if "long" in case:
        assert "prompt is too long: 5021 tokens > 4095 maximum" in caught.value.message
    if "image" in case:
        assert "messages[0].content[0].type: got image" in caught.value.message
