"""The compiled step as pure functions of arrays, and the state that stays on the device between steps.

    update_tables(tables, changes)              → tables      for page-table changes that a step's buffer cannot hold
    forward(…, state, packed inputs)            → state, SAMPLE_FIELDS of the rows to sample
    sample_rows(…, sampling state, hidden, …)   → sampling state, sampled rows; several times if prompts are scored
    decode(…, state, rules, packed inputs)      → state, rules, sampled rows of several tokens per sequence

A prefill or mixed step is one forward and then one sampler; a step in which every sequence decodes several tokens is
one decode. programs.py compiles these functions for every padded size, runner.py calls the executables. The model reads
`ModelInputs` and knows nothing of the packed buffer (step_layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..models.checked_cache import CheckedCache, check_all_layers_attended
from ..models.config.spec import AttentionLayer
from ..models.inputs import ModelInputs
from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from ..pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ..sampling.logit_rules import LogitRulesState, record_tokens
from ..sampling.sample_columns import SAMPLE_FIELDS, STOP_FIELDS
from ..sampling.sampler import SampledRows, SampleSettings, SamplingRows
from ..sampling.sampler import sample as sample_logits
from ..sampling.sampling_params import SampleMode
from ..sharding import TENSOR_AXIS
from .step_layout import COUNT_FIELDS, SLOT, TOKEN, StepLayout

SamplingState = tuple[Int[Array, " slots"], LogitRulesState | None]
"""The state that samplers keep by state slot: the last token, and the logit rules, which are None in modes that read
no rules."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Arrays that stay on the device between steps; each step takes them as donated arguments.

    State slot 0 belongs to no sequence: padding rows write there.
    """

    cache: PagedCache
    page_tables: Int[Array, "groups slots P"]
    last_tokens: Int[Array, " slots"]
    """The token sampled last in each state slot, which the host may not have read yet."""
    hidden: Float[Array, "T D"]
    """Hidden states of the last forward program's tokens, for the samplers after it."""


def new_state(shapes: DeviceState) -> DeviceState:
    """Return a state of these shapes. Pages are left uninitialized, since no slot is read before it is written."""
    ops = shapes.cache.backend.layer_ops
    pages = tuple(ops.uninitialized(leaf.shape, leaf.dtype) for leaf in shapes.cache.pages)
    others = shapes.page_tables, shapes.last_tokens, shapes.hidden
    zeros = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in others)
    return DeviceState(replace(shapes.cache, pages=pages), *zeros)


def update_tables(tables: Int[Array, "groups slots P"], changes: Int[Array, "4 N"]) -> Int[Array, "groups slots P"]:
    """Set the changed page-table entries. Padding sets entry 0 of state slot 0 to the null page, which it is."""
    group, slot, index, page = changes
    return tables.at[group, slot, index].set(page)


def forward(
    graph: Any, weights: Any, state: DeviceState, packed: Int[Array, " n"], layout: StepLayout
) -> tuple[DeviceState, Int[Array, "fields S"]]:
    """Compute every token of the step; return the new state and the buffer's SAMPLE_FIELDS, for the sampler.

    `graph` and `weights` are the two halves of the model (`nnx.merge`). `state` is donated.
    """
    view = layout.view(packed)
    tables = update_tables(state.page_tables, view["changes"])
    ids = view["token_ids"]
    from_slot = state.last_tokens[jnp.where(ids <= -2, -ids - 1, 0)]
    model = _merged(graph, weights)
    step = _metadata(view, tables, decodes_only=layout.decodes_only)
    inputs = ModelInputs(token_ids=jnp.where(ids <= -2, from_slot, ids), attention=step)
    hidden_TD, cache = model(inputs, state.cache)
    hidden = lax.dynamic_update_slice(state.hidden, hidden_TD.astype(state.hidden.dtype), (0, 0))
    return replace(state, cache=cache, page_tables=tables, hidden=hidden), view["samples"]


def trial(
    graph: Any,
    layout: StepLayout,
    layers: tuple[AttentionLayer, ...],
    weights: Any,
    cache: PagedCache,
    tables: Any,
    packed: Any,
) -> Float[Array, "T D"]:
    """Return the hidden states of a step: to trace a model without running it.

    Raises ValueError for a model that does not attend as `layers` say, or that returns something other than the cache
    of its last `attend`.
    """
    view, model = layout.view(packed), _merged(graph, weights)
    step = _metadata(view, tables, decodes_only=layout.decodes_only)
    inputs = ModelInputs(token_ids=view["token_ids"], attention=step)
    hidden_TD, new = model(inputs, CheckedCache(cache, layers))
    check_all_layers_attended(new, layers)
    return hidden_TD


