"""The packed step buffer says what the scheduler meant, and padding does nothing."""

import random
import struct
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jpaged.buckets import make_buckets
from jpaged.page_store import MoveKind, PageMove
from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
from jpaged.request import derived_seed, make_request
from jpaged.rule_book import RuleBook
from jpaged.sampling_params import SampleMode, SamplingParams
from jpaged.schedule import Chunk, SchedulerOutput
from jpaged.step_inputs import COUNT_FIELDS, SAMPLE_FIELDS, STOP_FIELDS, StepInputBuilder, StepLayout

UNHURRIED = settings(max_examples=100, deadline=None, derandomize=True, database=None)
GREEDY, DRAWN, SCORED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.0, logprobs=0),
)
SCORED_PROMPT = SamplingParams(temperature=0.0, prompt_logprobs=0)


def builder_of(*, block_size=4, num_groups=1, max_num_seqs=8, max_num_batched_tokens=64, max_pages=128, **options):
    buckets = make_buckets(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, platform="cpu")
    return StepInputBuilder(
        buckets=buckets,
        backend=XlaBackend(),
        block_size=block_size,
        num_groups=num_groups,
        max_num_seqs=max_num_seqs,
        max_pages=max_pages,
        rule_book=RuleBook(10_000),
        **options,
    )


def running(prompt_len, *, slots=(1,), params=None, number=0):
    """Sequences of one request, one for each slot. Their pages are in the table changes and nowhere else."""
    request = make_request(
        request_id="r",
        number=number,
        prompt_token_ids=[1000 * slots[0] + position for position in range(prompt_len)],
        params=params or SamplingParams(),
        arrival_time=0.0,
        max_tokens=10,
        engine_seed=0,
        num_groups=1,
        sample_indices=range(len(slots)),
    )
    for sequence, slot in zip(request.sequences, slots, strict=True):
        sequence.slot = slot
    return request.sequences


def chunk_of(sequence, start, num_tokens, samplers=()):
    return Chunk(sequence, start, num_tokens, tuple(samplers))


def work_of(*, decodes=(), chunks=(), placed=(), changes=(), moves=(), decode_lens=()):
    return SchedulerOutput(
        step=1,
        decodes=list(decodes),
        chunks=list(chunks),
        placed=list(placed),
        table_changes=list(changes),
        moves=list(moves),
        preempted=[],
        ignored=[],
        decode_lens=list(decode_lens),
    )


def table_of(sequence, *pages_of_group):
    """Table changes that give a sequence these pages from its first position on, per group."""
    return [
        (group, sequence.slot, index, page)
        for group, pages in enumerate(pages_of_group)
        for index, page in enumerate(pages)
    ]


def build(builder, **work):
    """Build a step; returns it and its sections."""
    built = builder.build(work_of(**work))
    return built, built.inputs.view(built.layout)


def prefill(builder, sequence, pages=(3, 4, 5)):
    """The whole prompt in one chunk, which draws a token."""
    chunk = chunk_of(sequence, 0, sequence.request.prompt_len, [sequence])
    return build(builder, chunks=[chunk], placed=[sequence], changes=table_of(sequence, pages))


def sample_columns(view, index=0):
    return dict(zip(SAMPLE_FIELDS, view["samples"][:, index].tolist(), strict=True))


def samples_named(view, name):
    return view["samples"][SAMPLE_FIELDS.index(name)].tolist()


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
    [chunk], [short], [long] = running(9, slots=[1]), running(1, slots=[2]), running(5, slots=[3])
    changes = [
        *table_of(chunk, [3, 4, 5], [6, 7, 8]),
        *table_of(short, [9], [10]),
        *table_of(long, [11, 12], [13, 14]),
    ]
    # The chunks come last to first: what they are is what counts.
    starts = [chunk_of(long, 0, 5, [long]), chunk_of(short, 0, 1, [short])]
    build(builder, chunks=starts, placed=[chunk, short, long], changes=changes)
    built, view = build(builder, decodes=[short, long], chunks=[chunk_of(chunk, 2, 5)])
    assert built.layout.num_tokens == 8
    assert dict(zip(COUNT_FIELDS, view["counts"].tolist(), strict=True)) == {
        "num_tokens": 7,
        "num_rows": 3,
        "num_decode_rows": 2,
        "num_samples": 2,
        "is_drawn": 1,
    }
    assert view["row_slots"].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert view["context_lens"].tolist() == [6, 2, 7, 0, 0, 0, 0, 0]
    assert view["query_starts"].tolist() == [0, 1, 2, 7, 7, 7, 7, 7, 7]
    assert view["positions"].tolist() == [5, 1, 2, 3, 4, 5, 6, 0]
    assert view["token_ids"].tolist() == [-4, -3, 1002, 1003, 1004, 1005, 1006, 0]
    assert view["slots"].tolist() == [
        [12 * 4 + 1, 9 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 4 * 4, 4 * 4 + 1, 4 * 4 + 2, 0],
        [14 * 4 + 1, 10 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 7 * 4, 7 * 4 + 1, 7 * 4 + 2, 0],
    ]
    # Samples are in the order of the work, and say where their row is. The chunk leaves two tokens for later.
    assert built.samples == [short, long]
    assert view["samples"][:2, :2].tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 4, 7])
