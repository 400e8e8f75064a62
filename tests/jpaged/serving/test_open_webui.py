"""The bodies that open-webui 0.12.4 sends, and what it reads of the answers to them.

Its own code needs a browser and a database, so the bodies are written after its source: chats always as streams, tool
calls put together by `index`, the parameters that a user has set beside OpenAI's, thoughts sent back in
`reasoning_content`.
"""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from .scripted import SIZES, Scripted

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Is it warm in Paris?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
SCRIPTS = {
    "warm in Paris?": "<think>\nI ask.\n</think>\n\nI look." + CALL % "Paris" + CALL % "Lyon" + "<|end|>",
    "sunny": "Sunny.<|end|>",
    "Tell": "<think>\nA story.\n</think>\n\nOnce upon<|end|>",
    "Once upon": " a time.<|end|>",
}


def events(scripted: Scripted, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    asked = urllib.request.Request(scripted.url + path, json.dumps({"stream": True, **body}).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def read_chat(scripted: Scripted, body: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the content, the thought, the calls and the usages of a chat, put together as open-webui does."""
    content, thought = "", ""
    calls: dict[int, dict[str, Any]] = {}
    usages = []
    for event in events(scripted, "/v1/chat/completions", {"model": "scripted", **body}):
        usages += [event["usage"]] if event.get("usage") else []
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
                if call.get("id"):
                    known["id"] = call["id"]
                if name := call["function"].get("name"):
                    known["function"]["name"] = name
                known["function"]["arguments"] += call["function"].get("arguments") or ""
    return content, thought, [calls[index] for index in sorted(calls)], usages


@pytest.fixture
def webui(scripted: Scripted) -> Scripted:
    scripted.scripts.update(SCRIPTS)
    return scripted


def test_a_tool_turn_by_chats_goes_on_from_what_it_sends_back(webui: Scripted) -> None:
    """With parameters of the user's own, which it passes on whatever they are."""
    tools = [{"type": "function", "function": WEATHER}]
    body = {"messages": [SYSTEM, ASKED], "tools": tools, "max_tokens": 512, "temperature": 0.7, "stream_options":
            {"include_usage": True}, "top_k": 20, "min_p": 0.0, "repeat_penalty": 1.1, "my_parameter": "x"}  # fmt: skip
    content, thought, calls, usages = read_chat(webui, body)
    assert (content, thought, len(usages)) == ("I look.", "I ask.", 1)
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}, {"city": "Lyon"}]
    assert len({call["id"] for call in calls}) == 2
    sent = [{"type": "function", **call} for call in calls]
    said = {"role": "assistant", "content": content, "tool_calls": sent, "reasoning_content": thought}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    content, thought, calls, later = read_chat(webui, {**body, "messages": [SYSTEM, ASKED, said, *results]})
    assert (content, thought, calls) == ("Sunny.", "", [])
    page_size = SIZES["block_size"]
    assert later[0]["prompt_tokens_details"]["cached_tokens"] > usages[0]["total_tokens"] - 2 * page_size


def test_an_answer_is_continued_where_it_stopped(webui: Scripted) -> None:
    """As where a user clicks Continue: the thought and the beginning of the answer are the last message."""
    asked = {"role": "user", "content": "Tell me a story."}
    content, thought, _, _ = read_chat(webui, {"messages": [asked]})
    assert (content, thought) == ("Once upon", "A story.")
    said = {"role": "assistant", "content": content, "reasoning_content": thought}
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert read_chat(webui, {"messages": [asked, said], **options})[:2] == (" a time.", "")


def test_a_tool_turn_by_responses_goes_on_from_the_items_that_it_keeps(webui: Scripted) -> None:
    """It keeps few fields of each item, and may write a thought's part as a text of the output."""
    body: dict[str, Any] = {
        "model": "scripted", "instructions": "Be brief.", "max_output_tokens": 512,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED["content"]}]}],
        "tools": [{"type": "function", **WEATHER, "strict": False}],
    }  # fmt: skip
    items = [event["item"] for event in events(webui, "/v1/responses", body) if event["type"].endswith("item.done")]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    kept = {
        "reasoning": ("type", "id", "summary", "encrypted_content", "content"),
        "message": ("type", "role", "content"),
        "function_call": ("type", "call_id", "name", "arguments", "id"),
    }
    body["input"] += [{name: item[name] for name in kept[item["type"]] if name in item} for item in items]
    body["input"] += [
        {
            "type": "function_call_output",
            "call_id": item["call_id"],
            "output": [{"type": "input_text", "text": "sunny"}],
        }
        for item in items[2:]
    ]
    *_, last = events(webui, "/v1/responses", body)
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == "Sunny."
    body["input"][1]["content"] = [{"type": "output_text", "text": "I ask."}]
    *_, again = events(webui, "/v1/responses", body)
    counts = [one["response"]["usage"]["input_tokens"] for one in (last, again)]
    assert counts[0] == counts[1]
