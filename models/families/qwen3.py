"""Qwen3: Llama with a norm on each head of queries and keys. Source: Qwen team 2025, arXiv:2505.09388."""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..family import ModelFamily
from ..fields import Fields
from .llama import TENSOR_NAMES, read_biases, read_llama
from .qwen2 import Qwen2, read_qwen_windows

QK_NORM_NAMES = {
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
}


class Qwen3(ModelFamily):
    """Qwen3, dense."""

    config_defaults = Qwen2.config_defaults | {"head_dim": 128}
    tensor_names = TENSOR_NAMES | QK_NORM_NAMES

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        return read_llama(fields, **read_biases(fields), windows=read_qwen_windows(fields), qk_norm="head")
