"""What a model is called with, a `Decoder` and a caller's own module alike: `hidden_TD, cache = model(inputs, cache)`.

Nothing here knows how a step was scheduled or packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int

from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInputs:
    """The tokens of one step, of all its rows behind each other, and where they stand.

    An input of each token that only some models read becomes a field here whose default is None, so that no signature
    changes.
    """

    token_ids: Int[Array, " T"]
    """int32; those of padding tokens are arbitrary but valid."""
    attention: AttentionMetadata
    """What `cache.attend` takes as its `step`; `attention.positions` are the positions of the tokens."""
