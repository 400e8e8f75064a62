"""Compile steps of every model family at a public model's size for a TPU v6e and an H100, without such a chip.

    pip install -e ".[aot]"       # Python 3.12, for the kernels of the GPU
    python scripts/compile_families.py --output docs/measurements/compile_families.json

A model is cut to two layers of its kinds, and bfloat16. Two programs are compiled for each: a step of 256 decode rows,
and one of 512 tokens of prompts. Prints a line for each, and exits with 1 if one does not compile, copies an array as
large as a layer's keys, or does not hold its cache in place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "public_configs"
CHIPS = ("v6e", "h100")
NUM_LAYERS = 2


def compile_model(name: str, chip: str) -> dict[str, Any]:
    """Return what tests/compile_step.py prints about a model on a chip, or its last line of stderr as `error`."""
    script, config = ROOT / "tests" / "compile_step.py", CONFIGS / f"{name}.json"
    command = [sys.executable, str(script), chip, "1", "bfloat16", str(NUM_LAYERS), "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def faults_of(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with the compiled programs of a model, a clause each."""
    if "error" in found:
        return [found["error"]]
    faults = []
    for name, (step,) in found["steps"].items():
        if step["large"]:
            faults.append(f"{name} makes {', '.join(step['large'])}")
        if step["aliased"] < step["cache"]:
            faults.append(f"{name} does not hold its cache in place")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument("names", nargs="*", default=names, metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--output", type=Path, help="write what was found here, as JSON")
    args = parser.parse_args()
    rows, num_faults = [], 0
    for name in args.names:
        for chip in args.chips:
            found = compile_model(name, chip)
            faults = faults_of(found)
            num_faults += bool(faults)
            steps = {key: step for key, (step,) in found.get("steps", {}).items()}
            rows.append({"model": name.replace("__", "/"), "chip": chip, "backend": found.get("backend"), **steps})
            print(f"{name} on {chip}: {'; '.join(faults) or 'compiles'}", flush=True)
    if args.output:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        args.output.write_text(f'{{"date": "{date.today()}", "models": [\n{lines}\n]}}\n')
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
