"""Qwen2: Llama with biases on queries, keys and values, and windows on some layers. Source: Qwen team 2024,
arXiv:2407.10671."""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..config.hf import FULL, SLIDING, num_layers_of, read_layer_types, windows_by_type
from ..family import ModelFamily
from ..fields import Fields
from .llama import TENSOR_NAMES, read_llama


def read_qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, or None for full attention.

    There are windows only if `use_sliding_window` is true and `sliding_window` is not null. They are on layers from
    number `max_window_layers` on, counted from 0, which is 28 by default, unless the file lists the types of its
    layers. Example: 4 layers, a window of 512 and `max_window_layers` 3 give (None, None, None, 512). Raises
    ModelLoadError if that list has a sliding layer while no window is in use.
    """
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    if not fields.boolean("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 28, min=0)
    num_layers = num_layers_of(fields)
    default = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    return windows_by_type(fields, read_layer_types(fields, default), window)


class Qwen2(ModelFamily):
    """Qwen2 and Qwen2.5."""

    config_defaults = {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32}
    tensor_names = TENSOR_NAMES

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        return read_llama(fields, qkv_bias=True, windows=read_qwen_windows(fields))
