"""The decoder of GPT-NeoX: attention and MLP side by side, and LayerNorm."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from ..config.decoder import DecoderConfig
from ..decoder import MLP, Decoder, DecoderLayer
from ..experts import LayerOutput
from ..families.gpt_neox import GPTNeoXConfig
from ..inputs import ModelInputs
from ..layers import LayerNorm, WeightMaker


class GPTNeoXLayer(DecoderLayer):
    """A layer in which attention and MLP either both read the layer's input, or the MLP reads the stream after
    attention."""

    norm = LayerNorm
    mlp_class = MLP

    def __init__(self, config: DecoderConfig, index: int, *, make: WeightMaker) -> None:
        super().__init__(config, index, make=make)
        assert isinstance(config, GPTNeoXConfig), "read_config makes it"
        self.is_parallel = config.is_parallel

    @jax.jit
    def after(self, x_TD: Float[Array, "T D"], out_TNH: Float[Array, "T N H"], inputs: ModelInputs) -> LayerOutput:
        """Return the residual stream after the layer: the outputs of attention and MLP are added to `x_TD`.

        `out_TNH` is what `cache.attend` returned; `inputs` are unused. In a parallel layer the MLP reads `x_TD`, and
        otherwise the stream with attention's output added.
        """
        if not self.is_parallel:
            return super().after(x_TD, out_TNH, inputs)
        # transformers adds both outputs first; another order would round differently.
        attended_TD = self.attention.o_proj(out_TNH.reshape(x_TD.shape[0], -1))
        mlp_TD = self.chain(x_TD, self.mlp.as_products(self.mlp_norm.as_row_norm()))
        return LayerOutput(x_TD + (mlp_TD + attended_TD))


class GPTNeoXDecoder(Decoder):
    """GPT-NeoX and Pythia."""

    layer_class = GPTNeoXLayer
