"""The parameters that rows are sampled by, on the device: one column of int32 for each, as the host packs them.

Letters: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .sample_columns import FLOAT_PARAMETERS, SAMPLE_FIELDS
from .sampling_params import GREEDY_TEMPERATURE
from .top_blocks import RowSelection, take_rows
from .truncation import TruncationLimits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The parameters that R rows are sampled by. Each field is a column of SAMPLE_FIELDS."""

    seed_low: Int[Array, " R"]
    """The low 32 bits of the seed; `seed_high` are the high ones."""
    seed_high: Int[Array, " R"]
    sample_index: Int[Array, " R"]
    """Index of the sample within its request."""
    output_index: Int[Array, " R"]
    """Output tokens that the sample has already: 0 for its first one."""
    ruled_slot: Int[Array, " R"]
    """The row's state slot if its request has logit rules, else 0."""
    score: Int[Array, " R"]
    """In modes SCORED and FULL: the `Score` of each row, what its token gets beside its id."""
    top_k: Int[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]

    @classmethod
    def from_columns(cls, columns: Int[Array, "fields R"]) -> SamplingRows:
        """Return R rows from `columns`, int32, one column for each name in SAMPLE_FIELDS, in that order.

        The columns of float parameters hold the bits of float32 numbers. Columns that are no field here are left out:
        the token, the state slot and the stop tokens, which the step reads.
        """
        named = dict(zip(SAMPLE_FIELDS, columns, strict=True))
        for name in FLOAT_PARAMETERS:
            named[name] = lax.bitcast_convert_type(named[name], jnp.float32)
        return cls(**{field.name: named[field.name] for field in fields(cls)})

    def at(self, selection: RowSelection) -> SamplingRows:
        """Return the parameters of some of the rows, which one gather takes from all columns."""
        columns, tree = jax.tree.flatten(self)
        bits = jnp.stack([lax.bitcast_convert_type(column, jnp.int32) for column in columns], axis=1)
        selected = take_rows(bits, selection).T
        leaves = [lax.bitcast_convert_type(new, old.dtype) for new, old in zip(selected, columns, strict=True)]
        return jax.tree.unflatten(tree, leaves)

    @property
    def is_greedy(self) -> Bool[Array, " R"]:
        """Whether a row's likeliest token is taken."""
        # ≤, not <: a temperature just below the limit may round up to it on its way to float32.
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def keeps_one(self) -> Bool[Array, " R"]:
        """Whether a row draws from its likeliest token alone, even if others tie with it: top-p 0."""
        return ~self.is_greedy & (self.top_p <= 0.0)

    @property
    def limits(self) -> TruncationLimits:
        """Return the min-p, top-k and top-p of the rows; greedy rows get those that keep all tokens: 0, 0 and 1."""
        is_greedy = self.is_greedy
        min_p, top_k = jnp.where(is_greedy, 0.0, self.min_p), jnp.where(is_greedy, 0, self.top_k)
        return TruncationLimits(min_p, top_k, jnp.where(is_greedy, 1.0, self.top_p))
