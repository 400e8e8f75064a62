"""Reinforcement learning in one process: the engine draws, the trainer learns, and the engine takes its live weights.

    python examples/grpo.py [SEED]

A loop of GRPO (Shao et al. 2024, arXiv:2402.03300) on the module of own_model.py. The reward of an output is the share
of its tokens that are one more than the token before.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from own_model import VOCAB, Tiny

from jpaged import Engine, SamplingParams
from jpaged.models.dense import dense_logprobs

PROMPTS = [[first, first + 1, first + 2] for first in range(1, 81, 10)]
GROUP, LENGTH, STEPS, PASSES, CLIP = 8, 16, 40, 2, 0.2


def rewards_of(ids: jax.Array) -> jax.Array:
    """Return the reward of each sample [B], given prompts and outputs [B, N]."""
    follows = ids[:, 1:] == (ids[:, :-1] + 1) % VOCAB
    return follows[:, -LENGTH:].mean(axis=1)


@nnx.jit
def train(model: Tiny, optimizer: nnx.Optimizer, ids: jax.Array, drawn: jax.Array, advantages: jax.Array) -> None:
    """Take one step on samples [B, N], of which the last LENGTH tokens were drawn with the logprobs `drawn`."""

    def loss(model: Tiny) -> jax.Array:
        ratio = jnp.exp(dense_logprobs(model, ids)[:, -LENGTH:] - drawn)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def main(seed: int = 0) -> list[float]:
    """Train, and return the mean reward of each step."""
    model = Tiny(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    history = []
    params = SamplingParams(n=GROUP, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    with Engine(model, seed=seed, max_num_seqs=64, max_num_batched_tokens=128, max_model_len=64) as engine:
        for step in range(STEPS):
            samples = engine.generate(PROMPTS, params, return_arrays=True)
            ids = jnp.concatenate([samples.prompt_tokens, samples.tokens], axis=1)
            rewards = rewards_of(ids)
            groups = rewards.reshape(-1, GROUP)
            spread = groups.std(axis=1, keepdims=True) + 1e-4
            advantages = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)
            for _ in range(PASSES):
                train(model, optimizer, ids, samples.logprobs, advantages)
            engine.update_params(nnx.state(model, nnx.Param), version=step + 1)
            history.append(float(rewards.mean()))
            if step % 10 == 9:
                print(f"step {step + 1}: mean reward {np.mean(history[-10:]):.3f}")
    return history


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
