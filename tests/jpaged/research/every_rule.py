"""Tokens drawn under every logit rule and way of sampling. Run as a module, it prints those of a model's directory."""

import json
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from jpaged import BeamSearchParams, Engine, LogitsProcessor, SamplingParams
from jpaged.step import step_sizes

from ..fewest_buckets import fewest_buckets
from ..tiny_model import SIZES

IDS = [5, 99, 200, 7, 31] * 3
ONE: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "detokenize": False, "temperature": 0.8, "seed": 1 << 40}
SHIFT = LogitsProcessor(
    "shift", ("shift",), lambda logits, shift: logits + shift * jnp.sin(jnp.linspace(0, 99, len(logits)))
)
PARAMS: list[Any] = [
    SamplingParams(**{**ONE, "temperature": 0}, logprobs=3),
    SamplingParams(**ONE, allowed_token_ids=[5, 6, 7, 9]),
    SamplingParams(**{**ONE, "detokenize": True}, bad_words=["ab", "c"]),
    SamplingParams(**{**ONE, "ignore_eos": False}, min_tokens=4, logit_bias={0: 90.0}),
    SamplingParams(**ONE, logit_bias={5: 3.0, 7: -3.0}),
    SamplingParams(**ONE, extra_args={"shift": 2.5}),
    SamplingParams(**ONE, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
    SamplingParams(**ONE, top_k=30, top_p=0.9, min_p=0.01, logprobs=2, prompt_logprobs=2, log_kept_mass=True, n=2),
    BeamSearchParams(beam_width=3, max_tokens=4),
]


def tokens_by_every_rule(directory: str) -> list[list[tuple[int, ...]]]:
    """Return the tokens of all samples of each of PARAMS, by two attention backends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_sizes, "make_buckets", fewest_buckets)
        return _tokens(directory)


def _tokens(directory: str) -> list[list[tuple[int, ...]]]:
    found: list[list[tuple[int, ...]]] = []
    options: dict[str, Any]
    for options, chosen in (
        ({"attention_backend": "native"}, PARAMS),
        ({"attention_backend": "xla", "num_decode_steps": 1}, PARAMS[1:2]),
    ):
        with Engine(directory, logits_processors=[SHIFT], max_logprobs=8, **options, **SIZES) as engine:
            for params in chosen:
                outputs = engine.generate([jnp.array(IDS), IDS[:4]], params)
                assert all(output.error is None for output in outputs), [output.error for output in outputs]
                found.append([sample.token_ids for output in outputs for sample in output.outputs])
            assert engine.stats()["recompiles"] == 0
    return found


if __name__ == "__main__":
    print(json.dumps(tokens_by_every_rule(sys.argv[1])))
