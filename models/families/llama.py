"""Llama 2 and 3.

Sources: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Llama team 2024, arXiv:2407.21783.
"""

from __future__ import annotations

from typing import Any

from ...pallas_kernels.activations import ACTIVATIONS
from ..config.decoder import DecoderConfig
from ..config.hf import num_layers_of, read_head_size, read_sizes
from ..config.rope import RopeConfig, context_len, read_rope, rope_fields
from ..family import ModelFamily
from ..fields import Fields

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
ATTENTION_NAMES = {module: name for module, name in TENSOR_NAMES.items() if ".mlp." not in module}
"""`TENSOR_NAMES` without the MLP, for families that have experts in its place."""
EXPERT_NAMES = {
    "layers.{i}.mlp.router": "model.layers.{i}.mlp.gate",
    "layers.{i}.mlp.experts.{e}.gate_proj": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "layers.{i}.mlp.experts.{e}.up_proj": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "layers.{i}.mlp.experts.{e}.down_proj": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
"""Names of experts in most families that have them."""


def read_llama(fields: Fields, *, rope: RopeConfig | None = None, **overrides: Any) -> DecoderConfig:
    """Read the config of a family with Llama's keys: one rotary embedding for all layers, and no window.

    `overrides` replace or add fields of `DecoderConfig` for the family, such as `windows` with one entry per layer.
    `rope` is the rotary embedding of a family that reads it in its own way; None reads Llama's. The rotary embedding
    also decides the longest context, since scaling may stretch `max_position_embeddings`. Raises ModelLoadError, which
    names the key, for a value that is missing or not supported.
    """
    sizes, num_layers = read_sizes(fields), num_layers_of(fields)
    rope = rope or read_rope(fields, rope_fields(fields), head_size=sizes["head_size"])
    common: dict[str, Any] = {
        **sizes,
        "norm_eps": fields.number("rms_norm_eps", 1e-6, above=0),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "silu"),
        "ropes": (rope,) * num_layers,
        "windows": (None,) * num_layers,
        "max_context_len": context_len(rope, fields.integer("max_position_embeddings")),
    }
    return DecoderConfig(**{**common, **overrides})


def rope_of(fields: Fields, *, theta: float) -> RopeConfig:
    """Read the rotary embedding of all layers, of whole heads, for a family with another default than Llama's theta."""
    head_size = read_head_size(fields, fields.integer("hidden_size"), fields.integer("num_attention_heads"))
    return read_rope(fields, rope_fields(fields, theta=theta), head_size=head_size)


def read_biases(fields: Fields, *, has_mlp_key: bool = False) -> dict[str, Any]:
    """Return keyword arguments of `DecoderConfig`: which projections have biases; none without the keys.

    The key `attention_bias` is for all projections of attention: of queries, keys and values, and of the output. With
    `has_mlp_key` the family has a key `mlp_bias`, too; without it the MLP has no biases, whatever the file says.
    """
    has_bias = fields.boolean("attention_bias", False)
    mlp_bias = has_mlp_key and fields.boolean("mlp_bias", False)
    return {"qkv_bias": has_bias, "out_bias": has_bias, "mlp_bias": mlp_bias}


class Llama(ModelFamily):
    """Llama."""

    config_defaults = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    without_effect = frozenset({"pretraining_tp"})
    tensor_names = TENSOR_NAMES

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        return read_llama(fields, **read_biases(fields, has_mlp_key=True))
