"""Run random lives of a host core on a symbolic device, each from one seed, and report those that break a promise.

python scripts/simulate.py 4711                          # replay one seed, with its event log
python scripts/simulate.py --seeds 0:20000 --jobs 2 --output simulation.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = 50
"""Seeds that a process runs at a time."""


def run_block(seeds: range) -> tuple[int, int, int, Counter[str], list[tuple[int, str]]]:
    """Return (number of seeds, steps, requests, events, failures) of these seeds; a failure does not end the others."""
    from tests.jpaged.simulation import simulate

    steps = requests = 0
    events: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    for seed in seeds:
        try:
            summary = simulate(seed)
        except Exception:
            failures.append((seed, traceback.format_exc()))
            continue
        steps += summary.steps
        requests += summary.requests
        events += summary.events
    return len(seeds), steps, requests, events, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", help="replay this one, with its event log")
    parser.add_argument("--seeds", metavar="FIRST:END", help="all of these, END excluded")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write a summary in JSON")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.seed is not None:
        from tests.jpaged.simulation import simulate

        print(simulate(args.seed, print))
        return
    if args.seeds is None:
        parser.error("give a seed, or --seeds FIRST:END")
    first, end = map(int, args.seeds.split(":"))
    seeds = range(first, end)
    blocks = [seeds[at : at + BLOCK] for at in range(0, len(seeds), BLOCK)]
    started = time.monotonic()
    num_seeds = steps = requests = 0
    events: Counter[str] = Counter()
    failures: list[int] = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for block in pool.map(run_block, blocks):
            num_seeds += block[0]
            steps += block[1]
            requests += block[2]
            events += block[3]
            for seed, trace in block[4]:
                failures.append(seed)
                print(f"seed {seed} FAILS\n{trace}", flush=True)
            if num_seeds % 1000 == 0:
                print(f"{num_seeds} seeds, {steps} steps, {time.monotonic() - started:.0f} s", flush=True)
    report = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "command": f"python scripts/simulate.py --seeds {args.seeds}",
        "jobs": args.jobs,
        "seconds": round(time.monotonic() - started),
        "seeds": num_seeds,
        "failures": failures,
        "steps": steps,
        "steps_per_seed": round(steps / num_seeds, 1),
        "requests": requests,
        "requests_per_seed": round(requests / num_seeds, 1),
        "events": dict(sorted(events.items())),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    print(text, end="")
    if args.output:
        args.output.write_text(text)
    if failures:
        raise SystemExit(f"{len(failures)} of {num_seeds} seeds fail")


if __name__ == "__main__":
    main()
