"""The inputs of a model, of a `Decoder` and of a caller's own module: `hidden_TD, cache = model(inputs, cache)`.

Nothing here knows how a step was scheduled or packed.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInputs:
    """The tokens of one step, those of all its sequences one after the other, and their positions.

    A new input per token that only some models read becomes a field here whose default is None, so that no signature
    changes.
    """

    token_ids: Int[Array, " T"]
    """int32; those of padding tokens are arbitrary but valid."""
    attention: AttentionMetadata
    """What `cache.attend` takes as its `step`; `attention.positions` are the positions of the tokens."""
    counted: Bool[Array, " T"] | None = None
    """Which tokens a sparse layer counts for the experts that they choose; None where nothing is counted."""

    @property
    def num_tokens(self) -> Int[Array, ""] | int:
        """Return the number of tokens that are no padding, which come first; all tokens where rows are not known."""
        query_starts = self.attention.query_starts
        return query_starts[-1] if query_starts.shape[0] else self.token_ids.shape[0]


CALL_WANTED = "(inputs, cache): inputs.token_ids and inputs.attention are what token_ids and step were"
"""How a model is called, for errors about modules that expect the arguments of an earlier version."""


def unpaged_inputs(token_ids: Int[Array, " T"], positions: Int[Array, " T"]) -> ModelInputs:
    """Return the inputs of tokens at these positions, for a cache without pages.

    All other arrays of `AttentionMetadata` are empty, since they say where pages and rows lie, which such a cache does
    not read. Its static fields keep their defaults.
    """
    names = (field.name for field in fields(AttentionMetadata) if not field.metadata.get("static"))
    empty: dict[str, Any] = dict.fromkeys(names, jnp.zeros(0, jnp.int32))
    return ModelInputs(token_ids=token_ids, attention=AttentionMetadata(**{**empty, "positions": positions}))


def call_fault(model: Any, method: str = "__call__") -> str | None:
    """Return what is wrong with the signature of a model's `method`; None if it can be called with (inputs, cache).

    Older modules took `token_ids` and `step` in place of `inputs`, so every message says where these values are now.
    It shows the signature without annotations, which would make it long. A signature that Python cannot inspect counts
    as right.
    """
    try:
        signature = inspect.signature(getattr(model, method))
    except ValueError:  # A callable that is written in C may have no signature.
        return None
    with suppress(TypeError):  # `bind` raises it if two arguments do not fit.
        signature.bind(None, None)
        # A call with two arguments also fits an older signature whose further parameters have defaults.
        if not {"token_ids", "step"} <= signature.parameters.keys():
            return None
    parameters = signature.parameters.values()
    got = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
    return f"{type(model).__name__}.{method} takes ({got}), wanted {CALL_WANTED}"