def _merged(graph: Any, weights: Any) -> Any:
    """Return the model, with variables that belong to JAX's present trace."""
    # Flattening and unflattening makes new variables; `nnx.merge` alone would take those of the state as they are.
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf, weights))


def _metadata(view: dict[str, Any], tables: Int[Array, "groups slots P"], *, decodes_only: bool) -> AttentionMetadata:
    """Return what attention reads of a step; each row gets the page table of its state slot."""
    counts = _counts(view)
    return AttentionMetadata(
        positions=view["positions"],
        slot_mapping=view["slot_mapping"],
        query_starts=view["query_starts"],
        context_lens=view["context_lens"],
        page_tables=tables[:, view["seq_slots"]],
        num_rows=counts["num_rows"],
        num_decode_rows=counts["num_decode_rows"],
        plan=view["plan"],
        decodes_only=decodes_only,
    )


def _counts(view: dict[str, Any]) -> dict[str, Int[Array, ""]]:
    """Return the buffer's counts by name."""
    return dict(zip(COUNT_FIELDS, view["counts"], strict=True))


def sample_rows(
    graph: Any,
    weights: Any,
    state: SamplingState,
    hidden_TD: Float[Array, "T D"],
    columns: Int[Array, "fields R"],
    mode: SampleMode,
    settings: SampleSettings,
    mesh: Mesh | None = None,
) -> tuple[SamplingState, SampledRows]:
    """Sample rows, padding included; keep each token in its state slot, and in its slot's rules.

    `columns` are the SAMPLE_FIELDS of the rows; they say which hidden state each row is drawn from, or scored.
    """
    slots, rows = columns[SLOT], SamplingRows.from_columns(columns)
    logits_RV = _whole_logits(_merged(graph, weights), hidden_TD[columns[TOKEN]], mesh)
    last_tokens, rules = state
    sampled = sample_logits(logits_RV, rows, mode, settings, rules)
    if rules is not None:
        rules = record_tokens(rules, rows.ruled_slot, sampled.token_ids)
    return (last_tokens.at[slots].set(sampled.token_ids), rules), sampled


def _whole_logits(model: Any, hidden_RD: Float[Array, "R D"], mesh: Mesh | None) -> Float[Array, "R V"]:
    """Return the logits of the whole vocabulary in float32, whatever dtype a caller's own module gives them in.

    They are on every chip of a mesh, where each has computed those of a part.

    Every chip then draws the same tokens. The gather stands outside of loops and branches of the sampler: a TPU's
    compiler hangs on communication inside of a branch. It is explicit, because XLA by itself would gather the head's
    weights instead.
    """
    logits_RX = model.logits(hidden_RD)
    if mesh is None:
        return logits_RX.astype(jnp.float32)
    gather = partial(lax.all_gather, axis_name=TENSOR_AXIS, axis=1, tiled=True)
    by_vocab, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
    on_chips = jax.shard_map(gather, mesh=mesh, in_specs=by_vocab, out_specs=whole, check_vma=False)
    # Without what pads the vocabulary of a Decoder; a caller's own module pads nothing. Row by row: XLA would leave
    # them as they were gathered, column by column, and a GPU's sampler sums along rows.
    whole_RV = on_chips(logits_RX)[:, : getattr(model, "vocab_size", None)].astype(jnp.float32)
    return with_layout_constraint(whole_RV, Layout((0, 1)))


@dataclass(frozen=True)
class DecodeSampling:
    """How a decode program samples, and how often."""

    mode: SampleMode
    settings: SampleSettings
    num_steps: int
    """Most tokens of each row; if the settings are static, every call computes so many."""
    mesh: Mesh | None = None


