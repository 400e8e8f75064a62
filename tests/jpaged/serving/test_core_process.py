"""A server whose core is a process of its own: the same responses, and an end of both if one of them ends."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jpaged.serving.http.body_parser import LONG_BODY_BYTES

from ..tiny_model import write_tiny_model
from .conftest import FLAGS
from .served import ROOT, Served, command, computing_pid, read_all, serving, wait_until
from .test_lifecycle import body, send

PROCESS = [*FLAGS, "--core", "process"]


@pytest.fixture(scope="module")
def apart(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server with a core process; tests leave it idle."""
    with serving(tiny, *PROCESS, log=tmp_path_factory.mktemp("apart") / "log") as server:
        yield server


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a completion": ("/v1/completions", body(max_tokens=20, logprobs=2, prompt=["Hi", "Once"], n=2)),
    "logprobs of the prompt": ("/v1/completions", body(max_tokens=3, prompt_logprobs=1, echo=True)),
    "a chat": ("/v1/chat/completions", {
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 5,
        "structured_outputs": {"choice": ["yes", "no"]},
    }),
    "a field that is wrong": ("/v1/completions", body(temperature=9)),
    "more samples than fit": ("/v1/completions", body(n=9)),
    "a long body": ("/v1/completions", body(prompt=[72] * 3, max_tokens=4, padding=" " * LONG_BODY_BYTES)),
}  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), BODIES.values(), ids=BODIES.keys())
def test_responses_are_those_of_a_server_with_a_thread(served: Served, apart: Served, path: str, fields: Any):
    for server in (served, apart):
        server.request("/reset_prefix_cache", {})
    status, _, expected = served.request(path, fields)
    found_status, _, found = apart.request(path, fields)
    assert found_status == status
    for response in (found, expected):
        response.get("usage", {}).pop("prompt_tokens_details", None)  # Other tests fill the cache of `served`.
    names = ("choices", "usage", "error")
    assert {name: found.get(name) for name in names} == {name: expected.get(name) for name in names}


def test_a_stream_is_that_of_a_server_with_a_thread(served: Served, apart: Served):
    streams = []
    for server in (served, apart):
        events = read_all(send(server, body(stream=True, n=2, stream_options={"include_usage": True}))).split(b"\n\n")
        data = [event.partition(b"data: ")[2] for event in events if b"data: " in event]
        assert data[-1].startswith(b"[DONE]")
        samples: dict[int, str] = {}
        for choice in (choice for one in data[:-1] for choice in json.loads(one)["choices"]):
            samples[choice["index"]] = samples.get(choice["index"], "") + choice["text"]
        streams.append((samples, json.loads(data[-2])["usage"]["completion_tokens"]))
    assert streams[0] == streams[1]


def test_the_server_loads_no_jax_and_counts_what_the_core_does(apart: Served):
    apart.request("/v1/completions", body(max_tokens=5))
    assert "jaxlib" not in Path(f"/proc/{apart.process.pid}/maps").read_text()
    assert "jaxlib" in Path(f"/proc/{computing_pid(apart)}/maps").read_text()
    before = apart.metrics()
    apart.request("/v1/completions", body(max_tokens=5))
    after = apart.metrics()
    assert after["jpaged:generation_tokens_total"] - before["jpaged:generation_tokens_total"] == 5
    assert after["jpaged:time_to_first_token_seconds_count"] - before["jpaged:time_to_first_token_seconds_count"] == 1
    assert apart.request("/health")[2]["status"] == "ok"


def test_clients_that_leave_free_their_pages_and_the_owner_can_put_the_core_to_sleep(apart: Served):
    apart.request("/pause", {})
    connections = [send(apart, body(stream=True)) for _ in range(3)]
    wait_until(lambda: apart.metrics()["jpaged:num_requests_waiting"] == 3, 20)
    for connection in connections:
        connection.close()
    wait_until(apart.is_idle, 5)
    apart.request("/resume", {})
    assert apart.request("/sleep?level=1", {})[0] == 200
    assert apart.request("/is_sleeping")[2] == {"is_sleeping": True}
    assert apart.request("/v1/completions", body())[0] == 503
    assert apart.request("/wake_up", {})[0] == 200
    assert apart.request("/v1/completions", body(max_tokens=2))[0] == 200


