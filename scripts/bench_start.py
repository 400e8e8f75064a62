"""Time to the first text and peak memory of fresh starts, interleaved: one command a jpaged, one process a start.

    python scripts/bench_start.py --runs 10 "now=python -m jpaged.generate" \
        "parent=env -C ../parent python -m jpaged.generate"
    python scripts/bench_start.py --runs 3 --num-prompts 1 \
        "kept=python -m jpaged.generate --model FILE.gguf" \
        "converted=python -m jpaged.generate --model FILE.gguf --weights-cache-dir off"

Prints, for each of three prompts, the seconds from the start of each process to its first byte on stdout, and their
medians. A first start of each command is not counted: it fills the compilation cache and reads files from disk.

Memory is that of each process until its end, in MB, as Linux counts it: `rss` is all resident memory, with the pages
of mapped files that the process has touched; `anonymous` is what no file backs, so that it cannot be dropped.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

PROMPTS = (
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Name three rivers of Europe and say where each of them ends.",
)


SAMPLE_INTERVAL_S = 0.01
"""Time between two looks at a process's memory."""


class Start(NamedTuple):
    """A start of one process."""

    first_text_s: float
    """Time from the start of the process to its first byte on stdout."""
    rss_mb: float
    anonymous_mb: float


def run_start(command: str, prompt: str) -> Start:
    """Run the command to its end; return the time of its first text, and the most memory that it held."""
    start = time.monotonic()
    arguments = [*shlex.split(command), "--max-tokens", "8", prompt]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    has_ended, anonymous_mb = threading.Event(), [0.0]
    sampler = threading.Thread(target=_sample_anonymous, args=(process.pid, has_ended, anonymous_mb))
    sampler.start()
    first = process.stdout.read(1)
    seconds = time.monotonic() - start
    process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    has_ended.set()
    sampler.join()
    assert first, f"{command}: ended with status {process.returncode} and no text"
    return Start(round(seconds, 3), usage.ru_maxrss * 1024 / 1e6, max(anonymous_mb))


def _sample_anonymous(pid: int, has_ended: threading.Event, found_mb: list[float]) -> None:
    """Append the anonymous memory of a process to `found_mb` at each look, until it has ended."""
    status = Path(f"/proc/{pid}/status")
    while not has_ended.wait(SAMPLE_INTERVAL_S):
        try:
            match = re.search(r"^RssAnon:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        except OSError:
            return
        if match:  # A process that has ended, but has not been waited for, has no such line.
            found_mb.append(int(match[1]) * 1024 / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS), help="the first N prompts only")
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    args = parser.parse_args()
    commands = dict(one.split("=", 1) for one in args.commands)
    prompts = PROMPTS[: args.num_prompts]
    starts: dict[str, dict[str, list[Start]]] = {prompt: {name: [] for name in commands} for prompt in prompts}
    for run in range(-1, args.runs):
        for prompt in prompts:
            for name, command in commands.items():
                found = run_start(command, prompt)
                if run >= 0:
                    starts[prompt][name].append(found)
    results = {}
    for prompt, by_name in starts.items():
        results[prompt] = {
            "median_s": {name: statistics.median(one.first_text_s for one in each) for name, each in by_name.items()},
            "s": {name: [one.first_text_s for one in each] for name, each in by_name.items()},
            "peak_mb": {
                name: {
                    "rss": round(max(one.rss_mb for one in each)),
                    "anonymous": round(max(one.anonymous_mb for one in each)),
                }
                for name, each in by_name.items()
            },
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
