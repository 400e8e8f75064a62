"""Compares a server whose core is a process with one whose core is a thread: processor time, and times of tokens.

    python scripts/bench/cores.py -o cores.json

Both servers run at the same time, one of them idle, over devices that compute nothing and whose steps take so many
milliseconds (`served_process`); they are measured in turns. The time added is that from the end of a step to the
arrival of its tokens; the processor time is that of the server, and of its core's process. Ratios are process ÷ thread.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
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
from served_process import CONTEXT, Server, Stream, quantiles, stream_all
from serving import LONG_CONTEXT, NUM_TOKENS, added_ms, beside_long_prompts, request_body

NUM_STREAMS = (1, 8, 64, 256)
CORES = ("thread", "process")


def measure(server: Server, num_streams: int) -> tuple[list[Stream], float]:
    """Stream so many requests at once; return them, and the processor time in µs a token."""
    before_s = server.cpu_s()
    streams = asyncio.run(stream_all(server.port, [request_body()] * num_streams))
    num_tokens = sum(len(stream.token_times_s) for stream in streams)
    assert num_tokens == num_streams * NUM_TOKENS, (num_tokens, streams[0].data[:3])
    return streams, 1e6 * (server.cpu_s() - before_s) / num_tokens


def compare_streams(step_ms: float, num_runs: int) -> dict[int, dict[str, Any]]:
    """Return number of streams → what both cores take for them."""
    with tempfile.TemporaryDirectory() as name:
        servers = {core: _server(Path(name), core, step_ms, CONTEXT, rows=max(NUM_STREAMS)) for core in CORES}
        found: dict[tuple[str, int], list[tuple[list[Stream], float]]] = {}
        for _ in range(num_runs):
            for num_streams in NUM_STREAMS:
                for core, server in servers.items():
                    found.setdefault((core, num_streams), []).append(measure(server, num_streams))
        ends_s = {core: server.stop() for core, server in servers.items()}
    report = {}
    for num_streams in NUM_STREAMS:
        times = {}
        for core in CORES:
            runs = found[core, num_streams]
            added = [np.percentile(added_ms(streams, ends_s[core]), [50, 99]) for streams, _ in runs]
            p50, p99 = np.median(added, axis=0).round(2).tolist()
            cpu_us = round(float(np.median([us for _, us in runs])), 1)
            times[core] = {"cpu_us_per_token": cpu_us, "added_ms": {"p50": p50, "p99": p99}}
        report[num_streams] = _compared(times)
        say(f"{num_streams} streams: {report[num_streams]}")
    return report


def compare_long_prompts(step_ms: float, num_runs: int) -> dict[str, Any]:
    """Return what both cores add to eight streams beside prompts of 27 MB."""
    runs: dict[str, list[tuple[float, float, float]]] = {core: [] for core in CORES}
    for _ in range(num_runs):
        for core in CORES:
            with tempfile.TemporaryDirectory() as name:
                server = _server(Path(name), core, step_ms, LONG_CONTEXT)
                streams, health_ms, _ = asyncio.run(beside_long_prompts(server.port, server.process.pid))
                p50, p99 = np.percentile(added_ms(streams, server.stop()), [50, 99])
                runs[core].append((p50, p99, quantiles(health_ms)["p99"]))
    times = {}
    for core in CORES:
        p50, p99, health_p99 = np.median(runs[core], axis=0).round(2).tolist()
        times[core] = {"added_ms": {"p50": p50, "p99": p99}, "health_ms": {"p99": health_p99}}
    report = _compared(times)
    say(f"8 streams beside prompts of 27 MB: {report}")
    return report


def _server(folder: Path, core: str, step_ms: float, context: int, rows: int = 64) -> Server:
    (folder / core).mkdir()
    return Server(folder / core, step_ms, context, core=core, rows=rows)


def _compared(times: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the times of both cores with their ratios."""
    thread, process = times["thread"], times["process"]
    ratios = {"added_p99": round(process["added_ms"]["p99"] / thread["added_ms"]["p99"], 2)}
    if "cpu_us_per_token" in thread:
        ratios["cpu"] = round(process["cpu_us_per_token"] / thread["cpu_us_per_token"], 2)
    return {**times, "ratios": ratios}


def main(argv: Sequence[str]) -> int:
    """Measure both cores with 1, 8, 64 and 256 streams, and beside long prompts; report."""
    parser = FlagParser(prog="cores.py", description="Compare a core process with a core thread.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="milliseconds that a step takes")
    parser.add_argument("--only", choices=["streams", "long"], help="one of the parts")
    add_report_flags(parser, 3, "times that each is measured")
    args = parse_bench(parser, argv)
    report: dict[str, Any] = {"step_ms": args.step_ms, **machine(jax.devices("cpu")[0])}
    if args.only in (None, "streams"):
        report["streams"] = compare_streams(args.step_ms, args.runs)
    if args.only in (None, "long"):
        report["beside_27_MB"] = compare_long_prompts(args.step_ms, args.runs)
    write_report(report, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
