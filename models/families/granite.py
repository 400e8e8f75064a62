"""Granite: Llama with four multipliers. Source: Granite team, IBM, 2024, Granite 3.0 language models."""

from __future__ import annotations

from ..config.decoder import DecoderConfig
from ..family import ModelFamily
from ..fields import Fields
from .llama import TENSOR_NAMES, read_biases, read_llama


class Granite(ModelFamily):
    """Granite 3, dense."""

    config_defaults = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    tensor_names = TENSOR_NAMES

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read Granite's config: Llama's keys, and multipliers of embeddings, scores, residuals and logits.

        All four are 1 by default. `logits_scaling` divides the logits; the three others multiply.
        """
        return read_llama(
            fields,
            **read_biases(fields, has_mlp_key=True),
            attention_scale=fields.number("attention_multiplier", 1.0),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            residual_multiplier=fields.number("residual_multiplier", 1.0),
            logits_divisor=fields.number("logits_scaling", 1.0, above=0),
        )
