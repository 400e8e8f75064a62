"""The program that scores given tokens by the hidden states of the last forward program; nothing is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..sampling.sample_columns import SCORE_FIELDS
from ..sampling.sampler import SampledRows, is_finite_row
from ..sampling.sampling_params import ScoreKind
from ..sampling.token_scores import TokenScores, given_scores
from ..sampling.top_blocks import block_rows
from .model_calls import merged_model, whole_logits

if TYPE_CHECKING:
    from flax import nnx

    from ..models.served import ModelGraph


def score_tokens(
    graph: ModelGraph,
    weights: nnx.State,
    hidden_TD: Float[Array, "T D"],
    columns: Int[Array, "fields R"],
    asked: Int[Array, "R S"] | None,
    kind: ScoreKind,
    mesh: Mesh | None = None,
) -> SampledRows:
    """Return the scores of one given token for each of R rows, padding included.

    `graph` and `weights` are the two halves of the model (`merged_model`); only the weights that logits need are used,
    and none for hidden states alone. `columns` are the SCORE_FIELDS of the rows, `asked` the other tokens that a kind
    with `num_asked` scores. A temperature of 0 stands for 1. `mesh` is None on a single device.
    """
    token, target, temperature = (columns[SCORE_FIELDS.index(name)] for name in ("token", "target", "temperature"))
    hidden_RD = hidden_TD[token]
    if kind.is_hidden:
        rows = hidden_RD.astype(jnp.float32)
        nothing = jnp.zeros(len(target), jnp.float32)
        return SampledRows(target, jnp.isfinite(rows).all(axis=1), TokenScores(nothing, target, hidden=rows))
    logits_RV = whole_logits(merged_model(graph, weights), hidden_RD, mesh)
    logits, temperatures = block_rows(logits_RV), lax.bitcast_convert_type(temperature, jnp.float32)
    temperatures = jnp.where(temperatures > 0, temperatures, 1.0)
    scores = given_scores(logits, target, temperatures, kind, asked, vocab_size=logits_RV.shape[1])
    return SampledRows(target, is_finite_row(logits), scores)
