"""GPT-OSS: experts, windows on every second layer, and attention sinks. Source: OpenAI 2025, arXiv:2508.10925."""

from __future__ import annotations

from typing import Any

from ...pallas_kernels.activations import SWIGLU_LIMIT
from ..config.decoder import DecoderConfig
from ..config.experts import EXPERT_TRAINING_KEYS, read_experts
from ..config.hf import FULL, SLIDING, num_layers_of, read_layer_types, windows_by_type
from ..decoder import Decoder
from ..fields import Fields
from ..recipe import Source
from .llama import ATTENTION_NAMES, read_biases, read_llama, rope_of

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
ENDS = {"weight": "", "bias": "_bias"}
"""What follows the names of all experts' tensors."""


class GptOss(Decoder):
    """GPT-OSS."""

    config_defaults = {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "rms_norm_eps": 1e-5, "attention_bias": True, "num_experts_per_tok": 4, "rope_parameters": YARN,
    }  # fmt: skip
    fixed_options = {"swiglu_limit": SWIGLU_LIMIT, "swiglu_alpha": 1.702}
    without_effect = EXPERT_TRAINING_KEYS
    tensor_names = ATTENTION_NAMES | {
        "layers.{i}.attention": "model.layers.{i}.self_attn",
        "layers.{i}.mlp.router": "model.layers.{i}.mlp.router",
    }

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read GPT-OSS's config: Llama's keys, windows and experts.

        Layers 0, 2, 4, … have a window, unless the file lists the types of its layers. Experts are chosen by their
        logits, and their weights are a softmax over the chosen ones.
        """
        num_layers = num_layers_of(fields)
        default = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        experts = read_experts(
            fields,
            keys=("num_local_experts", "num_experts"),
            default=128,
            sparse_layers=(True,) * num_layers,
            width=fields.integer("intermediate_size"),
            router_bias=True,
            expert_bias=True,
            activation="clamped_swiglu",
        )
        return read_llama(
            fields,
            rope=rope_of(fields, theta=150_000.0),
            windows=windows_by_type(fields, read_layer_types(fields, default), window),
            experts=experts,
            has_sinks=True,
            **read_biases(fields),
        )

    @classmethod
    def sources(cls, config: DecoderConfig) -> dict[str, Source]:
        """Return where a checkpoint keeps each module: experts in tensors of all, as W [E, in, out], and biases [E, out].

        Outputs of gates and of what they gate take turns.
        """
        assert config.experts is not None, "read_config sets them"
        experts, num_rows = "model.layers.{i}.mlp.experts", 2 * config.experts.width
        options: dict[str, Any] = {"is_transposed": True, "ends": ENDS}
        return super().sources(config) | {
            "layers.{i}.mlp.experts.{e}.gate_proj": Source(
                f"{experts}.gate_up_proj", blocks=((0, num_rows),), step=2, **options
            ),
            "layers.{i}.mlp.experts.{e}.up_proj": Source(
                f"{experts}.gate_up_proj", blocks=((1, num_rows),), step=2, **options
            ),
            "layers.{i}.mlp.experts.{e}.down_proj": Source(f"{experts}.down_proj", **options),
        }
