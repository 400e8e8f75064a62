"""Starts servers as users do, in processes of their own, and sends them what no client library would."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
START_S = 120.0
CORE = os.environ.get("JPAGED_TEST_CORE", "")
"""Where the servers of tests compute, `thread` or `process`; empty for what `jpaged serve` does by itself."""
CORE_FLAGS = ("--core", CORE) if CORE else ()


@dataclass
class Served:
    """A server that runs: its process, its address and what it has written."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and body of one request; JSON is parsed, and `bytes` are sent as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if data is not None else {}
        sent |= {"authorization": f"Bearer {self.key}"} if self.key else {}
        asked = urllib.request.Request(self.url + path, data, sent | (headers or {}), method=method)
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                status, found, text = reply.status, dict(reply.headers), reply.read()
        except urllib.error.HTTPError as error:
            status, found, text = error.code, dict(error.headers), error.read()
        found = {name.lower(): value for name, value in found.items()}
        is_json = found.get("content-type", "").startswith("application/json")
        return status, found, json.loads(text) if is_json else text

    def raw(self, data: bytes, *, timeout_s: float = 30.0, chunks: int = 1) -> bytes:
        """Send bytes over a connection of its own, and return all that comes until it is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            size = -(-len(data) // chunks) or 1
            for start in range(0, len(data), size):
                connection.sendall(data[start : start + size])
            return read_all(connection)

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name, without the label of the model, those of all cores added up."""
        _, _, text = self.request("/metrics")
        samples: dict[str, float] = {}
        for line in text.decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r',?(model_name|engine)="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def is_idle(self) -> bool:
        """Return whether no request runs or waits, and no page is in use."""
        found = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(found[f"jpaged:{name}"] for name in names)


def core_pids(server: Served) -> list[int]:
    """Return the ids of the core processes, the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            is_core = b"core_process" in (path.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == server.process.pid and is_core and fields[0] != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def computing_pid(server: Served) -> int:
    """Return the id of the process that computes steps: that of the first core, if it has one of its own."""
    return [*core_pids(server), server.process.pid][0]


def read_all(connection: socket.socket) -> bytes:
    """Return what a connection gives until its other side closes it."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def wait_until(is_true: Any, seconds: float, what: str = "") -> float:
    """Wait until a function returns a true value; return how long that took."""
    start = time.monotonic()
    while not is_true():
        assert time.monotonic() - start < seconds, what
        time.sleep(0.01)
    return time.monotonic() - start


def command(*args: Any, python: tuple[str, ...] = ()) -> list[str]:
    """Return what starts a server; it computes where the arguments say, else where CORE does."""
    core = () if "--core" in args else CORE_FLAGS
    return [sys.executable, *python, "-m", "jpaged.serve", *map(str, args), *core]


@contextmanager
def serving(
    *args: Any, log: Path, key: str | None = None, python: tuple[str, ...] = (), awaits: bool = True
) -> Iterator[Served]:
    """Start a server at a free port, wait until it serves, and end it after the `with` block."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(*args, "--port", "0", python=python), stderr=stream, cwd=ROOT, env={**os.environ}
        )
    try:
        wait_until(lambda: b"listening at" in log.read_bytes() or process.poll() is not None, START_S)
        text = log.read_text()
        assert process.poll() is None, text
        port = int(text.split("listening at ")[1].split()[0].rpartition(":")[2])
        served = Served(process, port, log, key)
        if awaits:
            wait_until(lambda: served.request("/health")[0] == 200 or process.poll() is not None, START_S)
        assert process.poll() is None, log.read_text()
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
