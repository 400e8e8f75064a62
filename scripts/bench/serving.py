"""Measures what the server adds to an engine: time from the end of a step to the socket, and processor time a token.

    python scripts/bench/serving.py -o serving.json

The server runs in a process of its own, with the engine's own host core over a device that computes nothing
(`instant_runner`) and whose steps take so many milliseconds each (`--step-ms`). This process is the client. The end of
a step is the moment at which its results can be read; both processes read one monotonic clock. The processor time is
that of the whole server process, scheduler, detokenizer and HTTP, and that of the event loop in it; the process that
parses long prompts is not counted. `answers` tells what thoughts and calls add to chats.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.commands.bench.report import add_report_flags, machine, parse_bench, write_report
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say

sys.path.insert(0, str(Path(__file__).parent))
from answers import measure_answers
from served_process import CONTEXT, Server, Stream, cpu_s, quantiles, stream_all
from tool_rows import measure_tool_rows

NUM_TOKENS = 200
LONG_CONTEXT = 1 << 19
"""Tokens of a context whose limit on characters, 64 a token, lets a prompt of 27 MB reach the tokenizer.

The tokenizer finds it too long by its first 3 MB.
"""
LONG_CHARS = 27_000_000
NUM_HELD, HELD_TOKENS = 1000, 40
"""Streams that are open at the same time, and tokens of each."""


def request_body(**fields: Any) -> bytes:
    asked = {"prompt": [5] * 20, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    return json.dumps({**asked, **fields}).encode()


def added_ms(streams: Sequence[Stream], ends_s: np.ndarray) -> np.ndarray:
    """Return the milliseconds from the end of a step to the arrival of each of its tokens.

    Each token of a stream belongs to the step behind that of the token before, and the first one to the last step for
    which none comes before its step has ended.
    """
    found = []
    for stream in streams:
        times = np.array(stream.token_times_s)
        first = int(np.min(np.searchsorted(ends_s, times, side="right") - 1 - np.arange(len(times))))
        count = min(len(times), len(ends_s) - first)
        found.append(1e3 * (times[:count] - ends_s[first : first + count]))
    return np.concatenate(found)


async def measure(port: int, pid: int, num_streams: int) -> tuple[list[Stream], np.ndarray]:
    """Stream so many requests at once; return them, and the processor times of `cpu_s` in µs a token."""
    before = cpu_s(pid)
    streams = await stream_all(port, [request_body()] * num_streams)
    num_tokens = sum(len(stream.token_times_s) for stream in streams)
    assert num_tokens == num_streams * NUM_TOKENS, (num_tokens, streams[0].data[:3])
    return streams, 1e6 * (cpu_s(pid) - before) / num_tokens


async def health_times_ms(port: int, until: asyncio.Event) -> list[float]:
    """Ask for /health every 50 ms until an event is set; return how long each answer took."""
    times = []
    while not until.is_set():
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        times.append(1e3 * (time.monotonic() - start))
        await asyncio.sleep(0.05)
    return times


async def beside_long_prompts(port: int, pid: int) -> tuple[list[Stream], list[float], int]:
    """Stream eight requests while prompts of 27 MB come one after another.

    Return them, the times of /health in ms, and how many long prompts were refused, each once the tokenizer had found
    it too long.
    """
    text = "The quick brown fox jumps over the lazy dog. " * (LONG_CHARS // 45)
    body = request_body(prompt=text, max_tokens=1, stream=False)
    ended, num_long = asyncio.Event(), 0

    def send_long() -> None:
        """Send long prompts, on a thread: to copy one would hold up the event loop, and the times of tokens."""
        nonlocal num_long
        while not ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 400, reply.read(200)
            connection.close()
            num_long += 1

    health, long = asyncio.create_task(health_times_ms(port, ended)), asyncio.create_task(asyncio.to_thread(send_long))
    streams, _ = await measure(port, pid, 8)
    while not num_long:
        more, _ = await measure(port, pid, 8)
        streams += more
    ended.set()
    await long
    return streams, await health, num_long


async def hold_streams(port: int, pid: int) -> dict[str, Any]:
    """Open NUM_HELD streams at once and read all to their ends; return what that took.

    The engine computes 64 of them at a time, and the others wait.
    """
    before_cpu_s, before_files, start_s = cpu_s(pid), num_files(pid), time.monotonic()
    most_files = before_files

    async def watch() -> None:
        nonlocal most_files
        while True:
            most_files = max(most_files, num_files(pid))
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    streams = await stream_all(port, [request_body(max_tokens=HELD_TOKENS)] * NUM_HELD)
    watching.cancel()
    num_tokens = sum(len(stream.token_times_s) for stream in streams)
    if num_tokens != NUM_HELD * HELD_TOKENS or not all(stream.data[-1].endswith(b"0\r\n\r\n") for stream in streams):
        raise RuntimeError(f"{num_tokens} tokens came from {NUM_HELD} streams of {HELD_TOKENS}")
    return {
        "streams": NUM_HELD,
        "open_at_once": most_files - before_files,
        "seconds": round(time.monotonic() - start_s, 2),
        "cpu_us_per_token": round(1e6 * float((cpu_s(pid) - before_cpu_s)[0]) / num_tokens, 1),
        "first_token_s": quantiles([stream.token_times_s[0] - start_s for stream in streams]),
    }


def num_files(pid: int) -> int:
    """Return the number of files that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main(argv: Sequence[str]) -> int:
    """Measure 1, 8 and 64 streams, answers with thoughts and calls, eight streams beside long prompts; report."""
    parser = FlagParser(prog="serving.py", description="Measure what the server adds to an engine.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="milliseconds that a step takes")
    parser.add_argument("--only", choices=["streams", "long", "answers", "tools"], help="one of the parts")
    add_report_flags(parser, 3, "times that each number of streams is measured")
    args = parse_bench(parser, argv)
    report: dict[str, Any] = {"step_ms": args.step_ms, "streams": {}, **machine(jax.devices("cpu")[0])}
    with tempfile.TemporaryDirectory() as name:
        if args.only in (None, "streams"):
            server = Server(Path(name), args.step_ms, CONTEXT)
            found: dict[int, list[tuple[list[Stream], np.ndarray]]] = {1: [], 8: [], 64: []}
            for _ in range(args.runs):
                for num_streams, runs in found.items():
                    runs.append(asyncio.run(measure(server.port, server.process.pid, num_streams)))
            report["held"] = asyncio.run(hold_streams(server.port, server.process.pid))
            say(f"held: {report['held']}")
            ends_s = server.stop()
            for num_streams, runs in found.items():
                added = np.concatenate([added_ms(streams, ends_s) for streams, _ in runs])
                cpu_us, loop_us = np.median([times_us for _, times_us in runs], axis=0).round(1).tolist()
                times = {"cpu_us_per_token": cpu_us, "event_loop_us_per_token": loop_us}
                report["streams"][num_streams] = {**times, "added_ms": quantiles(added)}
                say(f"{num_streams} streams: {report['streams'][num_streams]}")
    if args.only in (None, "answers"):
        report["answers"] = measure_answers(args.runs)
    if args.only in (None, "tools"):
        report["tools"] = measure_tool_rows(args.runs)
    if args.only in (None, "long"):
        with tempfile.TemporaryDirectory() as name:
            server = Server(Path(name), args.step_ms, LONG_CONTEXT)
            streams, health_ms, num_long = asyncio.run(beside_long_prompts(server.port, server.process.pid))
            added = added_ms(streams, server.stop())
            report["beside_27_MB"] = {
                "prompts": num_long, "added_ms": quantiles(added), "health_ms": quantiles(health_ms)
            }  # fmt: skip
            say(f"8 streams beside prompts of 27 MB: {report['beside_27_MB']}")
    write_report(report, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
