"""The compiled step, in three programs: apply page-table changes, forward, sample. And the state between steps.

    update_tables(tables, changes)            → tables        only when a step's own buffer is too small for them
    forward(weights, state, packed)           → state, columns of the rows that are sampled
    sample_rows(weights, sampling state, …)   → sampling state, sampled rows; as often as a step needs it
    decode(weights, state, packed)            → state, sampled rows of up to MAX_DECODE_STEPS steps, in one program

Pure functions of arrays; what the buffer means is `step_inputs`' business, how a model works the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from .config import MAX_DECODE_STEPS
from .logit_rules import SlotRules, apply_rules, note_tokens
from .pallas_kernels.cpu_handler import uninitialized
from .pallas_kernels.ragged_paged_attention import AttentionMetadata, PagedCache
from .sampler import SampledRows, SampleSettings, SamplingRows
from .sampler import sample as sample_logits
from .sampling_params import SampleMode
from .sharding import TENSOR_AXIS
from .step_inputs import COUNT_FIELDS, SAMPLE_FIELDS, STOP_FIELDS, StepInputs, StepLayout

FLOAT_FIELDS = ("temperature", "top_p", "min_p")
DECODE_MODES = (SampleMode.GREEDY, SampleMode.DRAWN)
"""By `is_drawn`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What stays on the device between steps and is donated to each. State slot 0 takes padding's writes."""

    cache: PagedCache
    page_tables: Int[Array, "groups slots P"]
    last_tokens: Int[Array, " slots"]
    hidden: Float[Array, "T D"]
    """What the last forward program has left of its tokens for the sampling programs behind it."""


def new_state(shapes: DeviceState) -> DeviceState:
    """A state of these shapes. Pages begin with whatever was there: no slot is read before it is written."""

    def pages_of(leaf: Array) -> Array:
        def empty() -> Array:
            return lax.empty(leaf.shape, leaf.dtype)

        # On a CPU an empty array is one of zeros: half the machine's memory, written at every start.
        is_on_one = shapes.cache.mesh is None
        return lax.platform_dependent(
            cpu=(lambda: uninitialized(leaf.shape, leaf.dtype)) if is_on_one else empty, default=empty
        )

    pages = tuple(map(pages_of, shapes.cache.pages))
    return DeviceState(
        cache=replace(shapes.cache, pages=pages),
        page_tables=jnp.zeros(shapes.page_tables.shape, jnp.int32),
        last_tokens=jnp.zeros(shapes.last_tokens.shape, jnp.int32),
        hidden=jnp.zeros(shapes.hidden.shape, shapes.hidden.dtype),
    )


def update_tables(tables: Int[Array, "groups slots P"], changes: Int[Array, "4 N"]) -> Int[Array, "groups slots P"]:
    """Set the changed entries. Padding sets entry 0 of state slot 0 to the null page."""
    group, slot, index, page = changes
    return tables.at[group, slot, index].set(page)


def forward(
    graph: Any, weights: Any, state: DeviceState, inputs: StepInputs, layout: StepLayout
) -> tuple[DeviceState, Int[Array, "fields S"]]:
    """Compute every token of the step; return the SAMPLE_FIELDS of the rows that are sampled, which came with it."""
    view = inputs.view(layout)
    tables = update_tables(state.page_tables, view["changes"])
    ids = view["token_ids"]
    from_slot = state.last_tokens[jnp.where(ids <= -2, -ids - 1, 0)]
    model = nnx.merge(graph, weights)
    hidden_TD, cache = model(jnp.where(ids <= -2, from_slot, ids), state.cache, _metadata(view, tables))
    hidden = lax.dynamic_update_slice(state.hidden, hidden_TD, (0, 0))
    return replace(state, cache=cache, page_tables=tables, hidden=hidden), view["samples"]


