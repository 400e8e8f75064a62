"""Mixtral: Mistral whose MLPs are experts, two of eight for each token. Source: Jiang et al. 2024, arXiv:2401.04088."""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.experts import ExpertsConfig
from ..config.hf import num_layers_of
from ..decoder import Decoder
from ..fields import Fields
from .llama import TENSOR_NAMES, read_llama

ATTENTION_NAMES = {module: name for module, name in TENSOR_NAMES.items() if ".mlp." not in module}


class Mixtral(Decoder):
    """Mixtral."""

    config_defaults = {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 8,
    }  # fmt: skip
    without_effect = frozenset({"router_aux_loss_coef", "output_router_logits", "router_jitter_noise"})
    tensor_names = ATTENTION_NAMES | {
        "layers.{i}.mlp.router": "model.layers.{i}.block_sparse_moe.gate",
        "layers.{i}.mlp.experts.{e}.gate_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        "layers.{i}.mlp.experts.{e}.up_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
        "layers.{i}.mlp.experts.{e}.down_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
    }

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Mixtral's config. A window, if there is one, is on all layers."""
        num_layers = num_layers_of(fields)
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        num_experts = fields.integer("num_local_experts")
        experts = ExpertsConfig(
            num_experts=num_experts,
            num_chosen=fields.integer("num_experts_per_tok", max=num_experts),
            width=fields.integer("intermediate_size"),
            sparse_layers=(True,) * num_layers,
        )
        return read_llama(fields, windows=(window,) * num_layers, experts=experts)
