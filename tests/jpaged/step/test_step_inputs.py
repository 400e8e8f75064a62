"""The step builder packs what the scheduler asks for, and the padding around it changes nothing."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.kv_cache.page_store import MoveKind, PageMove
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sample_columns import SAMPLE_FIELDS, SCORE_FIELDS, STOP_FIELDS, Score
from jpaged.sampling.sampling_params import SampleMode, SamplingParams
from jpaged.scheduling.scheduler_output import Chunk, SchedulerOutput
from jpaged.step.step_inputs import StepInputBuilder
from jpaged.step.step_layout import COUNT_FIELDS, StepLayout
from jpaged.step.step_records import NO_ROWS
from jpaged.step.step_sizes import StepSizes

from ..host_requests import new_request

MANY = settings(max_examples=100, deadline=None, derandomize=True, database=None)
GREEDY, RANDOM, SCORED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.0, logprobs=0),
)
SCORED_PROMPT = SamplingParams(temperature=0.0, prompt_logprobs=0)


def builder_of(
    *,
    block_size=4,
    windows=(None,),
    backend=None,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    is_deterministic=False,
    platform="cpu",
):
    sizes = StepSizes("float32", "float32", block_size, 128 * block_size, max_num_seqs, max_num_batched_tokens)
    builder = StepInputBuilder(
        replace(sizes, is_deterministic=is_deterministic),
        sizes.buckets(platform),
        backend or XlaBackend(),
        rules_spec=LogitRulesSpec(10_000),
        windows=windows,
    )
    return builder


def running(prompt_len, *, slots=(1,), params=None, number=0):
    """Return the sequences of one request, one per state slot; their pages stand only in table changes."""
    request = new_request(
        [1000 * slots[0] + position for position in range(prompt_len)],
        number=number,
        params=params or SamplingParams(),
        sample_indices=range(len(slots)),
    )
    for sequence, slot in zip(request.sequences, slots, strict=True):
        sequence.seq_slot = slot
    return request.sequences


def chunk_of(sequence, start, num_tokens, samples=()):
    return Chunk(sequence, start, num_tokens, tuple(samples))


def work_of(*, decodes=(), chunks=(), placed=(), changes=(), moves=(), decode_lens=()):
    return SchedulerOutput(
        step=1,
        decodes=list(decodes),
        chunks=list(chunks),
        new_in_slots=list(placed),
        table_changes=list(changes),
        moves=list(moves),
        preempted=[],
        ignored=[],
        decode_lens=list(decode_lens),
    )


def table_of(sequence, *pages_of_group):
    """Return the table changes that give a sequence these pages from its first position on, by page-table group."""
    return [
        (group, sequence.seq_slot, index, page)
        for group, pages in enumerate(pages_of_group)
        for index, page in enumerate(pages)
    ]


def build(builder, **work):
    """Build a step; return its inputs, its rows and the sections of its buffer."""
    built, rows = builder.build(work_of(**work))
    return built, rows, built.layout.view(built.packed)


def prefill(builder, sequence, pages=(3, 4, 5)):
    """Build a step with the whole prompt in one chunk, from which a token is drawn."""
    chunk = chunk_of(sequence, 0, sequence.request.prompt_len, [sequence])
    return build(builder, chunks=[chunk], placed=[sequence], changes=table_of(sequence, pages))


def sample_columns(view, index=0):
    return dict(zip(SAMPLE_FIELDS, view["samples"][:, index].tolist(), strict=True))


def samples_named(view, name):
    return view["samples"][SAMPLE_FIELDS.index(name)].tolist()


# The layout of the buffer


@given(
    num_tokens=st.integers(1, 300),
    num_rows=st.integers(1, 40),
    num_samples=st.integers(1, 40),
    num_table_groups=st.integers(1, 3),
    num_changes=st.integers(1, 100),
    plan_len=st.integers(0, 50),
)
@MANY
def test_sections_do_not_overlap_and_begin_where_a_gpu_kernel_can_read_them(**sizes):
    """Mosaic's kernels refuse arrays that do not begin at a multiple of 256 bytes."""
    layout = StepLayout(**sizes)
    packed = np.zeros(layout.size, np.int32)
    view = layout.view(packed)
    assert list(view) == list(layout.sections)
    for section in view.values():
        assert not section.any()
        section[...] += 1
        assert (section.ctypes.data - packed.ctypes.data) % 256 == 0
    assert packed.sum() == sum(section.size for section in view.values())


