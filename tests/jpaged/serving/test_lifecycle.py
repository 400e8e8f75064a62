"""How a server starts, what becomes of requests whose clients leave, and how it ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from jpaged.serving.http.body_parser import LONG_BODY_BYTES
from jpaged.step.compile_threads import MAX_NICE, NICE

from .conftest import FLAGS
from .served import CORE, CORE_FLAGS, ROOT, Served, command, computing_pid, read_all, serving, wait_until


def body(*, stream: bool = False, max_tokens: int = 110, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": "Hi", "max_tokens": max_tokens, "temperature": 1.0, "seed": 3, "ignore_eos": True,
        "stream": stream, **fields,
    }  # fmt: skip


def send(
    server: Served, fields: dict[str, Any], path: str = "/v1/completions", *, receive_bytes: int | None = None
) -> socket.socket:
    """Send a request, and return its connection without reading. The kernel keeps so many bytes of the response."""
    data = json.dumps(fields).encode()
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
    return connection


EARLY = {"nothing": b"", "a blank line": b"\r\n", "half a request": b"POST /v1/completions HTTP/1.1\r\nHost:"}
"""What a client has sent behind its request before it leaves."""


def begins_some(server: Served) -> bool:
    """Let a paused engine compute for a moment; return whether requests run then. A fast one could do all at once."""
    server.request("/resume", {})
    server.request("/pause", {})
    return server.metrics()["jpaged:num_requests_running"] > 0


@pytest.mark.parametrize("early", EARLY.values(), ids=EARLY.keys())
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize("where", ["queued", "prefill", "decoding"])
def test_requests_of_clients_that_leave_are_aborted(served: Served, stream: bool, where: str, early: bytes):
    # In prefill: of a hundred steps' worth of prompts, some have been begun.
    fields = body(stream=stream, n=4) if where != "prefill" else body(stream=stream, prompt="x" * 110, max_tokens=10)
    num_clients = 60 if where == "prefill" else 6
    for number in range(2):  # Their programs are compiled at their first use.
        served.request("/v1/completions", {**fields, "stream": False, "seed": number})
    served.request("/pause", {})
    ended = [f'jpaged:request_success_total{{finished_reason="{reason}"}}' for reason in ("abort", "length")]
    before = served.metrics()
    connections = [send(served, {**fields, "cache_salt": str(index)}) for index in range(num_clients)]
    for connection in connections:
        connection.sendall(early)
    wait_until(lambda: served.metrics()["jpaged:num_requests_waiting"] == num_clients, 20)
    if where != "queued":
        wait_until(lambda: begins_some(served), 20)
    for connection in connections:
        connection.close()
    try:
        wait_until(served.is_idle, 5)
    finally:
        served.request("/resume", {})
    # Counted, not timed: a few may have reached their end before the engine paused.
    after = served.metrics()
    aborted, completed = (after[name] - before[name] for name in ended)
    assert aborted > 3 * completed


def test_a_client_that_does_not_read_costs_nobody_else(served: Served):
    alone = served.request("/v1/completions", body())[2]["choices"][0]["text"]
    slow = [send(served, body(stream=True, n=4, logprobs=5)) for _ in range(4)]
    for _ in range(3):
        assert served.request("/v1/completions", body())[2]["choices"][0]["text"] == alone
    texts = []
    for connection in slow:
        events = [line for line in read_all(connection).split(b"\n") if b"data: {" in line]
        texts.append("".join(json.loads(one.partition(b"data: ")[2])["choices"][0]["text"] for one in events
                             if json.loads(one.partition(b"data: ")[2])["choices"][0]["index"] == 0))  # fmt: skip
    assert texts == [alone] * 4
    wait_until(served.is_idle, 2)


def test_admin_routes_pause_sleep_and_forget(served: Served, tiny: str, log: Path):
    asked = body(max_tokens=5)
    before = served.request("/v1/completions", asked)[2]["choices"]
    assert served.request("/sleep?level=1", {})[0] == 200
    assert served.request("/is_sleeping")[2] == {"is_sleeping": True}
    status, _, found = served.request("/v1/completions", asked)
    assert (status, found["error"]["message"]) == (503, "the server is sleeping")
    for query in ("sleep?level=9", "sleep?level=²", "sleep?mode=x", "wake_up?tags=foo", "pause?x=1"):
        status, _, found = served.request(f"/{quote(query, safe='?=/')}", {})
        assert (status, found["error"]["type"]) == (400, "BadRequestError"), query
    assert served.request("/wake_up", {})[0] == 200
    assert served.request("/reset_prefix_cache", {})[0] == 200
    assert served.request("/v1/completions", asked)[2]["choices"] == before
    with serving(tiny, *(flag for flag in FLAGS if flag != "--enable-admin"), log=log, awaits=False) as plain:
        for path in ("/sleep", "/pause", "/reset_prefix_cache", "/start_profile"):
            assert plain.request(path, {})[0] == 404


def test_one_profile_is_taken_at_a_time(served: Served):
    status, _, found = served.request("/start_profile", {})
    assert status == 200
    assert served.request("/start_profile", {})[0] == 400
    assert served.request("/stop_profile", {})[0] == 200
    assert list(Path(found["folder"]).rglob("*.xplane.pb"))
    assert served.request("/stop_profile", {})[0] == 400
    shutil.rmtree(found["folder"])


def test_health_tells_the_phase_of_the_start_and_requests_wait_for_it(tiny: str, log: Path):
    with serving(tiny, *FLAGS, log=log, awaits=False) as server:
        status, headers, health = server.request("/health")
        if status == 503:
            assert health["status"] == "starting"
            assert set(health) == {"status", "phase", "done", "total", "eta_s"}
            assert int(headers["retry-after"]) > 0
            status, headers, _ = server.request("/v1/completions", body())
            assert status in (200, 503)
        assert server.request("/live")[0] == 200
        wait_until(lambda: server.request("/health")[0] == 200, 60)
        health = server.request("/health")[2]
        assert (health["status"], health["phase"], health["eta_s"]) == ("ok", "serve", 0)
        assert health["done"] == health["total"]


def nice_values(pid: int) -> list[tuple[str, int]]:
    """Return name and nice value of each thread of a process."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [(text.partition("(")[2].rpartition(")")[0], int(text.rpartition(")")[2].split()[16])) for text in stats]


