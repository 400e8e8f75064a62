"""Serve a model that was written and trained in Flax Linen. Run: python examples/linen_model.py"""

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jpaged import AttentionLayer, Engine, ModelSpec, SamplingParams
from jpaged.models.dense import DenseAttention, dense_logprobs
from jpaged.models.inputs import unpaged_inputs

HEADS, HEAD_SIZE, LAYERS = 2, 16, 2
SPEC = ModelSpec(
    vocab_size=97,
    hidden_size=32,
    dtype="float32",
    max_context_len=256,
    layers=(AttentionLayer(num_heads=HEADS, num_kv_heads=HEADS, head_size=HEAD_SIZE),) * LAYERS,
)


class Model(linen.Module):
    """A decoder whose attention goes through the cache that it is given, the engine's or a trainer's dense one."""

    def setup(self):
        self.tokens = linen.Embed(SPEC.vocab_size, SPEC.hidden_size)
        self.qkv = [linen.Dense(3 * HEADS * HEAD_SIZE) for _ in range(LAYERS)]
        self.out = [linen.Dense(SPEC.hidden_size) for _ in range(LAYERS)]

    def __call__(self, inputs, cache):
        x = self.tokens(inputs.token_ids)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = jnp.split(qkv(x).reshape(-1, 3 * HEADS, HEAD_SIZE), 3, axis=1)
            attended, cache = cache.attend(layer, q, k, v, inputs.attention, scale=HEAD_SIZE**-0.5)
            x = x + out(attended.reshape(x.shape))
        return x, cache

    def logits(self, hidden):
        return self.tokens.attend(hidden)


class Linen(nnx.Module):
    """A Linen model and its parameters, as a module of nnx: their paths are those of Linen's tree, behind "params"."""

    def __init__(self, model: linen.Module, params, spec: ModelSpec):
        self.model, self.spec = nnx.static(model), nnx.static(spec)
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def apply(self, *arguments, method=None):
        params = jax.tree.map(lambda one: one[...], self.params, is_leaf=lambda one: isinstance(one, nnx.Param))
        return self.model.apply({"params": params}, *arguments, method=method)

    def __call__(self, inputs, cache):
        return self.apply(inputs, cache)

    def logits(self, hidden):
        return self.apply(hidden, method="logits")


if __name__ == "__main__":
    ids = jnp.arange(8)
    params = Model().init(jax.random.key(0), unpaged_inputs(ids, ids), DenseAttention(1))["params"]
    model = Linen(Model(), params, SPEC)
    with Engine(model, max_num_seqs=8) as engine:
        sample = engine.generate([1, 2, 3], SamplingParams(max_tokens=16))[0].outputs[0]
        print(sample.token_ids)
        # A trainer's tree, as it is: Linen's {"params": …}.
        engine.update_params({"params": jax.tree.map(lambda leaf: 0.9 * leaf, params)})
        trained = Linen(Model(), jax.tree.map(lambda leaf: 0.9 * leaf, params), SPEC)
        ours, theirs = engine.logprobs(ids), dense_logprobs(trained, ids[None])[0]
        print("largest difference of logprobs:", float(jnp.abs(ours - theirs).max()))