def test_the_device_reads_the_sections_that_the_host_writes():
    layout = builder_of(windows=(None, 8)).layouts[16, False]
    packed = np.arange(layout.size, dtype=np.int32)
    traced = jax.jit(layout.view)(packed)
    for name, section in layout.view(packed).items():
        np.testing.assert_array_equal(traced[name], section)


# Rows and tokens


def test_a_mixed_step_is_packed_as_the_kernels_expect_it():
    """Rows with one token come first, longest context first; a KV slot is page × page size + offset, by group."""
    builder = builder_of(block_size=4, windows=(None, 8))
    [chunk], [short], [long] = running(9, slots=[1]), running(1, slots=[2]), running(5, slots=[3])
    changes = [*table_of(chunk, [3, 4, 5], [6, 7, 8]), *table_of(short, [9], [10]), *table_of(long, [11, 12], [13, 14])]
    starts = [chunk_of(long, 0, 5, [long]), chunk_of(short, 0, 1, [short])]
    build(builder, chunks=starts, placed=[chunk, short, long], changes=changes)
    built, rows, view = build(builder, decodes=[short, long], chunks=[chunk_of(chunk, 2, 5)])
    assert built.layout.num_tokens == 8
    assert dict(zip(COUNT_FIELDS, view["counts"].tolist(), strict=True)) == {
        "num_tokens": 7,
        "num_rows": 3,
        "num_decode_rows": 2,
        "num_samples": 2,
    }
    assert view["seq_slots"].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert view["context_lens"].tolist() == [6, 2, 7, 0, 0, 0, 0, 0]
    assert view["query_starts"].tolist() == [0, 1, 2, 7, 7, 7, 7, 7, 7]
    assert view["positions"].tolist() == [5, 1, 2, 3, 4, 5, 6, 0]
    assert view["token_ids"].tolist() == [-4, -3, 1002, 1003, 1004, 1005, 1006, 0]
    assert view["slot_mapping"].tolist() == [
        [12 * 4 + 1, 9 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 4 * 4, 4 * 4 + 1, 4 * 4 + 2, 0],
        [14 * 4 + 1, 10 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 7 * 4, 7 * 4 + 1, 7 * 4 + 2, 0],
    ]
    # Samples keep the order of the work and name their row's last token. The chunk ends before its prompt does.
    assert rows.samples == [short, long]
    assert view["samples"][:2, :2].tolist() == [[1, 0], [2, 3]]


def test_on_a_device_a_step_of_rows_with_one_token_is_planned_for_programs_that_only_decode():
    """A prompt of one token is such a row; one row with more tokens makes the step an ordinary one."""
    builder = builder_of(platform="gpu", max_num_batched_tokens=256)
    [one], [other], [short] = running(5, slots=[1]), running(5, slots=[2]), running(1, slots=[3])
    for sequence in (one, other):
        built, *_ = prefill(builder, sequence)
        assert not built.layout.decodes_only
    start = chunk_of(short, 0, 1, [short])
    works = [{"decodes": [one, other]}, {"decodes": [one, other], "decode_lens": [2, 2]}]
    works.append({"decodes": [one, other], "chunks": [start], "placed": [short]})
    for work in works:
        built, _, view = build(builder, **work)
        assert built.layout.decodes_only
        assert len(view["plan"]) == builder.backend.plan_len(16, 16, decodes_only=True)
        assert len(view["plan"]) < builder.backend.plan_len(16, 16)