def test_a_server_answers_while_it_compiles_and_ends_at_once(tiny: str, log: Path):
    """As users start it: /health is 200 before everything is compiled, and no signal waits for the compiler."""
    flags = (flag for flag in FLAGS if flag not in ("--warmup", "off"))
    with serving(tiny, *flags, "--compilation-cache-dir", "off", log=log) as server:
        health = server.request("/health")[2]
        assert (health["status"], health["phase"]) == ("ok", "compile")
        assert 0 < health["done"] < health["total"]
        assert server.request("/v1/completions", body())[0] == 200
        assert server.metrics()["jpaged:recompiles_after_warmup_total"] == 0
        if sys.platform == "linux":
            own = os.getpriority(os.PRIO_PROCESS, 0)
            nice = nice_values(computing_pid(server))
            assert min(own + NICE, MAX_NICE) in [value for _, value in nice], "the compiler gives way"
            assert {value for name, value in nice if name == "tf_XLAEigen"} == {own}, "steps do not"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        assert "Traceback" not in log.read_text()


def test_sigterm_lets_requests_end_and_refuses_new_ones(tiny: str, log: Path):
    """8 run and 50 wait: all that were accepted end; new ones get a 503 while the socket is open; the status is 0."""
    with serving(tiny, *FLAGS, log=log) as server:
        whole = server.request("/v1/completions", body())[2]["choices"][0]["text"]
        server.request("/pause", {})
        connections = [send(server, body(stream=index % 2 == 0)) for index in range(58)]
        wait_until(lambda: server.metrics()["jpaged:num_requests_waiting"] == 58, 20)
        server.request("/resume", {})
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("/health")[2].get("status") == "stopping", 20)
        status, headers, found = server.request("/v1/completions", body())
        assert (status, found["error"]["message"]) == (503, "the server is stopping")
        assert "retry-after" in headers
        for index, connection in enumerate(connections):
            reply = read_all(connection)
            assert reply.startswith(b"HTTP/1.1 200"), reply
            if index % 2:
                assert json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == whole
            else:
                assert b"data: [DONE]" in reply
        assert server.process.wait(10) == 0


SLOW_TEMPLATE = "{% for i in range(99999) %}{% set x = i * i %}{% endfor %}" * 20 + "{{ messages[0].content }}"
"""A chat template that takes seconds."""


