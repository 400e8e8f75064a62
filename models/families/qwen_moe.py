"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts on some layers or on all.

Sources: Qwen team 2024, arXiv:2407.10671; Qwen3: Qwen team 2025, arXiv:2505.09388.
"""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.experts import EXPERT_TRAINING_KEYS, read_experts, read_sparse_layers
from ..config.hf import FULL, SLIDING, num_layers_of, read_layer_types, windows_by_type
from ..family import ModelFamily
from ..fields import Fields
from .llama import EXPERT_NAMES, TENSOR_NAMES, read_biases, read_llama
from .qwen3 import QK_NORM_NAMES


def _window(fields: Fields) -> int | None:
    """Return the window of layers that have one; None unless `use_sliding_window` is true."""
    is_used, has_window = fields.boolean("use_sliding_window", False), fields.has("sliding_window")
    # transformers writes a window of 0 where none is in use.
    return fields.integer("sliding_window") if is_used and has_window else None


class Qwen2Moe(ModelFamily):
    """Qwen2-MoE and Qwen1.5-MoE: every token also takes a shared expert, whose output a sigmoid scales."""

    config_defaults = {
        "max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 16, "num_experts_per_tok": 4,
        "intermediate_size": 5632,
    }  # fmt: skip
    without_effect = EXPERT_TRAINING_KEYS
    tensor_names = {
        **TENSOR_NAMES,
        **EXPERT_NAMES,
        "layers.{i}.mlp.shared.gate_proj": "model.layers.{i}.mlp.shared_expert.gate_proj",
        "layers.{i}.mlp.shared.up_proj": "model.layers.{i}.mlp.shared_expert.up_proj",
        "layers.{i}.mlp.shared.down_proj": "model.layers.{i}.mlp.shared_expert.down_proj",
        "layers.{i}.mlp.shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
    }

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Qwen2-MoE's config: Llama's keys, experts, and windows.

        Unlike in Qwen2, windows that are in use are on the layers 0, 2, 4, … below number `max_window_layers`, unless
        the file lists the types of its layers.
        """
        num_layers, window = num_layers_of(fields), _window(fields)
        max_window_layers = fields.integer("max_window_layers", 28, min=0)
        end = 0 if window is None else max_window_layers
        default = [FULL if layer % 2 or layer >= end else SLIDING for layer in range(num_layers)]
        experts = read_experts(
            fields,
            keys=("num_experts",),
            default=60,
            sparse_layers=read_sparse_layers(fields, num_layers),
            width=fields.integer("moe_intermediate_size", 1408),
            renormalizes=fields.boolean("norm_topk_prob", False),
            shared_width=fields.integer("shared_expert_intermediate_size", 5632),
            has_shared_gate=True,
        )
        return read_llama(
            fields,
            qkv_bias=fields.boolean("qkv_bias", True),
            windows=windows_by_type(fields, read_layer_types(fields, default), window),
            experts=experts,
        )


class Qwen3Moe(ModelFamily):
    """Qwen3-MoE."""

    config_defaults = {
        "max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 4, "num_experts_per_tok": 8,
        "intermediate_size": 6144,
    }  # fmt: skip
    without_effect = EXPERT_TRAINING_KEYS
    tensor_names = {**TENSOR_NAMES, **QK_NORM_NAMES, **EXPERT_NAMES}

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Qwen3-MoE's config: Llama's keys, experts, and a window that, if it is in use, all layers have."""
        num_layers = num_layers_of(fields)
        experts = read_experts(
            fields,
            keys=("num_experts", "num_local_experts"),
            default=128,
            sparse_layers=read_sparse_layers(fields, num_layers),
            width=fields.integer("moe_intermediate_size", 768),
            renormalizes=fields.boolean("norm_topk_prob", False),
        )
        windows = (_window(fields),) * num_layers
        return read_llama(fields, **read_biases(fields), windows=windows, qk_norm="head", experts=experts)
