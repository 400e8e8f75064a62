"""What the benches of whole engines compute: prompts as token ids, and how many tokens come out of each.

A, B and C are fixed lists in `workloads.json`, in SmolLM2's tokens: one stream, mixed requests, and requests that
share a prefix. Two are drawn from a seed: `sharegpt`, lengths as conversations of that data set have them, on average
161 tokens in and 338 out (Kwon et al. 2023, arXiv:2309.06180, figure 11), both lognormal; and `decode`, short prompts
and outputs of one length, so that all rows decode together nearly all the time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from .errors import ConfigError

FIXED = ("A", "B", "C")
WORKLOADS = (*FIXED, "sharegpt", "decode")
SEED = 20231
MEAN_IN, MEAN_OUT, SIGMA_IN, SIGMA_OUT = 161, 338, 1.0, 0.7
MOST_TOKENS = 1024
"""Of a drawn prompt, and of a drawn output."""
LEAST_TOKENS = 4
DECODE_IN, DECODE_OUT = 16, 64


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, which is all at once."""

    name: str
    what: str
    prompts: tuple[tuple[int, ...], ...]
    outs: tuple[int, ...]
    """Tokens out of each, neither more nor fewer."""

    @property
    def num_out(self) -> int:
        """Tokens out of all of them."""
        return sum(self.outs)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.outs, strict=True))


def load_workload(name: str, *, vocab_size: int, num_requests: int | None = None) -> Workload:
    """The workload of that name, or its first `num_requests`. ConfigError for one that the model has no tokens for."""
    if name not in WORKLOADS:
        raise ConfigError(f"--workload: got {name!r}, allowed: {', '.join(WORKLOADS)}")
    if name == "sharegpt":
        return _sharegpt(vocab_size, num_requests or 64)
    if name == "decode":
        return _decode(vocab_size, num_requests or 64)
    data = json.loads(files("jpaged").joinpath("workloads.json").read_text())[name]
    requests = data["requests"][:num_requests]
    most = max(max(request["prompt"]) for request in requests)
    if most >= vocab_size:
        raise ConfigError(
            f"--workload: got {name}, whose token ids go up to {most}, the model has {vocab_size}: allowed: sharegpt, "
            "decode"
        )
    prompts = tuple(tuple(request["prompt"]) for request in requests)
    return Workload(name, data["what"], prompts, tuple(request["out"] for request in requests))


def _sharegpt(vocab_size: int, num_requests: int) -> Workload:
    rng = np.random.default_rng(SEED)

    def lengths(mean: float, sigma: float) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_requests)
        return np.clip(drawn, LEAST_TOKENS, MOST_TOKENS).astype(int).tolist()

    num_in, num_out = lengths(MEAN_IN, SIGMA_IN), lengths(MEAN_OUT, SIGMA_OUT)
    prompts = tuple(tuple(rng.integers(0, vocab_size, length).tolist()) for length in num_in)
    return Workload("sharegpt", f"{num_requests} requests of ShareGPT-like lengths, seeded", prompts, tuple(num_out))


def _decode(vocab_size: int, num_requests: int) -> Workload:
    rng = np.random.default_rng(SEED)
    prompts = tuple(tuple(rng.integers(0, vocab_size, DECODE_IN).tolist()) for _ in range(num_requests))
    what = f"{num_requests} requests, {DECODE_IN} tokens in and {DECODE_OUT} out, seeded"
    return Workload("decode", what, prompts, (DECODE_OUT,) * num_requests)
