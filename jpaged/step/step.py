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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ..models.checked_cache import CheckedCache, check_all_layers_attended
from ..models.config.spec import AttentionLayer
from ..models.inputs import ModelInputs
from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from ..pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ..sampling.logit_rules import LogitRulesState, record_tokens
from ..sampling.sample_columns import SAMPLE_FIELDS, STOP_FIELDS
from ..sampling.sampler import SampledRows, SampleSettings
from ..sampling.sampler import sample as sample_logits
from ..sampling.sampling_params import SampleMode
from ..sampling.sampling_rows import SamplingRows
from .model_calls import hidden_and_counts, merged_model, whole_logits
from .step_layout import COUNT_FIELDS, SLOT, TOKEN, StepLayout

if TYPE_CHECKING:
    from flax import nnx

    from ..models.served import ModelGraph

Sections = dict[str, Array]
"""Name of a section of the packed buffer → its values, as step_layout.py lists them."""

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
    expert_tokens: Int[Array, "L E"] | None = None
    """How many tokens have chosen each expert of each layer since the runner took the counts; None: not counted."""


def new_state(shapes: DeviceState) -> DeviceState:
    """Return a new device state, in which each array has the shape and dtype of its abstract array in `shapes`.

    The pages of the cache are left uninitialized, since attention uses no slot of a page before a key and a value were
    written there. Scales of pages are ones, which the caller replaces. All other arrays are zeros.
    """
    pages = tuple(shapes.cache.backend.uninitialized(leaf.shape, leaf.dtype) for leaf in shapes.cache.pages)
    scales = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes.cache.scales)
    page_tables, last_tokens, hidden = (
        jnp.zeros(leaf.shape, leaf.dtype) for leaf in (shapes.page_tables, shapes.last_tokens, shapes.hidden)
    )
    counts = None if shapes.expert_tokens is None else jnp.zeros_like(shapes.expert_tokens)
    return DeviceState(replace(shapes.cache, pages=pages, scales=scales), page_tables, last_tokens, hidden, counts)


def update_tables(tables: Int[Array, "groups slots P"], changes: Int[Array, "4 N"]) -> Int[Array, "groups slots P"]:
    """Set the changed page-table entries. Padding sets entry 0 of state slot 0 to the null page, which it is."""
    table_group, slot, table_index, page = changes
    return tables.at[table_group, slot, table_index].set(page)


def forward(
    graph: ModelGraph, weights: nnx.State, state: DeviceState, packed: Int[Array, " n"], layout: StepLayout
) -> tuple[DeviceState, Int[Array, "fields S"]]:
    """Run the model on the T tokens of a step, padding included; return the new device state and the samples' fields.

    `graph` and `weights` are the two halves of the model (`merged_model`); `packed` is a step's int32 buffer, which
    `layout` cuts into named sections. The section "changes" updates the page tables first. A token id −(s + 1) stands
    for the last token of state slot s: −4 for that of slot 3. `state` is donated: its pages take the new keys and
    values, and its `hidden`, which has room for the largest step, takes the T new hidden states in its first rows.
    Nothing is sampled here. A sampler computes logits from `hidden` afterwards; it gets the buffer's section "samples",
    which is returned as it is: SAMPLE_FIELDS of the S rows to sample, padding included.
    """
    view = layout.view(packed)
    tables = update_tables(state.page_tables, view["changes"])
    packed_ids = view["token_ids"]
    # Slot 0 belongs to no sequence, so s ≥ 1 and these ids are ≤ −2. Other tokens read slot 0, which is not used.
    from_slot = state.last_tokens[jnp.where(packed_ids <= -2, -packed_ids - 1, 0)]
    model = merged_model(graph, weights)
    step = _metadata(view, tables, decodes_only=layout.decodes_only)
    token_ids, samples = jnp.where(packed_ids <= -2, from_slot, packed_ids), view["samples"]
    counted = None if state.expert_tokens is None else _counted_tokens(view, from_slot)
    inputs = ModelInputs(token_ids=token_ids, attention=step, counted=counted)
    hidden_TD, cache, counts = hidden_and_counts(model, inputs, state.cache)
    hidden = lax.dynamic_update_slice(state.hidden, hidden_TD.astype(state.hidden.dtype), (0, 0))
    expert_tokens = _total_expert_tokens(state, counts)
    state = replace(state, cache=cache, page_tables=tables, hidden=hidden, expert_tokens=expert_tokens)
    return state, samples


