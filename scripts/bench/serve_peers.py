"""Measures several servers of the same weights by one client, `jpaged bench serve`, in turns.

    python scripts/bench/serve_peers.py --runs 3 -o docs/measurements/serve_peers.json \\
      --server jpaged=http://127.0.0.1:8101 --server vllm=http://127.0.0.1:8102 -- --workload B --concurrency 1 4 16

The servers run already, each alone at work while it is measured. What follows `--` goes to `jpaged bench serve`. The
report has the medians of the runs, and the ratio of the first server's throughput to that of each other one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jpaged.commands.bench.report import add_report_flags, host_machine, parse_bench, write_report
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say


def measure(url: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Return the points that one run of `jpaged bench serve` reports of a server."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "jpaged", "bench", "serve", "--base-url", url, *flags, "-o", report.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        points: list[dict[str, Any]] = json.loads(Path(report.name).read_text())["points"]
        return points


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the runs of one point."""

    def of(value: Any) -> float:
        return round(float(median(value(run) for run in runs)), 4)

    return {
        "concurrency": runs[0]["concurrency"],
        "output_tokens_per_s": of(lambda run: run["output_tokens_per_s"]),
        **{
            f"{name}_{q}_s": of(lambda run, key=key, q=q: run[key][q])
            for name, key in (("first_token", "time_to_first_token_s"), ("between_tokens", "between_tokens_s"))
            for q in ("p50", "p99")
        },
        "client_cpu_share": of(lambda run: run["client_cpu_share"]),
        "errors": sum(sum(run["errors"].values()) for run in runs),
    }


def main(argv: Sequence[str]) -> int:
    """Measure all servers; write the report."""
    own, _, flags = (list(argv[: argv.index("--")]), "--", list(argv[argv.index("--") + 1 :]))
    parser = FlagParser(prog="serve_peers.py", description="Measure several servers in turns.")
    parser.add_argument("--server", metavar="NAME=URL", action="append", required=True, help="a server (repeatable)")
    add_report_flags(parser, 3, "times that each server is measured")
    args = parse_bench(parser, own)
    urls = dict(one.split("=", 1) for one in args.server)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in urls}
    for index in range(args.runs):
        for name, url in urls.items():
            say(f"run {index + 1} of {args.runs}: {name}")
            runs[name].append(measure(url, flags))
    servers = {name: [summary(point) for point in zip(*found, strict=True)] for name, found in runs.items()}
    first, *others = servers
    for name in others:
        for ours, theirs in zip(servers[first], servers[name], strict=True):
            ratio = ours["output_tokens_per_s"] / theirs["output_tokens_per_s"]
            ours[f"output_tokens_per_s ÷ {name}"] = round(ratio, 3)
    report = {"servers": servers, "flags": flags, "runs": args.runs, "each_run": runs, **host_machine()}
    write_report(report, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
