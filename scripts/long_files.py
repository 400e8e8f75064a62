"""Times the first result of long prompt files, through files, pipes and `--resume`, and the memory that a line takes.

    python scripts/long_files.py --model DIR --num-lines 1000000 -o docs/measurements/long_files.json

DIR is a small model, as the tests write one (`tests/jpaged/tiny_model.py`): what is measured is the host. Each
case is started anew, in turn; those that are timed are ended once their first result is there. The last one runs to its
end: its peak memory, less that of ten lines, is divided by the lines.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jpaged.commands.files.lines import line_digest

NUM_SEQS = 64
FLAGS = ["--max-num-seqs", str(NUM_SEQS), "--max-num-batched-tokens", "1024", "--max-model-len", "128"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-lines", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many, results = folder / "few.jsonl", folder / "many.jsonl", folder / "results.jsonl"
        write_prompts(few, 10)
        write_prompts(many, args.num_lines)
        run = Command(args.model, results)
        run.whole(few)
        halves = {"first": folder / "first.jsonl", "every other": folder / "other.jsonl"}
        write_results(halves["first"], many, results, lambda number: number < args.num_lines // 2)
        write_results(halves["every other"], many, results, lambda number: number % 2 == 1)
        cases: dict[str, Any] = {
            "ten lines": lambda: run.first_result_s(few),
            "many lines": lambda: run.first_result_s(many),
            "through a pipe": lambda: run.first_result_s(many, is_piped=True),
            "resumed, first half done": lambda: run.first_result_s(many, done=halves["first"]),
            "resumed, every other line done": lambda: run.first_result_s(many, done=halves["every other"]),
        }
        times: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(args.runs):
            for case, measure in cases.items():
                times[case].append(measure())
                print(f"{case}: {times[case][-1]:.2f} s", file=sys.stderr)
        start = time.monotonic()
        peak_few, peak_many = run.whole(few), run.whole(many)
        report = {
            "num_lines": args.num_lines,
            "line_bytes": many.stat().st_size // args.num_lines,
            "first_result_s": {case: round(statistics.median(found), 2) for case, found in times.items()},
            "peak_bytes_per_line": round((peak_many - peak_few) / args.num_lines, 1),
            "whole_run_s": round(time.monotonic() - start, 1),
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
    print(json.dumps(report, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


class Command:
    """`jpaged generate` with one model and one output file, in a process of its own."""

    def __init__(self, model: str, results: Path):
        self.results = results
        self.words = [sys.executable, "-m", "jpaged.generate", "-m", model, *FLAGS, "-o", str(results)]

    def first_result_s(self, prompts: Path, *, is_piped: bool = False, done: Path | None = None) -> float:
        """Return the seconds from the start of the process to its first new result."""
        self.results.unlink(missing_ok=True)
        words = [*self.words, "--prompt-file", "-" if is_piped else str(prompts)]
        if done is not None:
            subprocess.run(["cp", done, self.results], check=True)
            words.append("--resume")
        size = self.results.stat().st_size if done is not None else 0
        start = time.monotonic()
        feeder = subprocess.Popen(["cat", prompts], stdout=subprocess.PIPE) if is_piped else None
        stdin = subprocess.DEVNULL if feeder is None else feeder.stdout
        process = subprocess.Popen(words, stdin=stdin, stderr=subprocess.DEVNULL)
        while not self.results.exists() or self.results.stat().st_size <= size:
            if process.poll() not in (None, 0):
                raise RuntimeError(f"the command ended with status {process.returncode}")
            time.sleep(0.01)
        took_s = time.monotonic() - start
        process.kill()
        process.wait()
        if feeder is not None:
            feeder.kill()
            feeder.wait()
        return took_s

    def whole(self, prompts: Path) -> int:
        """Run to the end; return the peak of the process's resident memory, in bytes."""
        self.results.unlink(missing_ok=True)
        process = subprocess.Popen([*self.words, "--prompt-file", str(prompts)], stderr=subprocess.DEVNULL)
        status, peak = Path(f"/proc/{process.pid}/status"), 0
        while process.poll() is None:
            lines = status.read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))])
            time.sleep(0.2)
        if process.returncode:
            raise RuntimeError(f"the command ended with status {process.returncode}")
        return peak


def write_prompts(path: Path, num_lines: int) -> None:
    with path.open("w") as file:
        for number in range(num_lines):
            text = f"Tell me a story about the number {number}, please."
            file.write(json.dumps({"id": f"line-{number:07d}", "prompt": text, "max_tokens": 2}) + "\n")


def write_results(path: Path, prompts: Path, results: Path, is_done: Any) -> None:
    """Write an output file that has results of the lines that `is_done` takes, copies of the first of `results`."""
    record = json.loads(results.open().readline())
    options = record["metrics"]["resume_key"][:16]
    with prompts.open("rb") as lines, path.open("w") as file:
        for number, line in enumerate(lines):
            if is_done(number):
                line = line.rstrip(b"\n")
                record["id"] = json.loads(line)["id"]
                record["metrics"]["resume_key"] = f"{options}{line_digest(line):016x}"
                file.write(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    sys.exit(main())
