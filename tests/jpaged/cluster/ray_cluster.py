"""A cluster of Ray for tests: one machine with two processors, and a token of its own."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
MARK = "JPAGED_TEST_CLUSTER"
"""A variable that all processes of a cluster have in their environment."""
WAIT_S = 300.0
"""Seconds after which a test gives up."""
POLL_S = 0.05
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"


class Cluster:
    """A cluster of one machine with two processors, and its processes."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.name, self.token = secrets.token_hex(8), secrets.token_hex(32)
        path = os.pathsep.join([str(HERE), str(EXAMPLES), *filter(None, sys.path)])
        environment = {**os.environ, MARK: self.name, "PYTHONPATH": path, **self.token_variables}
        port = self.address.partition(":")[2]
        options = ["--head", "--port", port, "--num-cpus=2", "--include-dashboard=false", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--temp-dir={folder}"]
        self.folder = folder
        folder.mkdir()
        self.log = folder / "start.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(lambda: b"Ray runtime started" in self.log.read_bytes())

    @property
    def token_variables(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def cores(self) -> list[int]:
        """Return the ids of the core processes of workers."""
        return [
            pid for pid in processes_with(f"{MARK}={self.name}") if b"jpaged.remote.core_process" in command_of(pid)
        ]

    def workers(self) -> list[int]:
        return [parent_of(pid) for pid in self.cores()]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)
        for pid in processes_with(f"{MARK}={self.name}"):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def processes_with(variable: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_until(is_so: Callable[[], Any], max_s: float = WAIT_S) -> None:
    end = time.monotonic() + max_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(POLL_S)