def test_sigterm_lets_requests_end(tiny: str, log: Path):
    with serving(tiny, *PROCESS, log=log) as server:
        core = computing_pid(server)
        whole = server.request("/v1/completions", body())[2]["choices"][0]["text"]
        server.request("/pause", {})
        connections = [send(server, body(stream=stream)) for stream in (True, False)]
        wait_until(lambda: server.metrics()["jpaged:num_requests_waiting"] == 2, 20)
        server.request("/resume", {})
        os.kill(core, signal.SIGTERM)  # As service managers send it to all processes.
        server.process.send_signal(signal.SIGTERM)
        stream, complete = map(read_all, connections)
        assert b"data: [DONE]" in stream
        assert json.loads(complete.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == whole
        assert server.process.wait(15) == 0
        assert has_ended(core)


@dataclass
class Killed:
    """A server before one of its two processes is killed."""

    server: Served
    connections: list[socket.socket]
    """Streams, and last a request whose response comes as a whole."""
    processes: list[int]
    """All that it has started, and their children."""
    folder: Path
    """Where it makes its temporary files."""


def when_idle(killed: Killed) -> None:
    killed.server.request("/v1/completions", body(max_tokens=2))


def under_streams(killed: Killed) -> None:
    """Also once a child has parsed a long body."""
    server = killed.server
    server.request("/v1/completions", body(max_tokens=2, prompt=[72], padding=" " * LONG_BODY_BYTES))
    server.request("/pause", {})
    killed.connections += [send(server, body(stream=stream)) for stream in (*[True] * 32, False)]
    wait_until(lambda: server.metrics()["jpaged:num_requests_waiting"] == len(killed.connections), 20)
    server.request("/resume", {})
    assert all(connection.recv(1) for connection in killed.connections[:-1][::8])


def in_a_start(killed: Killed) -> None:
    assert killed.server.request("/health")[0] == 503
    wait_until(lambda: computing_pid(killed.server) != killed.server.process.pid, 5)


def in_a_compilation(killed: Killed) -> None:
    health = killed.server.request("/health")[2]
    assert (health["status"], health["phase"]) == ("ok", "compile")
    killed.connections += [send(killed.server, body(stream=stream)) for stream in (True, False)]


WHEN: dict[str, Any] = {
    "idle": pytest.param(when_idle, marks=pytest.mark.slow),
    "streams": under_streams,
    "start": pytest.param(in_a_start, marks=pytest.mark.slow),
    "compilation": pytest.param(in_a_compilation, marks=pytest.mark.slow),
}
kills = pytest.mark.parametrize("when", WHEN.values(), ids=WHEN.keys())


@pytest.fixture
def killed(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: Callable[[Killed], None]
) -> Iterator[Killed]:
    """Give a server whose processes have come as far as the test wants."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    flags = PROCESS
    if when is in_a_compilation:
        flags = [*(flag for flag in PROCESS if flag not in ("--warmup", "off")), "--compilation-cache-dir", "off"]
    with serving(tiny, *flags, log=tmp_path / "log", awaits=when is not in_a_start) as server:
        found = Killed(server, [], [], folder)
        when(found)
        found.processes = children_of(server.process.pid)
        assert computing_pid(server) in found.processes
        yield found
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    for connection in found.connections:
        connection.close()
    wait_until(lambda: all(map(has_ended, found.processes)), 5)
    assert list(folder.glob("jpaged-*")) == []


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in tasks for child in path.read_text().split()]
    return children + [one for child in children for one in children_of(child)]


@kills
def test_a_killed_core_ends_streams_by_an_error_and_the_server_with_status_1(killed: Killed, when: Any):
    server = killed.server
    os.kill(computing_pid(server), signal.SIGKILL)
    start_s = time.monotonic()
    responses = list(map(read_all, killed.connections))
    assert time.monotonic() - start_s < 5
    for complete in responses[-1:]:
        assert complete.startswith(b"HTTP/1.1 503")
    for stream in responses[:-1]:
        assert b'"type":"ServiceUnavailableError"' in stream
        assert b"[DONE]" not in stream
    assert server.process.wait(10) == 1
    text = server.log.read_text()
    ending = ", before it was ready" * (when is in_a_start)
    assert text.splitlines()[-1] == f"error: the core process was ended by SIGKILL{ending}"
    assert "Traceback" not in text


@kills
def test_a_killed_server_leaves_no_process(killed: Killed, when: Any):
    killed.server.process.kill()
    killed.server.process.wait()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path: Path):
    broken = write_tiny_model(tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    start = command(broken, *PROCESS, "--port", "0")
    result = subprocess.run(start, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if "model.safetensors" in line]
    assert line.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_core_of_an_unknown_kind_is_refused(tiny: str):
    result = subprocess.run(command(tiny, "--core", "both"), capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == "error: core: got 'both', allowed: thread, process\n"
