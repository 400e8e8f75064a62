"""/v1/responses through OpenAI's own client: complete, and as the events of a stream."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from jpaged import SamplingParams
from jpaged.messages import NewRequest
from jpaged.outputs import Logprob, Mark, SampleDelta
from jpaged.serving.protocols.generation_request import GenerationRequest
from jpaged.serving.protocols.http_errors import HTTPError, unavailable
from jpaged.serving.protocols.request_parser import RequestParser
from jpaged.serving.protocols.responses.encoder import ResponsesEncoder
from jpaged.serving.protocols.responses.parser import parse_response
from jpaged.serving.protocols.responses.thoughts import unsealed
from jpaged.text.tokenizing.detokenizer import Detokenizer

from .scripted import SIZES, Scripted

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function", "name": "weather", "description": "Tells the weather.", "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"type": "custom", "name": "patch", "description": "Changes files."},
    {"type": "namespace", "name": "team", "description": "Others.", "tools": [
        {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "tell"},
    ]},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {
        "type": "object", "properties": {"query": {"type": "string"}},
    }},
]  # fmt: skip
THOUGHT = "<think>\nWhere is it?\n</think>\n\n"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROME = call("weather", '{"city": "Rome", "n": 1.50}')
SCRIPTS = {
    "only say it": "Hello there, Jürgen 🐄.<|end|>",
    "say nothing": "<|end|>",
    "think and say it": THOUGHT + "In Italy.<|end|>",
    "call": THOUGHT + ROME + "<|end|>",
    "call all": THOUGHT + "I look.\n" + "\n".join([
        ROME, call("patch", '{"input": "a\\n\\"b\\""}'), call("team__wait", "{}"),
        call("team__tell", '{"input": "hi"}'), call("tool_search", '{"query": "x", "limit": 8}'),
    ]) + "<|end|>",
    "call for ever": THOUGHT + call("weather", '{"city": "' + "x" * 500),
    "call and pause": ROME + "\n" * 500,
    "think for ever": "<think>" + "x" * 500,
    "say it for ever": THOUGHT + "x" * 500,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(scripted: Scripted) -> openai.OpenAI:
    scripted.scripts.update(SCRIPTS)
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without the ids that each response has of its own, after a look whether they differ."""
    for name in ("id", "call_id"):
        ids = [item[name] for item in items if item.get(name) is not None]
        assert len(set(ids)) == len(ids)
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def both(client: openai.OpenAI, text: str, **fields: Any) -> Response:
    """Return a complete response, after a comparison with the events of a stream.

    The package's `ResponseStreamState` puts the stream together. It takes anything for a type, so the types are checked
    too.
    """
    asked = {"model": "scripted", "input": text, "tools": TOOLS, **fields}
    raw = client.responses.with_raw_response.create(**asked)
    Response.model_validate_json(raw.text)
    whole = raw.parse()
    final = None
    for number, event in enumerate(client.responses.create(**asked, stream=True)):
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True, warnings=False))
        assert event.sequence_number == number
        final = event
    assert final.type == f"response.{whole.status}"
    streamed, complete = (one.model_dump(exclude_unset=True, warnings=False) for one in (final.response, whole))
    assert without_ids(streamed.pop("output")) == without_ids(complete.pop("output"))
    for one in (streamed, complete):  # The second request finds the pages of the first.
        for name in ("id", "created_at", "completed_at"):
            del one[name]
        del one["usage"]["input_tokens_details"]["cached_tokens"]
    assert streamed == complete
    with client.responses.stream(**asked) as stream:
        if whole.status == "completed":
            put_together = stream.get_final_response().model_dump(exclude_unset=True, warnings=False)
            put_together = [{k: v for k, v in item.items() if "parsed" not in k} for item in put_together["output"]]
            assert len(put_together) == len(whole.output)
    return whole


def shown(response: Response) -> list[dict[str, Any]]:
    return without_ids([item.model_dump(exclude_unset=True, warnings=False) for item in response.output])


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


def reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "status": status, "content": content, "summary": [], "encrypted_content": None}


