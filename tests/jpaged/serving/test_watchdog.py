"""A server whose core hangs says so by /health, and ends if it is told to; see RELIABILITY F18."""

import os
import signal
from pathlib import Path

import pytest

from .conftest import FLAGS
from .served import Served, computing_pid, read_all, serving, wait_until
from .test_lifecycle import body, send

FLAGS_SOON = [*FLAGS, "--watchdog-timeout", 3, "--warmup", "off"]
HANGS = """
import os, sys, time
from jpaged.core.engine_loop import EngineLoop

advance = EngineLoop.advance

def slow_advance(loop):
    while os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    advance(loop)

EngineLoop.advance = slow_advance
from jpaged.serve import main
sys.exit(main(sys.argv[4:]))
"""
"""A server whose steps hang while there is a file of its first argument."""


def is_stalled(server: Served) -> bool:
    status, _, found = server.request("/health")
    return status == 503 and found["status"] == "stalled" and "makes no progress since" in found["reason"]


def test_a_core_process_that_is_stopped_is_told_and_goes_on(tiny: str, log: Path):
    with serving(tiny, *FLAGS_SOON, "--core", "process", log=log) as server:
        core = computing_pid(server)
        os.kill(core, signal.SIGSTOP)
        wait_until(lambda: is_stalled(server), 20)
        status, headers, found = server.request("/v1/completions", body())
        assert (status, found["error"]["message"]) == (503, "the server is stalled")
        assert headers["retry-after"] == "10"
        os.kill(core, signal.SIGCONT)
        wait_until(lambda: server.request("/health")[0] == 200, 20)
        assert server.request("/v1/completions", body(max_tokens=2))[0] == 200
        text = log.read_text()
        assert "the core, which has no work, goes on after" in text
        assert "(most recent call first)" in text, "the stacks, once the process went on"


@pytest.mark.parametrize("core", ["thread", "process"])
def test_a_step_that_hangs_ends_its_streams_and_the_server(
    tiny: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str
):
    flags = [*FLAGS_SOON, "--core", core, "--watchdog", "exit"]
    hold = tmp_path / "hold"
    with serving(tiny, *flags, log=log, python=("-c", HANGS, str(hold))) as server:
        server.request("/v1/completions", body(max_tokens=2))
        child = computing_pid(server) if core == "process" else None
        connections = [send(server, body(stream=True)) for _ in range(2)]
        if child is None:
            hold.touch()
        else:
            os.kill(child, signal.SIGSTOP)
        for connection in connections:
            events = read_all(connection)
            assert b'"type":"ServiceUnavailableError"' in events
            assert b"[DONE]" not in events
        assert server.process.wait(10) == 1
        text = log.read_text()
    assert "makes no progress since 3 s; the stacks of all threads follow" in text
    if child is None:
        assert "in slow_advance" in text
        assert "the server ends, since a step makes no progress since 3 s" in text
    else:
        assert text.splitlines()[-1].startswith("error: the core process was killed, since ")