def decode(
    graph: Any,
    weights: Any,
    state: DeviceState,
    rules: LogitRulesState | None,
    packed: Int[Array, " n"],
    layout: StepLayout,
    sampling: DecodeSampling,
) -> tuple[tuple[DeviceState, LogitRulesState | None], SampledRows]:
    """Decode up to K = `sampling.num_steps` tokens of every row, one after another; return rows by iteration, [K, R].

    A row is live until it has its `decode_lens` tokens or draws one that ends its sequence. The loop runs until no row
    is live; with static settings it runs K times. What later iterations hold for a row means nothing. Rows that are no
    longer live are computed beside the others with unchanged inputs, so they write again what they have written. A row
    whose last token ends its sequence already draws nothing. `state` and `rules` are donated.
    """
    view = layout.view(packed)
    tables = update_tables(state.page_tables, view["changes"])
    counts = _counts(view)
    step, seq_slots = _metadata(view, tables, decodes_only=True), view["seq_slots"]
    page_size = state.cache.layout.page_size
    samples = view["samples"][:, : layout.num_rows]
    row_of_sample = samples[TOKEN]
    slots, params = samples[SLOT], SamplingRows.from_columns(samples)
    stops = samples[SAMPLE_FIELDS.index(STOP_FIELDS[0]) :]
    num_steps = jnp.where(jnp.arange(layout.num_rows) < counts["num_samples"], view["decode_lens"][row_of_sample], 0)

    def stays_live(token_ids: Int[Array, " R"], num_done: Int[Array, ""]) -> Bool[Array, " R"]:
        return (num_done < num_steps) & (token_ids[None] != stops).all(axis=0)

    def decode_one(carry: _DecodeCarry) -> _DecodeCarry:
        """Compute and draw one token for each row, and move the live rows on by one position."""
        positions = step.positions + carry.num_ahead
        pages = jnp.take_along_axis(step.page_tables, (positions // page_size)[None, :, None], axis=2)[..., 0]
        is_row = jnp.arange(layout.num_rows) < counts["num_rows"]
        now = replace(
            step,
            positions=positions,
            slot_mapping=jnp.where(is_row[None], pages * page_size + (positions % page_size)[None], 0),
            context_lens=step.context_lens + carry.num_ahead,
        )
        # In the loop's own trace: nnx's transforms, which a caller's own module may use, refuse variables of another.
        model = _merged(graph, weights)
        hidden_RD, cache = model(ModelInputs(token_ids=carry.token_ids, attention=now), carry.cache)
        logits_RV = _whole_logits(model, hidden_RD[row_of_sample].astype(state.hidden.dtype), sampling.mesh)
        rows = replace(params, output_index=params.output_index + carry.num_done)
        drawn = sample_logits(logits_RV, rows, sampling.mode, sampling.settings, carry.rules)
        is_live, rules = carry.is_live, carry.rules
        if rules is not None:
            rules = record_tokens(rules, jnp.where(is_live, rows.ruled_slot, 0), drawn.token_ids)
        last_tokens = carry.last_tokens.at[jnp.where(is_live, slots, 0)].set(drawn.token_ids)
        num_done = carry.num_done + 1
        is_live &= stays_live(drawn.token_ids, num_done)
        is_moving = jnp.zeros_like(is_row).at[jnp.where(is_live, row_of_sample, layout.num_rows)].set(True, mode="drop")
        return _DecodeCarry(
            cache=cache,
            rules=rules,
            last_tokens=last_tokens,
            token_ids=jnp.where(is_moving, last_tokens[seq_slots], carry.token_ids),
            num_ahead=carry.num_ahead + is_moving.astype(jnp.int32),
            is_live=is_live,
            num_done=num_done,
            rows=jax.tree.map(lambda all_rows, row: all_rows.at[carry.num_done].set(row), carry.rows, drawn),
        )

    drawn = jax.eval_shape(
        lambda hidden_RD: sample_logits(
            _whole_logits(_merged(graph, weights), hidden_RD, sampling.mesh),
            params,
            sampling.mode,
            sampling.settings,
            rules,
        ),
        jax.ShapeDtypeStruct((layout.num_rows, state.hidden.shape[1]), state.hidden.dtype),
    )
    start = _DecodeCarry(
        cache=state.cache,
        rules=rules,
        last_tokens=state.last_tokens,
        token_ids=state.last_tokens[seq_slots],
        num_ahead=jnp.zeros_like(seq_slots),
        is_live=stays_live(state.last_tokens[slots], jnp.int32(0)),
        num_done=jnp.int32(0),
        rows=jax.tree.map(lambda row: jnp.full((sampling.num_steps, *row.shape), row.dtype == bool, row.dtype), drawn),
    )
    repeat_while = sampling.settings.control_flow.repeat_while
    end = repeat_while(lambda carry: carry.is_live.any(), decode_one, start, max_steps=sampling.num_steps)
    state = replace(state, cache=end.cache, page_tables=tables, last_tokens=end.last_tokens)
    return (state, end.rules), end.rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _DecodeCarry:
    """The loop state of `decode`: what one iteration hands to the next."""

    cache: PagedCache
    rules: LogitRulesState | None
    last_tokens: Int[Array, " slots"]
    token_ids: Int[Array, " R"]
    """Token that each row computes next."""
    num_ahead: Int[Array, " R"]
    """Tokens by which each row is ahead of the packed inputs."""
    is_live: Bool[Array, " R"]
    """Sampled rows that draw another token."""
    num_done: Int[Array, ""]
    """Iterations done."""
    rows: SampledRows
    """Sampled rows by iteration, [K, R]."""