def test_in_deterministic_engines_a_chunk_is_packed_as_if_it_came_token_by_token():
    """The step, what it scores, and the step after it are the same, beside a row that decodes."""
    packed = []
    for is_deterministic in (True, False):
        builder = builder_of(is_deterministic=is_deterministic, max_num_seqs=16)
        [decoding] = running(6, slots=[1])
        siblings = running(9, slots=[2, 3], params=replace(SCORED, prompt_logprobs=1))
        prefill(builder, decoding)
        pages = table_of(siblings[0], (6, 7, 8)) + table_of(siblings[1], (6, 7, 8))
        whole = [chunk_of(siblings[0], 2, 7, siblings)]
        one_by_one = [chunk_of(siblings[0], at, 1, siblings if at == 8 else ()) for at in range(2, 9)]
        chunks = whole if is_deterministic else one_by_one
        built, rows, view = build(builder, decodes=[decoding], chunks=chunks, placed=siblings, changes=pages)
        assert view["counts"].tolist()[:4] == [8, 8, 8, 3]
        assert [list(positions) for batch in rows.scored for _, positions in batch] == [[at] for at in range(2, 8)]
        after, *_ = build(builder, decodes=[decoding, *siblings])
        packed += [built, after]
    for one, other in zip(packed[:2], packed[2:], strict=True):
        assert np.array_equal(one.packed, other.packed)
        assert all(np.array_equal(a.columns, b.columns) for a, b in zip(one.scores, other.scores, strict=True))


def test_a_row_that_scores_a_prompt_token_reads_the_hidden_state_before_it():
    """Two prompts, the second scored from its third token on, take two batches of as many rows as a program takes."""
    builder = builder_of(max_num_seqs=8)
    [one], [other] = running(7, slots=[1], params=SCORED_PROMPT), running(9, slots=[2], params=SCORED_PROMPT)
    other.request.num_scored = 2
    chunks = [chunk_of(one, 0, 7, [one]), chunk_of(other, 0, 8)]
    built, rows, view = build(builder, chunks=chunks, placed=[one, other], changes=table_of(one, (3, 4)))
    size = builder.buckets.max_samples
    assert size == 8
    assert [list(positions) for batch in rows.scored for _, positions in batch] == [[*range(6)], [2, 3], [*range(4, 8)]]
    assert [(batch.columns.shape, batch.num_rows) for batch in built.scores] == [((3, 8), 8), ((3, 8), 4)]
    columns = dict(zip(SCORE_FIELDS, np.concatenate([batch.columns for batch in built.scores], axis=1), strict=True))
    starts = {slot: view["query_starts"][row] for row, slot in enumerate(view["seq_slots"][:2])}
    tokens = [starts[1] + at for at in range(6)] + [starts[2] + at for at in range(2, 8)]
    assert columns["token"].tolist() == tokens + [0] * 4
    assert columns["target"].tolist() == [*one.token_ids[1:7], *other.token_ids[3:9], *[0] * 4]
    assert not columns["temperature"].any()


def test_prompt_tokens_are_scored_at_a_temperature_if_the_request_says_so():
    [sequence] = running(6, slots=[1], params=replace(SCORED_PROMPT, temperature=0.7))
    for tempers, wanted in ((False, 0.0), (True, 0.7)):
        sequence.request.tempers_scores = tempers
        chunks, changes = [chunk_of(sequence, 0, 6, [sequence])], table_of(sequence, (3, 4))
        built, *_ = build(builder_of(), chunks=chunks, placed=[sequence], changes=changes)
        temperatures = built.scores[0].columns[SCORE_FIELDS.index("temperature"), :5].view(np.float32)
        assert np.allclose(temperatures, wanted)


