"""How soon servers are ready, and how fast they answer from then on: one command a jpaged, interleaved.

    python scripts/bench_serve_start.py --runs 5 "now=python -m jpaged.serve" \
        "parent=env -C ../parent python -m jpaged.serve"
    python scripts/bench_serve_start.py --runs 3 --empty "now=python -m jpaged.serve" …

Prints, for each command, the seconds from the start of a process until /health answers 200, those of processor time
that the process has taken then, and the seconds until nothing is left to compile; the milliseconds to the first token
of a prompt of 40 tokens and between the tokens of 4 streams, in the EARLY_S seconds from ready on and once nothing is
left; and the most memory until then. With `--empty`, each start finds no compiled programs. Without it, a first start
of each command, which is not counted, fills the caches.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

EARLY_S = 20.0
"""Seconds from ready on in which answers count as early."""
TURN_S = 2.0
"""Seconds for which prompts are timed one by one, before as many with 4 streams, and so on."""
MAX_COMPILE_S = 600.0
"""Seconds that a server may compile behind."""
NUM_STREAMS, PROMPT_LEN, VOCAB_SIZE = 4, 40, 49_000


class Server:
    """One process of a command, on a port of its own."""

    def __init__(self, command: str, model: str, cache: str | None):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        options = ["--port", str(self.port), *([] if cache is None else ["--compilation-cache-dir", cache])]
        self.start_s = time.monotonic()
        self.process = subprocess.Popen(
            [*shlex.split(command), model, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def health(self) -> dict[str, Any] | None:
        """Return what /health tells; None while it is not 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = json.loads(response.read())
            return body if response.status == 200 else None
        except OSError:
            assert self.process.poll() is None, f"the server has ended with status {self.process.returncode}"
            return None
        finally:
            connection.close()

    def token_times_ms(self, max_tokens: int) -> list[float]:
        """Stream an answer to a prompt that no cache has; return the time to each token from the one before."""
        prompt = [random.randrange(100, VOCAB_SIZE) for _ in range(PROMPT_LEN)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        times_ms, last_s = [], time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                times_ms.append(1000 * (now_s - last_s))
                last_s = now_s
        connection.close()
        return times_ms

    def answer_for(self, seconds: float) -> dict[str, list[float]]:
        """Time first tokens and 4 streams in turns of TURN_S."""
        end_s = time.monotonic() + seconds
        first_ms: list[float] = []
        between_ms: list[float] = []
        while time.monotonic() < end_s:
            turn_end_s = time.monotonic() + TURN_S
            while time.monotonic() < turn_end_s:
                first_ms.append(self.token_times_ms(2)[0])
            turn_end_s = time.monotonic() + TURN_S
            while time.monotonic() < turn_end_s:
                streams = [
                    threading.Thread(target=lambda: between_ms.extend(self.token_times_ms(24)[1:]))
                    for _ in range(NUM_STREAMS)
                ]
                for stream in streams:
                    stream.start()
                for stream in streams:
                    stream.join()
        return {"first_ms": first_ms, "between_ms": between_ms}

    def cpu_s(self) -> float:
        """Return the processor time that the process has taken so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """Return the most memory that the process has held so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM"))

    def close(self) -> None:
        """End the process."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def run_start(command: str, model: str, *, is_empty: bool, is_answering: bool) -> dict[str, float]:
    """Start a server and return what the module's docstring names; with `is_answering` false only times and memory."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(command, model, folder if is_empty else None)
        try:
            while server.health() is None:
                time.sleep(0.02)
            ready_s, ready_cpu_s = time.monotonic() - server.start_s, server.cpu_s()
            early = server.answer_for(EARLY_S) if is_answering else {}
            while (health := server.health()) and health.get("phase") == "compile":
                assert time.monotonic() - server.start_s < ready_s + MAX_COMPILE_S, health
                time.sleep(0.2)
            compiled_s = time.monotonic() - server.start_s
            later = server.answer_for(EARLY_S / 2) if is_answering else {}
            return {
                "ready_s": ready_s,
                "ready_cpu_s": ready_cpu_s,
                "compiled_s": compiled_s,
                "peak_mb": server.peak_mb(),
                **{f"early_{name}": value for name, value in _summary(early).items()},
                **{f"later_{name}": value for name, value in _summary(later).items()},
            }
        finally:
            server.close()


def _summary(times: dict[str, list[float]]) -> dict[str, float]:
    if not times:
        return {}
    first_ms, between_ms = times["first_ms"], times["between_ms"]
    return {
        "first_p50_ms": statistics.median(first_ms),
        "first_p90_ms": statistics.quantiles(first_ms, n=10)[-1],
        "between_p50_ms": statistics.median(between_ms),
        "between_p99_ms": statistics.quantiles(between_ms, n=100)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--empty", action="store_true", help="each start compiles everything anew")
    parser.add_argument("--filled", action="store_true", help="the caches are full: no first start fills them")
    parser.add_argument("--no-answers", action="store_true", help="time only how soon the server is ready")
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    args = parser.parse_args()
    commands = dict(one.split("=", 1) for one in args.commands)
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for run in range(0 if args.empty or args.filled else -1, args.runs):
        for name, command in commands.items():
            is_counted = run >= 0
            found = run_start(command, args.model, is_empty=args.empty, is_answering=is_counted and not args.no_answers)
            if is_counted:
                starts[name].append(found)
    medians = {
        name: {key: round(statistics.median(one[key] for one in each), 3) for key in each[0]}
        for name, each in starts.items()
    }
    rounded = {
        name: [{key: round(value, 3) for key, value in one.items()} for one in each] for name, each in starts.items()
    }
    print(json.dumps({"load": os.getloadavg()[0], "medians": medians, "starts": rounded}))


if __name__ == "__main__":
    main()
