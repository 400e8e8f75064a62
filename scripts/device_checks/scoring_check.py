"""The item about scoring: given tokens are scored as they were drawn, and what the likeliest tokens cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import SamplingParams

from .engine_check import DUMMY, LLAMA_8B, NEAR_TIE, TINY_8B, TINY_OPTIONS, before_8b, engine_with
from .items import Item
from .kernel_items import Session, one

FOUR_LAYERS = {**LLAMA_8B, "num_hidden_layers": 4}


def measure_scores(session: Session) -> dict[str, Any]:
    """Compare scores of drawn tokens with the logprobs that they were drawn with, and time the likeliest tokens.

    The weights are random, in bfloat16. Raises AssertionError if two logprobs of one token are further apart than
    bfloat16 rounds: drawn one by one or scored at once, asked for by rank or by id.
    """
    config = TINY_8B if session.is_tiny else FOUR_LAYERS
    prompts, counts = ((2, 8), (4,)) if session.is_tiny else ((16, 300), (64, 256, 1000))
    num_samples, num_drawn = (2, 4) if session.is_tiny else (4, 64)
    options: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 1024}
    options = DUMMY | (TINY_OPTIONS | {"enable_prefix_caching": True} if session.is_tiny else options)
    ids = np.random.default_rng(session.seed).integers(1, config["vocab_size"], prompts)
    params = SamplingParams(n=num_samples, max_tokens=num_drawn, seed=1, ignore_eos=True, detokenize=False)
    with engine_with(config, session.backends[0], max_logprobs=max(counts), **options) as engine:
        drawn = engine.generate(ids, params, use_tqdm=False, return_arrays=True)
        before = engine.stats()["step_tokens"]
        scores = engine.score(ids, np.asarray(drawn.tokens).reshape(len(ids), num_samples, num_drawn))
        computed = engine.stats()["step_tokens"] - before
        tops = engine.logprobs(ids, top_k=max(counts))
        by_id = engine.logprobs(ids, token_ids=tops.token_ids)
        distances = {
            "drawn and scored": float(jnp.abs(scores.logprobs - drawn.logprobs).max()),
            "by rank and by id": float(jnp.abs(tops.logprobs - by_id).max()),
        }
        assert max(distances.values()) <= NEAR_TIE, f"logprobs of the same tokens differ: {distances}"
        ways: dict[str, Callable[[], Any]] = {"own": lambda: engine.logprobs(ids)}
        ways |= {str(count): (lambda count=count: engine.logprobs(ids, top_k=count)) for count in counts}
        seconds = _medians(engine.reset_prefix_cache, ways, 1 if session.is_tiny else 5)
        return {
            "distances": distances,
            "computed ÷ distinct tokens": computed / (ids.size + drawn.tokens.size),
            "tokens_per_s": {name: ids.size / value for name, value in seconds.items()},
            "speed ÷ own": {name: seconds["own"] / value for name, value in seconds.items()},
            "recompiles": engine.stats()["recompiles"],
        }


def _medians(prepare: Callable[[], Any], ways: Mapping[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Return the median seconds of each way; the ways take turns, and the first run of each, which compiles, is left
    out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            prepare()
            start = time.perf_counter()
            jax.block_until_ready(way())
            if run:
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def scoring_item(environment: Mapping[str, str]) -> Item:
    """Return the item, in a process of its own with these variables."""
    about = "scores of drawn tokens beside their logprobs; speed of the likeliest"
    return one("scores", 1.3, about, measure_scores, environment=dict(environment), before_opening=before_8b)
