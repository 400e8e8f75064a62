"""The Llama family: Llama, Mistral and Qwen2 differ in biases, windows and rotary scaling only.

Knows layers and what a checkpoint calls their weights; keys and values go through `cache.attend`.
Source: Touvron et al. 2023, arXiv:2302.13971; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from ...pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from ...pallas_kernels.ragged_paged_attention.paged_cache import AttentionCache
from ..config import ModelConfig
from ..layers import Embedding, FusedLinear, Linear, RMSNorm, WeightMaker
from ..rope import Rotation, attention_factor, inverse_frequencies, rotation_at

TENSOR_NAMES = {
    "embed": "model.embed_tokens",
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.attention.q_proj": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.attention.k_proj": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.attention.v_proj": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.attention.o_proj": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.mlp.down_proj": "model.layers.{i}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
"""Module, or part of a fused one, → what checkpoints call it; `.weight` and `.bias` follow on both sides."""


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, *, make: WeightMaker) -> None:
        hidden, head = config.hidden_size, config.head_size
        queries, keys = config.num_heads * head, config.num_kv_heads * head
        parts = ("q_proj", queries), ("k_proj", keys), ("v_proj", keys)
        self.qkv_proj = FusedLinear(hidden, parts, axes=("embed", "kv_heads"), bias=config.qkv_bias, make=make)
        self.o_proj = Linear(queries, hidden, axes=("heads", "embed"), bias=config.out_bias, make=make)
        self.head_size = head

    def project(self, x_TD: Float[Array, "T D"], rotation: Rotation) -> list[Float[Array, "T H S"]]:
        """Return queries, keys and values by head, the first two rotated."""
        q_TNH, k_TKH, v_TKH = (part.reshape(x_TD.shape[0], -1, self.head_size) for part in self.qkv_proj(x_TD))
        return [rotation.apply(q_TNH), rotation.apply(k_TKH), v_TKH]


class MLP(nnx.Module):
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, config: ModelConfig, *, make: WeightMaker) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = (("gate_proj", inner), ("up_proj", inner))
        options: dict[str, Any] = {"bias": config.mlp_bias, "make": make}
        self.gate_up_proj = FusedLinear(hidden, parts, axes=("embed", "mlp"), **options)
        self.down_proj = Linear(inner, hidden, axes=("mlp", "embed"), **options)

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_TF, up_TF = self.gate_up_proj(x_TD)
        return self.down_proj(jax.nn.silu(gate_TF) * up_TF)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind its norm and added to the stream.

    `before` and `after` the cache are jitted functions: layers differ in their weights alone, so JAX traces each
    function once and not once per layer.
    """

    def __init__(self, config: ModelConfig, *, make: WeightMaker) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, make=make)
        self.attention = Attention(config, make=make)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, make=make)
        self.mlp = MLP(config, make=make)

    @jax.jit
    def before(self, x_TD: Float[Array, "T D"], rotation: Rotation) -> list[Float[Array, "T H S"]]:
        """Return the layer's queries, keys and values."""
        return self.attention.project(self.attention_norm(x_TD), rotation)

    @jax.jit
    def after(self, x_TD: Float[Array, "T D"], out_TNH: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        """Return the stream after the layer; `out_TNH` is what attention gave."""
        x_TD = x_TD + self.attention.o_proj(out_TNH.reshape(x_TD.shape[0], -1))
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class Llama(nnx.Module):
    """A decoder of the Llama family. `__call__` gives hidden states, `logits` the scores of chosen rows of them."""

    tensor_names = TENSOR_NAMES
    logits_modules = ("embed", "head")
    """Modules that `logits` needs: the head, or the embedding where they are tied."""

    def __init__(self, config: ModelConfig, *, make: WeightMaker) -> None:
        is_tied = config.tie_word_embeddings
        self.embed = Embedding(config.vocab_size, config.hidden_size, is_tied=is_tied, make=make)
        self.layers = nnx.List([DecoderLayer(config, make=make) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, make=make)
        self.rope, self.head_size, self.windows = config.rope, config.head_size, config.windows
        # A tied model has no matrix of its own for the output.
        self.head = (
            nnx.data(None)
            if is_tied
            else Linear(config.hidden_size, config.vocab_size, axes=("embed", "vocab"), bias=False, make=make)
        )

    def __call__(
        self, token_ids: Int[Array, " T"], cache: AttentionCache, step: AttentionMetadata
    ) -> tuple[Float[Array, "T D"], Any]:
        """Return hidden states after the last norm, and the cache with this step's keys and values."""
        x_TD = self.embed(token_ids)
        frequencies, factor = inverse_frequencies(self.rope, self.head_size), attention_factor(self.rope)
        rotation = rotation_at(step.positions, frequencies, factor)
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            q_TNH, k_TKH, v_TKH = layer.before(x_TD, rotation)
            scale = self.head_size**-0.5
            out_TNH, cache = cache.attend(index, q_TNH, k_TKH, v_TKH, step, scale=scale, window=window)
            x_TD = layer.after(x_TD, out_TNH)
        return self.norm(x_TD), cache

    def logits(self, x_RD: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return scores over the vocabulary in float32."""
        return self.embed.logits(x_RD) if self.head is None else self.head.product(x_RD)