def _metadata(view: dict[str, Any], tables: Int[Array, "groups slots P"]) -> AttentionMetadata:
    counts = dict(zip(COUNT_FIELDS, view["counts"], strict=True))
    return AttentionMetadata(
        positions=view["positions"],
        slots=view["slots"],
        query_starts=view["query_starts"],
        context_lens=view["context_lens"],
        page_tables=tables[:, view["row_slots"]],
        num_rows=counts["num_rows"],
        num_decode_rows=counts["num_decode_rows"],
        plan=view["plan"],
    )


def sample_rows(
    graph: Any,
    weights: Any,
    state: tuple[Int[Array, " slots"], SlotRules | None],
    hidden_TD: Float[Array, "T D"],
    columns: Int[Array, "fields S"],
    num_rows: int,
    mode: SampleMode,
    settings: SampleSettings,
) -> tuple[tuple[Int[Array, " slots"], SlotRules | None], SampledRows]:
    """Sample the first `num_rows` rows and remember each token in its sequence's state slot, and in its rules.

    `columns` are SAMPLE_FIELDS of rows, padded: they say whose hidden state each is drawn from, or scored.
    """
    columns = columns[:, :num_rows]
    slots, rows = _sampling_rows(columns)
    logits_RV = nnx.merge(graph, weights).logits(hidden_TD[columns[SAMPLE_FIELDS.index("token")]])
    last_tokens, rules = state
    ruled_RV = None
    if rules is not None:
        ruled_RV = apply_rules(logits_RV, rules, rows.ruled_slot, rows.output_index, settings.processors)
    sampled = sample_logits(logits_RV, rows, mode, settings, ruled_RV)
    if rules is not None:
        rules = note_tokens(rules, rows.ruled_slot, sampled.token_ids)
    return (last_tokens.at[slots].set(sampled.token_ids), rules), sampled


def _sampling_rows(samples: Int[Array, "fields R"]) -> tuple[Int[Array, " R"], SamplingRows]:
    """State slots and parameters of sampled rows."""
    columns = dict(zip(SAMPLE_FIELDS, samples, strict=True))
    floats = {name: lax.bitcast_convert_type(columns.pop(name), jnp.float32) for name in FLOAT_FIELDS}
    slots = columns.pop("slot")
    for name in ("token", *STOP_FIELDS):
        del columns[name]
    return slots, SamplingRows(**columns, **floats)


