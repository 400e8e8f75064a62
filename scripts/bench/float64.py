"""Compares an engine's logprobs with a forward pass in float64, and torch's with it where torch is installed.

    python scripts/bench/float64.py --output docs/measurements/float64.json                # 6 minutes
    python scripts/bench/float64.py --model ../Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf     # 15 minutes
    python scripts/bench/float64.py --without-amx             # as processors without a matrix unit compute
    PYTHONPATH=../parent python scripts/bench/float64.py      # the same of another checkout

A Llama or Qwen2 model in float32 reads two kinds of rows: 20 of 60 to 480 tokens that repeat parts of themselves, as
texts do, and 40 of 4 to 64 random special tokens, whose activations are large. The forward pass is numpy's, of the same
tensors, all of it in float64. A distance is that of the logprob of one token of a row. The largest ones of each row are
compared with torch's by their geometric means, since they differ by factors of a hundred. Torch computes by
transformers, from a checkpoint that is written to a temporary folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jpaged
from jpaged import Engine, EngineConfig, SamplingParams
from jpaged.pallas_kernels.native.products import chain
from jpaged.research.checkpoints import save_checkpoint
from jpaged.startup.open_model import open_model

NUM_TEXTS, NUM_COMMON = 20, 4000
NUM_SPECIAL = 40
SIZES = {"max_num_seqs": 8, "max_model_len": 1024}
Rows = list[list[int]]


class Forward:
    """A Llama or Qwen2 in numpy, float64."""

    def __init__(self, module: Any) -> None:
        self.config: Any = module.origin.config
        self.tensors = {name: np.asarray(tensor, np.float64) for name, tensor in module.hf_state().items()}

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Return the logprobs of ids[1:], each after those before it."""
        stream = self.tensors["model.embed_tokens.weight"][ids]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}"
            stream = stream + self._attention(prefix, self._norm(f"{prefix}.input_layernorm", stream))
            normed = self._norm(f"{prefix}.post_attention_layernorm", stream)
            gates, ups = (self._product(f"{prefix}.mlp.{name}_proj", normed) for name in ("gate", "up"))
            stream = stream + self._product(f"{prefix}.mlp.down_proj", gates / (1 + np.exp(-gates)) * ups)
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        logits = self._norm("model.norm", stream)[:-1] @ head.T
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1)))

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0))

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x**2).mean(axis=1, keepdims=True) + self.config.norm_eps)
        return np.asarray(x / scale * self.tensors[f"{name}.weight"])

    def _attention(self, prefix: str, x: np.ndarray) -> np.ndarray:
        num_tokens, size = len(x), self.config.head_size
        heads = [
            self._product(f"{prefix}.self_attn.{name}_proj", x).reshape(num_tokens, -1, size).transpose(1, 0, 2)
            for name in ("q", "k", "v")
        ]
        angles = np.arange(num_tokens)[:, None] * self.config.ropes[0].theta ** (-np.arange(0, size, 2) / size)
        q, k = (_rotated(each, np.cos(angles), np.sin(angles)) for each in heads[:2])
        k, v = (np.repeat(each, len(q) // len(k), axis=0) for each in (k, heads[2]))
        scores = q @ k.transpose(0, 2, 1) * size**-0.5
        scores[:, np.triu(np.ones((num_tokens, num_tokens), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return self._product(f"{prefix}.self_attn.o_proj", (weights @ v).transpose(1, 0, 2).reshape(num_tokens, -1))


def _rotated(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(heads, 2, axis=2)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def texts() -> Rows:
    """Return rows of common tokens, whose second half repeats parts of the first."""
    rng, made = np.random.default_rng(0), []
    for size in rng.integers(30, 240, NUM_TEXTS):
        half = rng.integers(100, NUM_COMMON, size).tolist()
        start = int(rng.integers(0, size // 2))
        made.append([*half, *half[start:], *half[:start]])
    return made


def special_rows(special_ids: list[int]) -> Rows:
    """Return rows of random special tokens."""
    rng = np.random.default_rng(0)
    return [rng.choice(special_ids, int(size)).tolist() for size in rng.integers(4, 65, NUM_SPECIAL)]


def torch_logprobs(module: Any) -> Callable[[list[int]], np.ndarray]:
    """Return what `Forward.logprobs` does, by transformers and torch in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(module, Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)

    def logprobs(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            found = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        return np.asarray(found[torch.arange(len(ids) - 1), ids[1:]].numpy(), np.float64)

    return logprobs


def engine_logprobs(engine: Engine, rows: Rows) -> list[np.ndarray]:
    """Return the logprobs of each row's tokens but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate(rows, params, use_tqdm=False)
    return [
        np.array([found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)])
        for ids, output in zip(rows, outputs, strict=True)
    ]


def summary(distances: list[np.ndarray]) -> dict[str, float]:
    every = np.concatenate(distances)
    return {
        "largest": float(every.max()),
        "mean": float(every.mean()),
        "99th percentile": float(np.quantile(every, 0.99)),
        "geometric mean of the rows' largest": float(np.exp(np.mean([np.log(row.max()) for row in distances]))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--without-amx", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.without_amx:
        chain.has_amx_unit = lambda: False
    module = jpaged.load_module(args.model)
    tokenizer = open_model(EngineConfig(model=args.model)).tokenizer
    assert tokenizer is not None
    rows_by_kind = {"texts": texts(), "special tokens": special_rows(sorted(tokenizer.special_ids))}
    forward = Forward(module)
    exact = {kind: [forward.logprobs(ids) for ids in rows] for kind, rows in rows_by_kind.items()}
    # Before the engine asks the system for the matrix unit: torch was ten times as far from float64 on texts behind it.
    torch_distances = {}
    if importlib.util.find_spec("torch"):
        by_torch = torch_logprobs(module)
        torch_distances = {
            kind: [np.abs(by_torch(ids) - wanted) for ids, wanted in zip(rows, exact[kind], strict=True)]
            for kind, rows in rows_by_kind.items()
        }
    del module, forward
    results = []
    with Engine(args.model, dtype="float32", quantization="none", **SIZES) as engine:
        for kind, rows in rows_by_kind.items():
            found = engine_logprobs(engine, rows)
            result: dict[str, Any] = {"rows": kind, "num_rows": len(rows), "logprobs": sum(map(len, found))}
            result["jpaged"] = summary([np.abs(a - b) for a, b in zip(found, exact[kind], strict=True)])
            if kind in torch_distances:
                result["torch"] = summary(torch_distances[kind])
                result["jpaged ÷ torch"] = {
                    name: result["jpaged"][name] / result["torch"][name] for name in result["torch"]
                }
            results.append(result)
        report = {
            "checkout": Path(jpaged.__file__).parents[1].name,
            "model": Path(args.model).name,
            "backend": engine.backend.describe() + ", products without AMX" * args.without_amx,
            "results": results,
        }
    print(json.dumps(report, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