def test_requests_that_do_not_end_in_time_get_an_error_and_long_bodies_hold_up_no_other(
    tiny: str, log: Path, tmp_path: Path
):
    """Requests that wait, chats whose template is rendered and a long body: the process waits for none of them to end.

    Nor do long bodies whose clients have left hold up those of others.
    """
    (tmp_path / "slow").write_text(SLOW_TEMPLATE)
    flags = ("--shutdown-timeout", "0.5", "--chat-template", tmp_path / "slow")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    long_chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi" + " " * LONG_BODY_BYTES}]}
    tokens = json.dumps({"tokens": [70, 71]}).encode() + b" " * LONG_BODY_BYTES
    with serving(tiny, *FLAGS, *flags, log=log) as server:
        assert server.request("/detokenize", tokens)[0] == 200  # The process is there.
        for path in ("/v1/chat/completions", "/tokenize"):
            connections = [send(server, long_chat, path) for _ in range(3)]
            time.sleep(0.5)
            for connection in connections:
                connection.close()
            start = time.monotonic()
            assert server.request("/detokenize", tokens)[0] == 200
            assert time.monotonic() - start < 6, "a template takes longer"
        server.request("/pause", {})
        connections = [send(server, body(stream=stream)) for stream in (True, False)]
        wait_until(lambda: server.metrics()["jpaged:num_requests_waiting"] == 2, 20)
        chats = [send(server, chat, "/v1/chat/completions") for _ in range(6)]
        chats.append(send(server, long_chat, "/v1/chat/completions"))
        time.sleep(0.5)
        assert server.request("/metrics")[0] == 200  # Beside four templates.
        server.process.send_signal(signal.SIGTERM)
        stream, complete = map(read_all, connections)
        assert b'"type":"ServiceUnavailableError"' in stream
        assert b"[DONE]" not in stream
        for response in (complete, *map(read_all, chats)):
            assert response.startswith(b"HTTP/1.1 503"), response
            assert b'"type":"ServiceUnavailableError"' in response
        assert server.process.wait(10) == 0


def test_a_second_signal_ends_the_server_at_once(tiny: str, log: Path):
    with serving(tiny, *FLAGS, log=log) as server:
        server.request("/pause", {})
        connection = send(server, body(stream=True))
        wait_until(lambda: server.metrics()["jpaged:num_requests_waiting"] == 1, 20)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.request("/health")[0] == 503, 20)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        server.process.wait(5)
        assert time.monotonic() - start < 2
        connection.close()


