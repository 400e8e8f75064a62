"""Measures how long a trainer waits for rollouts: for groups that have ended, for `submit`, and for an interrupt.

    python scripts/bench/rollouts.py --output docs/measurements/rollouts.json      # 2 minutes

SmolLM2-135m in float32. `take(1)` of 100 groups that have ended, while long requests are computed by 16 tokens a step.
Then, in an engine that keeps no executables, `submit` of three prompts and an interrupt while a program is compiled:
the interrupt of `submit`, of `take` and of `generate`, each up to the end of `with Engine(…)`. Exit status 1 says that
the 95th percentile of the takes is above 20 ms, a `submit` takes more than 0.5 s, or an interrupt more than 2 s.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_weights import processor, seconds

from jpaged import Engine, SamplingParams

MODEL = "smollm2-135m"
OPTIONS: dict[str, Any] = {"dtype": "float32", "quantization": "none", "num_decode_steps": 16, "max_num_seqs": 16}
NUM_TAKES = 100
SETTLE_S = 0.2
"""Seconds after which a compilation that has begun is well under way."""


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(100, 40_000, (count, 12)).tolist()


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, seed=0)


def takes(engine: Engine) -> dict[str, float]:
    """Return the seconds of `take(1)` of groups that have ended, and of a step that is computed meanwhile."""
    with engine.submit(prompts(NUM_TAKES), params(4), max_in_flight=NUM_TAKES) as ended:
        while engine.stats()["requests"]:
            time.sleep(0.1)
        with engine.submit(prompts(8), params(1500)):
            while engine.stats()["generation_tokens"] < NUM_TAKES * 4 + 8 * 32:  # All eight are past their prompts.
                time.sleep(0.1)
            num_steps, start_s = engine.core.num_steps, time.perf_counter()
            times_s = []
            for _ in range(NUM_TAKES):
                times_s.append(seconds(lambda: ended.take(1)))
                time.sleep(0.05)
            step_s = (time.perf_counter() - start_s) / max(1, engine.core.num_steps - num_steps)
    p50, p95, most = np.quantile(times_s, [0.5, 0.95, 1]).tolist()
    return {"take p50": p50, "take p95": p95, "take max": most, "step beside it": step_s}


def wait_for_compilation(engine: Engine) -> None:
    while not engine.plan.is_compiling:
        time.sleep(0.01)
    time.sleep(SETTLE_S)


def submit(engine: Engine) -> None:
    """Submit prompts whose iterator blocks, while a program is compiled for others."""

    def blocked() -> Iterator[list[int]]:
        yield from prompts(3)
        time.sleep(60)

    with engine.submit(prompts(3), params(40)):
        engine.submit(blocked(), params(40))


INTERRUPTED: dict[str, Callable[[Engine], Any]] = {
    "submit": submit,
    "take": lambda engine: engine.submit(prompts(3), params(40)).take(1),
    "generate": lambda engine: engine.generate(prompts(3), params(40), use_tqdm=False),
}


def while_compiling(name: str) -> dict[str, float]:
    """Return the seconds of `submit`, and from an interrupt of a call to the end of the `with` of its engine."""
    sent_s = [0.0]
    taken: dict[str, float] = {}

    def interrupt(engine: Engine) -> None:
        wait_for_compilation(engine)
        if name != "submit":
            taken["submit"] = seconds(lambda: engine.submit(prompts(3), params(40)))
            assert engine.plan.is_compiling, "the compilation has ended: the figures say nothing"
        sent_s[0] = time.perf_counter()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    jax.clear_caches()
    try:
        with Engine(MODEL, **OPTIONS, warmup="off", compilation_cache_dir="off") as engine:
            threading.Thread(target=interrupt, args=(engine,), daemon=True).start()
            INTERRUPTED[name](engine)
    except KeyboardInterrupt:
        taken[f"interrupt of {name}"] = time.perf_counter() - sent_s[0]
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with Engine(MODEL, **OPTIONS) as engine:
        report: dict[str, Any] = {"model": MODEL, "processor": processor(), "seconds": takes(engine)}
    compiling: dict[str, float] = {}
    for name in INTERRUPTED:
        for key, taken_s in while_compiling(name).items():
            compiling[key] = max(taken_s, compiling.get(key, 0.0))
    report["seconds while a program is compiled"] = compiling
    print(json.dumps(report, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    slowest = max(value for key, value in compiling.items() if key != "submit")
    return 0 if report["seconds"]["take p95"] <= 0.02 and compiling["submit"] <= 0.5 and slowest <= 2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
