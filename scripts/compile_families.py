"""Compile steps of every model family at a public model's size for a TPU v6e and an H100, without such a chip.

    pip install -e ".[aot]"       # Python 3.12, for the kernels of the GPU
    python scripts/compile_families.py --output docs/measurements/compile_families.json
    python scripts/compile_families.py Qwen__Qwen3-8B --output docs/measurements/compile_families.json   # a row anew

A model is cut to two layers of its kinds, and bfloat16. Three programs are compiled for each: a step of 256 decode
rows, one of 512 tokens of prompts, and the drawing of tokens for 8 rows; of a model with experts only the steps. Prints
a line for each model, and exits with 1 if one does not compile, copies an array as large as a layer's keys, makes one
larger than the choices of experts need, does not hold its cache in place, or hands a GPU kernel an array where it
cannot read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "public_configs"
MODELS = (
    "EleutherAI__pythia-6.9b-deduped", "HuggingFaceTB__SmolLM3-3B", "Qwen__Qwen1.5-MoE-A2.7B",
    "Qwen__Qwen2.5-7B-Instruct", "Qwen__Qwen3-30B-A3B", "Qwen__Qwen3-8B", "allenai__OLMo-2-1124-7B",
    "allenai__OLMoE-1B-7B-0125-Instruct", "allenai__Olmo-3-7B-Instruct", "google__gemma-2-9b", "google__gemma-3-1b-it",
    "ibm-granite__granite-3.3-8b-instruct", "meta-llama__Llama-3.1-8B", "microsoft__Phi-3.5-mini-instruct",
    "mistralai__Mistral-7B-v0.1", "mistralai__Mixtral-8x7B-v0.1", "openai-community__gpt2", "openai__gpt-oss-20b",
)  # fmt: skip
"""One of each family."""
CHIPS = ("v6e", "h100")
NUM_LAYERS = 2


def compile_model(config: Path, chip: str, num_chips: int = 1, num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """Return what tests/compile_step.py prints about a model of so many layers, or its last line of stderr as `error`.

    `config` is a file like those of CONFIGS.
    """
    script, sizes = ROOT / "tests" / "compile_step.py", (str(num_chips), "bfloat16", str(num_layers))
    command = [sys.executable, str(script), chip, *sizes, "--config", str(config)]
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
        if step["beyond_choices"]:
            faults.append(f"{name} makes {', '.join(step['beyond_choices'])}, more than the choices of experts need")
        if step["misaligned"]:
            faults.append(f"{name} has kernels that read {', '.join(step['misaligned'])}")
        if name.startswith("forward") and step["aliased"] < step["cache"]:
            faults.append(f"{name} does not hold its cache in place")
    return faults


def write_report(path: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write `head` and the list `rows` as JSON, a line for each row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{json.dumps({"date": str(date.today()), **head})[:-1]}, "rows": [\n{lines}\n]}}\n')


def read_report(
    path: Path | None, versions: dict[str, str]
) -> tuple[dict[str, str], dict[tuple[str, str], dict[str, Any]]]:
    """Return the versions of a report and of these packages, and its rows by model and chip, each with its date.

    Without such a file there are no rows.

    Raises ValueError if they were made with another version of one of these packages.
    """
    if path is None or not path.exists():
        return versions, {}
    report = json.loads(path.read_text())
    if any(report["versions"].get(name, here) != here for name, here in versions.items()):
        raise ValueError(f"{path}: made with {report['versions']}, here are {versions}: take another file")
    rows = {(row["model"], row["chip"]): {"date": report["date"], **row} for row in report["rows"]}
    return report["versions"] | versions, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument(
        "names", nargs="*", default=MODELS, metavar="NAME", help=f"of {', '.join(names)}; default: one of each family"
    )
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--output", type=Path, help="write rows here, as JSON; those of other models and chips stay")
    args = parser.parse_args()
    versions: dict[str, str] = {}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin"):
        with suppress(PackageNotFoundError):  # Chips of one kind need one of the compilers.
            versions[name] = version(name)
    versions, rows = read_report(args.output, versions)
    num_faults = 0
    for name in args.names:
        for chip in args.chips:
            found = compile_model(CONFIGS / f"{name}.json", chip)
            faults = faults_of(found)
            num_faults += bool(faults)
            steps = {key: step for key, (step,) in found.get("steps", {}).items()}
            row = {"model": name.replace("__", "/"), "chip": chip, "date": str(date.today())}
            row |= {"backend": found.get("backend"), "faults": faults}
            rows[row["model"], chip] = {**row, **steps}
            print(f"{name} on {chip}: {'; '.join(faults) or 'compiles'}", flush=True)
    if args.output:
        by_name = sorted(rows, key=lambda place: (place[0].lower(), CHIPS.index(place[1])))
        write_report(args.output, {"versions": versions}, [rows[place] for place in by_name])
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