BAD_STARTS: dict[str, tuple[list[Any], str]] = {
    "an address that is not here": (["--host", "192.0.2.1"], "host: got 192.0.2.1 (not an address of this machine)"),
    "no address": (["--host", "no such host"], "host: got no such host, which has no address here"),
    "no certificate": (["--ssl-certfile", "/none.pem"], "ssl_certfile: got /none.pem, which is no file"),
    "a key without a certificate": (["--ssl-keyfile", __file__], "ssl_keyfile:"),
    "a file that is no certificate": (["--ssl-certfile", __file__], "ssl_certfile:"),
    "no key in the file": (["--api-key-file", "/dev/null"], "api_key_file:"),
    "an empty key": (["--api-key", ""], "api_key:"),
    "an unknown flag": (["--prot", "80"], "--prot: unknown flag; did you mean --port?"),
    "an unknown limit": (["--limits", "bodies=5"], "bodies: unknown key of limits; did you mean body_s?"),
    "a limit beyond its bound": (["--limits", "stop=17"], "limits: got 17 for stop, allowed: an integer in [1, 16]"),
    "a port out of range": (["--port", "70000"], "port: got 70000, allowed: an integer in [0, 65535]"),
    "a socket and a port": (["--uds", "/tmp/x", "--port", "80"], "port: got 80, allowed: none beside uds"),
    "no model": (["--model", "/none"], "none"),
    "a template that is not there": (["--chat-template", "/none"], "chat_template:"),
    "what is not available": (["--lora-modules", "x"], "--lora-modules: not available in this version"),
    "a format of calls that none has": (["--tool-call-parser", "x"], "unknown format, as --tool-call-parser takes it"),
    "cores in threads": (
        ["--data-parallel-size", "2", "--core", "thread"],
        "core: got 'thread', allowed: process with",
    ),
    "no core": (["--data-parallel-size", "0"], "data_parallel_size: got 0, allowed: an integer"),
    "more cores than processors": (
        ["--data-parallel-size", "9999", "--core", "process"],
        "data_parallel_size: got 9999",
    ),
    "restarts of a thread": (["--core-restarts", "1", "--core", "thread"], "core_restarts: got 1, allowed: 0"),
    "vLLM's number of fronts": (
        ["--api-server-count", "2"],
        "(got '2'); give --core process, and --data-parallel-size",
    ),
    "vLLM's local cores": (["--data-parallel-size-local", "2"], "(got '2'); give --data-parallel-size, the cores on"),
    "a root path without a slash": (["--root-path", "llm"], "root_path: got 'llm'"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_STARTS.values(), ids=BAD_STARTS.keys())
def test_a_bad_start_is_one_line_and_status_1(tiny: str, flags: list[Any], message: str, capfd: Any):
    from jpaged.commands.serve import main

    model = [] if "--model" in flags else [tiny]
    port = [] if "--port" in flags else ["--port", "0"]
    core = [] if "--core" in flags else CORE_FLAGS
    assert main([*model, *port, *core, *map(str, flags)]) == 1
    lines = capfd.readouterr().err.splitlines()
    if CORE == "process":  # There the model is opened once the server listens.
        lines = [line for line in lines if not line.startswith("listening at ")]
    assert len(lines) == 1, lines
    assert message in lines[0]


def test_a_port_that_is_taken_ends_the_start_within_five_seconds(served: Served, tiny: str):
    start = time.monotonic()
    result = subprocess.run(command(tiny, "--port", served.port), capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, time.monotonic() - start < 5) == (1, True)
    assert result.stderr.startswith(
        f"error: port: got {served.port} (Address already in use), allowed: one that is free"
    )


def test_without_the_extra_the_start_says_what_to_install(tiny: str, tmp_path: Path):
    hide = "import sys; sys.modules['uvicorn'] = None; from jpaged.serve import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run([sys.executable, "-c", hide, tiny], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("run: pip install 'jpaged[serve]'")


def test_a_model_that_cannot_be_loaded_ends_the_server_with_status_1(tiny: str, tmp_path: Path):
    from ..tiny_model import write_tiny_model

    broken = write_tiny_model(tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    result = subprocess.run(
        command(broken, *FLAGS, "--port", "0"), capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_after_sigkill_the_next_start_finds_the_port_free(tiny: str, log: Path):
    with serving(tiny, *FLAGS, log=log) as server:
        connection = send(server, body(stream=True))
        server.process.kill()
        server.process.wait()
        connection.close()
        again = subprocess.Popen(command(tiny, *FLAGS, "--port", server.port), stderr=subprocess.PIPE, cwd=ROOT)
        try:
            wait_until(lambda: _answers(server.port) or again.poll() is not None, 60)
            assert again.poll() is None, again.stderr.read() if again.stderr else ""
        finally:
            again.terminate()
            assert again.wait(20) == 0


def _answers(port: int) -> bool:
    try:
        return Served(None, port, Path()).request("/health")[0] in (200, 503)  # type: ignore[arg-type]
    except OSError:
        return False


def test_the_log_has_a_line_for_each_request_and_none_of_its_text(served: Served):
    served.request("/v1/completions", body(prompt="a secret"), headers={"x-request-id": "find-me"})
    wait_until(lambda: b"find-me" in served.log.read_bytes(), 2)
    (line,) = [line for line in served.log.read_text().splitlines() if "find-me" in line]
    assert "POST /v1/completions 200" in line
    assert "secret" not in served.log.read_text()


@pytest.mark.slow
def test_the_whole_server_runs_without_assertions(tiny: str, log: Path):
    """`python -O`: no check of what clients send may be an assert."""
    with serving(tiny, *FLAGS, log=log, python=("-O",)) as server:
        assert server.request("/v1/completions", body(max_tokens=3))[0] == 200
        for wrong in (body(temperature=9), body(prompt=[300]), body(max_tokens=0), {"prompt": 5}):
            assert server.request("/v1/completions", wrong)[0] == 400
        assert os.environ.get("PYTHONOPTIMIZE") is None
