"""SmolLM3: Llama in which every fourth layer has no rotary embedding. Source: Hugging Face 2025, SmolLM3.

Layers without it: Kazemnejad et al. 2023, arXiv:2305.19466.
"""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.hf import FULL, SLIDING, num_layers_of, read_head_size, read_layer_types, windows_by_type
from ..config.rope import read_rope, rope_fields
from ..family import ModelFamily
from ..fields import Fields
from .llama import TENSOR_NAMES, read_biases, read_llama


class SmolLM3(ModelFamily):
    """SmolLM3."""

    config_defaults = {
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 128000,
        "eos_token_id": 128001, "num_key_value_heads": 4,
    }  # fmt: skip
    without_effect = frozenset({"max_window_layers"})
    tensor_names = TENSOR_NAMES

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read SmolLM3's config: Llama's keys, and which layers have no rotary embedding.

        By default those are the layers 3, 7, 11, …, the last of every four; `no_rope_layer_interval` may give another
        period, and a list `no_rope_layers` says it layer by layer. That list may be longer than the model, and the rest
        is not used, but not shorter. If windows are in use, they are on the layers without a rotary embedding, unless
        the file lists the types of its layers.
        """
        num_layers = num_layers_of(fields)
        head_size = read_head_size(fields, fields.integer("hidden_size"), fields.integer("num_attention_heads"))
        rope = read_rope(fields, rope_fields(fields, theta=2_000_000.0), head_size=head_size)
        interval = fields.integer("no_rope_layer_interval", 4)
        # In spite of the key's name, 1 stands for a layer that is rotated.
        has_rope = fields.items("no_rope_layers", int, [int((i + 1) % interval != 0) for i in range(num_layers)])
        if len(has_rope) < num_layers or not set(has_rope) <= {0, 1}:
            raise fields.wrong("no_rope_layers", f"{num_layers} times 0 or 1")
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        is_windowed = fields.boolean("use_sliding_window", False) and window is not None
        default = [SLIDING if is_windowed and not has_rope[layer] else FULL for layer in range(num_layers)]
        return read_llama(
            fields,
            rope=rope,
            ropes=tuple(rope if has_rope[layer] else None for layer in range(num_layers)),
            windows=windows_by_type(fields, read_layer_types(fields, default), window),
            **read_biases(fields, has_mlp_key=True),
        )