WEATHER = {
    "type": "function_call",
    "status": "completed",
    "name": "weather",
    "arguments": '{"city": "Rome", "n": 1.50}',
}


@pytest.mark.parametrize(
    ("text", "items", "num_thought_tokens"),
    [
        ("only say it", [message("Hello there, Jürgen 🐄.")], 0),
        ("say nothing", [message("")], 0),
        ("think and say it", [reasoning("Where is it?"), message("In Italy.")], 16),
        ("call", [reasoning("Where is it?"), WEATHER], 16),
    ],
)
def test_a_stream_is_the_complete_response(client, text: str, items: list[dict[str, Any]], num_thought_tokens: int):
    response = both(client, text)
    assert shown(response) == items
    assert response.status == "completed"
    assert response.usage.output_tokens_details.reasoning_tokens == num_thought_tokens
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_each_kind_of_tool_is_called_by_an_item_of_its_own(client):
    response = both(client, "call all")
    assert shown(response)[1:] == [
        message("I look."),
        WEATHER,
        {"type": "custom_tool_call", "status": "completed", "name": "patch", "input": 'a\n"b"'},
        {"type": "function_call", "status": "completed", "name": "wait", "namespace": "team", "arguments": "{}"},
        {"type": "custom_tool_call", "status": "completed", "name": "tell", "namespace": "team", "input": "hi"},
        {
            "type": "tool_search_call", "status": "completed", "execution": "client",
            "arguments": {"query": "x", "limit": 8},
        },
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["call for ever", "think for ever", "say it for ever"])
def test_what_the_limit_cuts_is_incomplete_and_arguments_stay_json(client, text: str):
    response = both(client, text, max_output_tokens=100)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 100
    *others, last = response.output
    assert all(item.status == "completed" for item in others)
    assert last.status == "incomplete"
    if text == "call for ever":
        assert set(json.loads(last.arguments)["city"]) == {"x"}


@pytest.mark.parametrize("num_more", [-3, 0, 1])
def test_a_call_is_incomplete_only_if_the_limit_came_before_its_end(client, num_more: int):
    num_tokens = len(ROME.replace("<tool_call>", "-").replace("</tool_call>", "-"))
    response = both(client, "call and pause", max_output_tokens=num_tokens + num_more)
    assert shown(response) == [WEATHER | {"status": "incomplete" if num_more < 0 else "completed"}]
    assert response.status == "incomplete"


def test_a_thought_can_be_returned_by_clients_that_keep_only_its_encrypted_content(client):
    (thought, _) = both(client, "think and say it", include=["reasoning.encrypted_content"]).output
    assert unsealed(thought.encrypted_content) == "Where is it?"


