"""Measures the throughput of a server beside that of an engine in this process, in turns.

    jpaged serve --dtype bfloat16 --max-num-seqs 64 --port 8111 &
    python scripts/bench/http_cost.py --base-url http://127.0.0.1:8111 --dtype bfloat16 -o http_cost.json

Workload B, all 64 requests at once. Each run of the server, streamed and read by `jpaged bench serve`, stands between
two runs of the engine, and is compared with their mean: a machine whose speed changes changes all three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jpaged import Engine, SamplingParams
from jpaged.commands.bench.report import add_report_flags, host_machine, parse_bench, write_report
from jpaged.commands.bench.workloads import load_workload
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say

FIRST_TOKENS = 100
"""Token ids from here on are put in front of prompts, another one in each run, so that no page is in a prefix cache."""


def over_http(base_url: str, num_requests: int) -> dict[str, Any]:
    """Return what one run of `jpaged bench serve` reports."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        flags = ["--workload", "B", "--concurrency", str(num_requests), "--warmup", "0", "-o", report.name]
        command = [sys.executable, "-m", "jpaged", "bench", "serve", "--base-url", base_url, *flags]
        subprocess.run(command, check=True, capture_output=True)
        point: dict[str, Any] = json.loads(Path(report.name).read_text())["points"][0]
        return point


def main(argv: Sequence[str]) -> int:
    """Measure both; write the report."""
    parser = FlagParser(prog="http_cost.py", description="Measure a server beside an engine in this process.")
    parser.add_argument("--base-url", required=True, metavar="URL", help="a server of the default model, 64 sequences")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="the server's element type")
    add_report_flags(parser, 7, "runs of the server")
    args = parse_bench(parser, argv)
    engine = Engine(dtype=args.dtype, max_num_seqs=64, warmup="off")
    workload = load_workload("B", vocab_size=engine.handle.spec.vocab_size)
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in workload.output_lens]
    num_runs = 0

    def in_process() -> float:
        nonlocal num_runs
        num_runs += 1
        prompts = [[FIRST_TOKENS + num_runs, *prompt[1:]] for prompt in workload.prompts]
        start_s = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return workload.num_output_tokens / (time.perf_counter() - start_s)

    in_process()  # Compiles what it needs.
    runs = []
    last = in_process()
    for index in range(args.runs):
        point, before = over_http(args.base_url, len(workload.prompts)), last
        last = in_process()
        ratio = point["output_tokens_per_s"] / ((before + last) / 2)
        runs.append(
            {
                "http_tokens_per_s": point["output_tokens_per_s"],
                "in_process_tokens_per_s": [round(before, 1), round(last, 1)],
                "http ÷ in process": round(ratio, 3),
                "client_cpu_share": point["client_cpu_share"],
            }
        )
        say(f"run {index + 1} of {args.runs}: {runs[-1]}")
    middle = {name: round(median(run[name] for run in runs), 3) for name in ("http ÷ in process", "client_cpu_share")}
    say(f"medians: {middle}")
    write_report({**middle, "workload": "B", "dtype": args.dtype, "each_run": runs, **host_machine()}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
