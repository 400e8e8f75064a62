"""Serves mixed traffic for minutes and holds the server to its promises at the end.

    python scripts/soak.py --minutes 5
    python scripts/soak.py --minutes 10 --core process --faults

The server runs the tiny model of the tests, with a pool of 30 % of what its sequences need. Clients send chats and
completions of every kind: greedy, seeded, several samples, stop strings, JSON schemas, streamed and not. A fifth leave
while their response comes, a tenth soon after they have sent their request, some read slowly. At the end no request has
failed, and /metrics shows as many requests and tokens as clients have read; greedy texts are what they are alone;
pages, queues, open files and threads are as before; memory has not grown, and nothing was compiled anew.

With `--faults` a group of clients misbehaves every ten seconds, in another way each time. A core process is killed in
turn with them: the requests that it had must be told so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.jpaged.serving.served import Served, core_pids, serving, wait_until
from tests.jpaged.tiny_model import write_tiny_model

NUM_CLIENTS = 24
SLOW_BYTES_S = 2000
"""Bytes a second that a slow reader takes."""
MAX_GROWTH_MB_PER_MIN = 1.0
WATCH_S = 5.0
"""Seconds between two looks at the server's memory."""
MEAN_LEN = 130
"""Tokens of a sequence on average, about: the pool has pages for 30 % of 16 such sequences."""
MAX_POOL_THREADS = 10
"""Threads that the server's pools and the event loop's have at most, made as they are needed."""
FAULT_S = 10.0
"""Seconds between two faults, by default."""
NUM_FAULTY = 16
"""Clients that have a fault at the same time."""
MAX_RESTARTS = 1000
"""Core processes that may be started again, for each place."""
RETRY_S = 1.0
"""Seconds that a client waits after it was told that the server cannot serve now."""
STOPPED_S = 5.0
"""Seconds for which a reader that stops reads nothing."""
FLAGS = (
    "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "288", "--block-size", "8",
    "--num-blocks", str(1 + 16 * MEAN_LEN // 8 * 3 // 10), "--num-host-blocks", "64", "--preemption-mode", "swap",
    "--served-model-name", "tiny", "--disable-log-requests",
)  # fmt: skip
WORDS = ("the", "a", "river", "stone", "bright", "seven", "of", "under", "walks", "slowly", "toward", "blue", "never")
FATES = ("reads", "aborts", "leaves", "slow")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def drawn_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the route and the body of a random request."""
    prefix = "Once there was a river of stone. " if rng.random() < 0.4 else ""
    text = prefix + " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 4, 12, 24])))
    is_chat = rng.random() < 0.4
    body: dict[str, Any] = {"model": "tiny", "max_tokens": rng.choice([1, 5, 20, 60]), "temperature": 0, "user": "soak"}
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    kind = rng.choice(["greedy", "greedy", "seeded", "samples", "stop", "json", "salt", "logprobs"])
    if kind in ("seeded", "samples"):
        body |= {"temperature": 1.0, "seed": rng.randrange(1000)}
    if kind == "samples":
        body["n"] = rng.choice([2, 4])
    if kind == "stop":
        body["stop"] = ["e", "xy"]
    if kind == "json":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if kind == "salt":
        body["cache_salt"] = rng.choice(["a", "b"])
    if kind == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    body["stream"] = rng.random() < 0.6
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return "/v1/chat/completions" if is_chat else "/v1/completions", body


def text_and_usage(response: bytes, *, is_stream: bool) -> tuple[str, dict[str, Any]] | None:
    """Return the text of the first choice of a response, and its usage; None for one that is not complete."""
    head, _, data = response.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return None
    if not is_stream:
        body = json.loads(data)
        choice = body["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"]), body["usage"]
    lines = re.findall(rb"data: (.*)", data)
    if not lines or lines[-1].strip() != b"[DONE]":
        return None
    chunks, texts = [json.loads(line) for line in lines[:-1]], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == 0:
                texts.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
    return "".join(texts), chunks[-1]["usage"]


def as_bytes(route: str, data: bytes) -> bytes:
    """Return a request as it is sent."""
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


async def send(port: int, route: str, body: dict[str, Any], fate: str, rng: random.Random) -> bytes:
    """Send a request and return the response, as far as the client's fate lets it read it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(as_bytes(route, json.dumps(body).encode()))
        if fate == "leaves" or (fate == "aborts" and not body["stream"]):
            await asyncio.sleep(rng.expovariate(20 if fate == "leaves" else 5))
            return b""
        parts = []
        while part := await reader.read(SLOW_BYTES_S // 10 if fate == "slow" else 65536):
            parts.append(part)
            if fate == "slow":
                await asyncio.sleep(0.1)
            if fate == "aborts" and rng.random() < 0.3:
                return b"".join(parts)
        return b"".join(parts)
    finally:
        writer.close()


def is_unavailable(response: bytes) -> bool:
    """Return whether a response tells that the server cannot serve now, by its status or by an event of its stream."""
    return b'"type":"ServiceUnavailableError"' in response and b"[DONE]" not in response


class Soak:
    """The clients, and what they have seen."""

    def __init__(self, server: Served, seed: int):
        self.server, self.rng = server, random.Random(seed)
        self.loses_cores = False
        """Core processes are killed: requests may end by an error that tells so, and counts of theirs are lost."""
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Tokens of prompts and outputs, by the usage of the complete responses."""
        self.greedy: dict[str, set[str]] = {}
        """Body of a greedy request → the texts that came for it."""
        self.failures: list[str] = []
        self.memory_mb: list[tuple[float, float]] = []
        """(minutes since the start, MB) of the server's memory."""

    async def run(self, seconds: float, faults: Faults | None = None) -> None:
        start = time.monotonic()
        beside = [asyncio.create_task(self._watch(start))]
        if faults is not None:
            beside.append(asyncio.create_task(faults.run()))
        await asyncio.gather(*(self._client(start + seconds) for _ in range(NUM_CLIENTS)))
        for task in beside:
            task.cancel()
        for result in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(result, Exception):
                self.failures.append(f"{type(result).__name__}: {result}")

    async def _watch(self, start: float) -> None:
        """Note the server's memory every few seconds, for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            state = process_state(self.server.process.pid) if self.loses_cores else server_state(self.server)
            self.memory_mb.append(((time.monotonic() - start) / 60, state["rss_mb"]))

    def growth_mb_per_min(self) -> float:
        """Return the slope of the memory over the second half of the run, by least squares; 0 for a short run."""
        half = self.memory_mb[len(self.memory_mb) // 2 :]
        return statistics.linear_regression(*zip(*half, strict=True)).slope if len(half) > 2 else 0.0

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            route, body = drawn_body(self.rng)
            fate = self.rng.choices(FATES, [66, 20, 10, 4])[0]
            self.counts[fate] += 1
            try:
                response = await asyncio.wait_for(send(self.server.port, route, body, fate, self.rng), 120)
            except (OSError, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {body}")
                continue
            self._note(route, body, fate, response)
            if self.loses_cores and is_unavailable(response):
                await asyncio.sleep(RETRY_S)

    def _note(self, route: str, body: dict[str, Any], fate: str, response: bytes) -> None:
        """Note what a client has read; the response to one that reads to the end must be complete."""
        complete = text_and_usage(response, is_stream=body["stream"])
        if complete is None:
            self.counts["begun"] += b"data: " in response  # Without any event it may have left before it was queued.
            if self.loses_cores and is_unavailable(response):
                self.counts["lost"] += 1
            elif fate in ("reads", "slow"):
                self.failures.append(f"{response[:300]!r} for {body}")
            return
        text, usage = complete
        self.counts["complete"] += 1
        self.tokens.update({name: usage[name] for name in ("prompt_tokens", "completion_tokens")})
        if body["temperature"] == 0:
            key = json.dumps([route, {name: body[name] for name in sorted(body) if not name.startswith("stream")}])
            self.greedy.setdefault(key, set()).add(text)

    async def check_alone(self, num_checked: int) -> int:
        """Send greedy requests again, one after another; return how many have another text than before."""
        wrong = 0
        for key in self.rng.sample(sorted(self.greedy), min(num_checked, len(self.greedy))):
            route, body = json.loads(key)
            response = await send(self.server.port, route, {**body, "stream": False}, "reads", self.rng)
            complete = text_and_usage(response, is_stream=False)
            wrong += complete is None or self.greedy[key] != {complete[0]}
        return wrong


class Faults:
    """Clients that misbehave, a group at a time."""

    def __init__(self, soak: Soak, every_s: float, seed: int):
        self.soak, self.every_s, self.rng = soak, every_s, random.Random(f"faults {seed}")
        self.counts: Counter[str] = Counter()
        """How often there was each fault."""

    async def run(self) -> None:
        """Have a fault every few seconds, for ever."""
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "killed clients": self._killed, "stopped readers": self._stopped, "aborted uploads": self._aborted,
            "broken bodies": self._broken,
        }  # fmt: skip
        names = [*kinds, "killed cores"] if self.soak.loses_cores else list(kinds)
        for name in itertools.cycle(names):
            await asyncio.sleep(self.every_s)
            if name in kinds:
                await asyncio.gather(*(kinds[name]() for _ in range(NUM_FAULTY)))
            elif pids := core_pids(self.soak.server):
                os.kill(self.rng.choice(pids), signal.SIGKILL)
            self.counts[name] += 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.soak.server.port)

    async def _stream(self, max_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request for a stream; its client may be gone before it is queued."""
        self.soak.counts["leaves"] += 1
        reader, writer = await self._connect()
        body = {"model": "tiny", "prompt": self.rng.choice(WORDS), "max_tokens": max_tokens, "n": 4, "stream": True}
        writer.write(as_bytes("/v1/completions", json.dumps(body).encode()))
        return reader, writer

    async def _killed(self) -> None:
        """End as the system ends the connections of a process that it kills: by a reset."""
        reader, writer = await self._stream(60)
        if self.rng.random() < 0.5:
            await reader.read(100)
        end = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def _stopped(self) -> None:
        """Read nothing for some seconds, and leave."""
        _, writer = await self._stream(100)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(STOPPED_S)
        writer.close()

    async def _aborted(self) -> None:
        """Leave in the middle of a body."""
        _, writer = await self._connect()
        data = json.dumps({"model": "tiny", "prompt": "x" * self.rng.choice([10, 10_000, 1_000_000])}).encode()
        request = as_bytes("/v1/completions", data)
        writer.write(request[: len(request) - len(data) // 2])
        await writer.drain()
        writer.close()

    async def _broken(self) -> None:
        """Send what is no JSON; each must be told so."""
        reader, writer = await self._connect()
        data = self.rng.choice([b"{", b'{"prompt": ', b"\xff\xfe", b"[" * 1000, b'{"model": "tiny", "prompt": 5}'])
        writer.write(as_bytes("/v1/completions", data))
        response = await reader.read(100)
        writer.close()
        if not response.startswith(b"HTTP/1.1 400"):
            self.soak.failures.append(f"{response!r} for {data!r}")


def server_state(server: Served) -> dict[str, float]:
    """Return the memory, the threads and the open files of a server and of its core processes."""
    states = [process_state(pid) for pid in (server.process.pid, *core_pids(server))]
    return {name: sum(state[name] for state in states) for name in states[0]}


def process_state(pid: int) -> dict[str, float]:
    """Return the memory, the threads and the open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads")}  # type: ignore[index]
    num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"rss_mb": found["VmRSS"] / 1024, "threads": found["Threads"], "files": num_files}


def ended_by_reason(metrics: dict[str, float]) -> dict[str, int]:
    """Return the requests that have ended, by their finish reasons."""
    reasons = ("stop", "length", "abort", "error")
    return {reason: int(metrics[f'jpaged:request_success_total{{finished_reason="{reason}"}}']) for reason in reasons}


def metrics_faults(soak: Soak, metrics: dict[str, float]) -> list[str]:
    """Return where /metrics contradicts what clients have read. One request, of two tokens, was sent before them.

    Clients that leave early may never have been queued, and may have left when their request had ended already.
    """
    ended, counts = ended_by_reason(metrics), soak.counts
    num_complete, num_early = counts["complete"] + 1, counts["aborts"] + counts["leaves"]
    if soak.loses_cores:  # What they have counted is lost with them.
        return [f"{ended['error']} requests have failed"] if ended["error"] else []
    faults = [] if not ended["error"] else [f"{ended['error']} requests have failed"]
    for name, value, low, high in (
        ("requests", sum(ended.values()), num_complete + counts["begun"], sum(counts[fate] for fate in FATES) + 1),
        ("completed requests", ended["stop"] + ended["length"], num_complete, num_complete + num_early),
        ("aborted requests", ended["abort"], 0, num_early),
    ):
        if not low <= value <= high:
            faults.append(f"{value} {name} have ended, by what clients have read {low} to {high}")
    for name, key in (("prompt_tokens", "prompt_tokens_total"), ("completion_tokens", "generation_tokens_total")):
        if (value := metrics[f"jpaged:{key}"]) < soak.tokens[name]:
            faults.append(f"{key} is {value}, clients have read {soak.tokens[name]}")
    return faults


def check(server: Served, soak: Soak, before: dict[str, float], minutes: float) -> dict[str, Any]:
    """Return figures and, under `wrong`, every promise that does not hold."""
    wait_until(lambda: server.request("/health")[0] == 200, 120, "the server does not serve")
    wait_until(server.is_idle, 30, "requests or pages are left")
    wait_until(lambda: server_state(server)["files"] <= before["files"], 30, "files are left open")
    after, metrics = server_state(server), server.metrics()
    growth = soak.growth_mb_per_min()
    wrong = [*soak.failures[:5], *metrics_faults(soak, metrics)]
    differing = [key for key, texts in soak.greedy.items() if len(texts) > 1]
    wrong += [f"several texts for {key}" for key in differing[:3]]
    if alone := asyncio.run(soak.check_alone(60)):
        wrong.append(f"{alone} greedy texts differ from those alone")
    if growth > MAX_GROWTH_MB_PER_MIN and minutes > 2:
        wrong.append(f"memory grows by {growth:.2f} MB a minute")
    if after["threads"] > before["threads"] + MAX_POOL_THREADS:
        wrong.append(f"{after['threads']} threads, {before['threads']} before")
    if metrics["jpaged:recompiles_after_warmup_total"]:
        wrong.append("programs were compiled anew")
    counts = ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "swap_bytes_total")
    return {
        "clients": dict(soak.counts), "ended": ended_by_reason(metrics), "before": before, "after": after,
        "growth_mb_per_min": round(growth, 2), **{name: metrics[f"jpaged:{name}"] for name in counts}, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    """Run the soak, print its figures as JSON, and return 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description="Serve mixed traffic for minutes, and check the server at the end.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", default="full", help="when the server compiles its programs")
    parser.add_argument("--replicas", type=int, default=1, help="how many core processes serve the model")
    parser.add_argument("--core", choices=("thread", "process"), default="thread", help="where the server computes")
    parser.add_argument(
        "--faults", type=float, nargs="?", const=FAULT_S, metavar="S", help="have a fault every S seconds"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "tiny")
        flags = [*FLAGS, "--warmup", args.warmup, "--core", args.core]
        flags += ["--data-parallel-size", args.replicas] if args.replicas > 1 else []
        flags += ["--core-restarts", MAX_RESTARTS] if args.core == "process" and args.faults else []
        with serving(folder / "tiny", *flags, log=folder / "log") as server:
            server.request("/v1/completions", {"prompt": "warm", "max_tokens": 2})
            before = server_state(server)
            soak = Soak(server, args.seed)
            soak.loses_cores = args.core == "process" and bool(args.faults)
            faults = Faults(soak, args.faults, args.seed) if args.faults else None
            asyncio.run(soak.run(60 * args.minutes, faults))
            found = check(server, soak, before, args.minutes)
            found["faults"] = {} if faults is None else faults.counts
        lines = (folder / "log").read_text().splitlines()
        found["wrong"] += [line for line in lines if re.search(" (ERROR|CRITICAL) (?!engine .* SIGKILL)", line)][:5]
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
