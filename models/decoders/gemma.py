"""The decoder of Gemma 2 and 3: norms on both sides of attention and MLP, gains stored as 1 + w, a scaled embedding."""

from __future__ import annotations

import numpy as np

from ..config.decoder import DecoderConfig
from ..decoder import Decoder, DecoderLayer
from ..layers import RMSNormPlusOne, WeightMaker


class SandwichLayer(DecoderLayer):
    """A layer with a norm in front of and behind attention, and in front of and behind the MLP."""

    norm = RMSNormPlusOne
    norms_behind = {"attention": "attention_out_norm", "mlp": "mlp_out_norm"}


class GemmaDecoder(Decoder):
    """Gemma 2 and 3."""

    layer_class = SandwichLayer

    def __init__(self, config: DecoderConfig, *, make: WeightMaker) -> None:
        super().__init__(config, make=make)
        # √D is rounded to the dtype of the weights, as in transformers.
        self.embedding_multiplier = float(np.asarray(config.hidden_size**0.5, make.dtype))
