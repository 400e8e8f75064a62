"""Asynchronous reinforcement learning: samples are drawn in the engine's own thread while the trainer computes.

    python examples/async_grpo.py [SEED]

The loop of grpo.py, but the engine never waits for the trainer: it goes on with the samples in flight while weights
change under them. The ratios of the loss are those to the logprobs that the samples were drawn with. A group is at most
STALENESS versions older than the weights, because groups come in the order of their prompts and only so many are in
flight.
"""

import sys
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from grpo import GROUP, LENGTH, rewards_of, train
from own_model import VOCAB, Tiny

from jpaged import Engine, SamplingParams

UPDATES, GROUPS, STALENESS = 60, 8, 2


def prompts(seed: int) -> Iterator[list[int]]:
    """Yield prompts of three ascending tokens without end."""
    rng = np.random.default_rng(seed)
    while True:
        first = int(rng.integers(1, VOCAB - 3))
        yield [first, first + 1, first + 2]


def main(seed: int = 0) -> tuple[list[float], int]:
    """Train; return the mean reward of each update, and by how many versions the oldest token was behind."""
    model = Tiny(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    params = SamplingParams(n=GROUP, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    history, staleness = [], 0
    with (
        Engine(model, seed=seed, max_num_seqs=64, max_num_batched_tokens=128, max_model_len=64) as engine,
        engine.submit(prompts(seed), params, max_in_flight=GROUPS * STALENESS, in_order=True) as rollouts,
    ):
        for version in range(UPDATES):
            samples = rollouts.take(GROUPS)
            staleness = max(staleness, version - int(samples.versions.min(where=samples.mask, initial=version)))
            ids = jnp.concatenate([samples.prompt_tokens, samples.tokens], axis=1)
            rewards = rewards_of(ids)
            groups = rewards.reshape(-1, GROUP)
            spread = groups.std(axis=1, keepdims=True) + 1e-4
            advantages = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)
            train(model, optimizer, ids, samples.logprobs, advantages)
            engine.update_params(nnx.state(model, nnx.Param), version=version + 1, in_flight="keep")
            history.append(float(rewards.mean()))
            if version % 10 == 9:
                print(f"update {version + 1}: mean reward {np.mean(history[-10:]):.3f}, staleness {staleness}")
    return history, staleness


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