def test_fields_are_repeated_as_the_type_of_a_response_has_them(client):
    response = both(
        client, "only say it", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, top_p=0.75,
        tools=TOOLS[:1], parallel_tool_calls=False, max_output_tokens=200, tool_choice="none", store=True,
        reasoning={"effort": "low", "summary": "auto"},
    )  # fmt: skip
    assert (response.instructions, response.metadata, response.store) == ("Be brief.", {"a": "b"}, False)
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.75, 200)
    assert [tool.name for tool in response.tools] == ["weather"]
    assert (response.tool_choice, response.parallel_tool_calls) == ("none", False)
    assert response.reasoning.effort == "low"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"input": [{"type": "magic"}]}, openai.BadRequestError, "input[0].type", None),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id", None),
        ({"input": "x" * 5000}, openai.BadRequestError, "input", "context_length_exceeded"),
        ({"model": "another"}, openai.NotFoundError, "model", "model_not_found"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_raise_the_exceptions_of_the_package(
    client, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str, code: str | None, stream: bool
):
    with pytest.raises(kind) as caught:
        client.responses.create(**{"model": "scripted", "input": "only say it", "stream": stream, **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_the_packages_parser_reads_what_a_schema_has_forced(client, scripted: Scripted):
    class Place(BaseModel):
        city: str
        people: int

    scripted.scripts["which place"] = '{"city":"Rome","people":5}<|end|>'
    response = client.responses.parse(model="scripted", input="which place", text_format=Place)
    assert response.output_parsed == Place(city="Rome", people=5)


def encoder(request: GenerationRequest | None = None, **options: Any) -> ResponsesEncoder:
    """Return an encoder of a request, by default of one for a stream without an answer that can be told apart."""
    if request is None:
        new = NewRequest(
            request_id="7", number=0, prompt_token_ids=bytes(12), prompt=None, params=SamplingParams(), max_tokens=5,
            stop_ids=frozenset(), arrival_time=0.0,
        )  # fmt: skip
        details = {"repeated": '{"tools":[],"tool_choice":"auto","parallel_tool_calls":true}'}
        request = GenerationRequest(model="m", new_requests=(new,), num_samples=1, is_stream=True, details=details)
    options = {"tokenizer": None, **options}
    return ResponsesEncoder(request, ["7-0"], created=5, fingerprint="f", **options)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events in the bytes of a stream, whose names must be their types."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, text = block.split("\n")
        events.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HTTPError(500, "broken"), "server_error"),
        (unavailable("aborted"), "server_error"),
        (HTTPError(504, "late"), "server_error"),
        (HTTPError(429, "later"), "rate_limit_exceeded"),
        (HTTPError(400, "bad"), "invalid_prompt"),
        (HTTPError(400, "too long", code="context_length_exceeded"), "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_stream_that_fails_ends_with_response_failed(error: HTTPError, code: str, is_open: bool):
    """An event `error` alone makes Codex try again, and its package raises for any event with a key `error`."""
    one = encoder()
    events = events_of((one.opening() if is_open else b"") + one.failure(error))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert len({event["response"]["id"] for event in events}) == 1
    assert events[-1]["response"]["error"] == {"code": code, "message": error.message}
    assert events[-1]["response"]["status"] == "failed"


def test_silence_is_broken_by_numbered_events_with_data():
    """Comments do not reset Codex's clock."""
    one = encoder()
    events = events_of(one.opening() + one.keepalive + one.keepalive)
    assert [(event["type"], event["sequence_number"]) for event in events[2:]] == [("keepalive", 2), ("keepalive", 3)]


def test_a_call_is_whole_as_soon_as_it_ends(chat_parser: RequestParser):
    """Codex runs it then; what else the model writes may take long."""
    fields = {"input": "x", "tools": TOOLS[:1], "stream": True}
    request = parse_response(chat_parser, bytearray(json.dumps(fields), "utf-8"))
    one = encoder(request, tokenizer=chat_parser.tokenizer, answer_format=chat_parser.builder.encoder.answer_format)
    marks = {text: chat_parser.tokenizer.backend.token_to_id(text) for text in ("<tool_call>", "</tool_call>")}
    data = b""
    for text in ("<tool_call>", ROME.removeprefix("<tool_call>").removesuffix("</tool_call>"), "</tool_call>"):
        ids, at_mark = ((marks[text],), (Mark(0, marks[text]),)) if text in marks else ((70,), ())
        data += one.chunks_of(SampleDelta("7-0", 0, ids, text, marks=at_mark))
    *_, last = events_of(data)
    assert (last["type"], last["item"]["arguments"]) == ("response.output_item.done", WEATHER["arguments"])


ANSWER = "<think>\nHm.\n</think>\n\nJürgen 🐄 <b>" + ROME + "\nDone.<|end|>"


def deltas(parser: RequestParser, request: GenerationRequest, sizes: list[int]) -> Iterator[SampleDelta]:
    """Yield the deltas of ANSWER, of so many tokens each; the last has the rest."""
    (new,), tokenizer = request.new_requests, parser.tokenizer
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [5], stop=["</b>"], mark_ids=new.mark_ids)
    num_chars = num_marks = first = 0
    for size in [*sizes, len(ids)]:
        taken, first = ids[first : first + size], first + size
        is_last = first >= len(ids)
        detokenizer.append(taken[:-1] if is_last else taken)
        text = detokenizer.delta(finished=is_last)
        found = detokenizer.marks(num_marks, num_chars + len(text))
        marks = tuple(Mark(mark.place - num_chars, mark.token_id) for mark in found)
        num_marks, num_chars = num_marks + len(marks), num_chars + len(text)
        logprobs = tuple({id: Logprob(-1.0, 1, tokenizer.decode([id], skip_special_tokens=False))} for id in taken)
        yield SampleDelta("7-0", 0, tuple(taken), text, logprobs, "stop" if is_last else None, marks=marks)
        if is_last:
            return


@pytest.fixture(scope="module")
def scored_request(chat_parser: RequestParser) -> GenerationRequest:
    """Give a request whose messages have logprobs."""
    fields = {"input": "x", "tools": TOOLS[:1], "top_logprobs": 1, "stop": ["</b>"], "stream": True}
    return parse_response(chat_parser, bytearray(json.dumps(fields), "utf-8"))


@given(sizes=st.lists(st.integers(1, 12)))
@settings(max_examples=40, deadline=None)
def test_however_an_output_is_cut_it_has_the_same_items_and_logprobs(
    chat_parser: RequestParser, scored_request: GenerationRequest, sizes: list[int]
):
    """Several tokens come at once where the event loop is late, and text is held back for a stop string."""
    one = encoder(
        scored_request, tokenizer=chat_parser.tokenizer, answer_format=chat_parser.builder.encoder.answer_format
    )
    data = one.opening() + b"".join(map(one.chunks_of, deltas(chat_parser, scored_request, sizes))) + one.closing([])
    *_, last = events_of(data)
    thought, text, called, done = last["response"]["output"]
    for item, written in ((text, "Jürgen 🐄 <b>"), (done, "Done.")):
        (part,) = item["content"]
        assert part["text"].strip() == written
        assert b"".join(bytes(record["bytes"]) for record in part["logprobs"]).decode() == part["text"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert called["arguments"] == WEATHER["arguments"]
    assert last["response"]["usage"]["output_tokens"] == len(chat_parser.tokenizer.encode(ANSWER))


TURNS = [
    ("first turn", THOUGHT + "I look.\n" + ROME + "\n" + call("patch", '{"input": "a\\nb"}') + "<|end|>"),
    ("It rains.", THOUGHT + "It rains in Rome.<|end|>"),
    ("third turn", ROME + "<|end|>"),
]
"""What ends a turn's prompt, and what the model writes behind it."""
RESULTS = {"weather": "It is Rome.", "patch": "It rains."}


def test_three_turns_have_the_prompts_of_chat_completions_and_find_their_pages(client, scripted: Scripted):
    """Each client gives back what its package has given it: items here, messages there."""
    scripted.scripts.update(TURNS)
    tools = TOOLS[:2]
    chat_tools = [
        {"type": tool["type"], tool["type"]: {k: v for k, v in tool.items() if k != "type"}} for tool in tools
    ]
    items: list[Any] = []
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    usages = []
    for text, _ in TURNS:
        if text != "It rains.":
            items.append({"role": "user", "content": text})
            messages.append({"role": "user", "content": text})
        response = client.responses.create(model="scripted", instructions="Be brief.", input=items, tools=tools)
        chat = client.chat.completions.create(model="scripted", messages=messages, tools=chat_tools)
        usages.append((response.usage, chat.usage))
        items += response.output
        for item in response.output:
            if item.type.endswith("_call"):
                output = {"type": f"{item.type}_output", "call_id": item.call_id, "output": RESULTS[item.name]}
                items.append(output)
        message = chat.choices[0].message
        messages.append(message)
        for called in message.tool_calls or ():
            name = (called.function if called.type == "function" else called.custom).name
            messages.append({"role": "tool", "tool_call_id": called.id, "content": RESULTS[name]})
    for index, (mine, theirs) in enumerate(usages):
        assert mine.input_tokens == theirs.prompt_tokens
        assert theirs.prompt_tokens_details.cached_tokens >= mine.input_tokens - SIZES["block_size"]
        if index:
            assert mine.input_tokens_details.cached_tokens >= 0.9 * usages[index - 1][0].input_tokens
