"""The runner on a tiny model: page moves around real steps, measurements, and the memory it frees."""

import gc
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.kv_cache.page_store import MoveKind, PageMove
from jpaged.models.opening.reading import config_from_hf
from jpaged.pallas_kernels.ragged_paged_attention.interface import LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.page_moves import MAX_MOVES
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.scheduling.scheduler_output import Chunk, SchedulerOutput
from jpaged.sharding import device_mesh
from jpaged.step import programs as programs_module
from jpaged.step.compile_plan import CompilePlan
from jpaged.step.programs import (
    COPY_KEY,
    NUM_MODULES,
    SWAP_IN_KEY,
    SWAP_OUT_KEY,
    ProgramOptions,
    Programs,
    move_programs,
)
from jpaged.step.runner import MAX_SWAPS_UNDER_WAY, Runner
from jpaged.step.step_inputs import StepInputBuilder
from jpaged.step.step_sizes import StepSizes

from ..host_requests import new_request
from ..tiny_model import CONFIG, random_weights, tiny_layout

PAGE, NUM_PAGES, MAX_PAGES, MAX_SEQS, NUM_HOST_PAGES = 4, 48, 5, 4, 40
MODEL = config_from_hf(CONFIG, Path("config.json"))
BACKEND = NativeBackend(share_prefixes=False)
LAYOUT = tiny_layout(BACKEND, num_pages=NUM_PAGES, page_size=PAGE)
SIZES = StepSizes("float32", "float32", PAGE, MAX_PAGES * PAGE, MAX_SEQS, 64)
BUCKETS = SIZES.buckets("cpu")
SHUFFLED = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()


def new_builder():
    return StepInputBuilder(SIZES, BUCKETS, BACKEND, rules_spec=LogitRulesSpec(MODEL.vocab_size))


def new_programs(weights, mesh, **options):
    places = tuple(LayerPlace(0, layer) for layer in range(MODEL.num_layers))
    cache, options = PagedCache((), LAYOUT, places, BACKEND), ProgramOptions(**options)
    return Programs(weights, cache, mesh, new_builder(), hidden_size=MODEL.hidden_size, options=options)


def new_plan(weights, mesh, num_host_blocks=NUM_HOST_PAGES):
    return CompilePlan(new_programs(weights, mesh, num_host_blocks=num_host_blocks).lower)


@pytest.fixture(scope="module")
def mesh():
    return device_mesh(jax.devices()[:1])


@pytest.fixture(scope="module")
def weights():
    return random_weights(MODEL, BACKEND)


@pytest.fixture(scope="module")
def plan(weights, mesh):
    plan = new_plan(weights, mesh)
    yield plan
    plan.close()


@pytest.fixture
def runner(weights, plan, mesh):
    """Give a runner whose pages hold random bits, NaNs among them; no two pages are equal."""
    runner = Runner(weights=weights, compile_plan=plan, buckets=BUCKETS, mesh=mesh)
    fill_pages(runner)
    yield runner
    runner.reset()


def fill_pages(runner):
    rng = np.random.default_rng(1)
    placed = runner.state.cache.pages
    arrays = [rng.integers(0, 2**32, array.shape, dtype=np.uint32).view(np.float32) for array in placed]
    pages = tuple(jax.device_put(array, old.sharding) for array, old in zip(arrays, placed, strict=True))
    runner.state = replace(runner.state, cache=replace(runner.state.cache, pages=pages))


def bits(runner):
    """Return the bits of every page: for each array of the cache, [layer, page, …]."""
    entries = runner.state.cache.layout.entry(np.arange(MODEL.num_layers)[:, None], np.arange(NUM_PAGES))
    arrays = [np.array(array).view(np.uint32)[entries] for array in runner.state.cache.pages]
    return [array.reshape(MODEL.num_layers, NUM_PAGES, -1) for array in arrays]


def assert_pages(runner, before, content):
    """Assert that page `d` holds what page `content[d]` held before, and every other page what it held itself."""
    for now, old in zip(bits(runner), before, strict=True):
        expected = old.copy()
        for page, source in content.items():
            expected[:, page] = old[:, source]
        differs = (now != expected).any(axis=(0, 2))
        assert np.flatnonzero(differs[1:]).tolist() == [], "pages (less 1) that hold something else"


def inputs_of(builder, work):
    """Build a step; return what a runner takes of it."""
    inputs, _ = builder.build(work)
    return inputs


def work_of(moves=(), *, decodes=(), chunks=(), placed=(), changes=()):
    return SchedulerOutput(1, list(decodes), list(chunks), list(placed), list(changes), list(moves))


def copy(source, destination):
    return PageMove(MoveKind.COPY, source, destination)


def swap_out(source, destination):
    return PageMove(MoveKind.SWAP_OUT, source, destination)


def swap_in(source, destination):
    return PageMove(MoveKind.SWAP_IN, source, destination)


