"""Serve a module of your own, and compute the same module as a trainer would. Run: python examples/own_model.py"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged import AttentionLayer, Engine, ModelSpec, SamplingParams
from jpaged.models.dense import dense_logprobs

VOCAB, HIDDEN, HEADS, HEAD_SIZE, LAYERS = 97, 64, 4, 16, 2


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm. Keys and values go through the cache that the engine brings."""

    def __init__(self, layer: int, rngs: nnx.Rngs):
        self.layer = layer
        self.norm_1, self.norm_2 = (nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(HIDDEN, 3 * HEADS * HEAD_SIZE, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_SIZE, HIDDEN, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(HIDDEN, 256, rngs=rngs), nnx.Linear(256, HIDDEN, rngs=rngs)

    def __call__(self, x, inputs, cache):
        q, k, v = jnp.split(self.qkv(self.norm_1(x)).reshape(-1, 3 * HEADS, HEAD_SIZE), 3, axis=1)
        attended, cache = cache.attend(self.layer, q, k, v, inputs.attention, scale=HEAD_SIZE**-0.5)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x)))), cache


class Tiny(nnx.Module):
    """A decoder with learned positions. An engine calls it with all tokens of a step in one row, [T]."""

    spec = ModelSpec(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        dtype="float32",
        max_context_len=256,
        layers=(AttentionLayer(num_heads=HEADS, num_kv_heads=HEADS, head_size=HEAD_SIZE),) * LAYERS,
    )

    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.positions = nnx.Embed(VOCAB, HIDDEN, rngs=rngs), nnx.Embed(256, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(layer, rngs) for layer in range(LAYERS)])

    def __call__(self, inputs, cache):
        x = self.tokens(inputs.token_ids) + self.positions(inputs.attention.positions)
        for block in self.blocks:
            x, cache = block(x, inputs, cache)
        return x, cache

    def logits(self, hidden):
        return self.tokens.attend(hidden).astype(jnp.float32)


if __name__ == "__main__":
    model = Tiny(nnx.Rngs(0))
    with Engine(model, max_num_seqs=8) as engine:
        params = SamplingParams(max_tokens=16, logprobs=0, detokenize=False)
        output = engine.generate([1, 2, 3], params)[0]
        drawn = output.outputs[0].token_ids
        print("drawn:", drawn)
        trainer = dense_logprobs(model, jnp.array([[1, 2, 3, *drawn]]))[0, 2:]
        ours = [entry[token].logprob for token, entry in zip(drawn, output.outputs[0].logprobs, strict=True)]
        print("largest difference between engine and trainer:", np.abs(trainer - np.array(ours)).max())

        # A trainer's step changes the weights; the engine takes them, and says which of them drew which tokens.
        graph, state = nnx.split(model)
        engine.update_params(jax.tree.map(lambda x: 1.1 * x, state))
        print(engine.generate([1, 2, 3], params)[0].outputs[0].weight_versions)
