"""Measures scoring: tokens computed for continuations that share contexts, and the speed of the likeliest tokens.

    python scripts/bench/scores.py --output docs/measurements/scores.json      # 20 minutes

SmolLM2-135M in float32. 300 continuations of 75 contexts of 50 to 500 tokens, in shuffled order, and the likeliest
tokens at several temperatures, against the module's own dense forward. Then `logprobs(ids, top_k=K)` beside
`logprobs(ids)`, for one prompt and for several of 512 tokens. Runs take turns; figures are medians. Exit status 1 says
that more than 1.05 × the distinct tokens were computed, or that the logprob of a given or a likeliest token is off by
more than 1e-4. Speeds are printed and not judged, and so are the distances of unlikely tokens, of which float32 leaves
more on both sides (docs/decisions.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_weights import processor, seconds

import jpaged
from jpaged import Engine

MODEL = "smollm2-135m"
TOPS = (64, 256, 1000)
Dense = Callable[[np.ndarray, float], np.ndarray]
"""Takes token ids [1, N] and a temperature; returns logprobs of the tokens behind each place, float64 [N, V]."""


def dense_forward() -> Dense:
    """Return the module's own forward pass, without pages."""
    module = jpaged.load_module(MODEL)
    compiled = jax.jit(lambda ids, mask: module(ids, mask))

    def dense(ids: np.ndarray, temperature: float) -> np.ndarray:
        logits = np.asarray(compiled(ids, ids > 0), np.float64)[0] / temperature
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    return dense


def shared_contexts(engine: Engine, dense: Dense) -> dict[str, Any]:
    """Return the tokens that 300 continuations take, and how far their logprobs are from a dense forward's."""
    rng = np.random.default_rng(0)
    vocab_size = engine.handle.config.vocab_size
    contexts = [rng.integers(10, vocab_size, size).tolist() for size in rng.integers(50, 501, 75)]
    pairs = [
        (context, rng.integers(10, vocab_size, size).tolist())
        for context in contexts
        for size in rng.integers(1, 30, 4)
    ]
    pairs = [pairs[index] for index in rng.permutation(len(pairs))]
    before = engine.stats()["step_tokens"]
    taken_s = seconds(lambda: engine.score(*map(list, zip(*pairs, strict=True))))
    computed = engine.stats()["step_tokens"] - before
    scores = engine.score(*map(list, zip(*pairs, strict=True)))
    distinct = sum(map(len, contexts)) + sum(len(continuation) for _, continuation in pairs)
    whole = sum(len(context) + len(continuation) for context, continuation in pairs)
    worst = 0.0
    for row, (context, continuation) in enumerate(pairs[:40]):
        ids = np.zeros((1, 544), np.int32)
        ids[0, : len(context) + len(continuation)] = [*context, *continuation]
        logprobs = dense(ids, 1.0)[len(context) - 1 :][: len(continuation)]
        wanted = logprobs[np.arange(len(continuation)), continuation]
        worst = max(worst, float(np.abs(np.asarray(scores.logprobs[row])[: len(wanted)] - wanted).max()))
    return {
        "distinct_tokens": distinct,
        "tokens_of_all_pairs": whole,
        "computed_tokens": int(computed),
        "computed ÷ distinct": computed / distinct,
        "seconds": taken_s,
        "worst_distance_to_dense": worst,
    }


def tops_to_dense(engine: Engine, dense: Dense) -> dict[str, float]:
    """Return how far logprobs and rests of a prompt's likeliest tokens are from a dense forward's, the worst by case.

    That the tokens are the likeliest ones shows in their logprobs, sorted on both sides.
    """
    ids = np.random.default_rng(2).integers(10, engine.handle.config.vocab_size, (1, 544)).astype(np.int32)
    worst = {}
    for temperature in (0.5, 1.0):
        logprobs = dense(ids, temperature)[:-1]
        likeliest = -np.sort(-logprobs, axis=1)
        for count in (1, *TOPS):
            found = engine.logprobs(ids[0], top_k=count, temperature=temperature)
            own = np.take_along_axis(logprobs, np.asarray(found.token_ids), axis=1)
            rests = np.log(np.exp(likeliest[:, count:]).sum(axis=1))
            distances = [found.logprobs - own, found.logprobs - likeliest[:, :count], found.log_rest - rests]
            name = f"{count} at temperature {temperature}"
            worst[name] = max(float(np.abs(np.asarray(distance)).max()) for distance in distances)
    return worst


def tops(engine: Engine, num_prompts: int, runs: int) -> dict[str, Any]:
    """Return the seconds of scoring prompts of 512 tokens, with and without the likeliest tokens."""
    ids = np.random.default_rng(1).integers(10, engine.handle.config.vocab_size, (num_prompts, 512))
    ways: dict[str, Any] = {"own": lambda: engine.logprobs(ids)}
    ways |= {
        str(count): (lambda count=count: jax.block_until_ready(engine.logprobs(ids, top_k=count))) for count in TOPS
    }
    ways["hidden"] = lambda: engine.logprobs(ids, hidden=True)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(runs + 1):
        for name, run in ways.items():
            engine.reset_prefix_cache()
            taken = seconds(run)
            if index:  # The first ones compile.
                times[name].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": medians, "speed ÷ own": {name: medians["own"] / value for name, value in medians.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with Engine(MODEL, dtype="float32", quantization="none", max_logprobs=1000, max_model_len=1024) as engine:
        dense = dense_forward()
        report = {"model": MODEL, "processor": processor(), "shared contexts": shared_contexts(engine, dense)}
        report["worst distance of tops to dense"] = tops_to_dense(engine, dense)
        report["tops of 1 prompt"] = tops(engine, 1, 3 * args.runs)
        report[f"tops of {args.prompts} prompts"] = tops(engine, args.prompts, args.runs)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    found = report["shared contexts"]
    firsts = [one for name, one in report["worst distance of tops to dense"].items() if name.startswith("1 at")]
    worst = max(found["worst_distance_to_dense"], *firsts)
    return 0 if found["computed ÷ distinct"] <= 1.05 and worst <= 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
