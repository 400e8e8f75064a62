"""Gemma 2 and 3 (text): a norm on both sides of attention and MLP, gains stored as 1 + w, a scaled embedding.

Sources: Gemma team 2024, arXiv:2408.00118; Gemma team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

from typing import Any

from ...pallas_kernels.activations import ACTIVATIONS
from ..config.decoder import DecoderConfig
from ..config.hf import FULL, SLIDING, num_layers_of, read_layer_types, read_sizes, windows_by_type
from ..config.rope import context_len, read_rope, read_ropes_by_type, rope_fields
from ..family import ModelFamily
from ..fields import Fields
from .llama import TENSOR_NAMES, read_biases
from .qwen3 import QK_NORM_NAMES
from .table import IMAGE_TENSORS, LANGUAGE_MODEL_BASES


class Gemma2(ModelFamily):
    """Gemma 2."""

    config_defaults = {
        "vocab_size": 256000, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }  # fmt: skip
    without_effect = frozenset({"use_bidirectional_attention"})
    tensor_names = {
        **TENSOR_NAMES,
        "layers.{i}.attention_out_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
        "layers.{i}.mlp_out_norm": "model.layers.{i}.post_feedforward_layernorm",
    }
    decoder = "decoders.gemma.GemmaDecoder"

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Gemma 2's config: layers 0, 2, 4, … have a window, unless the file lists the types of its layers.

        All layers share one rotary embedding, which may make the context longer than `max_position_embeddings`.
        """
        default = [SLIDING if layer % 2 == 0 else FULL for layer in range(num_layers_of(fields))]
        layer_types, common = read_layer_types(fields, default), _read_common(fields)
        rope = read_rope(fields, rope_fields(fields), head_size=common["head_size"])
        return DecoderConfig(
            **common | {"max_context_len": context_len(rope, common["max_context_len"])},
            ropes=(rope,) * len(layer_types),
            windows=windows_by_type(fields, layer_types, fields.integer("sliding_window")),
            attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping"),
        )


class Gemma3(Gemma2):
    """Gemma 3, text only: norms of queries and keys, and another rotary embedding on layers with a window."""

    config_defaults = {
        **Gemma2.config_defaults, "vocab_size": 262208, "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
    }  # fmt: skip
    # transformers' class stores the soft cap of attention and does not apply it.
    without_effect = frozenset({"attn_logit_softcapping", "_sliding_window_pattern"})
    fixed_options = {"use_bidirectional_attention": False}
    tensor_names = Gemma2.tensor_names | QK_NORM_NAMES
    other_bases = LANGUAGE_MODEL_BASES
    other_names = {"lm_head.weight": "language_model.lm_head.weight"}
    ignored_tensors = IMAGE_TENSORS

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Gemma 3's config: layers 5, 11, 17, … have full attention and the others a window.

        The file may give another period than 6, or list the types of its layers. Layers with and without a window have
        different rotary embeddings, with the default thetas 10,000 and 1,000,000.
        """
        pattern = fields.integer("sliding_window_pattern", 6)
        # Layers count from 0, so the last of each `pattern` layers has full attention.
        default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers_of(fields))]
        layer_types, common = read_layer_types(fields, default), _read_common(fields)
        # Layer type → (key of its theta at the top level of older files, default theta).
        thetas = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
        return DecoderConfig(
            **common,
            ropes=read_ropes_by_type(fields, layer_types, head_size=common["head_size"], thetas=thetas),
            windows=windows_by_type(fields, layer_types, fields.integer("sliding_window")),
            qk_norm="head",
        )


def _read_common(fields: Fields) -> dict[str, Any]:
    """Return keyword arguments of `DecoderConfig` whose keys are the same for Gemma 2 and 3.

    They are the sizes, biases, activation, norm and token ids, the longest context before rotary scaling, the bound of
    the logits, and the factor of attention scores, 1 ÷ √query_pre_attn_scalar.
    """
    return {
        **read_sizes(fields),
        **read_biases(fields),
        "norm_eps": fields.number("rms_norm_eps", 1e-6, above=0),
        "activation": fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        "max_context_len": fields.integer("max_position_embeddings"),
        "attention_scale": fields.number("query_pre_attn_scalar", above=0) ** -0.5,
        "logits_soft_cap": _soft_cap(fields, "final_logit_softcapping"),
    }


def _soft_cap(fields: Fields, key: str) -> float | None:
    return fields.number(key, above=0) if fields.has(key) else None
