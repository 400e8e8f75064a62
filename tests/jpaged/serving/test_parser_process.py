"""A body is parsed alike in the server's process and, if it is long, in another one."""

import io
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from jpaged import Engine, codec
from jpaged.errors import InvalidRequestError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.serving.http.body_parser import LONG_BODY_BYTES
from jpaged.serving.protocols.completions.parser import parse_completion
from jpaged.serving.protocols.generation_request import GenerationRequest
from jpaged.serving.protocols.http_errors import HTTPError, http_error
from jpaged.serving.protocols.parser_process import ParserProcess, _parser_of, _Request, _Setup, _setup_of
from jpaged.serving.protocols.request_parser import RequestParser
from jpaged.serving.protocols.table import METHODS
from jpaged.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

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
    ("parse_response", {
        "input": CHAT[1:], "instructions": "Short.", "stream": True, "metadata": {"a": "b"}, "top_logprobs": 1,
        "include": ["reasoning.encrypted_content"], "text": {"format": {"type": "json_object"}},
    }),
    ("tokenize", {"messages": CHAT, "return_token_strs": True}),
    ("detokenize", {"tokens": [70, 71, 72]}),
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, {"type": "custom", "custom": {"name": "g"}}
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
def process(parser: RequestParser) -> Iterator[ParserProcess]:
    process = ParserProcess(parser)
    yield process
    process.close()


def as_body(fields: Any) -> bytearray:
    return bytearray(json.dumps(fields).encode())


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
    body, start_s = as_body(fields), time.monotonic()
    found, wanted = timeless(process.run(method, body)), timeless(METHODS[method](parser, body))
    assert found == wanted
    if isinstance(found, GenerationRequest):
        for one, other in zip(found.new_requests, wanted.new_requests, strict=True):  # 1, 1.0 and True are equal.
            assert msgspec.msgpack.encode(one.params) == msgspec.msgpack.encode(other.params)
        assert all(start_s <= one.arrival_time <= time.monotonic() for one in process.run(method, body).new_requests)


@pytest.mark.parametrize(("method", "fields"), REFUSED)
def test_what_the_process_refuses_is_refused_as_the_server_would(
    parser: RequestParser, process: ParserProcess, method: str, fields: dict[str, Any]
):
    body, told = as_body(fields), []
    for run in (lambda: process.run(method, body), lambda: METHODS[method](parser, body)):
        with pytest.raises((HTTPError, InvalidRequestError)) as caught:
            run()
        told.append(vars(http_error(caught.value)))
    assert told[0] == told[1]


def test_a_process_that_dies_costs_one_body(parser: RequestParser, process: ParserProcess):
    body = as_body({"prompt": "Hi"})
    before = timeless(process.run("parse_completion", body))
    child = process._process
    assert child is not None
    child.send_signal(signal.SIGSTOP)  # Amid a body.
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(HTTPError, match="has ended") as caught:
        process.run("parse_completion", body)
    assert caught.value.status == 500
    assert timeless(process.run("parse_completion", body)) == before
    child = process._process
    assert child is not None
    child.kill()  # While it is idle: that costs nobody anything.
    child.wait()
    assert timeless(process.run("parse_completion", body)) == before


