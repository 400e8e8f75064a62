"""A body is parsed alike in the server's process and, if it is long, in another one."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jpaged import Engine
from jpaged.errors import InvalidRequestError
from jpaged.serving.http.body_parser import LONG_BODY_BYTES
from jpaged.serving.protocols.generation_request import GenerationRequest
from jpaged.serving.protocols.http_errors import HTTPError, http_error
from jpaged.serving.protocols.parser_process import METHODS, ParserProcess
from jpaged.serving.protocols.request_parser import RequestParser

from .served import Served, wait_until

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT = [{"role": "developer", "content": "Short."}, {"role": "user", "content": [{"type": "text", "text": "é 日本"}]}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("parse_completion", {"prompt": "Hi"}),
    ("parse_completion", {"prompt": ["Hi", "there"], "echo": True, "logprobs": 2, "n": 2, "seed": -7, "stop": "x"}),
    ("parse_completion", {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "stream": False, "cache_salt": "s"}),
    ("parse_completion", {"prompt": [5, 6], "n": 3, "use_beam_search": True, "length_penalty": 0.5}),
    ("parse_completion", {"prompt": "x" * 300, "truncate_prompt_tokens": -1, "prompt_logprobs": 1, "stop": ["a", "b"]}),
    ("parse_completion", {
        "prompt": "Hi", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "bad_words": ["no", "never"], "logit_bias": {"7": -3.5}, "allowed_token_ids": [3, 7, 9], "stop_token_ids": [9],
        "return_token_ids": True, "return_tokens_as_token_ids": True, "request_id": "mine", "an_unknown_field": 1,
    }),
    ("parse_chat", {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "temperature": 0.5, "frequency_penalty": 1}),
    ("parse_chat", {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("parse_chat", {"messages": CHAT, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("tokenize", {"messages": CHAT, "return_token_strs": True}),
    ("detokenize", {"tokens": [70, 71, 72]}),
]  # fmt: skip
REFUSED: list[tuple[str, Any]] = [
    ("parse_completion", {"prompt": "x" * 100_000}),
    ("parse_completion", {"prompt": "Hi", "model": "other"}),
    ("parse_chat", {"messages": CHAT, "top_p": 7}),
    ("parse_chat", {"messages": CHAT, "tools": [{}]}),
    ("tokenize", []),
    ("detokenize", {"tokens": [1 << 70]}),
]


@pytest.fixture(scope="module")
def parser(engine: Engine) -> RequestParser:
    return RequestParser(engine.builder, ("tiny",))


@pytest.fixture(scope="module")
def process(parser: RequestParser) -> Iterator[ParserProcess]:
    process = ParserProcess(parser)
    yield process
    process.close()


def timeless(parsed: Any) -> Any:
    """Return what was parsed without the times at which its requests came."""
    if not isinstance(parsed, GenerationRequest):
        return parsed
    new_requests = tuple(msgspec.structs.replace(one, arrival_time=0.0) for one in parsed.new_requests)
    return replace(parsed, new_requests=new_requests)


@pytest.mark.parametrize(("method", "fields"), BODIES)
def test_what_the_process_parses_is_what_the_server_would(
    parser: RequestParser, process: ParserProcess, method: str, fields: dict[str, Any]
):
    body = json.dumps(fields).encode()
    start_s = time.monotonic()
    found = process.run(method, body)
    assert timeless(found) == timeless(METHODS[method](parser, body))
    if isinstance(found, GenerationRequest):
        assert all(start_s <= one.arrival_time <= time.monotonic() for one in found.new_requests)


@pytest.mark.parametrize(("method", "fields"), REFUSED)
def test_what_the_process_refuses_is_refused_as_the_server_would(
    parser: RequestParser, process: ParserProcess, method: str, fields: dict[str, Any]
):
    body = json.dumps(fields).encode()
    told = []
    for run in (lambda: process.run(method, body), lambda: METHODS[method](parser, body)):
        with pytest.raises((HTTPError, InvalidRequestError)) as caught:
            run()
        told.append(vars(http_error(caught.value)))
    assert told[0] == told[1]


def test_a_process_that_dies_costs_one_body(parser: RequestParser, process: ParserProcess):
    body = b'{"prompt": "Hi"}'
    before = process.run("parse_completion", body)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    with pytest.raises(HTTPError, match="its process has ended") as caught:
        process.run("parse_completion", body)
    assert caught.value.status == 500
    assert timeless(process.run("parse_completion", body)) == timeless(before)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_long_bodies_get_the_answers_of_short_ones(served: Served, path: str):
    prompts = {"/detokenize": {"tokens": [70, 71]}, "/v1/chat/completions": {"messages": CHAT}}
    prompt = prompts.get(path, {"prompt": "Hi"})
    how = {"temperature": 1.0, "seed": 5, "max_tokens": 5} if path.startswith("/v1") else {}
    short = json.dumps({"model": "tiny", **prompt, **how}).encode()
    replies = []
    for body in (short, short + b" " * LONG_BODY_BYTES, short.replace(b"tiny", b"other") + b"\n" * LONG_BODY_BYTES):
        status, _, reply = served.request(path, body)
        different = ("id", "created", "usage")  # The second one finds its prompt in the cache.
        replies.append((status, {name: value for name, value in reply.items() if name not in different}))
    assert replies[0] == replies[1]
    assert (replies[0][0], replies[2][0]) == (200, 404)
    wait_until(served.is_idle, 2)
