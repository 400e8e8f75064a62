"""`jpaged chat --url` with our server, and with servers that do what ours does not."""

import http.server
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from jpaged.commands.chat import main
from jpaged.commands.dialog.answers import AnswerError, AnswerPart
from jpaged.commands.dialog.server_answers import ServerAnswers, checked_url
from jpaged.errors import ConfigError

from ..commands.command_line import Run
from .served import Served

HELLO = [{"role": "user", "content": "hello"}]


def chat(text: str, *args: Any) -> Run:
    """Run the command in this process, with a text on its stdin."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    former = os.dup(0)
    os.dup2(reader, 0)
    os.close(reader)
    try:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            status = main([str(arg) for arg in args])
    finally:
        os.dup2(former, 0)
        os.close(former)
    return Run(status, out.getvalue(), err.getvalue())


def test_a_conversation_with_our_server(served: Served) -> None:
    flags = ["--url", served.url, "--temperature", 0, "--max-tokens", 8, "--top-k", 5, "--ignore-eos"]
    run = chat("hello\nmore\n/exit\n", *flags, "--system", "Be brief")
    assert run.returncode == 0, run.stderr
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief"}]
    for text in ("hello", "more"):
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        _, _, answer = served.request("/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert run.stdout == "".join(f"{message['content']}\n" for message in messages[2::2])


def test_errors_of_our_server_are_one_line_each_and_the_conversation_goes_on(served: Served) -> None:
    run = chat(
        f"{'long ' * 40}\nhello\n{'more ' * 16}\n/reset\n/retry\n", "--url", f"{served.url}/v1/", "--max-tokens", 8
    )
    assert run.returncode == 3
    first, second = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert "400" in first
    assert "/reset" not in first  # A new conversation has no more room for this message.
    assert "128 tokens" in second
    assert "/reset" in second
    assert run.stdout.count("\n") >= 2
    run = chat("hello\n", "--url", served.url, "-m", "another")
    assert run.returncode == 3
    assert (
        run.stderr
        == "error: the server answers 404: The model `another` does not exist.; /retry sends the message again\n"
    )


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host:x", "http://u:p@host", "http://h/?a"]
)
def test_what_is_no_url_of_a_server_ends_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="--url: "):
        checked_url(url)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/api/openai", "https://host/api/openai"),
    ],
)
def test_a_url_without_a_path_gets_one(url: str, base: str) -> None:
    assert checked_url(url) == base


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--url", "http://localhost:1", "--max-model-len", 64], "--max-model-len"),
        (["--url", "http://localhost:1", "--chat-template", "x"], "--chat-template"),
        (["--url", "http://localhost:1", "-m", "x", "--temperature", -1], "temperature"),
        (["--api-key-file", "x"], "--api-key-file"),
        (["--url", "http://localhost:1", "--api-key-file", "/nowhere"], "--api-key-file"),
        (["--url", "http://localhost:1"], "--url"),
        (["--logprobs", 2], "--logprobs"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(flags: list[Any], named: str) -> None:
    run = chat("hello\n", *flags)
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {named}: ")
    assert run.stderr.count("\n") == 1


@contextmanager
def scripted(reply: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[ServerAnswers]:
    """Give the answers of a server that replies by a function."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            reply(self)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        yield ServerAnswers(url, key=None, model="any", params={})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def body(text: str, *, status: int = 200, kind: str = "text/event-stream") -> Callable[[Any], None]:
    """Return a function that sends this body."""

    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-type", kind)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return reply


def event(delta: dict[str, Any], finish_reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish_reason}]})}\r\n\r\n"


END = event({}, "stop")
SPOKEN = {
    "reasoning_content": (event({"reasoning_content": "hm"}) + event({"content": "hi"}) + END, "hm", "hi"),
    "reasoning": (event({"reasoning": "hm", "content": ""}) + event({"content": "hi"}) + END, "hm", "hi"),
    "both names": (event({"reasoning": "hm", "reasoning_content": "hm"}) + event({"content": "hi"}) + END, "hm", "hi"),
    "a refusal": (event({"role": "assistant", "refusal": "no"}) + END, "", "no"),
    "comments, usage, no space": (
        f": waiting\n\nevent: x\nid: 3\n{event({'content': 'hi'})}data:{{\"choices\": []}}\n\n{END}", "", "hi"
    ),
    "nothing behind [DONE]": (event({"content": "hi"}, "stop") + "data: [DONE]\n\ndata: {\n\n", "", "hi"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "thought", "content"), SPOKEN.values(), ids=SPOKEN.keys())
