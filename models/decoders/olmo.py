"""The decoder of OLMo 2 and 3: norms behind attention and MLP, and not in front."""

from __future__ import annotations

from ..decoder import Decoder, DecoderLayer
from ..layers import RMSNormFloat32


class PostNormLayer(DecoderLayer):
    """A layer that norms what attention and MLP give, and not what they get."""

    norm = RMSNormFloat32
    norms_in_front = {}
    norms_behind = DecoderLayer.norms_in_front


class PostNormDecoder(Decoder):
    """OLMo 2 and 3."""

    layer_class = PostNormLayer
