"""The decoder of GPT-2: learned positions, LayerNorm, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Array, Float

from ..config.decoder import DecoderConfig
from ..decoder import MLP, Decoder, DecoderLayer
from ..inputs import ModelInputs
from ..layers import Embedding, LayerNorm, WeightMaker


class GPT2Layer(DecoderLayer):
    """A layer with LayerNorm and an MLP without a gate."""

    norm = LayerNorm
    mlp_class = MLP


class GPT2Decoder(Decoder):
    """GPT-2."""

    layer_class = GPT2Layer

    def __init__(self, config: DecoderConfig, *, make: WeightMaker) -> None:
        super().__init__(config, make=make)
        make = replace(make, keeps_codes=False)  # A table of positions is small.
        size = config.max_context_len, config.hidden_size
        self.positions = Embedding(*size, is_tied=False, make=make, axis=None, stays_floats=True)

    def embedded(self, inputs: ModelInputs) -> Float[Array, "T D"]:
        """Return the residual stream before the first layer: vectors of tokens plus vectors of positions."""
        return self.embed(inputs.token_ids) + self.positions(inputs.attention.positions)
