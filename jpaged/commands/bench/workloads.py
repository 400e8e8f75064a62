"""Workloads of the benches of whole engines: prompts as token ids, and how many tokens each request generates.

A, B and C are fixed lists in `workloads.json`, in SmolLM2's tokens: one stream, mixed requests, and requests that
share a prefix. Two more are drawn from a seed: `sharegpt` has lognormal lengths like the conversations of that data
set, on average 161 tokens in and 338 out (Kwon et al. 2023, arXiv:2309.06180, figure 11); `decode` has short prompts
and outputs of one length, so that all rows decode together nearly all the time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from ...checks import refusal, shown
from ...errors import ConfigError

FIXED = ("A", "B", "C")
EQUAL = {"decode": (64, 16, 64), "even": (64, 64, 64), "prompt": (1, 1500, 1), "prompt-512": (1, 512, 1)}
"""Workloads of equal requests: how many, and the tokens in and out of each."""
WORKLOADS = (*FIXED, "sharegpt", *EQUAL)
NUM_DRAWN = 64
"""Requests of `sharegpt`."""
SEED = 20231
MEAN_IN, MEAN_OUT, SIGMA_IN, SIGMA_OUT = 161, 338, 1.0, 0.7
"""Mean tokens of drawn prompts and outputs, and the standard deviations of their logarithms."""
MIN_TOKENS, MAX_TOKENS = 4, 1024
"""Fewest and most tokens of a drawn prompt, and of a drawn output."""


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once, in the order of the queue."""

    name: str
    description: str
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]
    """Tokens that each request generates, neither more nor fewer."""

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens that all requests generate together."""
        return sum(self.output_lens)

    @property
    def max_len(self) -> int:
        """Return the tokens of the longest sequence, prompt and output together."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.output_lens, strict=True))


def load_workload(name: str, *, vocab_size: int, num_requests: int | None = None) -> Workload:
    """Return the workload `name`, one of WORKLOADS, with `num_requests` requests; None means all.

    A fixed workload (A, B or C) is cut to its first `num_requests`, if it has more. A drawn one has exactly
    `num_requests`, or its usual number, with token ids below `vocab_size`. Raises ConfigError if there is no such
    workload, or if a fixed one has token ids that the model lacks.
    """
    if name not in WORKLOADS:
        raise refusal("--workload", shown(name), ", ".join(WORKLOADS), error=ConfigError)
    if name not in FIXED:
        return _drawn(name, vocab_size, num_requests)
    data = json.loads(files(__package__).joinpath("workloads.json").read_text())[name]
    requests = data["requests"][:num_requests]
    max_id = max(max(request["prompt"]) for request in requests)
    if max_id >= vocab_size:
        got = f"{name}, whose token ids go up to {max_id}, but the model has {vocab_size} ids"
        raise refusal("--workload", got, ", ".join(("sharegpt", *EQUAL)), error=ConfigError)
    prompts = tuple(tuple(request["prompt"]) for request in requests)
    return Workload(name, data["what"], prompts, tuple(request["out"] for request in requests))


def _drawn(name: str, vocab_size: int, num_requests: int | None) -> Workload:
    """Return `sharegpt` or one of EQUAL with `num_requests` prompts of random token ids below `vocab_size`.

    The seed is fixed, so that the same arguments give the same workload. `sharegpt` has lognormal lengths whose means
    are MEAN_IN and MEAN_OUT tokens.
    """
    rng = np.random.default_rng(SEED)

    def lengths(mean: float, sigma: float) -> list[int]:
        """Draw lognormal lengths in tokens. `sigma` is that of their logarithm; `mean` is that before clipping."""
        # A lognormal distribution has the mean exp(μ + σ² ÷ 2), which is solved for μ.
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(drawn, MIN_TOKENS, MAX_TOKENS).astype(int).tolist()

    if name in EQUAL:
        usual, each_in, each_out = EQUAL[name]
        count = num_requests or usual
        num_in, num_out = [each_in] * count, [each_out] * count
        description = f"{count} requests, {each_in} tokens in and {each_out} out, seeded"
    else:
        count = num_requests or NUM_DRAWN
        num_in, num_out = lengths(MEAN_IN, SIGMA_IN), lengths(MEAN_OUT, SIGMA_OUT)
        description = f"{count} requests of ShareGPT-like lengths, seeded"
    prompts = tuple(tuple(rng.integers(0, vocab_size, length).tolist()) for length in num_in)
    return Workload(name, description, prompts, tuple(num_out))
