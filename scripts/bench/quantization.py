"""Measures what quantization does to a model's predictions: perplexity, and divergence from the unquantized model.

    python scripts/bench/quantization.py --output docs/measurements/quantization.json      # minutes a model

The text is the beginning of Shakespeare's Coriolanus (public domain), cut into pieces of 512 tokens. Weights are those
of a GGUF file as floats, quantized at load; `Q4_0` are the same floats quantized by the gguf package, and served as
floats. Pages of one byte are measured with unquantized weights. Divergence is that of the quantized distribution from
the unquantized one, mean of all places: over the unquantized model's 500 likeliest tokens, with all others as one, so
that it is a lower bound, and a tight one, since these others have little weight. Exit status 1 says that a limit of
GATES is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_weights import processor

from jpaged import Engine
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.startup.model_source import resolve_model

TEXT = Path(__file__).with_name("shakespeare.txt")
PIECE = 512
NUM_TOPS = 500
WAYS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "Q4_0": {"quantization": "none"},
    "pages int8": {"quantization": "none", "kv_cache_dtype": "int8"},
    "pages fp8": {"quantization": "none", "kv_cache_dtype": "fp8"},
}
GATES = {
    "int8": ("floats", 1.01, 0.005), "fp8": ("floats", 1.015, 0.02), "int4": ("Q4_0", 1.01, math.inf),
    "pages int8": ("floats", 1.005, math.inf), "pages fp8": ("floats", 1.005, math.inf),
}  # fmt: skip
"""Way → what its perplexity is compared with, and the largest ratio and divergence."""


def float_tensors(model: str) -> dict[str, np.ndarray]:
    """Return the floats of all tensors of a model, under Hugging Face's names."""
    source = resolve_model(model, revision=None, load_format="auto", with_weights=True)
    _, checkpoint = open_checkpoint(source.path)
    return {name: np.asarray(checkpoint.read(name, slice(None)), np.float32) for name in checkpoint.names()}


def by_the_gguf_package(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with each matrix quantized to Q4_0 and de-quantized."""
    kind = gguf.GGMLQuantizationType.Q4_0
    return {
        name: gguf.dequantize(gguf.quantize(values, kind), kind) if values.ndim == 2 else values
        for name, values in tensors.items()
    }


def predictions(engine: Engine, pieces: np.ndarray, tops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logprobs of the tokens [B, N − 1] and those of `tops` [B, N − 1, K], which one pass computes."""
    asked = np.concatenate([pieces[:, 1:, None], tops], axis=-1)
    found = np.asarray(engine.logprobs(pieces, token_ids=asked), np.float64)
    return found[..., 0], found[..., 1:]


def divergence(wanted: np.ndarray, found: np.ndarray) -> float:
    """Return the mean Kullback-Leibler divergence of distributions from the `wanted` ones, from logprobs [B, N, K]."""

    def with_rest(logprobs: np.ndarray) -> np.ndarray:
        rest = np.maximum(1 - np.exp(logprobs).sum(axis=-1, keepdims=True), 1e-12)
        return np.concatenate([logprobs, np.log(rest)], axis=-1)

    wanted, found = with_rest(wanted), with_rest(found)
    return float((np.exp(wanted) * (wanted - found)).sum(axis=-1).mean())


def measure(model: str, num_tokens: int, ways: list[str]) -> dict[str, Any]:
    tensors = float_tensors(model)
    options: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": 16, "max_model_len": PIECE + 64, "max_logprobs": NUM_TOPS + 1,
        "enable_prefix_caching": False,
    }  # fmt: skip
    with Engine(model, params=tensors, quantization="none", **options) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(TEXT.read_text())
        num_pieces = min(num_tokens, len(ids)) // PIECE
        pieces = np.asarray(ids[: num_pieces * PIECE], np.int32).reshape(num_pieces, PIECE)
        tops = np.asarray(engine.logprobs(pieces, top_k=NUM_TOPS).token_ids)
        own, wanted = predictions(engine, pieces, tops)
    results: dict[str, Any] = {"floats": {"perplexity": math.exp(-own.mean())}}
    for name in ways:
        params = by_the_gguf_package(tensors) if name == "Q4_0" else tensors
        with Engine(model, params=params, **options | WAYS[name]) as engine:
            own, found = predictions(engine, pieces, tops)
        results[name] = {"perplexity": math.exp(-own.mean()), "divergence": divergence(wanted, found)}
        print(model, name, results[name], flush=True)
    missed = []
    for name in ways:
        if name not in GATES or (other := GATES[name][0]) not in results:
            continue
        ratio = results[name]["perplexity"] / results[other]["perplexity"]
        results[name][f"perplexity ÷ {other}"] = ratio
        if ratio > GATES[name][1] or results[name]["divergence"] > GATES[name][2]:
            missed.append(name)
    return {"tokens": pieces.size, "results": results, "gates missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"], help="names or GGUF files")
    parser.add_argument("--tokens", type=int, default=24_000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    models = {Path(model).name: measure(model, args.tokens, args.ways) for model in args.model}
    report = {"processor": processor(), "text": TEXT.name, "models": models}
    print(json.dumps(report, indent=2, ensure_ascii=False))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return 1 if any(each["gates missed"] for each in models.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