def _counted_tokens(view: Sections, from_slot: Int[Array, " T"]) -> Bool[Array, " T"]:
    """Return which tokens of a step are neither padding nor the last ones of sequences that these have ended.

    The host starts a step before it has read the tokens of the one before, so that a row may follow the token that ends
    its sequence. `from_slot` has the last token of the sequence of each such row.
    """
    counts, ids = _counts(view), view["token_ids"]
    token = view["samples"][TOKEN]
    stop_ids = view["samples"][SAMPLE_FIELDS.index(STOP_FIELDS[0]) :]
    is_sample = jnp.arange(len(token)) < counts["num_samples"]
    is_ended = is_sample & (ids[token] <= -2) & (from_slot[token][None] == stop_ids).any(axis=0)
    is_token = jnp.arange(len(ids)) < view["query_starts"][-1]
    return is_token.at[jnp.where(is_ended, token, len(ids))].set(False, mode="drop")


def _total_expert_tokens(
    state: DeviceState | _DecodeCarry, counts: Int[Array, "L E"] | None
) -> Int[Array, "L E"] | None:
    """Return the `expert_tokens` of a state plus the counts of one call of the model; None if none are counted."""
    return None if state.expert_tokens is None or counts is None else state.expert_tokens + counts


def trial(
    graph: ModelGraph,
    layout: StepLayout,
    layers: tuple[AttentionLayer, ...],
    weights: nnx.State,
    cache: PagedCache,
    tables: Int[Array, "groups slots P"],
    packed: Int[Array, " n"],
) -> tuple[Float[Array, "T D"], Int[Array, ""], list[Array]]:
    """Return the hidden states of one step, the number of layers that have attended, and the running statistics.

    Callers only trace this function, to check a model without running it. The statistics are those of a caller's own
    module after its call, in the order of `ModuleGraph.statistics`; a Decoder has none.

    `graph` and `weights` are the two halves of the model (`merged_model`). `packed` is a step's int32 buffer, which
    `layout` cuts into named sections. `tables` are the page tables of all state slots, and `layers` are the attention
    layers that the model's config announces. `CheckedCache` compares each `attend` of the model with them.

    Raises ValueError if the model does not attend exactly as `layers` say, or if it returns something other than the
    cache that its last `attend` returned.
    """
    view, model = layout.view(packed), merged_model(graph, weights)
    step = _metadata(view, tables, decodes_only=layout.decodes_only)
    inputs = ModelInputs(token_ids=view["token_ids"], attention=step)
    hidden_TD, cache_after = model(inputs, CheckedCache(cache, layers))
    check_all_layers_attended(cache_after, layers)
    statistics = getattr(model, "statistics", [])
    return hidden_TD, cache_after.num_layers_attended, statistics


def _metadata(view: Sections, tables: Int[Array, "groups slots P"], *, decodes_only: bool) -> AttentionMetadata:
    """Return what attention reads of a step, from the named sections of its buffer (`view`).

    `tables` are the page tables of all state slots after the step's changes. Each of the R rows gets the table of its
    own slot, so that the result's `page_tables` are [groups, R, P]; padding rows get that of slot 0, all null pages.
    `decodes_only` says that every row has exactly one token.
    """
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


def _counts(view: Sections) -> dict[str, Int[Array, ""]]:
    """Return the buffer's counts by name."""
    return dict(zip(COUNT_FIELDS, view["counts"], strict=True))


