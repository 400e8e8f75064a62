"""The compiled step's functions on a tiny random model with XLA attention."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.opening.reading import config_from_hf
from jpaged.pallas_kernels.native.products.panels import columns_of
from jpaged.pallas_kernels.ragged_paged_attention.interface import LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from jpaged.sampling.logit_rules import new_rules
from jpaged.sampling.logit_rules_spec import COUNT_MASK, LogitRulesSpec
from jpaged.sampling.sample_columns import SAMPLE_FIELDS
from jpaged.sampling.sampler import SampleSettings
from jpaged.sampling.sampling_params import SampleMode, SamplingParams
from jpaged.scheduling.scheduler_output import Chunk, SchedulerOutput
from jpaged.step.step import DecodeSampling, DeviceState, decode, forward, sample_rows, update_tables
from jpaged.step.step_inputs import StepInputBuilder
from jpaged.step.step_sizes import StepSizes

from ..host_requests import new_request
from ..tiny_model import CONFIG, random_weights, tiny_layout

PAGE, NUM_PAGES, MAX_PAGES, MAX_SEQS = 4, 24, 6, 4
MODEL = config_from_hf(CONFIG, Path("config.json"))
BACKEND = NativeBackend(share_prefixes=False)


@pytest.fixture(scope="module")
def weights():
    return random_weights(MODEL, BACKEND)


@pytest.fixture
def builder():
    sizes = StepSizes("float32", "float32", PAGE, MAX_PAGES * PAGE, MAX_SEQS, 16)
    return StepInputBuilder(sizes, sizes.buckets("cpu"), BACKEND, rules_spec=LogitRulesSpec(MODEL.vocab_size))


def fresh_state(fill=np.nan):
    """Return a state of NaN pages, tables that name the last page, and last tokens that are valid but wrong."""
    layout = tiny_layout(BACKEND, num_pages=NUM_PAGES, page_size=PAGE)
    places = tuple(LayerPlace(0, layer) for layer in range(MODEL.num_layers))
    pages = tuple(jnp.full(shape, fill, jnp.float32) for shape in layout.shapes)
    tables = jnp.full((1, MAX_SEQS + 1, MAX_PAGES), NUM_PAGES - 1, jnp.int32)
    last_tokens, hidden = jnp.full((MAX_SEQS + 1,), 99, jnp.int32), jnp.full((16, MODEL.hidden_size), fill)
    return DeviceState(PagedCache(pages, layout, places, BACKEND), tables, last_tokens, hidden)


def sequence(token_ids, *, slot, pages, **params):
    request = new_request(token_ids, number=slot, params=SamplingParams(**params))
    made = request.sequences[0]
    made.seq_slot = slot
    made.pages[0].extend(pages)
    return made


jitted_forward = jax.jit(forward, static_argnums=(0, 4))
jitted_sample = jax.jit(sample_rows, static_argnums=(0, 5, 6))


def run(weights, builder, state, *work):
    """Run a forward over pairs of sequence and number of tokens.

    Returns the new state, the sampled rows' hidden states and SAMPLE_FIELDS, and the built step. Page-table changes
    name all pages of a sequence each time.
    """
    scheduled = SchedulerOutput(1)
    for one, num_tokens in work:
        end = one.num_computed + num_tokens
        if one.is_last_token_on_device:
            scheduled.decodes.append(one)
        else:
            samples = (one,) if end == len(one.token_ids) else ()
            scheduled.chunks.append(Chunk(one, one.num_computed, num_tokens, samples))
        if one.num_computed == 0:
            scheduled.new_in_slots.append(one)
        scheduled.table_changes.extend((0, one.seq_slot, entry, page) for entry, page in enumerate(one.pages[0]))
    step, rows = builder.build(scheduled)
    for changes in step.table_updates:
        state = replace(state, page_tables=update_tables(state.page_tables, jnp.asarray(changes)))
    packed = jnp.asarray(step.packed)
    state, columns = jitted_forward(weights.graph, weights.state, state, packed, step.layout)
    for one, num_tokens in work:
        one.num_computed += num_tokens
    hidden = np.asarray(state.hidden)[np.asarray(columns)[SAMPLE_FIELDS.index("token")]]
    return state, hidden, columns, step, rows


def prompt(length, seed):
    return np.random.default_rng(seed).integers(2, 258, length).tolist()


def hidden_alone(weights, builder, token_ids):
    """Return the hidden state of the last of these tokens, computed in a step of its own."""
    one = sequence(token_ids, slot=1, pages=range(1, 1 - -len(token_ids) // PAGE + 1))
    return run(weights, builder, fresh_state(), (one, len(token_ids)))[1][0]


def test_update_tables_sets_the_named_entries_and_with_padding_only_entry_0_of_slot_0():
    before = jnp.asarray(np.random.default_rng(0).integers(1, 20, (2, 3, 4)), jnp.int32)
    changes = jnp.array([[0, 1, 0, 0], [2, 1, 0, 0], [3, 0, 0, 0], [7, 9, 0, 0]], jnp.int32)
    expected = np.array(before)
    expected[0, 2, 3], expected[1, 1, 0], expected[0, 0, 0] = 7, 9, 0
    assert np.array_equal(update_tables(before, changes), expected)


def test_hidden_rows_are_those_of_the_sampled_tokens_in_the_order_of_the_samples(weights, builder):
    """A chunk that samples nothing lies between two that do. XLA rounds differently in other padded sizes: 1e-5."""
    first, chunk, last = prompt(5, 1), prompt(9, 2), prompt(3, 3)
    work = [
        (sequence(first, slot=2, pages=[4, 9]), 5),
        (sequence(chunk, slot=1, pages=[7, 3, 5]), 6),
        (sequence(last, slot=3, pages=[8]), 3),
    ]
    _, hidden, columns, _, rows = run(weights, builder, fresh_state(), *work)
    assert [one.seq_slot for one in rows.samples] == [2, 3]
    assert np.asarray(columns)[SAMPLE_FIELDS.index("slot"), :2].tolist() == [2, 3]
    np.testing.assert_allclose(hidden[0], hidden_alone(weights, builder, first), atol=1e-5)
    np.testing.assert_allclose(hidden[1], hidden_alone(weights, builder, last), atol=1e-5)


def test_page_table_changes_apply_to_the_step_that_brings_them(weights, builder):
    """Before, the tables named a wrong page and every page held NaN."""
    token_ids = prompt(10, 4)
    one = sequence(token_ids, slot=2, pages=[6, 2])
    state, *_ = run(weights, builder, fresh_state(), (one, 7))
    one.pages[0].append(11)
    state, hidden, *_ = run(weights, builder, state, (one, 3))
    np.testing.assert_allclose(hidden[0], hidden_alone(weights, builder, token_ids), atol=1e-5)
    tables = np.asarray(state.page_tables)[0]
    assert tables[2].tolist() == [6, 2, 11, *[NUM_PAGES - 1] * 3]
    assert (tables[[1, 3, 4]] == NUM_PAGES - 1).all()


def test_padding_writes_no_page(weights, builder):
    """Every KV slot was NaN before, so a slot that holds numbers was written."""
    one = sequence(prompt(6, 5), slot=1, pages=[3, 7])
    before = fresh_state()
    state, _, _, step, _ = run(weights, builder, before, (one, 6))
    assert step.layout.num_tokens > 6, "nothing was padded"
    for array, is_key in zip(state.cache.pages, (True, False), strict=True):
        entries = state.cache.layout.entry(np.arange(MODEL.num_layers)[:, None], np.arange(NUM_PAGES))
        by_page = np.asarray(array)[entries]
        written = ~np.isnan(by_page)
        # Keys lie [page, head, size, slot], values [page, head, slot, size].
        slots = written.any(axis=(2, 3)) if is_key else written.any(axis=(2, 4))
        expected = np.zeros((MODEL.num_layers, NUM_PAGES, PAGE), bool)
        expected[:, 3, :], expected[:, 7, :2] = True, True
        assert np.array_equal(slots, expected)
    assert np.array_equal(state.last_tokens, before.last_tokens)


@pytest.mark.parametrize("slot", [1, MAX_SEQS])
def test_a_coded_id_stands_for_the_last_token_of_its_slot(weights, builder, slot):
    """The code is −(slot + 1). The same token given by its id has the same bits in the same executable."""
    token_ids = prompt(6, 6)
    results = []
    for is_on_device in (False, True):
        one = sequence(token_ids, slot=slot, pages=[3, 7])
        state, *_ = run(weights, builder, fresh_state(), (one, 5))
        one.is_last_token_on_device = is_on_device
        state = replace(state, last_tokens=state.last_tokens.at[slot].set(token_ids[5]))
        if is_on_device:
            one.token_ids[5] = 2  # The host's own copy of the token is not read.
        _, hidden, _, step, _ = run(weights, builder, state, (one, 1))
        sent = step.layout.view(step.packed)["token_ids"][0]
        assert sent == (-(slot + 1) if is_on_device else token_ids[5])
        results.append(hidden[0])
    assert np.array_equal(*results)


def test_a_coded_id_never_reaches_the_embedding(weights, builder):
    """A negative id would read a row from the end of the embedding."""
    one = sequence(prompt(4, 7), slot=3, pages=[3])
    state, *_ = run(weights, builder, fresh_state(), (one, 3))
    one.is_last_token_on_device = True
    _, coded, *_ = run(weights, builder, replace(state, last_tokens=state.last_tokens.at[3].set(17)), (one, 1))
    np.testing.assert_allclose(coded[0], hidden_alone(weights, builder, [*prompt(4, 7)[:3], 17]), atol=1e-5)


def test_sampled_tokens_are_kept_in_their_state_slots_and_padding_in_slot_0(weights, builder):
    work = [
        (sequence(prompt(5, 1), slot=4, pages=[4, 9], temperature=0), 5),
        (sequence(prompt(3, 3), slot=2, pages=[8], temperature=0), 3),
    ]
    state, hidden, columns, *_ = run(weights, builder, fresh_state(), *work)
    kept = state.last_tokens, None
    (last_tokens, _), sampled = jitted_sample(
        weights.graph, weights.state, kept, state.hidden, columns[:, :8], SampleMode.GREEDY, SampleSettings()
    )
    head = weights.state["head"]["weight"].get_value()
    rows = columns_of(head, jnp.arange(MODEL.vocab_size), MODEL.hidden_size)
    logits = hidden.astype(np.float64) @ np.asarray(rows, np.float64).T
    tokens = np.asarray(sampled.token_ids)
    assert tokens[:2].tolist() == logits[:2].argmax(axis=1).tolist()
    kept_tokens = np.asarray(last_tokens)
    assert kept_tokens[[4, 2]].tolist() == tokens[:2].tolist()
    assert kept_tokens[[1, 3]].tolist() == [99, 99]


def test_a_rows_parameters_reach_the_sampler(weights, builder):
    """Rows with equal logits draw different tokens only because of their parameters."""
    token_ids = prompt(5, 8)

    def drawn(**params):
        one = sequence(token_ids, slot=1, pages=[1, 2], logprobs=0, **params)
        state, _, columns, *_ = run(weights, builder, fresh_state(), (one, 5))
        kept = state.last_tokens, new_rules(LogitRulesSpec(MODEL.vocab_size), len(state.last_tokens))
        mode, settings = SampleMode.FULL, SampleSettings(max_logprobs=3)
        arguments = weights.graph, weights.state, kept, state.hidden, columns[:, :8], mode, settings
        sampled = jitted_sample(*arguments)[1]
        return int(sampled.token_ids[0]), int(sampled.scores.ranks[0])

    greedy, rank = drawn(temperature=0)
    assert rank == 1
    hot = {drawn(temperature=2.0, seed=seed) for seed in range(8)}
    assert len(hot) > 4
    for rule in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert {drawn(**{"temperature": 2.0, "seed": seed, **rule}) for seed in range(4)} == {(greedy, 1)}
    assert drawn(temperature=2.0, seed=5) == drawn(temperature=2.0, seed=5)
    assert drawn(temperature=2.0, seed=5 + (7 << 32)) != drawn(temperature=2.0, seed=5)


def test_a_row_counts_the_tokens_of_its_own_share_of_a_decode_program(weights, builder):
    """A row whose share is shorter than its neighbour's is computed beside it to the end, and decodes on later."""
    work = [
        (sequence(prompt(5, 9), slot=1, pages=[4, 9, 3], presence_penalty=1.0, ignore_eos=True, max_tokens=9), 5),
        (sequence(prompt(3, 10), slot=3, pages=[8, 2], presence_penalty=1.0, ignore_eos=True, max_tokens=9), 3),
    ]
    state, *_ = run(weights, builder, fresh_state(), *work)
    sequences = [one for one, _ in work]
    step, _ = builder.build(SchedulerOutput(2, decodes=sequences, decode_lens=[2, 4]))
    rules = new_rules(LogitRulesSpec(MODEL.vocab_size), MAX_SEQS + 1)
    sampling = DecodeSampling(SampleMode.FULL, SampleSettings(), num_steps=4)
    jitted_decode = jax.jit(decode, static_argnums=(0, 5, 6))
    (_, rules), _ = jitted_decode(
        weights.graph, weights.state, state, rules, jnp.asarray(step.packed), step.layout, sampling
    )
    counts = np.asarray(rules.tokens & COUNT_MASK).sum(axis=1)
    assert counts.tolist() == [0, 2, 0, 4, 0]
