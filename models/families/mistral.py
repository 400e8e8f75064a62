"""Mistral: Llama with a sliding window on every layer. Mixtral: Mistral whose MLPs are experts, two for each token.

Sources: Jiang et al. 2023, arXiv:2310.06825; Mixtral: Jiang et al. 2024, arXiv:2401.04088.
"""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.experts import EXPERT_TRAINING_KEYS, read_experts
from ..config.hf import FULL, SLIDING, num_layers_of, read_layer_types
from ..family import ModelFamily
from ..fields import Fields
from .llama import ATTENTION_NAMES, TENSOR_NAMES, read_llama, rope_of
from .table import IMAGE_TENSORS, LANGUAGE_MODEL_BASES


class Mistral(ModelFamily):
    """Mistral."""

    config_defaults = {
        "max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    tensor_names = TENSOR_NAMES
    other_bases = LANGUAGE_MODEL_BASES
    other_names = {"lm_head.weight": "language_model.lm_head.weight"}
    ignored_tensors = IMAGE_TENSORS

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Mistral's config: Llama's keys, and one window for all layers, or none.

        There is a window if `sliding_window` is not null. If the file has `layer_types`, they must agree with that, or
        ModelLoadError is raised: a list that mixes both types is not supported.
        """
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        layer_types = [FULL if window is None else SLIDING] * num_layers_of(fields)
        if read_layer_types(fields, layer_types) != layer_types:
            raise fields.wrong("layer_types", "the same type for all layers of Mistral, as sliding_window says")
        return read_llama(fields, windows=(window,) * len(layer_types))


class Mixtral(ModelFamily):
    """Mixtral."""

    config_defaults = {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
    }  # fmt: skip
    without_effect = EXPERT_TRAINING_KEYS | {"router_jitter_noise"}
    tensor_names = ATTENTION_NAMES | {
        "layers.{i}.mlp.router": "model.layers.{i}.block_sparse_moe.gate",
        "layers.{i}.mlp.experts.{e}.gate_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        "layers.{i}.mlp.experts.{e}.up_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
        "layers.{i}.mlp.experts.{e}.down_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
    }

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Mixtral's config: Llama's keys, one window for all layers or none, and experts on all layers."""
        num_layers = num_layers_of(fields)
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        experts = read_experts(
            fields,
            keys=("num_local_experts", "num_experts"),
            default=8,
            sparse_layers=(True,) * num_layers,
            width=fields.integer("intermediate_size"),
        )
        rope = rope_of(fields, theta=1_000_000.0)
        return read_llama(fields, rope=rope, windows=(window,) * num_layers, experts=experts)
