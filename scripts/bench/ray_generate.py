"""Compares `jpaged generate` on one worker of Ray with the same run without Ray, starts left out.

    python scripts/bench/ray_generate.py -o ray_generate.json

Both compute the same lines, in turns, over a device that computes nothing and whose steps take so many milliseconds
(`served_process`). The rates are those of the commands' summaries, in output tokens a second; the ratio is with Ray ÷
without. It needs the extra `ray`.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray

from jpaged.cluster import driver
from jpaged.cluster.worker import WorkerSpec
from jpaged.commands import generate
from jpaged.commands.bench.report import add_report_flags, machine, parse_bench, write_report
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say
from jpaged.config.engine_config import EngineConfig

sys.path.insert(0, str(Path(__file__).parent))
from served_process import CONTEXT, make_paced

NUM_LINES, MAX_NUM_SEQS = 1024, 64
MIN_TOKENS, MAX_TOKENS = 32, 96
FLAGS = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(MAX_NUM_SEQS)]
THROUGHPUT = re.compile(r"^throughput: ([\d.]+) output tokens/s", re.MULTILINE)


def write_lines(path: Path) -> None:
    """Write lines with outputs of different lengths."""
    lengths = np.random.default_rng(0).integers(MIN_TOKENS, MAX_TOKENS, NUM_LINES, endpoint=True)
    lines = [
        {"prompt": f"Line {index}", "max_tokens": int(length), "ignore_eos": True}
        for index, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def paced_spec(options: dict[str, Any], config: Any, num_on_node: int, core_options: Any) -> WorkerSpec:
    """Return what makes a worker with such a device."""
    return WorkerSpec(config, num_on_node, options, "served_process:make_paced")


def rate(lines: Path, flags: Sequence[str]) -> float:
    """Run the command, and return its output tokens a second."""
    with redirect_stderr(io.StringIO()) as said:
        status = generate.main([*FLAGS, *flags, "--prompt-file", str(lines), "-o", str(lines.with_name("out.jsonl"))])
    found = THROUGHPUT.search(said.getvalue())
    if status or found is None:
        raise RuntimeError(f"the run has failed: {said.getvalue()}")
    return float(found[1])


def main(argv: Sequence[str]) -> int:
    """Measure both, and report."""
    parser = FlagParser(prog="ray_generate.py", description="Compare a run on Ray with one without.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="milliseconds that a step takes")
    add_report_flags(parser, 3, "times that each is measured")
    args = parse_bench(parser, argv)
    rates: dict[str, list[float]] = {"without": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "lines.jsonl")
        options: dict[str, Any] = {
            "step_ms": args.step_ms,
            "context": CONTEXT,
            "max_num_seqs": MAX_NUM_SEQS,
            "ends_file": str(folder / "ends"),
            "cached_pages": 0,
        }
        generate._start_engine = lambda *_, **__: make_paced(EngineConfig(), None, **options)  # type: ignore[assignment]
        driver.WorkerSpec = partial(paced_spec, options)  # type: ignore[misc, assignment]
        for _ in range(args.runs):
            rates["without"].append(rate(folder / "lines.jsonl", []))
            rates["ray"].append(rate(folder / "lines.jsonl", ["--ray", "local", "--data-parallel-size", "1"]))
            say(f"output tokens/s: {rates['without'][-1]:.0f} without, {rates['ray'][-1]:.0f} with Ray")
    medians = {name: float(np.median(found)) for name, found in rates.items()}
    report = {
        "step_ms": args.step_ms,
        "lines": NUM_LINES,
        "max_num_seqs": MAX_NUM_SEQS,
        "ray": ray.__version__,
        **machine(jax.devices("cpu")[0]),
        "output_tokens_per_s": rates,
        "ratio": round(medians["ray"] / medians["without"], 3),
    }
    write_report(report, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