def sample_rows(
    graph: ModelGraph,
    weights: nnx.State,
    state: SamplingState,
    hidden_TD: Float[Array, "T D"],
    columns: Int[Array, "fields R"],
    mode: SampleMode,
    settings: SampleSettings,
    mesh: Mesh | None = None,
    masks: Int[Array, "R W"] | None = None,
) -> tuple[SamplingState, SampledRows]:
    """Sample one token for each of R rows, padding included; return the new sampling state and the sampled rows.

    `graph` and `weights` are the halves of the model (`merged_model`), with the weights that logits need. `state` is
    the last token of each state slot, and the logit rules, None if the mode reads none. `columns` are the SAMPLE_FIELDS
    of the rows; "token" says which hidden state a row is sampled from. The row's token is written to its state slot
    (padding writes slot 0) and counted in its rules. `mesh` is None on a single device, and `masks` in a program that
    knows none.
    """
    slots, rows = columns[SLOT], SamplingRows.from_columns(columns)
    logits_RV = whole_logits(merged_model(graph, weights), hidden_TD[columns[TOKEN]], mesh)
    last_tokens, rules = state
    sampled = sample_logits(logits_RV, rows, mode, settings, rules, masks)
    if rules is not None:
        rules = record_tokens(rules, rows.ruled_slot, sampled.token_ids)
    return (last_tokens.at[slots].set(sampled.token_ids), rules), sampled


@dataclass(frozen=True)
class DecodeSampling:
    """How a decode program samples, and how often."""

    mode: SampleMode
    settings: SampleSettings
    num_steps: int
    """Most tokens of each row; with static control flow, every call computes so many."""
    mesh: Mesh | None = None


def decode(
    graph: ModelGraph,
    weights: nnx.State,
    state: DeviceState,
    rules: LogitRulesState | None,
    packed: Int[Array, " n"],
    layout: StepLayout,
    sampling: DecodeSampling,
) -> tuple[tuple[DeviceState, LogitRulesState | None], SampledRows]:
    """Decode up to K = `sampling.num_steps` tokens of every row, one after another.

    Return the new state and rules, and the sampled rows of each iteration, [K, R]. `graph` and `weights` are the two
    halves of the model (`merged_model`), `rules` the logit rules of all state slots (None if the mode reads none).
    `packed` is a step's int32 buffer, which `layout` cuts into named sections; every row has one token. A row is live
    until it has drawn as many tokens as the section "decode_lens" says, at most K, or one that ends its sequence; it is
    not live at all if its last token has ended its sequence, or if it is padding. The loop runs until no row is live;
    with static control flow it runs K times. A row that is not live is computed again with unchanged inputs beside the
    others: it rewrites the same keys and values, and its results mean nothing. `state` and `rules` are donated.
    """
    view = layout.view(packed)
    tables = update_tables(state.page_tables, view["changes"])
    counts = _counts(view)
    step = _metadata(view, tables, decodes_only=True)
    # Each row has one sample, so the first R columns hold all samples, padding included. Samples are in the scheduler's
    # order and rows by descending context: the field TOKEN is the sample's row here, where a row is one token.
    samples = view["samples"][:, : layout.num_rows]
    row_of_sample = samples[TOKEN]
    loop = _DecodeLoop(
        graph=graph,
        weights=weights,
        sampling=sampling,
        hidden_dtype=state.hidden.dtype,
        page_size=state.cache.layout.page_size,
        step=step,
        num_rows=counts["num_rows"],
        slot_of_row=view["seq_slots"],
        row_of_sample=row_of_sample,
        slot_of_sample=samples[SLOT],
        params=SamplingRows.from_columns(samples),
        stop_ids=samples[SAMPLE_FIELDS.index(STOP_FIELDS[0]) :],  # STOP_FIELDS are the last of SAMPLE_FIELDS.
        num_tokens=jnp.where(
            jnp.arange(layout.num_rows) < counts["num_samples"], view["decode_lens"][row_of_sample], 0
        ),
    )
    repeat_while = sampling.settings.control_flow.repeat_while
    start = loop.start(state, rules)
    end = repeat_while(lambda carry: carry.is_live.any(), loop.decode_one, start, max_steps=sampling.num_steps)
    state = replace(state, cache=end.cache, page_tables=tables, last_tokens=end.last_tokens)
    return (replace(state, expert_tokens=end.expert_tokens), end.rules), end.rows


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
    """How many tokens each row has moved on since the first iteration."""
    is_live: Bool[Array, " R"]
    """Whether each sample draws another token."""
    num_done: Int[Array, ""]
    """Iterations done."""
    rows: SampledRows
    """Results of the samples by iteration, [K, R]."""
    expert_tokens: Int[Array, "L E"] | None
    """As in `DeviceState`, with those of the iterations done; a row that is not live is not counted."""