@pytest.mark.parametrize(("windows", "num_shared"), [((None,), 3), ((None, 8), 3), ((8,), 0)])
def test_rows_share_the_first_pages_of_full_attention_whatever_windows_have_passed(windows, num_shared):
    """Where a window has passed, a page table still names pages, which may be other sequences' by now."""
    builder = builder_of(windows=windows, backend=XlaBackend(share_prefixes=True, min_saved_tokens=1))
    [one], [other] = running(15, slots=[1]), running(14, slots=[2])
    tables = {one: {None: [3, 4, 5, 6], 8: [20, 21, 8, 9]}, other: {None: [3, 4, 5, 7], 8: [20, 30, 31, 32]}}
    changes = [change for each in tables for change in table_of(each, *(tables[each][window] for window in windows))]
    build(
        builder, chunks=[chunk_of(one, 0, 15, [one]), chunk_of(other, 0, 14, [other])], placed=tables, changes=changes
    )
    built, _, view = build(builder, decodes=[one, other])
    sections = builder.backend.planner.sections(view["plan"], built.layout.num_tokens, built.layout.num_rows)
    assert sections.num_shared_pages[:2].tolist() == [num_shared] * 2


def test_several_tokens_per_row_are_packed_with_their_numbers_and_the_next_step_follows_them():
    """`decode_lens` are in the order of the rows; the plan is made for the final context lengths."""
    builder = builder_of(block_size=4)
    sequences = [running(prompt_len, slots=[slot])[0] for slot, prompt_len in [(1, 3), (2, 9), (3, 6)]]
    for sequence, stops in zip(sequences, [(), (7, 5), (1, 2, 3, 4, 5, 6)], strict=True):
        sequence.stop_ids = frozenset(stops)
        prefill(builder, sequence)
    lens = [5, 2, 3]
    planned = []
    plan = builder.backend.plan

    def record(rows, out):
        planned.append(rows.context_lens)
        plan(rows, out)

    builder.backend = SimpleNamespace(plan=record)
    built, rows, view = build(builder, decodes=sequences, decode_lens=lens)
    assert (built.decode_lens, rows.samples) == (lens, sequences)
    assert view["counts"].tolist() == [3, 3, 3, 3]
    assert view["seq_slots"][:3].tolist() == [2, 3, 1]
    assert view["decode_lens"].tolist() == [2, 3, 5, 0, 0, 0, 0, 0]
    assert view["context_lens"][:3].tolist() == [10, 7, 4]
    assert planned[0].tolist() == [11, 9, 8]
    assert samples_named(view, "output_index")[:3] == [1, 1, 1]
    columns = zip(*(samples_named(view, name)[:3] for name in STOP_FIELDS), strict=True)
    assert list(columns) == [(-1, -1, -1, -1), (5, 7, -1, -1), (1, 2, 3, 4)]
    *_, view = build(builder, decodes=sequences)
    assert view["positions"][:3].tolist() == [11, 9, 8]
    assert samples_named(view, "output_index")[:3] == [6, 3, 4]
    assert not view["decode_lens"].any()


def test_steps_in_flight_share_no_memory():
    """On a CPU the device may use the host's buffer itself, so later steps must not write into it."""
    builder = builder_of(max_num_seqs=64)
    sequences = [running(1, slots=[slot])[0] for slot in range(1, 65)]
    prompts = [chunk_of(sequence, 0, 1, [sequence]) for sequence in sequences]
    many = [(0, slot, index, slot + index) for slot in range(1, 65) for index in range(40)]
    steps = [builder.build(work_of(chunks=prompts, placed=sequences, changes=many))[0]]
    copies, on_device = [], []
    for _ in range(4):
        copies.append(steps[-1].packed.copy())
        on_device.append(jax.device_put(steps[-1].packed))
        steps.append(builder.build(work_of(decodes=sequences))[0])
    for copy, array in zip(copies, on_device, strict=True):
        np.testing.assert_array_equal(array, copy)
    buffers = [step.packed for step in steps] + list(steps[0].table_updates)
    assert len(steps[0].table_updates) > 1
    kept = [value for value in vars(builder).values() if isinstance(value, np.ndarray)]
    for index, buffer in enumerate(buffers):
        assert not any(np.shares_memory(buffer, other) for other in (*buffers[:index], *kept))


