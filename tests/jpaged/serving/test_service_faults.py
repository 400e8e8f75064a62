"""Service goes on beside a log that takes nothing, hundreds of readers that stop and thousands of idle connections.

The server computes in a thread and in a core process.
"""

import re
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .conftest import FLAGS
from .served import ROOT, Served, command, computing_pid, read_all, serving, wait_until
from .test_lifecycle import body, send

CORES = ("thread", "process")
NUM_STOPPED = 500
NUM_IDLE = 10_000
MAX_READER_MB = 0.5
"""What a reader that has stopped may take: an output with 20 logprobs for each of 110 tokens, in two processes."""


@contextmanager
def logging_to_nobody(tiny: str, core: str, *, is_full: bool) -> Iterator[Served]:
    """Start a server whose log is a pipe that nobody reads any more, or a full disk."""
    with ExitStack() as stack:
        if is_full:
            stderr: Any = stack.enter_context(open("/dev/full", "wb"))
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        else:
            stderr, port = subprocess.PIPE, 0
        start = command(tiny, *FLAGS, "--core", core, "--port", port)
        process = stack.enter_context(subprocess.Popen(start, stderr=stderr, cwd=ROOT))
        stack.callback(process.kill)
        if process.stderr is not None:
            line = process.stderr.readline().decode()
            port = int(re.findall(r":(\d+) ", line)[0])
            process.stderr.close()
        served = Served(process, port, Path())
        wait_until(lambda: process.poll() is None and is_ready(served), 60)
        yield served


def is_ready(server: Served) -> bool:
    try:
        return server.request("/health")[0] == 200
    except OSError:
        return False


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("core", "is_full"),
    [
        ("process", True),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [("thread", True), ("process", False), ("thread", False)]
        ),
    ],
)
def test_a_log_that_takes_nothing_costs_no_request(served: Served, tiny: str, core: str, is_full: bool):
    expected = served.request("/v1/completions", body())[2]["choices"]
    with logging_to_nobody(tiny, core, is_full=is_full) as server:
        assert server.request("/v1/completions", body())[2]["choices"] == expected
        assert server.request("/v1/completions", body(temperature=9))[0] == 400
        stream = read_all(send(server, body(stream=True)))
        assert b"data: [DONE]" in stream
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.fixture(params=CORES)
def crowded(tiny: str, log: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Give a server that takes thousands of connections, and closes those that ask nothing after ten seconds."""
    limits = f"connections={NUM_IDLE + 100},header_s=10,keep_alive_s=10,waiting_requests={NUM_STOPPED + 100}"
    with serving(tiny, *FLAGS, "--core", request.param, "--limits", limits, log=log) as server:
        yield server


def memory_mb(server: Served) -> float:
    """Return the memory of the processes that serve and compute."""
    pids = {server.process.pid, computing_pid(server)}
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(text.partition("VmRSS:")[2].split()[0]) / 1024 for text in texts)


def num_files(server: Served) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.slow
def test_hundreds_of_readers_that_stop_cost_no_other_reader_anything(crowded: Served):
    """Their responses are longer than what the kernel keeps of them, so that the server has to hold the rest.

    It holds one output of each, and gives it up when they leave: the next hundreds take no more.
    """
    expected = crowded.request("/v1/completions", body())[2]["choices"]
    grown_mb, before_mb = list[float](), memory_mb(crowded)
    for _ in range(2):
        stopped = list[socket.socket]()
        try:
            for _ in range(NUM_STOPPED):
                stopped.append(send(crowded, body(stream=True, logprobs=20), receive_bytes=4096))
            assert crowded.request("/v1/completions", body())[2]["choices"] == expected
            wait_until(crowded.is_idle, 300)
            assert crowded.request("/v1/completions", body())[2]["choices"] == expected
            grown_mb.append(memory_mb(crowded) - before_mb)
        finally:
            for connection in stopped:
                connection.close()
        wait_until(crowded.is_idle, 10)
    assert grown_mb[0] < NUM_STOPPED * MAX_READER_MB
    assert grown_mb[1] < 1.2 * grown_mb[0]


@pytest.mark.slow
def test_thousands_of_connections_that_ask_nothing_cost_no_request_and_are_closed(crowded: Served):
    expected = crowded.request("/v1/completions", body())[2]["choices"]
    before, idle = num_files(crowded), list[socket.socket]()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        for index in range(NUM_IDLE):
            idle.append(socket.create_connection(("127.0.0.1", crowded.port), timeout=60))
            if index % 2:
                idle[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        assert crowded.request("/v1/completions", body())[2]["choices"] == expected
        assert crowded.request("/health")[0] == 200
        wait_until(lambda: num_files(crowded) <= before, 60, "connections are left open")
        assert crowded.request("/v1/completions", body())[2]["choices"] == expected
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