def test_streams_of_other_servers_are_understood(text: str, thought: str, content: str) -> None:
    with scripted(body(text)) as answers:
        parts = list(answers.parts(HELLO))
    assert "".join(part.text for part in parts if part.is_thought) == thought
    assert "".join(part.text for part in parts if not part.is_thought) == content
    assert parts[-1] == AnswerPart(finish_reason="stop")


def test_a_server_that_does_not_stream_is_understood() -> None:
    message = {"choices": [{"message": {"content": "hi", "reasoning": "hm"}, "finish_reason": "length"}]}
    with scripted(body(json.dumps(message), kind="application/json")) as answers:
        parts = list(answers.parts(HELLO))
    assert parts == [AnswerPart("hm", is_thought=True), AnswerPart("hi"), AnswerPart(finish_reason="length")]


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("# a comment\nsecret\n")

    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        if handler.headers["authorization"] != "Bearer secret":
            body('{"error": {"message": "no key"}}', status=401)(handler)
        elif handler.command == "GET":
            body('{"data": [{"id": "any"}]}')(handler)
        else:
            body(event({"content": "hi"}) + END)(handler)

    with scripted(reply) as answers:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        run = chat("hello\n", "--url", answers.url)
        assert (run.returncode, run.stderr.count("\n")) == (1, 1)
        assert "answers 401: no key; give the key by --api-key-file or OPENAI_API_KEY" in run.stderr
        assert chat("hello\n", "--url", answers.url, "--api-key-file", path).stdout == "hi\n"
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert chat("hello\n", "--url", answers.url).stdout == "hi\n"
        monkeypatch.setenv("OPENAI_API_KEY", "another")
        run = chat("hello\n", "--url", answers.url, "-m", "any")
        assert run.returncode == 3
        assert "another" not in run.stderr


FAULTS = {
    "an error in a stream": (body('data: {"error": {"message": "a\\nb"}}\n\n'), "^a b$"),
    "an error as a text": (body('data: {"error": "broken"}\n\n'), "^broken$"),
    "an error of FastAPI": (body('{"detail": "wrong"}', status=422), "^the server answers 422: wrong$"),
    "an error of a proxy": (body("<html>bad\ngateway", status=502), "^the server answers 502: <html>bad gateway$"),
    "a redirect": (lambda handler: (handler.send_response(302), handler.send_header("location", "http://x/"),
                                    handler.end_headers()), "^the server answers 302: "),
    "an early end": (body(event({"content": "hi"})), "ended the connection"),
    "no JSON": (body("data: {\n\n"), "is no JSON"),
    "another JSON": (body("data: [1]\n\n"), "no part of a chat completion"),
    "no HTTP": (lambda handler: handler.wfile.write(b"nonsense\r\n"), "has ended"),
}  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "too long"},
        {"code": 400, "type": "exceed_context_size_error", "message": "too long"},
        {"code": 400, "message": "This model's maximum context length is 7 tokens."},
    ],
    ids=["OpenAI", "llama.cpp", "vLLM"],
)
def test_a_full_context_is_known_by_the_words_of_each_server(error: dict[str, Any]) -> None:
    with scripted(body(json.dumps({"error": error}), status=400)) as answers, pytest.raises(AnswerError) as found:
        list(answers.parts(HELLO))
    assert found.value.is_full


@pytest.mark.parametrize(("reply", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_of_servers_are_one_line(reply: Callable[[Any], None], message: str) -> None:
    with scripted(reply) as answers, pytest.raises(AnswerError, match=message) as found:
        list(answers.parts(HELLO))
    assert "\n" not in str(found.value)


def test_thoughts_go_to_stderr_and_ctrl_c_closes_the_connection() -> None:
    has_left = threading.Event()

    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        body(event({"reasoning": "hm"}) + event({"content": "begun"}))(handler)
        time.sleep(0.2)  # Until the text has been shown.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            while True:
                handler.wfile.write(b": waiting\n")
                time.sleep(0.05)
        except OSError:
            has_left.set()

    with scripted(reply) as answers:
        run = chat("hello\n", "--url", answers.url, "-m", "any")
        assert has_left.wait(10)
    assert (run.returncode, run.stdout) == (0, "begun\n")
    assert run.stderr.startswith("hm\nthe answer was ended; what has come of it is kept\n")