@dataclass(frozen=True)
class _DecodeLoop:
    """The values that stay the same in all iterations of `decode`.

    Row r of the step computes a token; sample s draws one from the hidden state of row `row_of_sample[s]`. There are R
    rows and R samples, padding included; their orders may differ.
    """

    graph: ModelGraph
    weights: nnx.State
    sampling: DecodeSampling
    hidden_dtype: jnp.dtype[Any]
    page_size: int
    """Tokens per page."""
    step: AttentionMetadata
    """What attention reads in the first iteration."""
    num_rows: Int[Array, ""]
    """Rows without padding."""
    slot_of_row: Int[Array, " R"]
    """State slot of each row."""
    row_of_sample: Int[Array, " R"]
    slot_of_sample: Int[Array, " R"]
    """State slot of each sample."""
    params: SamplingRows
    """Sampling parameters of the samples in the first iteration."""
    stop_ids: Int[Array, "stops R"]
    """Tokens that end the sequence of a sample."""
    num_tokens: Int[Array, " R"]
    """Tokens that each sample draws at most; 0 for padding."""

    def start(self, state: DeviceState, rules: LogitRulesState | None) -> _DecodeCarry:
        """Return the loop state before the first iteration: no row has advanced, and the results are placeholders.

        There are R rows, which compute tokens, and R samples, each of which draws from the hidden state of one row. The
        first token that a row computes is the last one of its state slot. A sample is live unless that token has ended
        its sequence; samples of padding are not live. `rows` gets room for the results of all iterations, [K, R, …].
        """
        hidden = jax.ShapeDtypeStruct((len(self.slot_of_row), state.hidden.shape[1]), self.hidden_dtype)

        def draw(hidden_RD: Float[Array, "R D"]) -> SampledRows:
            model = merged_model(self.graph, self.weights)
            return self._sample(whole_logits(model, hidden_RD, self.sampling.mesh), self.params, rules)

        drawn = jax.eval_shape(draw, hidden)  # Shapes of one iteration's results; nothing is computed.
        num_steps = self.sampling.num_steps
        return _DecodeCarry(
            cache=state.cache,
            rules=rules,
            last_tokens=state.last_tokens,
            token_ids=state.last_tokens[self.slot_of_row],
            num_ahead=jnp.zeros_like(self.slot_of_row),
            is_live=self._stays_live(state.last_tokens[self.slot_of_sample], jnp.int32(0)),
            num_done=jnp.int32(0),
            # Results of iterations that do not run: True in bool arrays (`is_finite`), 0 in all others (token 0).
            rows=jax.tree.map(lambda row: jnp.full((num_steps, *row.shape), row.dtype == bool, row.dtype), drawn),
            expert_tokens=state.expert_tokens,
        )

    def decode_one(self, carry: _DecodeCarry) -> _DecodeCarry:
        """Run one iteration: compute one token of each of R rows, draw one for each of R samples, advance live rows.

        Only live samples write their token to their state slot and to its logit rules; the others write slot 0, which
        belongs to no sequence. A row advances by one position, to the token just drawn, if its sample stays live. Any
        other row keeps its token and position, and so computes the same keys and values in every later iteration. The
        results of all samples are stored at index `num_done` of the carry's `rows`.
        """
        step = self._advanced_step(carry.num_ahead)
        # The model is merged inside the loop's body, because nnx's transforms, which a caller's own module may use,
        # refuse variables that were made in another trace. A loop's body has a trace of its own.
        model = merged_model(self.graph, self.weights)
        counted = None if carry.expert_tokens is None else self._rows_with_samples(carry.is_live)
        inputs = ModelInputs(token_ids=carry.token_ids, attention=step, counted=counted)
        hidden_RD, cache, counts = hidden_and_counts(model, inputs, carry.cache)
        sampled_hidden_RD = hidden_RD[self.row_of_sample].astype(self.hidden_dtype)
        logits_RV = whole_logits(model, sampled_hidden_RD, self.sampling.mesh)
        params = replace(self.params, output_index=self.params.output_index + carry.num_done)
        drawn = self._sample(logits_RV, params, carry.rules)
        is_live, rules = carry.is_live, carry.rules
        if rules is not None:
            rules = record_tokens(rules, jnp.where(is_live, params.ruled_slot, 0), drawn.token_ids)
        last_tokens = carry.last_tokens.at[jnp.where(is_live, self.slot_of_sample, 0)].set(drawn.token_ids)
        num_done = carry.num_done + 1
        is_live &= self._stays_live(drawn.token_ids, num_done)
        is_advancing = self._rows_with_samples(is_live)
        return _DecodeCarry(
            cache=cache,
            rules=rules,
            last_tokens=last_tokens,
            token_ids=jnp.where(is_advancing, last_tokens[self.slot_of_row], carry.token_ids),
            num_ahead=carry.num_ahead + is_advancing.astype(jnp.int32),
            is_live=is_live,
            num_done=num_done,
            rows=jax.tree.map(lambda all_rows, row: all_rows.at[carry.num_done].set(row), carry.rows, drawn),
            expert_tokens=_total_expert_tokens(carry, counts),
        )

    def _advanced_step(self, num_ahead: Int[Array, " R"]) -> AttentionMetadata:
        """Return what attention reads when each row is `num_ahead` tokens further than in the first iteration.

        A row's KV slot is page × page size + offset, with the page that its page table has for the new position. With
        16 tokens per page, position 35 of a row whose pages are 4, 9 and 7 has the slot 7 × 16 + 3. Tables hold pages
        for all tokens of the step already. Padding rows have KV slot 0, which no sequence reads. `plan` stays as it
        is, since it was made for the longest contexts of the step.
        """
        positions = self.step.positions + num_ahead
        page_indices = positions // self.page_size  # [R]; the page tables are [groups, R, P].
        pages = jnp.take_along_axis(self.step.page_tables, page_indices[None, :, None], axis=2)[..., 0]
        is_row = jnp.arange(len(self.slot_of_row)) < self.num_rows
        return replace(
            self.step,
            positions=positions,
            slot_mapping=jnp.where(is_row[None], pages * self.page_size + (positions % self.page_size)[None], 0),
            context_lens=self.step.context_lens + num_ahead,
        )

    def _sample(
        self, logits_RV: Float[Array, "R V"], params: SamplingRows, rules: LogitRulesState | None
    ) -> SampledRows:
        """Draw a token for each sample from the logits of its row."""
        return sample_logits(logits_RV, params, self.sampling.mode, self.sampling.settings, rules)

    def _stays_live(self, token_ids: Int[Array, " R"], num_done: Int[Array, ""]) -> Bool[Array, " R"]:
        """Return which samples draw another token, once `num_done` iterations are done and have drawn `token_ids`."""
        return (num_done < self.num_tokens) & (token_ids[None] != self.stop_ids).all(axis=0)

    def _rows_with_samples(self, is_live: Bool[Array, " R"]) -> Bool[Array, " R"]:
        """Return which rows have a live sample, given which samples are live.

        Rows and samples differ in order. If sample 0 draws from row 2 and is the only live one, only row 2 is true.
        """
        num_padded_rows = len(self.slot_of_row)
        has_live_sample = jnp.zeros(num_padded_rows, bool)
        # A sample that is not live gets an index beyond the last row, which the scatter drops.
        rows = jnp.where(is_live, self.row_of_sample, num_padded_rows)
        return has_live_sample.at[rows].set(True, mode="drop")