def decode(
    graph: Any, weights: Any, state: DeviceState, inputs: StepInputs, layout: StepLayout
) -> tuple[DeviceState, SampledRows]:
    """Decode up to MAX_DECODE_STEPS tokens of every row, one after another; returns rows by step, [K, R].

    A row goes on until it has its `row_steps` tokens or draws one that ends its sequence, and the loop until no row
    does: what later steps hold for it means nothing. Rows that have stopped are computed as they were, beside the
    others, and write what they have written before. A row whose sequence has ended already draws nothing.
    """
    view = inputs.view(layout)
    tables = update_tables(state.page_tables, view["changes"])
    counts = dict(zip(COUNT_FIELDS, view["counts"], strict=True))
    step, row_slots = _metadata(view, tables), view["row_slots"]
    page_size = state.cache.layout.page_size
    samples = view["samples"][:, : layout.num_rows]
    row_of_sample = samples[SAMPLE_FIELDS.index("token")]
    slots, params = _sampling_rows(samples)
    stops = samples[SAMPLE_FIELDS.index(STOP_FIELDS[0]) :]
    num_steps = jnp.where(jnp.arange(layout.num_rows) < counts["num_samples"], view["row_steps"][row_of_sample], 0)
    model = nnx.merge(graph, weights)

    def goes_on(token_ids: Int[Array, " R"], num_done: Int[Array, ""]) -> Bool[Array, " R"]:
        return (num_done < num_steps) & (token_ids[None] != stops).all(axis=0)

    def draw(logits_RV: Float[Array, "R V"], output_index: Int[Array, " R"]) -> SampledRows:
        modes = [lambda logits, rows, mode=mode: sample_logits(logits, rows, mode) for mode in DECODE_MODES]

        def choose(is_drawn: Int[Array, ""], logits_RV: Float[Array, "R V"], rows: SamplingRows) -> SampledRows:
            return lax.switch(is_drawn, modes, logits_RV, rows)

        def gather(is_drawn: Int[Array, ""], logits_RX: Float[Array, "R X"], rows: SamplingRows) -> SampledRows:
            return choose(is_drawn, lax.all_gather(logits_RX, TENSOR_AXIS, axis=1, tiled=True), rows)

        rows = replace(params, output_index=output_index)
        if (mesh := state.cache.mesh) is None:
            return choose(counts["is_drawn"], logits_RV, rows)
        # Every chip draws the same from all logits. Were they to talk in the switch, a TPU's compiler would hang; left
        # to itself it would gather the weights.
        specs = PartitionSpec(), PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
        draw_on_chips = jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return draw_on_chips(counts["is_drawn"], logits_RV, rows)

    def decode_one(carry: _DecodeCarry) -> _DecodeCarry:
        ahead = carry.num_ahead
        positions = step.positions + ahead
        pages = jnp.take_along_axis(step.page_tables, (positions // page_size)[None, :, None], axis=2)[..., 0]
        is_row = jnp.arange(layout.num_rows) < counts["num_rows"]
        now = replace(
            step,
            positions=positions,
            slots=jnp.where(is_row[None], pages * page_size + (positions % page_size)[None], 0),
            context_lens=step.context_lens + ahead,
        )
        hidden_RD, cache = model(carry.token_ids, carry.cache, now)
        drawn = draw(model.logits(hidden_RD[row_of_sample]), params.output_index + carry.num_done)
        is_live = carry.is_live
        last_tokens = carry.last_tokens.at[jnp.where(is_live, slots, 0)].set(drawn.token_ids)
        num_done = carry.num_done + 1
        is_live &= goes_on(drawn.token_ids, num_done)
        is_moving = jnp.zeros_like(is_row).at[jnp.where(is_live, row_of_sample, layout.num_rows)].set(True, mode="drop")
        return _DecodeCarry(
            cache=cache,
            last_tokens=last_tokens,
            token_ids=jnp.where(is_moving, last_tokens[row_slots], carry.token_ids),
            num_ahead=ahead + is_moving.astype(jnp.int32),
            is_live=is_live,
            num_done=num_done,
            rows=jax.tree.map(lambda all_rows, row: all_rows.at[carry.num_done].set(row), carry.rows, drawn),
        )

    nothing = SampledRows(
        jnp.zeros((MAX_DECODE_STEPS, layout.num_rows), jnp.int32), jnp.ones((MAX_DECODE_STEPS, layout.num_rows), bool)
    )
    token_ids = state.last_tokens[row_slots]
    start = _DecodeCarry(
        cache=state.cache,
        last_tokens=state.last_tokens,
        token_ids=token_ids,
        num_ahead=jnp.zeros_like(row_slots),
        is_live=goes_on(state.last_tokens[slots], jnp.int32(0)),
        num_done=jnp.int32(0),
        rows=nothing,
    )
    end = lax.while_loop(lambda carry: carry.is_live.any(), decode_one, start)
    return replace(state, cache=end.cache, page_tables=tables, last_tokens=end.last_tokens), end.rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _DecodeCarry:
    """What goes from one decoded token to the next."""

    cache: PagedCache
    last_tokens: Int[Array, " slots"]
    token_ids: Int[Array, " R"]
    """That the rows compute next."""
    num_ahead: Int[Array, " R"]
    """Tokens that each row has gone on by."""
    is_live: Bool[Array, " R"]
    """Samples that draw another token."""
    num_done: Int[Array, ""]
    rows: SampledRows