def test_a_chunk_may_begin_and_end_anywhere_in_a_page(block_size, start):
    pages = list(range(20, 2, -1))[: -(-12 // block_size)]
    for end in range(start + 1, 13):
        [sequence] = running(12)
        chunk = chunk_of(sequence, start, end - start)
        _, view = build(builder_of(block_size=block_size), chunks=[chunk], changes=table_of(sequence, pages))
        expected = [pages[at // block_size] * block_size + at % block_size for at in range(start, end)]
        assert view["slots"][0, : end - start].tolist() == expected
        assert view["positions"][: end - start].tolist() == list(range(start, end))


@pytest.mark.parametrize("slot", [1, 2, 8])
def test_a_token_drawn_in_the_slot_travels_as_its_code(slot):
    """−(s + 1) ≤ −2: the host need not know the token. What the host knows travels as it is."""
    builder = builder_of()
    [sequence] = running(6, slots=[slot])
    prefill(builder, sequence)
    _, view = build(builder, decodes=[sequence])
    assert view["token_ids"][0] == -(slot + 1)
    sequence.token_ids.append(77)
    _, view = build(builder, chunks=[chunk_of(sequence, 6, 1, [sequence])])
    assert view["token_ids"][0] == 77


def test_a_chunk_of_one_token_stands_among_the_decodes_by_its_context():
    builder = builder_of()
    sequences = [running(prompt_len, slots=[slot])[0] for slot, prompt_len in [(1, 3), (2, 9), (3, 6)]]
    for sequence in sequences:
        prefill(builder, sequence)
    [known], [chunk] = running(8, slots=[4]), running(9, slots=[5])
    chunks = [chunk_of(chunk, 0, 2), chunk_of(known, 7, 1, [known])]
    built, view = build(builder, decodes=sequences, chunks=chunks, placed=[known, chunk])
    assert view["row_slots"][:5].tolist() == [2, 4, 3, 1, 5]
    assert view["token_ids"][:6].tolist() == [-3, 4007, -4, -2, 5000, 5001]
    assert view["counts"].tolist()[:4] == [6, 5, 4, 4]
    assert built.samples == [*sequences, known]
    assert samples_named(view, "token")[:4] == [3, 0, 2, 1]


def test_with_one_token_rows_a_prompt_is_packed_as_if_it_came_token_by_token():
    """In one step, beside others that decode; what it draws and scores, and how it decodes on, is the same."""
    packed = []
    for is_asked in (True, False):
        builder = builder_of(one_token_rows=is_asked, max_num_seqs=16)
        [decoding], siblings = (
            running(6, slots=[1]),
            running(9, slots=[2, 3], params=replace(SCORED, prompt_logprobs=1)),
        )
        prefill(builder, decoding)
        samplers, pages = siblings, table_of(siblings[0], (6, 7, 8)) + table_of(siblings[1], (6, 7, 8))
        at_once = [chunk_of(siblings[0], 2, 7, samplers)]
        one_by_one = [chunk_of(siblings[0], at, 1, samplers if at == 8 else ()) for at in range(2, 9)]
        chunks = at_once if is_asked else one_by_one
        built, view = build(builder, decodes=[decoding], chunks=chunks, placed=siblings, changes=pages)
        assert view["counts"].tolist()[:4] == [8, 8, 8, 3]
        assert [list(positions) for _, positions in built.scored] == [[at] for at in range(2, 8)]
        after, _ = build(builder, decodes=[decoding, *siblings])
        packed += [built, after]
    for one, other in zip(packed[:2], packed[2:], strict=True):
        assert np.array_equal(one.inputs.packed, other.inputs.packed)
        assert np.array_equal(one.score_columns, other.score_columns)


def test_tokens_that_are_scored_are_rows_that_are_given_them_as_many_as_a_sampler_takes():
    """Two prompts, the second from its third token on: in two pieces, each with the hidden state before the token."""
    builder = builder_of(max_num_seqs=8)
    [one], [other] = running(7, slots=[1], params=SCORED_PROMPT), running(9, slots=[2], params=SCORED_PROMPT)
    other.request.num_scored = 2
    chunks = [chunk_of(one, 0, 7, [one]), chunk_of(other, 0, 8)]
    built, view = build(builder, chunks=chunks, placed=[one, other], changes=table_of(one, (3, 4)))
    assert [list(positions) for _, positions in built.scored] == [list(range(6)), list(range(2, 8))]
    size = builder.buckets.max_samples
    assert [piece.shape for piece in built.score_columns] == [(len(SAMPLE_FIELDS), size)] * 2
    columns = dict(zip(SAMPLE_FIELDS, np.concatenate(built.score_columns, axis=1), strict=True))
    starts = {slot: view["query_starts"][row] for row, slot in enumerate(view["row_slots"][:2])}
    places = [starts[1] + at for at in range(6)] + [starts[2] + at for at in range(2, 8)]
    assert columns.pop("token").tolist() == places + [0] * (2 * size - 12)
    given = [*one.token_ids[1:7], *other.token_ids[3:9]]
    assert columns.pop("forced_token").tolist() == [1 + token for token in given] + [0] * (2 * size - 12)
    assert not any(column.any() for column in columns.values())


def test_rows_that_decode_on_are_packed_with_their_steps_and_the_next_step_begins_behind_them():
    """In the order of the rows, longest context first; the plan is made for the longest that contexts become."""
    builder = builder_of(block_size=4)
    sequences = [running(prompt_len, slots=[slot])[0] for slot, prompt_len in [(1, 3), (2, 9), (3, 6)]]
    for sequence, stops in zip(sequences, [(), (7, 5), (1, 2, 3, 4, 5, 6)], strict=True):
        sequence.stop_ids = frozenset(stops)
        prefill(builder, sequence)
    lens = [5, 2, 3]
    planned = []
    plan = builder.backend.plan

    def noted(*args, **options):
        planned.append(args[1])
        plan(*args, **options)

    builder.backend = SimpleNamespace(plan=noted)
    built, view = build(builder, decodes=sequences, decode_lens=lens)
    assert (built.draws, built.samples) == (lens, sequences)
    assert view["counts"].tolist() == [3, 3, 3, 3, 1]
    assert view["row_slots"][:3].tolist() == [2, 3, 1]
    assert view["row_steps"].tolist() == [2, 3, 5, 0, 0, 0, 0, 0]
    assert view["context_lens"][:3].tolist() == [10, 7, 4]
    assert planned[0].tolist() == [11, 9, 8]
    assert samples_named(view, "output_index")[:3] == [1, 1, 1]
    columns = zip(*(samples_named(view, name)[:3] for name in STOP_FIELDS), strict=True)
    assert list(columns) == [(-1, -1, -1, -1), (5, 7, -1, -1), (1, 2, 3, 4)]
    _, view = build(builder, decodes=sequences)
    assert view["positions"][:3].tolist() == [11, 9, 8]
    assert samples_named(view, "output_index")[:3] == [6, 3, 4]
    assert not view["row_steps"].any()


def test_a_decode_stands_where_the_slot_stopped():
    """After a chunk, after other decodes, after a step without it, and after the slot changed hands twice."""
    builder = builder_of(block_size=4)
    [first], [second] = running(5, slots=[1]), running(2, slots=[1])
    seen = []

    def decode(sequence):
        _, view = build(builder, decodes=[sequence])
        seen.append((int(view["positions"][0]), int(view["slots"][0, 0]), sample_columns(view)["output_index"]))

    prefill(builder, first, [3, 4])
    decode(first)
    decode(first)
    [other] = running(4, slots=[2])
    prefill(builder, other)
    decode(first)
    assert seen == [(5, 4 * 4 + 1, 1), (6, 4 * 4 + 2, 2), (7, 4 * 4 + 3, 3)]
    seen.clear()
    prefill(builder, second, [7])
    decode(second)
    assert seen == [(2, 7 * 4 + 2, 1)]
    seen.clear()
    # The first comes back with the four tokens that it has drawn, the last of which is still to be computed.
    first.token_ids.extend([50, 51, 52, 53])
    build(builder, chunks=[chunk_of(first, 8, 1, [first])], placed=[first], changes=table_of(first, [9, 10, 11]))
    decode(first)
    # Whoever drew what is decoded: the slot has computed so far.
    build(builder, chunks=[chunk_of(first, 3, 4)])
    decode(first)
    assert seen == [(9, 11 * 4 + 1, 5), (7, 10 * 4 + 3, 3)]


def test_padding_touches_the_null_page_and_the_null_slot_only():
    builder = builder_of(num_groups=2)
    for num_tokens in range(1, 18):
        [sequence] = running(20, slots=[3])
        changes = table_of(sequence, [4, 5, 6, 7, 8], [9, 10, 11, 12, 13])
        built, view = build(
            builder, chunks=[chunk_of(sequence, 0, num_tokens)], placed=[sequence], changes=changes[: num_tokens // 4]
        )
        assert built.layout.num_tokens >= num_tokens
        assert not view["slots"][:, num_tokens:].any()
        assert not view["token_ids"][num_tokens:].any()
        assert not view["positions"][num_tokens:].any()
        assert not view["row_slots"][1:].any()
        assert not view["context_lens"][1:].any()
        assert (view["query_starts"][1:] == num_tokens).all()
        assert not view["samples"].any()  # Nothing is sampled: the row for slot 0 reads token 0.
        num_changes = np.count_nonzero(view["changes"][1])
        assert num_changes == num_tokens // 4
        assert not view["changes"][:, num_changes:].any()


def test_steps_in_flight_share_no_memory():
    """On a CPU a buffer may be the device's own: what is built next must leave it alone."""
    builder = builder_of(max_num_seqs=64)
    sequences = [running(1, slots=[slot])[0] for slot in range(1, 65)]
    prompts = [chunk_of(sequence, 0, 1, [sequence]) for sequence in sequences]
    many = [(0, slot, index, slot + index) for slot in range(1, 65) for index in range(40)]
    steps = [builder.build(work_of(chunks=prompts, placed=sequences, changes=many))]
    copies, on_device = [], []
    for _ in range(4):
        copies.append(steps[-1].inputs.packed.copy())
        on_device.append(jax.device_put(steps[-1].inputs.packed))
        steps.append(builder.build(work_of(decodes=sequences)))
    for copy, array in zip(copies, on_device, strict=True):
        np.testing.assert_array_equal(array, copy)
    buffers = [step.inputs.packed for step in steps] + list(steps[0].table_updates)
    assert len(steps[0].table_updates) > 1
    kept = [value for value in vars(builder).values() if isinstance(value, np.ndarray)]
    for index, buffer in enumerate(buffers):
        assert not any(np.shares_memory(buffer, other) for other in (*buffers[:index], *kept))


def test_a_step_without_rows_is_its_moves_and_table_changes():
    """What it says of slots holds for the next step."""
    builder = builder_of(block_size=4)
    [sequence] = running(6, slots=[2], params=SCORED)
    moves = [PageMove(MoveKind.COPY, 3, 4), PageMove(MoveKind.SWAP_OUT, 5, 6)]
    built = builder.build(work_of(moves=moves, placed=[sequence], changes=table_of(sequence, [8, 9])))
    assert built.inputs is None
    assert built.layout is None
    assert built.samples == []
    assert built.moves == moves
    assert [update.shape for update in built.table_updates] == [(4, builder.num_changes)]
    assert built.table_updates[0][:, :3].T.tolist() == [[0, 2, 0, 8], [0, 2, 1, 9], [0, 0, 0, 0]]
    built, view = build(builder, chunks=[chunk_of(sequence, 5, 1, [sequence])], moves=moves[:1])
    assert view["slots"][0, 0] == 9 * 4 + 1
    assert built.mode is SampleMode.EVERYTHING
    assert built.moves == moves[:1]
    assert not builder.build(work_of(moves=moves)).table_updates


# Sampled rows


@given(
    temperature=st.floats(0, 2), top_p=st.floats(0, 1, exclude_min=True), min_p=st.floats(0, 1), top_k=st.integers(-1)
)
@UNHURRIED
def test_sampling_parameters_arrive_to_the_bit(temperature, top_p, min_p, top_k):
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    _, view = prefill(builder_of(), *running(3, slots=[5], params=params))
    columns = sample_columns(view)
    for name in ("temperature", "top_p", "min_p"):
        assert np.array(columns[name], np.int32).view(np.float32) == np.float32(getattr(params, name))
    assert columns["top_k"] == (0 if top_k < 1 else min(top_k, 2**31 - 1))
    assert (columns["token"], columns["slot"], columns["output_index"], columns["sample_index"]) == (2, 5, 0, 0)


@given(seed=st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-2, 0, 2**31, 2**32, -(2**63), 2**63 - 1]))
@UNHURRIED
def test_a_seed_travels_as_two_words_of_its_twos_complement(seed):
    assume(seed != -1)  # None.
    _, view = prefill(builder_of(), *running(3, params=SamplingParams(seed=seed)))
    columns = sample_columns(view)
    words = np.array([columns["seed_low"], columns["seed_high"]], np.int32)
    assert words.view(np.int64)[0] == seed


def test_a_request_without_a_seed_sends_the_one_of_its_number():
    _, view = prefill(builder_of(), *running(3, number=77))
    columns = sample_columns(view)
    assert columns["seed_low"] % 2**32 + columns["seed_high"] % 2**32 * 2**32 == derived_seed(0, 77)


def test_a_slot_that_changes_hands_is_its_new_owners_alone():
    """S10: parameters, mode, prompt length, position; also where the old owner comes back after another one."""
    builder = builder_of(block_size=4)
    first, second = (
        running(prompt_len, params=params)[0]
        for prompt_len, params in [
            (3, SamplingParams(seed=11, top_k=3, top_p=0.5, min_p=0.1, temperature=0.3, logprobs=1)),
            (9, SamplingParams(seed=22, temperature=0.0)),
        ]
    )
    seen = []
    for sequence, pages in [(first, [3]), (second, [4, 5, 6]), (first, [7])]:
        for built, view in [prefill(builder, sequence, pages), build(builder, decodes=[sequence])]:
            columns = sample_columns(view)
            floats = np.array([columns[name] for name in ("temperature", "top_p", "min_p")], np.int32)
            last = columns["token"]
            seen.append(
                (
                    columns["seed_low"],
                    columns["top_k"],
                    floats.view(np.float32).tolist(),
                    columns["output_index"],
                    built.mode,
                    view["positions"][last].item(),
                    view["slots"][0, last].item(),
                )
            )
    own = np.array([0.3, 0.5, 0.1], np.float32).tolist()
    assert seen == [
        (11, 3, own, 0, SampleMode.EVERYTHING, 2, 3 * 4 + 2),
        (11, 3, own, 1, SampleMode.EVERYTHING, 3, 3 * 4 + 3),
        (22, 0, [0.0, 1.0, 0.0], 0, SampleMode.GREEDY, 8, 6 * 4),
        (22, 0, [0.0, 1.0, 0.0], 1, SampleMode.GREEDY, 9, 6 * 4 + 1),
        (11, 3, own, 0, SampleMode.EVERYTHING, 2, 7 * 4 + 2),
        (11, 3, own, 1, SampleMode.EVERYTHING, 3, 7 * 4 + 3),
    ]


def test_the_output_index_counts_from_the_first_drawn_token():
    builder = builder_of()
    [sequence] = running(3)
    views = [prefill(builder, sequence)[1], *(build(builder, decodes=[sequence])[1] for _ in range(3))]
    assert [sample_columns(view)["output_index"] for view in views] == [0, 1, 2, 3]


def test_a_replayed_sequence_draws_the_output_token_that_it_lacks():
    """Its first tokens may come in chunks that draw nothing."""
    builder = builder_of()
    [sequence] = running(3)
    sequence.token_ids.extend([50, 51])
    built, view = build(builder, chunks=[chunk_of(sequence, 0, 4)], placed=[sequence])
    assert (built.samples, view["counts"][3]) == ([], 0)
    _, view = build(builder, chunks=[chunk_of(sequence, 4, 1, [sequence])])
    assert sample_columns(view)["output_index"] == 2


def test_siblings_draw_from_one_row_and_go_on_from_its_end():
    """Each with its own slot and sample index; the next step finds each in its own pages."""
    builder = builder_of(block_size=4)
    siblings = running(5, slots=[2, 7, 4], params=SamplingParams(seed=3))
    [other] = running(8, slots=[1])
    prefill(builder, other)
    changes = [
        change for sibling, last in zip(siblings, (8, 9, 10), strict=True) for change in table_of(sibling, [6, last])
    ]
    built, view = build(
        builder,
        decodes=[other],
        chunks=[chunk_of(siblings[0], 0, 5, siblings)],
        placed=siblings,
        changes=changes,
    )
    assert built.samples == [other, *siblings]
    assert view["counts"].tolist()[:4] == [6, 2, 1, 4]
    assert samples_named(view, "token")[:4] == [0, 5, 5, 5]
    assert samples_named(view, "slot")[:4] == [1, 2, 7, 4]
    assert samples_named(view, "sample_index")[:4] == [0, 0, 1, 2]
    assert samples_named(view, "output_index")[:4] == [1, 0, 0, 0]
    assert samples_named(view, "seed_low")[1:4] == [3, 3, 3]
    built, view = build(builder, decodes=siblings)
    assert view["positions"][:3].tolist() == [5, 5, 5]
    assert view["slots"][0, :3].tolist() == [8 * 4 + 1, 9 * 4 + 1, 10 * 4 + 1]
    assert samples_named(view, "output_index")[:3] == [1, 1, 1]


def test_siblings_may_go_on_from_a_chunk_whose_own_sequence_draws_nothing():
    """The one that computed the prompt was aborted, and those that shared its pages were not."""
    builder = builder_of(block_size=4)
    first, second = running(5, slots=[2, 3])
    chunk = chunk_of(first, 0, 5, [second])
    built, view = build(builder, chunks=[chunk], placed=[first, second], changes=table_of(second, [6, 8]))
    assert built.samples == [second]
    assert view["samples"][:2, 0].tolist() == [4, 3]
    _, view = build(builder, decodes=[second])
    assert view["positions"][0] == 5


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ([GREEDY], SampleMode.GREEDY),
        ([GREEDY, GREEDY], SampleMode.GREEDY),
        ([GREEDY, DRAWN], SampleMode.DRAWN),
        ([SCORED, GREEDY], SampleMode.EVERYTHING),
        ([DRAWN, SCORED, GREEDY], SampleMode.EVERYTHING),
    ],
    ids=["greedy", "all greedy", "one drawn", "one with logprobs", "all kinds"],
)
def test_the_mode_is_the_least_that_serves_all_who_draw(params, mode):
    """Whether they draw from a chunk or from a decode. A chunk that draws nothing asks for nothing."""
    builder = builder_of()
    sequences = [running(3, slots=[slot], params=each)[0] for slot, each in enumerate(params, 1)]
    [silent] = running(6, slots=[8], params=SCORED)
    chunks = [chunk_of(sequence, 0, 3, [sequence]) for sequence in sequences]
    built, _ = build(builder, chunks=[*chunks, chunk_of(silent, 0, 5)], placed=[*sequences, silent])
    assert built.mode is mode
    assert build(builder, decodes=sequences)[0].mode is mode
    assert build(builder, decodes=sequences[:1], chunks=chunks[1:])[0].mode is mode
    assert build(builder, chunks=[chunk_of(silent, 0, 5)])[0].mode is SampleMode.GREEDY


# Page-table changes


def changes_of(built, view):
    """All page-table changes that a step sends, batches of their own first, without padding."""
    batches = [*built.table_updates, view["changes"]]
    return [tuple(change) for batch in batches for change in batch.T.tolist() if change[1]]


def test_a_change_is_used_from_the_step_that_brings_it():
    """A page that comes, one that another replaces (copy on write), and the null page where a window has passed."""
    builder = builder_of(block_size=2, num_groups=2)
    [sequence] = running(3, slots=[4])
    slots = []
    for changes in (
        table_of(sequence, [3, 4], [5, 6]),
        [],
        [(0, 4, 2, 7), (1, 4, 2, 8), (1, 4, 0, 0)],
        [(0, 4, 2, 9)],
    ):
        work = {"decodes": [sequence]} if slots else {"chunks": [chunk_of(sequence, 0, 3, [sequence])]}
        built, view = build(builder, changes=changes, **work)
        assert changes_of(built, view) == changes
        slots.append(view["slots"][:, view["counts"][0] - 1].tolist())
    assert slots == [[4 * 2, 6 * 2], [4 * 2 + 1, 6 * 2 + 1], [7 * 2, 8 * 2], [9 * 2 + 1, 8 * 2 + 1]]
    assert builder.tables[:, 4, :4].tolist() == [[3, 4, 9, 0], [0, 6, 8, 0]]


def test_more_changes_than_the_buffer_has_room_for_travel_ahead_in_batches():
    """One token to compute behind 100 cached pages of one token: two changes fit the bucket of one token."""
    builder = builder_of(block_size=1, max_num_batched_tokens=16)
    [sequence] = running(101)
    pages = list(range(1, 102))
    chunk = chunk_of(sequence, 100, 1, [sequence])
    built, view = build(builder, chunks=[chunk], placed=[sequence], changes=table_of(sequence, pages))
    assert built.layout.num_tokens == 1
    assert not view["changes"].any()
    assert len(built.table_updates) > 1
    assert {update.shape for update in built.table_updates} == {(4, builder.num_changes)}
    assert {update.dtype for update in built.table_updates} == {np.dtype(np.int32)}
    assert changes_of(built, view) == [(0, 1, index, page) for index, page in enumerate(pages)]
    assert view["slots"][0, 0] == 101


@pytest.mark.parametrize("num_changes", range(5))
def test_a_step_takes_all_its_changes_or_none(num_changes):
    """The bucket of one token has room for two."""
    [sequence] = running(20)
    changes = table_of(sequence, range(1, num_changes + 1))
    built, view = build(builder_of(), chunks=[chunk_of(sequence, 0, 1)], placed=[sequence], changes=changes)
    assert built.layout.num_changes == 2
    assert bool(built.table_updates) == (num_changes > 2)
    assert np.count_nonzero(view["changes"][1]) == (num_changes if num_changes <= 2 else 0)
    assert changes_of(built, view) == changes


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_without_prefix_hits_all_changes_fit_the_step(block_size, num_groups):
    """The worst case: every row begins a page with its first token, whatever the bucket."""
    builder = builder_of(block_size=block_size, num_groups=num_groups)
    for num_rows in range(1, 9):
        for num_tokens in (1, block_size + 1, 64 // num_rows):
            num_tokens = min(num_tokens, 64 // num_rows)
            num_pages = -(-num_tokens // block_size)
            sequences = [running(num_tokens, slots=[row + 1])[0] for row in range(num_rows)]
            tables = [range(1, num_pages + 1)] * num_groups
            built, view = build(
                builder,
                chunks=[chunk_of(sequence, 0, num_tokens, [sequence]) for sequence in sequences],
                placed=sequences,
                changes=[change for sequence in sequences for change in table_of(sequence, *tables)],
            )
            assert not built.table_updates
            assert len(changes_of(built, view)) == num_rows * num_groups * num_pages


# Against a slow, obvious builder


class Life:
    """Sequences that come, share prompts, are computed in pieces, wait, lose their slots and come back.

    A scheduler without a thought for memory: it keeps in each sequence what is true of it (`pages`, `num_computed`,
    `num_tokens`, all known `token_ids`) and makes the work of one step after another.
    """

    def __init__(self, rng, *, block_size, num_groups, max_num_seqs):
        self.rng, self.block_size, self.num_groups = rng, block_size, num_groups
        self.free_slots = list(range(1, max_num_seqs + 1))
        self.running, self.resting, self.awaiting = [], [], {}
        """`awaiting`: the siblings that share the prompt which their first one computes."""
        self.changes = {}
        self.num_requests = 0

    def step(self):
        """Work of the next step, from sequences as they are before it; `complete` makes them what they are after."""
        rng, placed, decodes, chunks = self.rng, [], [], []
        self.changes = {}
        if rng.random() < 0.4:  # Nobody comes or goes, and all who can decode do, in their order.
            for sequence in self.running:
                if sequence.is_last_token_on_device:
                    self._grow(sequence, sequence.num_computed + 1)
                    decodes.append(sequence)
            return self._work(decodes, chunks, placed)
        for sequence in list(self.running):
            if rng.random() < 0.1 and sequence not in self.awaiting and not self._is_awaiting(sequence):
                self._leave(sequence)
        while self.free_slots and rng.random() < 0.6:
            placed.extend(self._come())
        budget = 48
        for sequence in rng.sample(self.running, len(self.running)):
            if self._is_awaiting(sequence) or rng.random() < 0.2:
                continue
            if sequence.is_last_token_on_device:
                self._grow(sequence, sequence.num_computed + 1)
                decodes.append(sequence)
                continue
            num_tokens = min(sequence.num_tokens - sequence.num_computed, rng.choice([1, 1, 2, 5, 9]), budget)
            if num_tokens > 0:
                end = sequence.num_computed + num_tokens
                self._grow(sequence, end)
                samplers = (sequence, *self.awaiting.get(sequence, ())) if end == sequence.num_tokens else ()
                for sibling in samplers[1:]:
                    self._share(sequence, sibling, end)
                chunks.append(Chunk(sequence, sequence.num_computed, num_tokens, samplers))
                budget -= num_tokens
        return self._work(decodes, chunks, placed)

    def _work(self, decodes, chunks, placed):
        changes = [(*place, page) for place, page in self.changes.items()]
        return work_of(decodes=decodes, chunks=chunks, placed=placed, changes=changes)

    def complete(self, work):
        for sequence in work.decodes:
            sequence.num_computed += 1
            self._draw(sequence)
        for chunk in work.chunks:
            chunk.sequence.num_computed = chunk.start + chunk.num_tokens
            for sampler in chunk.samplers:
                sampler.num_computed = chunk.start + chunk.num_tokens
                self._draw(sampler)
            if chunk.samplers:
                self.awaiting.pop(chunk.sequence, None)

    def _draw(self, sequence):
        sequence.token_ids.append(self.rng.randrange(10**6))
        sequence.num_tokens += 1
        sequence.is_last_token_on_device = True

    def _is_awaiting(self, sequence):
        return any(sequence in siblings for siblings in self.awaiting.values())

    def _come(self):
        """A new request, or a sequence that had to leave: with some of its tokens computed, or none."""
        rng = self.rng
        if self.resting and rng.random() < 0.5:
            sequences = [self.resting.pop(rng.randrange(len(self.resting)))]
            sequences[0].num_computed = rng.randrange(sequences[0].num_tokens)
        else:
            self.num_requests += 1
            num_samples = rng.randint(1, min(3, len(self.free_slots)))
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.5]), top_k=rng.randrange(5), logprobs=rng.choice([None, None, None, 2])
            )
            request = make_request(
                request_id=str(self.num_requests),
                number=self.num_requests,
                prompt_token_ids=[rng.randrange(10**6) for _ in range(rng.randint(1, 20))],
                params=params,
                arrival_time=0.0,
                max_tokens=100,
                engine_seed=0,
                num_groups=self.num_groups,
                sample_indices=range(num_samples),
            )
            sequences = request.sequences
            if num_samples > 1:
                self.awaiting[sequences[0]] = sequences[1:]
        for sequence in sequences:
            sequence.slot = self.free_slots.pop(rng.randrange(len(self.free_slots)))
        self.running.extend(sequences)
        return sequences

    def _leave(self, sequence):
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        for pages in sequence.pages:
            pages.clear()
        sequence.slot, sequence.is_last_token_on_device = 0, False
        if self.rng.random() < 0.7:
            self.resting.append(sequence)

    def _grow(self, sequence, num_tokens):
        for group, pages in enumerate(sequence.pages):
            while len(pages) * self.block_size < num_tokens:
                self._set(sequence, group, len(pages), self.rng.randint(1, 10**6))

    def _share(self, parent, sibling, num_tokens):
        for group, pages in enumerate(parent.pages):
            for index, page in enumerate(pages):
                self._set(sibling, group, index, page)
            if num_tokens % self.block_size:
                self._set(sibling, group, len(pages) - 1, self.rng.randint(1, 10**6))

    def _set(self, sequence, group, index, page):
        sequence.pages[group][index:] = [page]
        self.changes[group, sequence.slot, index] = page


def packed_row_by_row(work, layout, block_size):
    """The step's sections, one token after the other from the state of its sequence."""
    rows = [(each.num_computed, [-(each.slot + 1)], each, [each]) for each in work.decodes]
    for chunk in work.chunks:
        ids = [chunk.sequence.token_ids[chunk.start + index] for index in range(chunk.num_tokens)]
        rows.append((chunk.start, ids, chunk.sequence, chunk.samplers))
    in_order = sorted(rows, key=lambda row: (len(row[1]) > 1, -row[0]))
    sections = {name: np.zeros(shape, np.int32) for name, (_, shape) in layout.sections.items()}
    token, ends = 0, {}
    for index, (start, ids, sequence, _) in enumerate(in_order):
        for offset, token_id in enumerate(ids):
            sections["token_ids"][token] = token_id
            sections["positions"][token] = start + offset
            for group, pages in enumerate(sequence.pages):
                page = pages[(start + offset) // block_size]
                sections["slots"][group, token] = page * block_size + (start + offset) % block_size
            token += 1
        sections["query_starts"][index + 1 :] = token
        sections["context_lens"][index] = start + len(ids)
        sections["row_slots"][index] = sequence.slot
        ends[sequence] = token
    draws = [(ends[sequence] - 1, sampler) for _, _, sequence, samplers in rows for sampler in samplers]
    for index, (last, sampler) in enumerate(draws):
        request, params = sampler.request, sampler.request.params
        output_index = len(sampler.token_ids) - len(request.prompt_token_ids)
        ruled_slot = sampler.slot if params.has_rules else 0
        forced = 0 if params.logprobs is None else -1
        whole = last, sampler.slot, output_index, ruled_slot, forced, sampler.index, request.seed, params.top_k
        stops = sorted(sampler.stop_ids)[:4]
        stops += [-1] * (4 - len(stops))
        fields = struct.pack("<6iQi3f4i", *whole, params.temperature, params.top_p, params.min_p, *stops)
        sections["samples"][:, index] = np.frombuffer(fields, "<i4")
    num_ones = sum(len(ids) == 1 for _, ids, _, _ in rows)
    lens = np.diff(sections["query_starts"])[: len(rows)]
    XlaBackend().plan(
        lens,
        sections["context_lens"][: len(rows)],
        num_ones,
        np.zeros((layout.num_groups, 1, 1), np.int32),
        np.zeros(len(rows), np.intp),
        page_size=block_size,
        num_tokens=layout.num_tokens,
        num_rows=layout.num_rows,
        out=sections["plan"],
    )
    if len(work.table_changes) <= layout.num_changes:
        for index, change in enumerate(work.table_changes):
            sections["changes"][:, index] = change
    mode = SampleMode.GREEDY
    for params in (sampler.request.params for _, sampler in draws):
        if params.logprobs is not None:
            mode = SampleMode.EVERYTHING
        elif params.temperature > 0 and mode is SampleMode.GREEDY:
            mode = SampleMode.DRAWN
    sections["counts"][:] = token, len(rows), num_ones, len(draws), mode is not SampleMode.GREEDY
    return sections, [sampler for _, sampler in draws], mode


@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 8]),
    num_groups=st.sampled_from([1, 2]),
)
@UNHURRIED
def test_any_life_is_packed_as_a_builder_without_memory_packs_it(seed, num_steps, block_size, num_groups):
    """Bit for bit, padding too. The one under test sees the work and the tokens of chunks, never a page."""
    builder = builder_of(block_size=block_size, num_groups=num_groups)
    life = Life(random.Random(seed), block_size=block_size, num_groups=num_groups, max_num_seqs=8)
    for _ in range(num_steps):
        work = life.step()
        built = builder.build(work)
        updates = [tuple(change) for update in built.table_updates for change in update.T.tolist() if change[1]]
        if not work.decodes and not work.chunks:
            assert built.layout is None
            assert updates == work.table_changes
            continue
        sections, samples, mode = packed_row_by_row(work, built.layout, block_size)
        for name, section in built.inputs.view(built.layout).items():
            np.testing.assert_array_equal(section, sections[name], err_msg=name)
        assert built.samples == samples
        assert built.mode is mode
        assert updates == ([] if len(work.table_changes) <= built.layout.num_changes else work.table_changes)
        life.complete(work)


def test_lives_have_in_them_what_builders_get_wrong():
    """A life in which nobody comes back proves nothing about coming back."""
    seen = Counter()
    for seed in range(20):
        builder = builder_of(block_size=1)
        life = Life(random.Random(seed), block_size=1, num_groups=1, max_num_seqs=8)
        before = None
        for _ in range(40):
            work = life.step()
            built = builder.build(work)
            seen["steps without rows"] += built.layout is None
            seen["changes ahead"] += bool(built.table_updates)
            seen["comebacks"] += sum(len(each.token_ids) > each.request.prompt_len for each in work.placed)
            seen["known tokens among decodes"] += bool(work.decodes) * sum(each.num_tokens == 1 for each in work.chunks)
            seen["chunks that draw nothing"] += sum(not chunk.samplers for chunk in work.chunks)
            seen["shared rows"] += sum(len(chunk.samplers) > 1 for chunk in work.chunks)
            seen[built.mode] += 1
            is_plain = bool(work.decodes) and not work.chunks
            seen["the same decodes once more"] += is_plain and before == work.decodes
            before = work.decodes if built.layout is not None else before
            life.complete(work)
    assert len(seen) == 7 + len(SampleMode)
    assert min(seen.values()) >= 10, seen
