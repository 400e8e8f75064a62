"""How core processes start and end: what keeps them from starting, and what is left when either side is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jpaged import AsyncEngine, SamplingParams
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError, EngineStoppedError, JpagedError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.remote import wire
from jpaged.remote.core_client import OutputStream
from jpaged.remote.process_client import ProcessClient, check_greeting

from .conftest import StartProcess

LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
FRONT = """
import sys
from jpaged.config.engine_config import EngineConfig
from jpaged.remote.child_process import ChildProcess
from jpaged.remote.process_client import ProcessClient

start = ChildProcess.start
ChildProcess.start = lambda self: (start(self), print(self.pid, flush=True))
sys.path.insert(0, sys.argv[1])
ProcessClient(EngineConfig(), maker=f"core_makers:{sys.argv[2]}")
"""
"""A program that starts a core process, and writes its id on stdout."""


IN_PYTHON = """
import asyncio, sys
from jpaged import AsyncEngine, SamplingParams

async def run():
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    async with AsyncEngine(sys.argv[1], core="process", max_num_seqs=4, max_model_len=64, warmup="off") as engine:
        async for output in engine.generate("Hi", params, "mine"):
            last = output
        print(last.request_id, last.prompt, len(last.outputs[0].token_ids), engine.config.max_num_seqs)
        for call in (lambda: engine.engine, lambda: engine.call(len, ""), lambda: engine.update_params({})):
            try:
                await call()
            except Exception as error:
                print(type(error).__name__, error)
    print(engine.is_alive)
    print([name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib", "flax")])

asyncio.run(run())
"""


def until(is_true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def thread_states(pid: int) -> set[str]:
    """Return the states of a process's threads."""
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}


async def take_all(stream: OutputStream) -> None:
    """Take outputs until the stream raises an error."""
    while True:
        await stream.take()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder for the files of processes that the test starts."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


STARTS_THAT_FAIL: dict[str, tuple[str, type[Exception], str]] = {
    "an option that the engine refuses": ("refuses", ConfigError, "^model: got no good one$"),
    "a bug": ("has_a_bug", JpagedError, "^ZeroDivisionError: "),
    "an end": ("ends", EngineStoppedError, "^the core process has ended with status 7, before it was ready$"),
}


@pytest.mark.parametrize(("maker", "error", "message"), STARTS_THAT_FAIL.values(), ids=STARTS_THAT_FAIL.keys())
def test_a_failed_start_is_told_as_it_was_in_the_core(
    start_process: StartProcess, folder: Path, maker: str, error: type[Exception], message: str
):
    steps: list[tuple[str, int, int]] = []
    with pytest.raises(error, match=message) as raised:
        start_process(maker, progress=lambda *step: steps.append(step))
    assert type(raised.value) is error
    assert steps == ([("load", 1, 2)] if maker == "refuses" else [])
    assert list(folder.iterdir()) == []


def test_a_core_of_another_version_is_refused_by_one_line():
    check_greeting(wire.greeting())
    with pytest.raises(ConfigError, match=r"^core: got 'jpaged 9\.9 abc' as its greeting, allowed: jpaged [^\n]*$"):
        check_greeting(b"jpaged 9.9 abc")


def test_the_digest_of_the_messages_is_that_of_every_process_and_changes_with_them(monkeypatch: pytest.MonkeyPatch):
    code = "from jpaged.remote.wire import schema_digest; print(schema_digest())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.decode().strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {wire.schema_digest()}
    monkeypatch.setattr(wire, "FromCore", wire.Progress | wire.Ready)
    assert found != {wire.schema_digest()}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a policy that is a function": ({"scheduling_policy": lambda request: 0}, "scheduling_policy: got a function"),
    "weights": ({"params": {"a": 1}}, "params: got one with a core process"),
    "processors of logits": ({"logits_processors": [type("Rule", (), {"name": "rule"})]}, "logits_processors: got"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_message_can_hold_is_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ProcessClient(EngineConfig(**options))


def test_an_engine_for_asyncio_loads_no_jax_and_refuses_what_needs_it(tiny: str):
    found = subprocess.run([sys.executable, "-c", IN_PYTHON, tiny], capture_output=True, text=True, timeout=100)
    assert found.stderr == ""
    needs_thread = 'with a core process, allowed: none there; take core="thread"'
    assert found.stdout.splitlines() == [
        "mine Hi 5 4",
        f"ConfigError engine: got a call of it {needs_thread}",
        f"ConfigError call: got a function {needs_thread}",
        f"ConfigError update_params: got a tree of arrays {needs_thread}",
        "False",
        "[]",
    ]


def test_loggers_and_unknown_cores_are_refused(tiny: str):
    with pytest.raises(ConfigError, match="stat_loggers: got some with a core process"):
        AsyncEngine(tiny, core="process", stat_loggers=[object()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="core: got 'both', allowed: thread, process"):
        AsyncEngine(tiny, core="both")
    with pytest.raises(ConfigError, match="model: got a list with a core process"):
        AsyncEngine([], core="process")  # type: ignore[arg-type]


def test_a_killed_core_ends_streams_and_calls_by_an_error_that_names_the_signal(
    start_process: StartProcess, builder: RequestBuilder, folder: Path
):
    client = start_process()
    assert list(folder.iterdir()) == [], "the socket has no file once both ends are there"

    async def run() -> None:
        messages = [builder.build("", "Hi", LONG, number=0)] * 2
        streams = [await client.submit(messages[:1], takes_deltas=takes_deltas) for takes_deltas in (True, False)]
        client.pause()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)  # So that the call is under way when the process is killed.
        until(lambda: thread_states(client.pid) == {"T"})
        call = asyncio.create_task(client.stats())
        await asyncio.sleep(0.1)
        os.kill(client.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineStoppedError, match=r"^the core process was ended by SIGKILL$"):
                await asyncio.wait_for(take_all(stream), 5)
        with pytest.raises(EngineStoppedError, match="SIGKILL"):
            await call
        assert not client.status().is_alive
        with pytest.raises(EngineStoppedError, match="SIGKILL"):
            await client.submit(messages[:1], takes_deltas=True)
        assert client.lost_process == "the core process was ended by SIGKILL"

    asyncio.run(run())


LOGS_TO_NOBODY = """
import sys
from jpaged.config.engine_config import EngineConfig
from jpaged.remote.process_client import ProcessClient
import asyncio

async def run(client):
    for _ in range(3):
        client._socket.send(b"no message")
        client._take_data(b"no message")
    print((await client.stats())["requests"])

client = ProcessClient(EngineConfig(model=sys.argv[1], max_num_seqs=4, max_model_len=64, warmup="off"))
asyncio.run(run(client))
client.shutdown()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_core_whose_log_cannot_be_written_goes_on(tiny: str):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", LOGS_TO_NOBODY, tiny]
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=100)
    assert (found.returncode, found.stdout) == (0, "0\n")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end the children of a process")
@pytest.mark.parametrize("maker", ["sleeps", "holds_the_lock"])
def test_a_core_ends_with_its_front_and_leaves_nothing(folder: Path, maker: str):
    """Also while native code holds Python's lock, which no thread that reads stdin would get."""
    command = [sys.executable, "-c", FRONT, str(Path(__file__).parent), maker]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        until(lambda: not list(folder.iterdir()))  # It is connected.
        time.sleep(0.3)
        assert is_running(pid)
        front.kill()
    until(lambda: not is_running(pid), 5)
    assert list(folder.iterdir()) == []


def test_a_core_that_starts_ends_with_its_front_and_removes_the_folder(folder: Path):
    """Before the two are connected, too."""
    command = [sys.executable, "-c", FRONT, str(Path(__file__).parent), "sleeps"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        front.kill()
    until(lambda: not is_running(pid), 5)
    assert list(folder.iterdir()) == []


def test_a_path_that_is_too_long_for_a_socket_is_left_for_a_short_one(folder: Path, monkeypatch: pytest.MonkeyPatch):
    deep = folder / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with pytest.raises(ConfigError, match="no good one"):
        ProcessClient(EngineConfig(), maker="core_makers:refuses")
    assert list(deep.iterdir()) == []
