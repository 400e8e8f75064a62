"""Compares an engine's logprobs with a forward pass in float64: the largest and the mean distance over 20 prompts.

    python scripts/bench/float64.py --output docs/measurements/float64.json      # 6 minutes
    PYTHONPATH=../parent python scripts/bench/float64.py                         # the same of another checkout

SmolLM2-135M in float32, prompts of 60 to 480 tokens that repeat parts of themselves, as texts do. The forward pass is
numpy's, of the same tensors, all of it in float64. A distance is that of the logprob of one prompt token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import jpaged
from jpaged import Engine, SamplingParams

MODEL, NUM_PROMPTS, NUM_COMMON = "smollm2-135m", 20, 4000


class Forward:
    """A Llama in numpy, float64."""

    def __init__(self) -> None:
        module = jpaged.load_module(MODEL)
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
        logits = self._norm("model.norm", stream)[:-1] @ self.tensors["model.embed_tokens.weight"].T
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1)))

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ self.tensors[f"{name}.weight"].T)

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


def prompts() -> list[list[int]]:
    """Return prompts of common tokens, whose second half repeats parts of the first."""
    rng, made = np.random.default_rng(0), []
    for size in rng.integers(30, 240, NUM_PROMPTS):
        half = rng.integers(100, NUM_COMMON, size).tolist()
        start = int(rng.integers(0, size // 2))
        made.append([*half, *half[start:], *half[:start]])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    all_ids, forward = prompts(), Forward()
    with Engine(MODEL, dtype="float32", quantization="none", max_num_seqs=8, max_model_len=1024) as engine:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = engine.generate(all_ids, params, use_tqdm=False)
        attention = engine.backend.describe()
    distances = []
    for ids, output in zip(all_ids, outputs, strict=True):
        given = [found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        distances.append(np.abs(np.array(given) - forward.logprobs(ids)))
    every = np.concatenate(distances)
    report = {
        "jpaged": str(Path(jpaged.__file__).parents[1].name),
        "backend": attention,
        "prompts": NUM_PROMPTS,
        "logprobs": len(every),
        "largest": float(every.max()),
        "mean": float(every.mean()),
        "99th percentile": float(np.quantile(every, 0.99)),
    }
    print(json.dumps(report, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
