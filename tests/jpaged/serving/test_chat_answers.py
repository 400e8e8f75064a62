"""Thoughts and tool calls in /v1/chat/completions, through OpenAI's own client: complete, and in chunks."""

import json
from typing import Any

import openai
import pytest

from .scripted import Scripted

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "weather", "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }},
    {"type": "function", "function": {"name": "now"}},
    {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}},
]  # fmt: skip
THOUGHT = "<think>\nWhere is it?\n</think>\n\n"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROME, OSLO = call("weather", '{"city": "Rome", "n": 1.50}'), call("weather", '{"city": "Oslo"}')
PATCH = call("patch", '{"input": "a\\n\\"b\\""}')
SCRIPTS = {
    "say nothing of tools": "Hello there.<|end|>",
    "think only": THOUGHT + "In Italy.<|end|>",
    "call one": THOUGHT + ROME + "<|end|>",
    "call two": f"I look.\n{ROME}\n{OSLO}<|end|>",
    "call a custom tool": PATCH + "<|end|>",
    "call an unknown tool": call("rain", "{}") + "<|end|>",
    "call without arguments": call("now", "{}") + "<|end|>",
    "call for ever": THOUGHT + call("weather", '{"city": "' + "x" * 100),
    "think for ever": "<think>" + "x" * 100,
}


@pytest.fixture(scope="module")
def client(scripted: Scripted) -> openai.OpenAI:
    scripted.scripts.update(SCRIPTS)
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60)


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **fields}


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Return each choice of a stream as a complete response has it, but for the ids of calls."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.model_dump(exclude_unset=True)["choices"]:
            one = found.setdefault(choice["index"], {"content": None, "tool_calls": [], "finish_reason": None})
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name) is not None:
                    one[name] = (one.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = one["tool_calls"]
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append({name: value for name, value in piece.items() if name != "index"})
                    continue
                kind = calls[piece["index"]]["type"]
                for name, text in piece[kind].items():
                    calls[piece["index"]][kind][name] += text
            if "function_call" in delta:
                held = one.setdefault("function_call", {"name": "", "arguments": ""})
                for name, text in delta["function_call"].items():
                    held[name] += text
            one["finish_reason"] = choice["finish_reason"] or one["finish_reason"]
    return found


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(one["id"].startswith("call_") for one in calls)
    assert len({one["id"] for one in calls}) == len(calls)
    return [{name: value for name, value in one.items() if name != "id"} for one in calls]


def both(client: openai.OpenAI, text: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a complete response, after a comparison with the chunks of a stream."""
    whole = client.chat.completions.create(**asked(text, **fields))
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked(text, **fields, **stream)))
    streamed, choices = joined(chunks), []
    for choice in whole.model_dump(exclude_unset=True)["choices"]:
        message, one = choice["message"], streamed[choice["index"]]
        calls = without_ids(message.get("tool_calls", []))
        assert calls == without_ids(one["tool_calls"])
        for name in ("reasoning", "reasoning_content", "function_call"):
            assert message.get(name) == one.get(name)
        assert (message["content"] or "") == (one["content"] or "")
        assert choice["finish_reason"] == one["finish_reason"]
        assert message.get("reasoning") == message.get("reasoning_content")
        choices.append({**message, "tool_calls": calls, "finish_reason": choice["finish_reason"]})
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details
    return choices


WEATHER = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "n": 1.50}'}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "input": 'a\n"b"'}}
NOW = {"type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names", "reason"),
    [
        ("say nothing of tools", "Hello there.", None, [], "stop"),
        ("think only", "In Italy.", "Where is it?", [], "stop"),
        ("call one", None, "Where is it?", ["Rome"], "tool_calls"),
        ("call two", "I look.", None, ["Rome", "Oslo"], "tool_calls"),
        ("call a custom tool", None, None, [CUSTOM], "tool_calls"),
        ("call without arguments", None, None, [NOW], "tool_calls"),
        ("call an unknown tool", call("rain", "{}"), None, [], "stop"),
    ],
)
def test_thoughts_and_calls_are_told_apart(client, text, content, reasoning, names, reason):
    (found,) = both(client, text)
    assert (found["content"], found.get("reasoning"), found["finish_reason"]) == (content, reasoning, reason)
    assert len(found["tool_calls"]) == len(names)
    for one, wanted in zip(found["tool_calls"], names, strict=True):
        assert one == wanted if isinstance(wanted, dict) else wanted in one["function"]["arguments"]
    if "Rome" in names:
        assert found["tool_calls"][0] == WEATHER


def test_an_answer_that_is_cut_in_a_call_has_whole_arguments_and_its_own_finish_reason(client):
    (found,) = both(client, "call for ever", max_tokens=90)
    assert found["finish_reason"] == "length"
    assert set(json.loads(found["tool_calls"][0]["function"]["arguments"])["city"]) == {"x"}


@pytest.mark.parametrize(
    ("text", "fields", "num_tokens"),
    [
        ("say nothing of tools", {}, 0),
        ("think only", {}, len("\nWhere is it?\n") + 2),
        ("call one", {}, len("\nWhere is it?\n") + 2),
        ("think for ever", {"max_tokens": 30}, 30),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_marks(client, text, fields, num_tokens):
    """Each byte of a text is a token here, and each mark."""
    usage = client.chat.completions.create(**asked(text, **fields)).usage
    assert usage.completion_tokens_details.reasoning_tokens == num_tokens
    both(client, text, **fields)


def test_thoughts_are_left_out_where_a_client_asks_for_none(client):
    (found,) = both(client, "think only", extra_body={"include_reasoning": False})
    assert found["content"] == "In Italy."
    assert "reasoning" not in found
    usage = client.chat.completions.create(**asked("think only", extra_body={"include_reasoning": False})).usage
    assert usage.completion_tokens_details.reasoning_tokens == 16


def test_a_call_that_the_client_has_chosen_ends_as_openais_do(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    (found,) = both(client, "call one", tool_choice=choice)
    assert (found["tool_calls"], found["finish_reason"]) == ([WEATHER], "stop")


def test_the_older_form_of_tools_gets_answers_in_its_own_words(client):
    functions = [one["function"] for one in TOOLS[:2]]
    (found,) = both(client, "call one", tools=openai.omit, functions=functions)
    assert found["function_call"] == WEATHER["function"]
    assert (found["tool_calls"], found["finish_reason"]) == ([], "function_call")


def test_openais_helper_reads_a_stream_with_calls(client):
    with client.chat.completions.stream(**asked("call two", tools=TOOLS[:2])) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [one.function.parsed_arguments for one in message.tool_calls] == [None, None]
    assert [json.loads(one.function.arguments)["city"] for one in message.tool_calls] == ["Rome", "Oslo"]


def test_a_turn_with_results_is_a_prompt_again(client):
    """The next turn, as a client returns it: calls, results and thoughts are in the prompt."""
    message = client.chat.completions.create(**asked("call two")).choices[0].message
    results = [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in message.tool_calls]
    fields = asked("call two")
    messages = [*fields["messages"], message.model_dump(exclude_none=True), *results]
    messages.append({"role": "user", "content": "think only"})
    whole = client.chat.completions.create(**{**fields, "messages": messages})
    assert whole.choices[0].message.content == "In Italy."


def test_bad_calls_in_a_conversation_are_named_by_their_place(client):
    calls = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{"}}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        client.chat.completions.create(**{**asked("Hi"), "messages": messages})
