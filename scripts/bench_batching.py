"""What continuous batching is worth: 64 mixed prompts together ÷ the same prompts one at a time.

Runs `python -m jpaged.generate` on the same file with the default batch and with --max-num-seqs 1, in turn, and
reads the throughput that each run prints (compilation excluded). The prompts are workload B of
jpaged/workloads.json: half greedy, half sampled as the model's makers recommend.

    python scripts/bench_batching.py --runs 3 --output docs/measurements/batching.json
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
RATE = re.compile(r"throughput: ([\d.]+) output tokens/s")
RECOMPILES = re.compile(r"recompiles (\d+)")


def write_prompts(path: Path) -> None:
    workload = json.loads((ROOT / "jpaged" / "workloads.json").read_text())["B"]
    with path.open("w") as file:
        for index, request in enumerate(workload["requests"]):
            sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.2, "top_p": 0.9}
            line = {"prompt_token_ids": request["prompt"], "max_tokens": request["out"], "ignore_eos": True, **sampling}
            file.write(json.dumps(line) + "\n")


def run(prompts: Path, output: Path, *flags: str) -> tuple[float, int]:
    """Output tokens/s and compilations outside the plan, as the run itself prints them."""
    command = [sys.executable, "-m", "jpaged.generate", "--prompt-file", str(prompts), "-o", str(output), *flags]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    rate, recompiles = RATE.search(result.stderr), RECOMPILES.search(result.stderr)
    assert rate, result.stderr
    assert recompiles, result.stderr
    return float(rate[1]), int(recompiles[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"together": [], "one at a time": []}
    recompiles = 0
    with tempfile.TemporaryDirectory() as folder:
        prompts, output = Path(folder) / "prompts.jsonl", Path(folder) / "out.jsonl"
        write_prompts(prompts)
        for _ in range(args.runs):
            for name, flags in (("together", []), ("one at a time", ["--max-num-seqs", "1"])):
                rate, outside = run(prompts, output, *flags)
                rates[name].append(rate)
                recompiles += outside
                print(f"{name}: {rate} output tokens/s, recompiles {outside}", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    report = {
        "what": "output tokens/s of 64 mixed prompts (workload B), smollm2-135m float32, together and one at a time",
        "ratio": round(medians["together"] / medians["one at a time"], 2),
        "median": medians,
        "runs": rates,
        "recompiles": recompiles,
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
        "jax": jax.__version__,
        "date": date.today().isoformat(),
    }
    print(json.dumps(report, indent=1))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
