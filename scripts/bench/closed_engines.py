"""Measures the resident memory of a process after each of ten engines is closed, one after the other.

    python scripts/bench/closed_engines.py --output docs/measurements/closed_engines.json      # half a minute

Each engine has the default model and answers three prompts. What stays after the first one is JAX, its compiler, and
what they keep of the programs; memory that grows from engine to engine is lost to a process that opens many.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jpaged import Engine, SamplingParams

NUM_ENGINES = 10


def resident_mb() -> float:
    """Return the resident memory of this process, as Linux counts it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    open_mb, closed_mb = list[float](), list[float]()
    for _ in range(NUM_ENGINES):
        with Engine(args.model, max_num_seqs=8, max_model_len=512) as engine:
            engine.generate(["The capital of France"] * 3, SamplingParams(max_tokens=8), use_tqdm=False)
            open_mb.append(round(resident_mb(), 1))
        closed_mb.append(round(resident_mb(), 1))
    report = {"open_mb": open_mb, "closed_mb": closed_mb, "tenth ÷ first closed": closed_mb[-1] / closed_mb[0]}
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
