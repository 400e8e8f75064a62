"""The compiled step, in three programs: apply page-table changes, forward, sample. And the state between steps.

    update_tables(tables, changes)            → tables        only when a step's own buffer is too small for them
    forward(weights, state, packed)           → state, hidden rows, sample parameters
    sample_rows(weights, last tokens, …)      → last tokens, sampled rows

Pure functions of arrays; what the buffer means is `step_inputs`' business, how a model works the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from .pallas_kernels.ragged_paged_attention import AttentionMetadata, PagedCache
from .sampler import SampledRows, SampleMode, SamplingRows
from .sampler import sample as sample_logits
from .step_inputs import COUNT_FIELDS, SAMPLE_FIELDS, StepInputs, StepLayout

FLOAT_FIELDS = ("temperature", "top_p", "min_p")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What stays on the device between steps and is donated to each. State slot 0 takes padding's writes."""

    cache: PagedCache
    page_tables: Int[Array, "groups slots P"]
    last_tokens: Int[Array, " slots"]


def new_state(shapes: DeviceState) -> DeviceState:
    """A state of these shapes. Pages begin with whatever was there: no slot is read before it is written."""
    pages = tuple(lax.empty(leaf.shape, leaf.dtype) for leaf in shapes.cache.pages)
    return DeviceState(
        cache=replace(shapes.cache, pages=pages),
        page_tables=jnp.zeros(shapes.page_tables.shape, jnp.int32),
        last_tokens=jnp.zeros(shapes.last_tokens.shape, jnp.int32),
    )


def update_tables(tables: Int[Array, "groups slots P"], changes: Int[Array, "4 N"]) -> Int[Array, "groups slots P"]:
    """Set the changed entries. Padding sets entry 0 of state slot 0 to the null page."""
    group, slot, index, page = changes
    return tables.at[group, slot, index].set(page)


def forward(
    graph: Any, weights: Any, state: DeviceState, inputs: StepInputs, layout: StepLayout
) -> tuple[DeviceState, Float[Array, "S D"], Int[Array, "fields S"]]:
    """Compute every token of the step; return the hidden states of the rows that are sampled, and their parameters."""
    view = inputs.view(layout)
    tables = update_tables(state.page_tables, view["changes"])
    ids = view["token_ids"]
    from_slot = state.last_tokens[jnp.where(ids <= -2, -ids - 1, 0)]
    counts = dict(zip(COUNT_FIELDS, view["counts"], strict=True))
    step = AttentionMetadata(
        positions=view["positions"],
        slots=view["slots"],
        query_starts=view["query_starts"],
        context_lens=view["context_lens"],
        page_tables=tables[:, view["row_slots"]],
        num_rows=counts["num_rows"],
        num_decode_rows=counts["num_decode_rows"],
        plan=view["plan"],
    )
    model = nnx.merge(graph, weights)
    hidden_TD, cache = model(jnp.where(ids <= -2, from_slot, ids), state.cache, step)
    hidden_SD = hidden_TD[view["samples"][SAMPLE_FIELDS.index("token")]]
    return replace(state, cache=cache, page_tables=tables), hidden_SD, view["samples"]


def sample_rows(
    graph: Any,
    weights: Any,
    last_tokens: Int[Array, " slots"],
    hidden_SD: Float[Array, "S D"],
    samples: Int[Array, "fields S"],
    num_rows: int,
    mode: SampleMode,
    max_logprobs: int,
) -> tuple[Int[Array, " slots"], SampledRows]:
    """Sample the first `num_rows` rows and remember each token in its sequence's state slot."""
    columns = dict(zip(SAMPLE_FIELDS, samples[:, :num_rows], strict=True))
    floats = {name: lax.bitcast_convert_type(columns.pop(name), jnp.float32) for name in FLOAT_FIELDS}
    slots = columns.pop("slot")
    del columns["token"]
    logits_RV = nnx.merge(graph, weights).logits(hidden_SD[:num_rows])
    sampled = sample_logits(logits_RV, SamplingRows(**columns, **floats), mode, max_logprobs)
    return last_tokens.at[slots].set(sampled.token_ids), sampled
