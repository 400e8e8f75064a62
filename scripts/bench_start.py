"""Time to the first text of fresh starts, interleaved: one command a jpaged, three prompts, one process a start.

    python scripts/bench_start.py --runs 10 "now=python -m jpaged.generate" \
        "parent=env -C ../parent python -m jpaged.generate"

Prints, for each prompt, the seconds from the start of each process to its first byte on stdout, and their medians. A
first start of each command is not counted: it fills the compilation cache and reads files from disk.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import time

PROMPTS = (
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Name three rivers of Europe and say where each of them ends.",
)


def first_text_s(command: str, prompt: str) -> float:
    """Return the seconds until the command writes to stdout, then wait for its end."""
    start = time.monotonic()
    arguments = [*shlex.split(command), "--max-tokens", "8", prompt]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.monotonic() - start
        process.stdout.read()
    assert first, f"{command}: ended with status {process.returncode} and no text"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    args = parser.parse_args()
    commands = dict(one.split("=", 1) for one in args.commands)
    seconds: dict[str, dict[str, list[float]]] = {prompt: {name: [] for name in commands} for prompt in PROMPTS}
    for run in range(-1, args.runs):
        for prompt in PROMPTS:
            for name, command in commands.items():
                found = first_text_s(command, prompt)
                if run >= 0:
                    seconds[prompt][name].append(round(found, 3))
    results = {}
    for prompt, by_name in seconds.items():
        results[prompt] = {"median_s": {name: statistics.median(each) for name, each in by_name.items()}, "s": by_name}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
