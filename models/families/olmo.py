"""OLMo 2 and 3: norms behind attention and MLP, not in front, and of all queries and of all keys; OLMoE: experts.

Sources: OLMo team 2024, arXiv:2501.00656; OLMo 3: OLMo team 2025, arXiv:2512.13961; OLMoE: Muennighoff et al. 2024,
arXiv:2409.02060.
"""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.experts import EXPERT_TRAINING_KEYS, read_experts
from ..config.hf import FULL, SLIDING, num_layers_of, read_head_size, read_layer_types, windows_by_type
from ..config.rope import read_ropes_by_type
from ..family import ModelFamily
from ..fields import Fields
from .llama import ATTENTION_NAMES, EXPERT_NAMES, TENSOR_NAMES, read_biases, read_llama
from .qwen3 import QK_NORM_NAMES


class Olmo2(ModelFamily):
    """OLMo 2."""

    config_defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
    tensor_names = {
        **TENSOR_NAMES,
        **QK_NORM_NAMES,
        "layers.{i}.attention_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
    }
    decoder = "decoders.olmo.PostNormDecoder"

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        return read_llama(fields, **read_biases(fields), qk_norm="all")


class Olmo3(Olmo2):
    """OLMo 3: OLMo 2 with windows on three of four layers, and a rotary embedding for each of the two kinds."""

    config_defaults = {**Olmo2.config_defaults, "sliding_window": 4096}

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read OLMo 3's config: layers 3, 7, 11, … have full attention and the others a window.

        The file may list the types of its layers instead. Each type has its own rotary embedding. The longest context
        follows from that of layers with full attention or, without such layers, from that of the first layer.
        """
        default = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(num_layers_of(fields))]
        layer_types = read_layer_types(fields, default)
        head_size = read_head_size(fields, fields.integer("hidden_size"), fields.integer("num_attention_heads"))
        # (Key of the theta at the top level, default theta): layers with a window have no such key.
        thetas = {FULL: ("rope_theta", 500_000.0), SLIDING: (None, 500_000.0)}
        ropes = read_ropes_by_type(fields, layer_types, head_size=head_size, thetas=thetas)
        return read_llama(
            fields,
            rope=next((rope for rope, kind in zip(ropes, layer_types, strict=True) if kind == FULL), ropes[0]),
            ropes=ropes,
            windows=windows_by_type(fields, layer_types, fields.integer("sliding_window")),
            **read_biases(fields),
            qk_norm="all",
        )


class Olmoe(ModelFamily):
    """OLMoE: norms in front, as in Llama, norms of all queries and of all keys, and experts on all layers."""

    config_defaults = {
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 50279, "num_experts_per_tok": 8,
        "intermediate_size": 2048,
    }  # fmt: skip
    fixed_options = {"clip_qkv": None}
    without_effect = EXPERT_TRAINING_KEYS
    tensor_names = {**ATTENTION_NAMES, **QK_NORM_NAMES, **EXPERT_NAMES}

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        experts = read_experts(
            fields,
            keys=("num_experts", "num_local_experts"),
            default=64,
            sparse_layers=(True,) * num_layers_of(fields),
            width=fields.integer("intermediate_size"),
            renormalizes=fields.boolean("norm_topk_prob", False),
        )
        return read_llama(fields, **read_biases(fields), qk_norm="all", experts=experts)