def move(runner, *moves):
    outputs = runner.dispatch(inputs_of(new_builder(), work_of(moves)))
    assert outputs.read() is None


def pinned_arrays():
    gc.collect()
    return [array for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host"]


@pytest.mark.parametrize("num_pages", [1, MAX_MOVES + 3, MAX_MOVES * (MAX_SWAPS_UNDER_WAY + 1)])
def test_pages_swapped_out_and_in_are_equal_bit_for_bit_and_no_other_page_changes(runner, num_pages):
    before = bits(runner)
    host = np.random.default_rng(2).permutation(np.arange(1, NUM_HOST_PAGES + 1)).tolist()[:num_pages]
    sources, destinations = SHUFFLED[:num_pages], SHUFFLED[-num_pages:]
    move(runner, *map(swap_out, sources, host))
    assert_pages(runner, before, {})
    move(runner, *reversed(list(map(swap_in, host, destinations))))
    assert_pages(runner, before, dict(zip(destinations, sources, strict=True)))
    assert runner.swap_bytes == 2 * num_pages * LAYOUT.page_bytes


def test_moves_run_in_the_order_given(runner):
    """Each move depends on the one before it: a copy reads what was swapped in, a swap-out what was copied."""
    before = bits(runner)
    move(
        runner,
        swap_out(5, 1),
        copy(6, 5),  # Overwrites the page that was swapped out.
        swap_out(5, 2),
        swap_in(1, 6),  # Overwrites the page that was copied.
        copy(6, 7),
        swap_out(7, 1),  # Writes host page 1 again.
        swap_in(2, 9),
        swap_out(8, 2),
        swap_in(1, 10),
        swap_in(2, 11),
    )
    assert_pages(runner, before, {5: 6, 6: 5, 7: 5, 9: 6, 10: 5, 11: 8})
    assert runner.swap_bytes == 8 * LAYOUT.page_bytes


@pytest.mark.parametrize("num_pages", [1, MAX_MOVES + 1])
def test_copies_reach_every_layer_and_count_as_no_swap(runner, num_pages):
    before = bits(runner)
    sources, destinations = SHUFFLED[:num_pages], SHUFFLED[-num_pages:]
    move(runner, *map(copy, sources, destinations))
    assert_pages(runner, before, dict(zip(destinations, sources, strict=True)))
    assert runner.swap_bytes == 0


def prefill(slot, pages, moves=()):
    """Return a step that prefills as many tokens as these pages hold."""
    request = new_request(range(2, 2 + PAGE * len(pages)), params=SamplingParams(temperature=0))
    sequence = request.sequences[0]
    sequence.seq_slot = slot
    changes = [(0, slot, index, page) for index, page in enumerate(pages)]
    chunk = Chunk(sequence, 0, PAGE * len(pages), (sequence,))
    return work_of(moves, chunks=[chunk], placed=[sequence], changes=changes)


def test_a_swapped_out_page_keeps_its_content_though_the_same_step_overwrites_it(runner):
    """Steps, swaps and copies are dispatched one after another without waiting for the device."""
    before, builder = bits(runner), new_builder()
    pages = [21, 9]
    runner.dispatch(inputs_of(builder, prefill(1, pages, [swap_out(21, 3), swap_out(9, 4), copy(9, 30)])))
    first = runner.dispatch(inputs_of(builder, prefill(2, [14, 15], [swap_in(3, 31), swap_in(4, 32)])))
    runner.dispatch(inputs_of(builder, prefill(3, [31], [swap_out(31, 5), swap_in(5, 33)])))
    written = {21, 9, 14, 15, 31}
    for now, old in zip(bits(runner), before, strict=True):
        assert all((now[:, page] != old[:, page]).any() for page in written)
        assert np.array_equal(now[:, [30, 32, 33]], old[:, [9, 9, 21]])
        rest = [page for page in range(1, NUM_PAGES) if page not in written | {30, 32, 33}]
        assert np.array_equal(now[:, rest], old[:, rest])
    assert len(first.read().token_ids) == 1


def test_a_step_reads_the_pages_that_were_copied_and_swapped_in_before_it(runner):
    """A prompt's first page is computed, swapped out and in to another page, and read there."""
    builder = new_builder()
    expected = runner.dispatch(inputs_of(builder, prefill(1, [21, 9]))).read().token_ids.tolist()

    def second_page(slot, pages, moves):
        work = prefill(slot, pages, moves)
        work.chunks[0] = replace(work.chunks[0], start=PAGE, num_tokens=PAGE)
        return runner.dispatch(inputs_of(builder, work)).read().token_ids.tolist()

    assert second_page(2, [30, 31], [swap_out(21, 1), swap_in(1, 30)]) == expected
    assert second_page(3, [32, 33], [copy(30, 32)]) == expected


def test_a_step_without_rows_changes_tables_too(runner):
    move(runner)
    changed = inputs_of(new_builder(), work_of([copy(1, 2)], changes=[(0, 3, 4, 17)]))
    assert changed.layout is None
    assert runner.dispatch(changed).read() is None
    tables = np.asarray(runner.state.page_tables)
    assert tables[0, 3, 4] == 17
    assert np.count_nonzero(tables) == 1


def test_moves_compile_nothing_outside_the_plan(runner, plan):
    with plan.serving():
        move(runner, swap_out(1, 1), copy(2, 3), swap_in(1, 2))
    assert plan.num_outside == 0


def test_swap_programs_exist_only_with_host_pages(weights, mesh, plan):
    assert {COPY_KEY, SWAP_OUT_KEY, SWAP_IN_KEY} <= set(plan.programs)
    without = move_programs(LAYOUT, mesh, num_host_blocks=0)
    assert set(without) == {COPY_KEY}


@pytest.mark.parametrize(("num_cores", "num_modules"), [(1, 1), (8, 8), (33, 32), (64, 32)])
def test_a_program_is_cut_into_as_many_modules_as_a_cpu_has_cores_and_no_more_than_by_default(
    weights, mesh, monkeypatch, num_cores, num_modules
):
    """For all programs but those that move pages, which have few operations."""
    found = {}
    monkeypatch.setattr(Programs, "lower_program", lambda _, one: found.update({one.name: one.compiler_options}))
    programs = new_programs(weights, mesh, num_cores=num_cores, num_decode_steps=4)
    lower = {key: one for key, one in (programs.lower | programs.lower_masked).items() if key != COPY_KEY}
    for one in lower.values():
        one()
    assert len(found) == len(lower)
    assert {options[NUM_MODULES] for options in found.values()} == {num_modules}


def test_programs_that_score_have_the_options_too(weights, mesh, monkeypatch):
    monkeypatch.setattr(programs_module, "NUM_MODULES", "xla_no_such")
    lower = next(iter(new_programs(weights, mesh).lower_scores.values()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such'"):
        lower().compile()


def test_host_pages_are_pinned_when_first_written_and_freed_by_reset_and_close(mesh):
    weights = random_weights(MODEL, BACKEND)
    own = Runner(weights=weights, compile_plan=new_plan(weights, mesh), buckets=BUCKETS, mesh=mesh)
    assert pinned_arrays() == []
    num_arrays = len(LAYOUT.shapes)
    move(own, swap_out(1, 1), swap_out(2, 2))
    assert len(pinned_arrays()) == 2 * num_arrays
    move(own, swap_out(3, 1))
    for _ in range(MAX_SWAPS_UNDER_WAY):  # The old page may live as long as its transfer is under way.
        move(own, swap_out(3, 1))
    assert len(pinned_arrays()) <= (2 + MAX_SWAPS_UNDER_WAY) * num_arrays
    own.reset()
    assert pinned_arrays() == []
    move(own, swap_out(1, 1))
    assert len(pinned_arrays()) == num_arrays
    own.close()
    assert pinned_arrays() == []
    assert all(array.is_deleted() for array in own.state.cache.pages)


def test_after_a_failed_step_that_destroyed_the_cache_a_reset_runner_moves_pages(runner):
    for array in runner.state.cache.pages:
        array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        runner.dispatch(inputs_of(new_builder(), work_of([copy(1, 2)])))
    runner.reset()
    fill_pages(runner)
    before = bits(runner)
    move(runner, swap_out(1, 1), swap_in(1, 2))
    assert_pages(runner, before, {2: 1})


def test_at_most_max_staged_swap_batches_are_under_way(runner):
    """Each batch takes device memory, which a long sequence must not fill."""
    num_pages = MAX_MOVES * (MAX_SWAPS_UNDER_WAY + 1)
    move(runner, *(swap_out(page, page) for page in range(1, num_pages + 1)))
    assert len(runner._swaps_under_way) == MAX_SWAPS_UNDER_WAY
    move(runner, *(swap_in(page, page) for page in range(1, num_pages + 1)))
    assert len(runner._swaps_under_way) == MAX_SWAPS_UNDER_WAY


def test_a_rehearsal_writes_the_null_page_of_every_layer_and_no_other(runner):
    before = bits(runner)
    step, _ = new_builder().null_prefill(64)
    runner.rehearse(step)
    for now, old in zip(bits(runner), before, strict=True):
        assert (now != old)[:, 0].any(axis=1).all()
    assert_pages(runner, before, {})


@pytest.mark.parametrize("bucket", [1, 64])
def test_measuring_changes_nothing_but_the_null_page(runner, bucket):
    before = bits(runner)
    tables, tokens = np.asarray(runner.state.page_tables), np.asarray(runner.state.last_tokens)
    step, _ = new_builder().null_prefill(bucket)
    assert 0 < runner.measure_forward(step) < 60
    assert runner.measure_swap() > 0
    assert_pages(runner, before, {})
    assert np.array_equal(runner.state.page_tables, tables)
    assert np.array_equal(runner.state.last_tokens, tokens)
    assert runner.swap_bytes == 0