def test_a_process_that_cannot_be_started_is_an_error_of_the_server(
    parser: RequestParser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    process = ParserProcess(parser)
    body = as_body({"prompt": "Hi"})
    for name in ("/no/such/python", "/bin/false"):
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", name)
            with pytest.raises(HTTPError, match="has ended") as caught:
                process.run("parse_completion", body)
            assert caught.value.status == 500
    assert "No such file" in caplog.text
    assert timeless(process.run("parse_completion", body)) == timeless(parse_completion(parser, body))
    process.close()


def test_a_body_that_nobody_needs_any_more_is_given_up(
    parser: RequestParser, process: ParserProcess, monkeypatch: pytest.MonkeyPatch
):
    body, other = as_body({"prompt": "Hi"}), as_body({"prompt": "Hi"})
    process.run("parse_completion", body)
    child = process._process
    assert child is not None
    process.abandon(body)  # It has been parsed already.
    assert child.poll() is None
    child.send_signal(signal.SIGSTOP)
    start_s = time.monotonic()
    threading.Timer(0.2, process.abandon, (other,)).start()
    threading.Timer(0.4, process.abandon, (body,)).start()
    with pytest.raises(HTTPError):
        process.run("parse_completion", body)
    assert 0.4 <= time.monotonic() - start_s < 5
    process.close()
    start = process._start
    monkeypatch.setattr(process, "_start", lambda: (process.abandon(body), start())[1])  # While it is started.
    with pytest.raises(HTTPError):
        process.run("parse_completion", body)
    monkeypatch.undo()
    assert timeless(process.run("parse_completion", body)) == timeless(parse_completion(parser, body))


def test_a_number_of_any_size_is_taken_as_the_server_takes_it(process: ParserProcess):
    """msgpack has no larger integers than of 64 bits."""
    found = process.run("parse_completion", as_body({"prompt": "Hi", "top_k": 1 << 70}))
    assert found.new_requests[0].params.top_k >= 1 << 62


def test_the_process_is_told_once_what_all_prompts_share(parser: RequestParser, process: ParserProcess):
    schema = {**SCHEMA, "description": "x" * 20_000}
    body = as_body({"prompt": ["Hi"] * 500, "structured_outputs": {"json": schema}})
    encoded = codec.encode(_Request.of(parse_completion(parser, body)))
    assert len(encoded) < 500_000
    assert timeless(process.run("parse_completion", body)) == timeless(parse_completion(parser, body))


def test_other_options_of_the_engine_and_the_server_reach_the_process(engine: Engine):
    """Among them what the tokenizer's JSON does not say: that the names of special tokens are plain text."""
    builder, tokenizer = engine.builder, engine.builder.encoder.tokenizer
    assert tokenizer is not None
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    encoder = replace(
        builder.encoder,
        tokenizer=Tokenizer(backend, tokenizer.special_tokens),
        chat_template="{{ messages[0].content }}!{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}",
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    config = replace(builder.config, scheduling_policy="priority", max_logprobs=3)
    defaults = {"temperature": 0.25, "top_k": 7}
    parser = RequestParser(RequestBuilder(config, encoder, builder.sizes, defaults), ("a", "b"), is_strict=True)
    process = ParserProcess(parser)
    for method, fields in (
        ("parse_completion", {"prompt": "<|end|>", "model": "b", "priority": 5}),
        ("parse_chat", {"messages": CHAT}),
        ("parse_chat", {"messages": CHAT, "functions": [{"name": "f"}], "truncate_prompt_tokens": 20}),
        ("parse_chat", {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "truncate_prompt_tokens": 20}),
        ("parse_completion", {"prompt": "Hi", "an_unknown_field": 1}),
        ("parse_completion", {"prompt": "Hi", "logprobs": 4}),
    ):
        body, told = as_body(fields), []
        for run in (lambda: process.run(method, body), lambda: METHODS[method](parser, body)):  # noqa: B023
            try:
                told.append(timeless(run()))
            except (HTTPError, InvalidRequestError) as error:
                told.append(vars(http_error(error)))
        assert told[0] == told[1], fields
        if "tools" in fields:
            (new,) = told[0].new_requests
            assert (set(new.answer.tools), new.answer.custom_tools) == ({"f", "g"}, {"g"})
            assert new.grammar
        if fields.get("prompt") == "<|end|>":
            assert told[0].new_requests[0].num_prompt_tokens == len("<|end|>")
            assert told[0].new_requests[0].params.top_k == 7
    process.close()
    with_ids = replace(builder.encoder, tokenizer=None, grammars=None)
    parser = RequestParser(RequestBuilder(config, with_ids, builder.sizes, {}), ("a",))
    process, body = ParserProcess(parser), as_body({"prompt": [5, 6]})
    assert timeless(process.run("parse_completion", body)) == timeless(parse_completion(parser, body))
    process.close()


def test_what_a_models_files_say_of_its_answers_reaches_the_process(engine: Engine):
    """The template of chats with tools tells how calls are written, and `response_template` how thoughts are."""
    tokenizer = engine.builder.encoder.tokenizer
    assert tokenizer is not None
    thought = {"open": "[T]", "close": "[/T]"}
    own = Tokenizer(
        tokenizer.backend,
        tokenizer.special_tokens,
        chat_template="{{ messages[0].content }}",
        tool_template="{{ messages[0].content }}{% for t in tools %}{{ t.function.name, t.function.parameters }}"
        "{% endfor %}{# within <tool_call></tool_call> XML tags #}",
        response_template={"defaults": {"role": "assistant"}, "fields": {"thinking": thought}},
    )
    builder = RequestBuilder(
        engine.builder.config, replace(engine.builder.encoder, tokenizer=own), engine.builder.sizes, {}
    )
    setup = codec.decode(codec.encode(_setup_of(RequestParser(builder, ("a",)))), _Setup)
    found = _parser_of(setup).builder.encoder
    assert found.answer_format == builder.encoder.answer_format
    assert found.answer_format is not None
    assert (found.answer_format.format.calls, found.answer_format.format.thought) != (None, None)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert found.encode(chat) == builder.encoder.encode(chat)


def test_a_tokenizer_of_sentencepiece_reaches_the_process(engine: Engine, tmp_path: Path):
    from sentencepiece import SentencePieceTrainer

    model, builder = io.BytesIO(), engine.builder
    SentencePieceTrainer.train(
        sentence_iterator=iter(["to be or not"]), model_writer=model, model_type="char", vocab_size=12, minloglevel=2
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    encoder = replace(builder.encoder, tokenizer=load_tokenizer(tmp_path))
    parser = RequestParser(RequestBuilder(builder.config, encoder, builder.sizes, {}), ("a",))
    setup = codec.decode(codec.encode(_setup_of(parser)), _Setup)
    body = as_body({"prompt": "to be</s>", "min_tokens": 1, "structured_outputs": {"choice": ["to"]}})
    found = timeless(parse_completion(_parser_of(setup), body))
    assert found == timeless(parse_completion(parser, body))
    assert found.new_requests[0].num_prompt_tokens == len("_to_be") + 1


LONG_PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", LONG_PATHS)
def test_long_bodies_get_the_answers_of_short_ones(served: Served, path: str):
    prompts = {
        "/detokenize": {"tokens": [70, 71]}, "/v1/chat/completions": {"messages": CHAT},
        "/v1/responses": {"input": CHAT[1]["content"][0]["text"]},
    }  # fmt: skip
    prompt = prompts.get(path, {"prompt": "Hi"})
    max_tokens = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    how = {"temperature": 1.0, "seed": 5, max_tokens: 5} if path.startswith("/v1") else {}
    short = json.dumps({"model": "tiny", **prompt, **how}).encode()
    replies = []
    for body in (short, short + b" " * LONG_BODY_BYTES, short.replace(b"tiny", b"other") + b"\n" * LONG_BODY_BYTES):
        status, _, reply = served.request(path, body)
        if path == "/v1/responses" and status == 200:
            reply["output"] = [item["content"] for item in reply["output"]]  # Without ids.
        different = ("id", "created", "created_at", "usage")  # The second one finds its prompt in the cache.
        replies.append((status, {name: value for name, value in reply.items() if name not in different}))
    assert replies[0] == replies[1]
    assert (replies[0][0], replies[2][0]) == (200, 404)
    children = [path.read_text().split() for path in Path(f"/proc/{served.process.pid}/task").glob("*/children")]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pids in children for pid in pids]
    assert sum("parser_process" in command for command in commands) == 1
    wait_until(served.is_idle, 2)