def test_a_step_without_rows_has_only_moves_and_table_changes():
    """The state slots and pages that it assigns hold in the next step."""
    builder = builder_of(block_size=4)
    [sequence] = running(6, slots=[2], params=SCORED)
    moves = [PageMove(MoveKind.COPY, 3, 4), PageMove(MoveKind.SWAP_OUT, 5, 6)]
    built, rows = builder.build(work_of(moves=moves, placed=[sequence], changes=table_of(sequence, [8, 9])))
    assert built.packed is None
    assert built.layout is None
    assert rows == NO_ROWS
    assert built.moves == moves
    assert [update.shape for update in built.table_updates] == [(4, builder.num_changes)]
    assert built.table_updates[0][:, :3].T.tolist() == [[0, 2, 0, 8], [0, 2, 1, 9], [0, 0, 0, 0]]
    built, _, view = build(builder, chunks=[chunk_of(sequence, 5, 1, [sequence])], moves=moves[:1])
    assert view["slot_mapping"][0, 0] == 9 * 4 + 1
    assert built.mode is SampleMode.SCORED
    assert built.moves == moves[:1]
    assert not builder.build(work_of(moves=moves))[0].table_updates


@pytest.mark.parametrize(("bucket", "row_lens"), [(64, [20, 20, 20]), (16, [16]), (1, [1])])
def test_a_null_prefill_fills_its_bucket_with_rows_as_long_as_page_tables_allow(bucket, row_lens):
    """All tokens stand in null pages, so that running it to measure it changes no sequence."""
    sizes = StepSizes("float32", "float32", 4, 20, 8, 64)
    builder = StepInputBuilder(sizes, sizes.buckets("cpu"), XlaBackend(), rules_spec=LogitRulesSpec(10))
    built, num_tokens = builder.null_prefill(bucket)
    view, num_rows = built.layout.view(built.packed), len(row_lens)
    assert num_tokens == sum(row_lens)
    assert view["counts"].tolist() == [num_tokens, num_rows, num_rows if row_lens == [1] else 0, 0]
    assert view["context_lens"][:num_rows].tolist() == row_lens
    assert np.diff(view["query_starts"]).tolist() == row_lens + [0] * (built.layout.num_rows - num_rows)
    assert view["positions"][:num_tokens].tolist() == [at for length in row_lens for at in range(length)]
    assert view["slot_mapping"].max() < 4
    assert not view["seq_slots"].any()
    assert not view["changes"].any()


# Sampled rows


MODES = {
    SampleMode.GREEDY: (GREEDY, 0, 0),
    SampleMode.RANDOM: (RANDOM, 0, 0),
    SampleMode.SCORED: (SCORED, 0, Score.OWN),
    SampleMode.FULL: (replace(RANDOM, logprobs=2, log_kept_mass=True, presence_penalty=1.0), 5, Score(7)),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_row_names_the_slot_of_its_rules_and_whether_it_is_scored_and_the_mode_follows(mode):
    params, ruled_slot, score = MODES[mode]
    built, _, view = prefill(builder_of(), *running(3, slots=[5], params=params))
    columns = sample_columns(view)
    assert (built.mode, columns["ruled_slot"], columns["score"]) == (mode, ruled_slot, score)


# Page-table changes


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_without_prefix_hits_all_changes_fit_the_buffer(block_size, num_groups):
    """In the worst case every row begins a page with its first token, in any bucket."""
    builder = builder_of(block_size=block_size, windows=(None,) * num_groups)
    for num_rows in range(1, 9):
        for num_tokens in (1, block_size + 1, 64 // num_rows):
            num_tokens = min(num_tokens, 64 // num_rows)
            num_pages = -(-num_tokens // block_size)
            sequences = [running(num_tokens, slots=[row + 1])[0] for row in range(num_rows)]
            tables = [range(1, num_pages + 1)] * num_groups
            built, _, view = build(
                builder,
                chunks=[chunk_of(sequence, 0, num_tokens, [sequence]) for sequence in sequences],
                placed=sequences,
                changes=[change for sequence in sequences for change in table_of(sequence, *tables)],
            )
            assert not built.table_updates
            assert np.count_nonzero(view["changes"][1]) == num_rows * num_groups * num_pages
