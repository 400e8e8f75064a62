"""Measures what `generate(…, return_arrays=True)` takes beyond a plain `generate`: 256 prompts of 128 output tokens.

    python scripts/array_costs.py --output docs/measurements/array_costs.json      # 3 minutes

A tiny model of the golden files serves, so that the difference is not lost beside the steps. Runs take turns; figures
are medians. `generate` asks for no logprobs; `entries` asks for those of the drawn tokens, as objects. Exit status 1
says that making the arrays takes more than 5 ms, or that arrays take 5 ms more than the same logprobs as objects.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from live_weights import processor, seconds

from jpaged import Engine, SamplingParams
from jpaged.messages import ResultForm
from jpaged.research import arrays

MODEL = Path(__file__).parents[1] / "tests" / "golden" / "families" / "llama"
NUM_PROMPTS, LENGTH = 256, 128
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1, ignore_eos=True, detokenize=False)
PROMPTS = [[1 + index % 60, 2, 3] for index in range(NUM_PROMPTS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    make = arrays.generation_arrays
    options: dict[str, Any] = {
        "max_num_seqs": NUM_PROMPTS,
        "max_model_len": 160,
        "hf_overrides": {"max_position_embeddings": 160},
        "skip_tokenizer_init": True,
    }
    with Engine(str(MODEL), **options) as engine:
        ways: dict[str, Callable[[], Any]] = {
            "generate": lambda: engine.generate(PROMPTS, PARAMS),
            "arrays": lambda: engine.generate(PROMPTS, PARAMS, return_arrays=True),
            "entries": lambda: engine.generate(PROMPTS, replace(PARAMS, logprobs=0)),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(args.runs + 2):
            for name, run in ways.items():
                taken = seconds(run)
                if index >= 2:  # The first ones compile.
                    times[name].append(taken)
        each = [replace(PARAMS, logprobs=0)] * NUM_PROMPTS
        _, requests = engine._batch.run("generate", PROMPTS, each, form=ResultForm.ARRAYS)
        made = [seconds(lambda: make(requests)) for _ in range(args.runs)]
    report = {name: statistics.median(values) for name, values in times.items()}
    report["making the arrays"] = statistics.median(made)
    result = {"what": "seconds", "prompts": NUM_PROMPTS, "tokens": LENGTH, "processor": processor(), **report}
    print(result)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if report["making the arrays"] <= 0.005 and report["arrays"] <= report["entries"] + 0.005 else 1


if __name__ == "__main__":
    raise SystemExit(main())
