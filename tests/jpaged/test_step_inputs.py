"""The packed step buffer says what the scheduler meant, and padding does nothing."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.buckets import make_buckets
from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
from jpaged.request import derived_seed, make_request
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import ScheduledSequence
from jpaged.step_inputs import COUNT_FIELDS, SAMPLE_FIELDS, StepInputBuilder, StepLayout

from .symbolic import Host

UNHURRIED = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def builder_of(*, block_size=4, num_groups=1, max_num_seqs=8, max_num_batched_tokens=64):
    buckets = make_buckets(
        max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, platform="cpu", dtype="float32"
    )
    return StepInputBuilder(
        buckets=buckets,
        backend=XlaBackend(),
        block_size=block_size,
        num_groups=num_groups,
        max_num_seqs=max_num_seqs,
    )


def running(num_tokens, *, slot, pages, num_computed=0, params=None, number=0):
    """A sequence as the scheduler leaves it: in a slot, with its pages per group."""
    request = make_request(
        request_id="r",
        number=number,
        prompt_token_ids=[1000 * slot + position for position in range(num_tokens)],
        params=params or SamplingParams(),
        arrival_time=0.0,
        max_tokens=10,
        engine_seed=0,
        num_groups=len(pages),
    )
    sequence = request.sequences[0]
    sequence.slot, sequence.num_computed = slot, num_computed
    for own, given_pages in zip(sequence.pages, pages, strict=True):
        own.extend(given_pages)
    return sequence


def build(builder, *work):
    """Build a step of (sequence, number of tokens) pairs; returns it and its sections."""
    scheduled = [ScheduledSequence(sequence, sequence.num_computed, num_tokens) for sequence, num_tokens in work]
    built = builder.build(scheduled)
    return built, built.inputs.view(built.layout)


def sample_columns(view, index=0):
    return dict(zip(SAMPLE_FIELDS, view["samples"][:, index].tolist(), strict=True))


# The cut


@given(
    num_tokens=st.integers(1, 300),
    num_rows=st.integers(1, 40),
    num_samples=st.integers(1, 40),
    num_groups=st.integers(1, 3),
    num_changes=st.integers(1, 100),
    plan_len=st.integers(0, 50),
)
@UNHURRIED
def test_sections_cover_the_buffer_without_gap_or_overlap(**sizes):
    layout = StepLayout(**sizes)
    packed = np.zeros(layout.size, np.int32)
    view = layout.view(packed)
    assert list(view) == list(layout.sections)
    for section in view.values():
        assert not section.any()
        section[...] += 1
    assert (packed == 1).all()


def test_the_device_cuts_as_the_host_does():
    layout = builder_of(num_groups=2).layouts[16]
    packed = np.arange(layout.size, dtype=np.int32)
    traced = jax.jit(layout.view)(packed)
    for name, section in layout.view(packed).items():
        np.testing.assert_array_equal(traced[name], section)


def test_layouts_of_one_cut_are_one_static_argument():
    first, second = builder_of().layouts[16], builder_of().layouts[16]
    assert first == second
    assert hash(first) == hash(second)
    assert first != builder_of(num_groups=2).layouts[16]


# What a step says


def test_a_mixed_step_is_packed_as_the_kernels_expect_it():
    """Rows of one token first, longest context first; a slot is page × page size + offset, per group."""
    builder = builder_of(block_size=4, num_groups=2)
    chunk = running(9, slot=1, pages=[[3, 4, 5], [6, 7, 8]], num_computed=2)
    short = running(2, slot=2, pages=[[9], [10]], num_computed=1)
    long = running(6, slot=3, pages=[[11, 12], [13, 14]], num_computed=5)
    built, view = build(builder, (chunk, 5), (short, 1), (long, 1))
    assert built.layout.num_tokens == 8
    assert dict(zip(COUNT_FIELDS, view["counts"].tolist(), strict=True)) == {
        "num_tokens": 7,
        "num_rows": 3,
        "num_decode_rows": 2,
        "num_samples": 2,
    }
    assert view["row_slots"].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert view["context_lens"].tolist() == [6, 2, 7, 0, 0, 0, 0, 0]
    assert view["query_starts"].tolist() == [0, 1, 2, 7, 7, 7, 7, 7, 7]
    assert view["positions"].tolist() == [5, 1, 2, 3, 4, 5, 6, 0]
    assert view["token_ids"].tolist() == [3005, 2001, 1002, 1003, 1004, 1005, 1006, 0]
    assert view["slots"].tolist() == [
        [12 * 4 + 1, 9 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 4 * 4, 4 * 4 + 1, 4 * 4 + 2, 0],
        [14 * 4 + 1, 10 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 7 * 4, 7 * 4 + 1, 7 * 4 + 2, 0],
    ]
    assert built.samples == (long, short)  # The chunk leaves two tokens for later.
    assert view["samples"][:2, :2].tolist() == [[0, 1], [3, 2]]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 4, 7])
def test_a_chunk_may_begin_and_end_anywhere_in_a_page(block_size, start):
    pages = list(range(20, 2, -1))[: -(-12 // block_size)]
    for end in range(start + 1, 13):
        sequence = running(12, slot=1, pages=[pages], num_computed=start)
        _, view = build(builder_of(block_size=block_size), (sequence, end - start))
        expected = [pages[at // block_size] * block_size + at % block_size for at in range(start, end)]
        assert view["slots"][0, : end - start].tolist() == expected


@pytest.mark.parametrize("slot", [1, 2, 8])
def test_a_token_drawn_in_the_slot_travels_as_its_code(slot):
    """−(s + 1) ≤ −2: the host need not know the token. What the host knows travels as it is."""
    builder = builder_of()
    sequence = running(6, slot=slot, pages=[[3, 4]], num_computed=5)
    _, view = build(builder, (sequence, 1))
    assert view["token_ids"][0] == 1000 * slot + 5
    sequence.is_last_token_on_device = True
    _, view = build(builder, (sequence, 1))
    assert view["token_ids"][0] == -(slot + 1)


def test_after_a_preemption_the_host_sends_the_token_itself():
    sequence = running(6, slot=2, pages=[[3, 4]], num_computed=5)
    sequence.is_last_token_on_device = True
    sequence.release_device()
    sequence.slot, sequence.num_computed = 1, 5
    sequence.pages[0].extend([5, 6])
    _, view = build(builder_of(), (sequence, 1))
    assert view["token_ids"][0] == 2005


def test_padding_touches_the_null_page_and_the_null_slot_only():
    builder = builder_of(num_groups=2)
    for num_tokens in range(1, 18):
        sequence = running(20, slot=3, pages=[[4, 5, 6, 7, 8], [9, 10, 11, 12, 13]])
        built, view = build(builder, (sequence, num_tokens))
        assert built.layout.num_tokens >= num_tokens
        assert not view["slots"][:, num_tokens:].any()
        assert not view["token_ids"][num_tokens:].any()
        assert not view["row_slots"][1:].any()
        assert not view["context_lens"][1:].any()
        assert (view["query_starts"][1:] == num_tokens).all()
        assert not view["samples"].any()  # Nothing is sampled: the row for slot 0 reads token 0.
        num_changes = np.count_nonzero(view["changes"][1])
        assert not view["changes"][:, num_changes:].any()


# Sampled rows


@given(
    temperature=st.floats(0, 2), top_p=st.floats(0, 1, exclude_min=True), min_p=st.floats(0, 1), top_k=st.integers(-1)
)
@UNHURRIED
def test_sampling_parameters_arrive_to_the_bit(temperature, top_p, min_p, top_k):
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    _, view = build(builder_of(), (running(3, slot=5, pages=[[1]], params=params), 3))
    columns = sample_columns(view)
    for name in ("temperature", "top_p", "min_p"):
        assert np.array(columns[name], np.int32).view(np.float32) == np.float32(getattr(params, name))
    assert columns["top_k"] == (0 if top_k < 1 else min(top_k, 2**31 - 1))
    assert (columns["token"], columns["slot"], columns["output_index"], columns["sample_index"]) == (2, 5, 0, 0)


@given(seed=st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, 0, 2**31, 2**32, -(2**63), 2**63 - 1]))
@UNHURRIED
def test_a_seed_travels_as_two_words_of_its_twos_complement(seed):
    _, view = build(builder_of(), (running(3, slot=1, pages=[[1]], params=SamplingParams(seed=seed)), 3))
    columns = sample_columns(view)
    words = np.array([columns["seed_low"], columns["seed_high"]], np.int32)
    assert words.view(np.int64)[0] == seed


def test_a_request_without_a_seed_sends_the_one_of_its_number():
    _, view = build(builder_of(), (running(3, slot=1, pages=[[1]], number=77), 3))
    columns = sample_columns(view)
    assert columns["seed_low"] % 2**32 + columns["seed_high"] % 2**32 * 2**32 == derived_seed(0, 77)


def test_a_slot_takes_the_parameters_of_its_new_owner():
    """S10: also where the old owner comes back after another one."""
    builder = builder_of()
    first = running(3, slot=1, pages=[[1]], params=SamplingParams(seed=11, top_k=3))
    second = running(3, slot=1, pages=[[2]], params=SamplingParams(seed=22, top_k=4))
    seen = []
    for sequence in (first, second, first):
        _, view = build(builder, (sequence, 3))
        columns = sample_columns(view)
        seen.append((columns["seed_low"], columns["top_k"]))
        sequence.release_device()
        sequence.slot = 1
        sequence.pages[0].append(1)
    assert seen == [(11, 3), (22, 4), (11, 3)]


def test_the_output_index_counts_from_the_first_drawn_token():
    builder = builder_of()
    sequence = running(3, slot=1, pages=[[1, 2]])
    seen = []
    for token in (50, 51, 52):
        _, view = build(builder, (sequence, sequence.num_pending))
        seen.append(sample_columns(view)["output_index"])
        sequence.num_computed = sequence.num_tokens
        sequence.token_ids.append(token)
    assert seen == [0, 1, 2]


# Page-table changes


def changes_of(built, view):
    """All page-table changes that a step sends, batches of their own first, without padding."""
    batches = [*built.table_updates, view["changes"]]
    return [tuple(change) for batch in batches for change in batch.T.tolist() if change[1]]


def test_a_page_is_sent_once_for_each_slot_that_its_sequence_holds():
    builder = builder_of(block_size=2, num_groups=2)
    sequence = running(7, slot=4, pages=[[3, 4], [5, 6]])
    sent = []
    for num_tokens, new_pages in [(3, ([], [])), (2, ([7], [8])), (1, ([], [])), (1, ([9], [10]))]:
        for pages, new in zip(sequence.pages, new_pages, strict=True):
            pages.extend(new)
        sent.append(changes_of(*build(builder, (sequence, num_tokens))))
        sequence.num_computed += num_tokens
    assert sent == [
        [(0, 4, 0, 3), (0, 4, 1, 4), (1, 4, 0, 5), (1, 4, 1, 6)],
        [(0, 4, 2, 7), (1, 4, 2, 8)],
        [],
        [(0, 4, 3, 9), (1, 4, 3, 10)],
    ]
    sequence.release_device()
    sequence.slot = 2
    for pages in sequence.pages:
        pages.extend([11, 12])
    assert changes_of(*build(builder, (sequence, 3))) == [
        (group, 2, index, page) for group in (0, 1) for index, page in [(0, 11), (1, 12)]
    ]


def test_more_prefix_hits_than_the_buffer_has_room_for_travel_ahead_in_batches():
    """One token to compute behind 100 cached pages of one token: two changes fit the bucket of one token."""
    builder = builder_of(block_size=1, max_num_batched_tokens=16)
    pages = list(range(1, 102))
    built, view = build(builder, (running(101, slot=1, pages=[pages], num_computed=100), 1))
    assert built.layout.num_tokens == 1
    assert not view["changes"].any()
    assert len(built.table_updates) > 1
    assert {update.shape for update in built.table_updates} == {(4, builder.num_changes)}
    assert {update.dtype for update in built.table_updates} == {np.dtype(np.int32)}
    assert changes_of(built, view) == [(0, 1, index, page) for index, page in enumerate(pages)]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_without_prefix_hits_all_changes_fit_the_step(block_size, num_groups):
    """The worst case: every row begins a page with its first token, whatever the bucket."""
    builder = builder_of(block_size=block_size, num_groups=num_groups)
    for num_rows in range(1, 9):
        for num_tokens in (1, block_size + 1, 64 // num_rows):
            num_tokens = min(num_tokens, 64 // num_rows)
            num_pages = -(-num_tokens // block_size)
            work = [
                (running(num_tokens, slot=row + 1, pages=[range(1, num_pages + 1)] * num_groups), num_tokens)
                for row in range(num_rows)
            ]
            built, view = build(builder, *work)
            assert not built.table_updates
            assert len(changes_of(built, view)) == num_rows * num_groups * num_pages


def test_over_a_whole_run_each_page_table_entry_is_sent_once():
    host = Host(num_groups=2, enable_prefix_caching=False)
    for index in range(6):
        host.add([100 * index + position + 100 for position in range(9)], max_tokens=5)
    host.run()
    assert host.scheduler.num_preemptions == 0
    # 9 + 5 − 1 tokens take 4 pages of 4 in each of 2 groups.
    assert host.device.num_changes == 6 * 4 * 2
