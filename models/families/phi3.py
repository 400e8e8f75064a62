"""Phi-3 and Phi-4: Llama with fused tensors, heads that are rotated in part, and LongRoPE.

Source: Abdin et al. 2024, arXiv:2404.14219.
"""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.hf import num_layers_of, read_head_size
from ..config.rope import RopeConfig, read_rope, rope_fields
from ..family import ModelFamily
from ..fields import Fields
from ..sources import Source
from .llama import TENSOR_NAMES, read_llama

LONGROPE_NAMES = ("su", "yarn", "longrope")
"""What files call longrope."""


class Phi3(ModelFamily):
    """Phi-3, Phi-3.5 and Phi-4 without experts or images."""

    config_defaults = {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 32000,
    }  # fmt: skip
    without_effect = frozenset({"resid_pdrop", "embd_pdrop"})
    tensor_names = TENSOR_NAMES

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Phi-3's config: Llama's keys, one window for all layers, and a rotary embedding that may be LongRoPE.

        If `sliding_window` is absent or null, no layer has a window. Raises ModelLoadError, which names the key, for a
        value that is missing or not supported.
        """
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        return read_llama(
            fields,
            rope=_read_rope(fields),
            windows=(window,) * num_layers_of(fields),
            # In files with LongRoPE, max_position_embeddings is the context after stretching.
            max_context_len=fields.integer("max_position_embeddings"),
        )

    @classmethod
    def sources(cls, config: DecoderConfig) -> dict[str, Source]:
        """Return, for each module, where a checkpoint keeps it.

        One tensor, qkv_proj, holds the rows of all queries, then of all keys, then of all values, and another,
        gate_up_proj, those of gate and then of up. All other tensors are as in Llama. With 4 query heads and 2 KV heads
        of size 8, queries are the rows 0 to 31 of qkv_proj, keys 32 to 47, and values 48 to 63.
        """
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        inner = config.intermediate_size
        blocks = {
            "attention.q_proj": ("self_attn.qkv_proj", 0, queries),
            "attention.k_proj": ("self_attn.qkv_proj", queries, queries + keys),
            "attention.v_proj": ("self_attn.qkv_proj", queries + keys, queries + 2 * keys),
            "mlp.gate_proj": ("mlp.gate_up_proj", 0, inner),
            "mlp.up_proj": ("mlp.gate_up_proj", inner, 2 * inner),
        }
        fused = {
            f"layers.{{i}}.{part}": Source(f"model.layers.{{i}}.{tensor}", ((start, stop),))
            for part, (tensor, start, stop) in blocks.items()
        }
        return super().sources(config) | fused


def _read_rope(fields: Fields) -> RopeConfig:
    """Return the rotary embedding; "su" and "yarn" are read as longrope, as transformers' class does.

    The original context is the top-level key `original_max_position_embeddings`, which the class's defaults always
    provide. Only a part of each head may be rotated, the share `partial_rotary_factor` of its lanes.
    """
    parameters = rope_fields(fields)
    key = "rope_type" if parameters.has("rope_type") else "type"
    # Other kinds, such as linear, are refused here, since Phi-3's class has none of them.
    kind = parameters.choice(key, ("default", *LONGROPE_NAMES), "default")
    rope = parameters.with_data({**parameters.data, "rope_type": "longrope" if kind in LONGROPE_NAMES else kind})
    head_size = read_head_size(fields, fields.integer("hidden_size"), fields.integer("num_attention_heads"))
    return read_rope(fields, rope, head_size=head_size, is_partial=True)
