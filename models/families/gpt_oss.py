"""GPT-OSS: experts, windows on every second layer, and attention sinks. Source: OpenAI 2025, arXiv:2508.10925."""

from __future__ import annotations

from typing import Any

from ...pallas_kernels.activations import SWIGLU_LIMIT
from ..config.decoder import DecoderConfig
from ..config.experts import EXPERT_TRAINING_KEYS, read_experts
from ..config.hf import FULL, SLIDING, num_layers_of, read_layer_types, windows_by_type
from ..family import ModelFamily
from ..fields import Fields
from ..formats.packed_matrix import BLOCKS
from ..sources import Source
from .llama import ATTENTION_NAMES, read_biases, read_llama, rope_of

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
ENDS = {"weight": "", "bias": "_bias"}
"""What follows the names of all experts' tensors."""


class GptOss(ModelFamily):
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
        """Return where a checkpoint keeps each module.

        Experts are in tensors of all, W [E, in, out] and biases [E, out], whose outputs of gate and up take turns.
        OpenAI's own files have codes of Wᵀ [E, out, in] instead, and GGUF files have gate and up apart.
        """
        assert config.experts is not None, "read_config sets them"
        experts, num_rows, found = "model.layers.{i}.mlp.experts", 2 * config.experts.width, super().sources(config)
        for part, first_row in (("gate_proj", 0), ("up_proj", 1), ("down_proj", None)):
            is_down = first_row is None
            name = f"{experts}.{'down_proj' if is_down else 'gate_up_proj'}"
            rows: dict[str, Any] = {} if is_down else {"blocks": ((first_row, num_rows),), "step": 2}
            others = Source(name, ends={**ENDS, "weight": BLOCKS}, **rows), Source(f"{experts}.{part}")
            source = Source(name, is_transposed=True, ends=ENDS, others=others, **rows)
            found["layers.{i}.mlp.experts.{e}." + part] = source
        return found
