"""The GPU kernels against the dense oracle, in an interpreter that knows the GPU's memories, copies and barriers.

Memory that was never written is NaN, and so is every slot that no token was given; races between copies and accesses
raise. Interpreted, products are `jnp.dot` and not `mma`; everything else is what a GPU gets.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.ragged_paged_attention.gpu import backend as gpu_backend
from jpaged.pallas_kernels.ragged_paged_attention.gpu.backend import GpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.gpu.memory_ops import (
    Chip,
    row_layout,
    smem_tile,
    start_query_copies,
    store_global,
    to_compute_dtype,
)
from jpaged.pallas_kernels.ragged_paged_attention.gpu.plan import ROW_ALIGN
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttendOptions

from ....paged_steps import plan_of
from ..paged_world import World, shape_of
from ..scenarios import (
    PLACE,
    TWO_GROUPS,
    check_any_order,
    check_that_a_layout_is_refused,
    check_that_a_wrong_window_is_noticed,
    features,
    ragged_steps,
    run_beyond_the_window,
    run_layer_without_keys,
    run_ragged,
    run_shared_pages,
    run_single_tokens,
    run_three_steps,
)

CUT = {"num_sms": 4, "min_share": 1}
"""Options under which rows of more than 64 keys are cut into pieces."""
FEATURES = features(page_size=16)
PAIR: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2}


def backend(num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64, **options: Any) -> GpuBackend:
    options = {"num_sms": 1, "interpret": plgpu.InterpretGPUParams(detect_races=True), **options}
    return GpuBackend(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, **options)


def world(page_size: int = 16, *, made_with: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> World:
    sizes = {name: changes[name] for name in ("num_heads", "num_kv_heads", "head_size") if name in changes}
    some = backend(**sizes, **(made_with or {}))
    shape = shape_of(page_size, backend=some, slot_axes=(2, 2), **{"dtype": "bfloat16", **PLACE, **changes})
    return World(shape, num_pages=48, seed=seed)


@pytest.mark.parametrize("page_size", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_ragged_rows_match_the_oracle(page_size: int) -> None:
    run_ragged(world(page_size, table_len=16))


@pytest.mark.slow
def test_rows_of_several_tiles_in_one_piece_each() -> None:
    """Rows at and beside the edges of a tile of 64 keys, while others decode at position 62, 63 and 64.

    At the end a row of 120 query rows, a multiple of eight, fills one tile and a part of another before the next row.
    """
    some = world(16, table_len=16)
    some.add_rows(3)
    some.step({0: 62})
    some.step({0: 1, 1: 64})
    some.step({0: 1, 1: 1, 2: 65})
    some.step({0: 1, 1: 60, 2: 8})


@pytest.mark.parametrize(
    "options", [{"num_stages": 3, "max_tile_kv": 32}, pytest.param({"num_stages": 4}, marks=pytest.mark.slow)], ids=str
)
def test_other_numbers_of_stages_and_smaller_tiles_match_the_oracle(options: dict[str, int]) -> None:
    """With nine heads and a soft cap, since each program takes seconds to compile."""
    heads: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "options": FEATURES["soft cap"]}
    some = world(16, made_with=options, table_len=16, **heads)
    some.add_rows(2)
    some.step({0: 79})
    some.step({0: 1, 1: 75})
    some.step({0: 1, 1: 1})


def test_rows_that_share_their_first_pages() -> None:
    run_shared_pages(world(16, table_len=16))


def world_of_three_pages_a_row() -> World:
    """Return a world with room for three rows, of three pages each."""
    some = world(table_len=3)
    some.shape = dataclasses.replace(some.shape, num_tokens=48, num_rows=3)
    some.add_rows(3)
    return some


@pytest.mark.slow
def test_padding_behind_the_last_of_as_many_rows_as_there_is_room_for_is_finite() -> None:
    """The padding lies in the last tile, which computes it from slots that hold NaN."""
    some = world_of_three_pages_a_row()
    some.step({0: 1, 1: 1, 2: 5})
    some.step({0: 1, 1: 1, 2: 1})


def test_a_row_that_fills_its_page_table_reads_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of four pages where there are three: the interpreter refuses an index beyond the last row's table.

    The table is not padded here, as one of a multiple of 64 pages is not.
    """
    monkeypatch.setattr(gpu_backend, "TABLE_ALIGN", 1)
    some = world_of_three_pages_a_row()
    some.shape = dataclasses.replace(some.shape, num_tokens=56)  # Of no other test: a program of its own.
    some.step({2: 47})
    some.step({0: 1, 1: 1, 2: 1})


def world_of_pieces(**changes: Any) -> World:
    """Return a world in which rows of more than 64 keys are cut."""
    some = world(64, made_with=CUT, table_len=8, **changes)
    some.shape = dataclasses.replace(some.shape, num_tokens=200)
    return some


SINKS = jnp.array([-1.0, 0.0, 2.0, 3.0])
WINDOW_AND_SINKS: dict[str, Any] = {"window": 70, "sinks": SINKS}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        WINDOW_AND_SINKS,
        pytest.param({"window": 70}, marks=pytest.mark.slow),
        pytest.param({"sinks": SINKS}, marks=pytest.mark.slow),
    ],
    ids=["plain", "window and sinks", "window", "sinks"],
)
def test_rows_that_are_cut_into_pieces_and_merged(options: dict[str, Any]) -> None:
    """The rows are long enough for pieces, as the plan says: `count_merges` sees them."""
    some = world_of_pieces(options=options)
    some.add_rows(2)
    some.step({0: 130, 1: 65})
    some.step({0: 1, 1: 60})
    assert count_merges(some, [1, 1], [132, 126]) > 0
    some.step({0: 1, 1: 1})


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "head_size"), [(17, 64), (24, 128)], ids=str)
def test_small_tiles_of_32_rows_in_pieces_that_are_merged(num_heads: int, head_size: int) -> None:
    """The heads of one query fill more than 16 rows and less than a large tile."""
    some = world(16, made_with=CUT, table_len=16, num_heads=num_heads, num_kv_heads=1, head_size=head_size)
    small, _ = some.shape.backend.sections(some.shape.num_tokens, some.shape.num_rows)
    assert small[0].tiles.tile_rows == 32
    some.add_rows(2)
    some.step({0: 76, 1: 4})
    assert count_merges(some, [1, 1], [77, 5]) > 0
    some.step({0: 1, 1: 1})


def test_a_tile_reads_nothing_behind_the_last_eight_of_its_rows() -> None:
    """The queries behind belong to another row, and another thread block may be writing them.

    The interpreter runs thread blocks one after another and sees no race of two, so the test compares what is read.
    """
    chip, place, num_rows, tile_rows = Chip(interpret=plgpu.InterpretGPUParams(detect_races=True)), 16, 30, 64
    source = jnp.broadcast_to(jnp.arange(256.0).reshape(2, 128, 1), (2, 128, 64))

    def body(source: Any, out: Any, *, tile: Any, here: Any) -> None:
        start_query_copies(source, 1, jnp.int32(place), jnp.int32(num_rows), tile, here, chip)
        plgpu.barrier_wait(here)
        for first in range(0, tile_rows, ROW_ALIGN):
            rows = pl.ds(first, ROW_ALIGN)
            store_global(out.at[rows], plgpu.load(tile.at[rows], layout=row_layout(64, chip)))

    read = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tile_rows, 64), jnp.bfloat16),
        scratch_types={
            "tile": smem_tile((tile_rows, 64), jnp.bfloat16, chip),
            "here": plgpu.Barrier(num_arrivals=tile_rows // ROW_ALIGN),
        },
        interpret=chip.interpret,
    )(source.astype(jnp.bfloat16))
    first_of_eight = np.minimum(np.arange(0, tile_rows, ROW_ALIGN), (num_rows - 1) // ROW_ALIGN * ROW_ALIGN)
    wanted = 128 + place + (first_of_eight[:, None] + np.arange(ROW_ALIGN)).ravel()
    np.testing.assert_array_equal(np.asarray(read, np.float32), np.broadcast_to(wanted[:, None], (tile_rows, 64)))


def count_merges(some: World, query_lens: list[int], context_lens: list[int], *, decodes_only: bool = False) -> int:
    room = {
        "num_tokens": some.shape.num_tokens,
        "num_rows": some.shape.num_rows,
        "decodes_only": decodes_only,
    }
    planner = some.shape.backend
    plan = plan_of(planner, query_lens, context_lens, **room)
    sections = planner.sections(**room)
    return sum(int(plan[of_class[0].num_merges_offset]) for of_class in sections)


@pytest.mark.parametrize(
    ("sizes", "tile_rows"),
    [
        pytest.param({"num_heads": 6, "num_kv_heads": 2}, 16, marks=pytest.mark.slow),
        pytest.param({"num_heads": 17, "num_kv_heads": 1}, 32, marks=pytest.mark.slow),
        pytest.param({"num_heads": 33, "num_kv_heads": 1, "head_size": 256}, 32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_that_only_decodes_has_tiles_of_one_size(sizes: dict[str, int], tile_rows: int) -> None:
    """Rows in pieces, padding rows behind them, all rows of a step, and a step of padding alone."""
    some = world(16, made_with=CUT, table_len=16, **sizes)
    (launch,) = some.shape.backend.launches(80, 6, AttendOptions(1.0), decodes_only=True)
    assert launch.section.tiles.tile_rows == tile_rows
    some.add_rows(6)
    some.step({0: 76, 1: 4})
    some.step({0: 79})
    assert count_merges(some, [1] * 3, [156, 5, 1], decodes_only=True) > 0
    some.step({0: 1, 1: 1, 2: 1}, decodes_only=True)
    some.step(dict.fromkeys(range(6), 1), decodes_only=True)
    some.step({}, decodes_only=True)


def test_steps_of_padding_alone_have_finite_outputs() -> None:
    """The program is that of the test of ragged rows."""
    some = world(16, table_len=16)
    some.add_row()
    some.step({})
    some.step({0: 3})


CASES: dict[str, dict[str, Any]] = {
    "int8, all features": {"dtype": "int8", "options": FEATURES["all of them"]},
    "float8 of 128, wgmma": {"dtype": "float8_e4m3fn", "head_size": 128, **PAIR, "made_with": {"prefill": "wgmma"}},
    "nine heads": {"num_heads": 9, "num_kv_heads": 3, "options": FEATURES["soft cap"]},
    "head size 80, window": {"head_size": 80, **PAIR, "options": FEATURES["window of a page less one"]},
    "head size 256, tiles of half a page": {"page_size": 64, "head_size": 256, "num_heads": 1, "num_kv_heads": 1},
}
"""Every dtype, head size and feature once, in few programs, each of which has another combination of them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_shapes_dtypes_and_features(name: str) -> None:
    run_three_steps(world(**CASES[name]))


def test_heads_that_fill_large_tiles_with_one_query() -> None:
    """There are no small tiles then."""
    some = world(num_heads=33, num_kv_heads=1, head_size=256)
    assert len(some.shape.backend.launches(80, 6, AttendOptions(1.0))) == 1
    some.add_rows(2)
    some.step({0: 3, 1: 1})
    some.step({0: 1, 1: 1})


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (16, 1), (24, 1), (71, 1)])
def test_every_ratio_of_query_to_kv_heads(num_heads: int, num_kv_heads: int) -> None:
    run_three_steps(world(num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_every_head_size_and_dtype_of_pages(head_size: int, dtype: str) -> None:
    run_three_steps(world(head_size=head_size, dtype=dtype, **PAIR))


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [80, 96, 192])
@pytest.mark.parametrize("changes", [PAIR, {"num_heads": 24, "num_kv_heads": 1}], ids=["1 head", "24 heads"])
def test_head_sizes_that_are_no_power_of_two(head_size: int, changes: dict[str, Any]) -> None:
    """With pieces that are merged, in tiles of every number of rows."""
    some = world(made_with=CUT, table_len=16, head_size=head_size, **changes)
    some.add_rows(3)
    some.step({0: 70, 1: 1})
    some.step({0: 60, 1: 1, 2: 17})
    assert count_merges(some, [1, 1], [131, 3]) > 0
    some.step({0: 1, 1: 1})
    some.step({0: 1, 1: 1, 2: 1}, decodes_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
def test_window_soft_cap_and_sinks(options: dict[str, Any]) -> None:
    run_three_steps(world(options=options))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_candidate_for_prefill_on_hopper_matches_the_oracle(dtype: str) -> None:
    """The interpreter runs `wgmma` on operands in shared memory."""
    run_three_steps(world(dtype=dtype, made_with={"prefill": "wgmma"}))


WINDOWED: dict[str, Any] = {"options": {"window": 17}, "made_with": {"windows": (None, 17, 40)}}
WINDOWED_INT8: dict[str, Any] = {**WINDOWED, "dtype": "int8", "options": {**FEATURES["all of them"], "window": 17}}


@pytest.mark.slow
def test_a_window_with_an_order_of_its_own() -> None:
    run_three_steps(world(**WINDOWED))


@pytest.mark.parametrize(("window", "index"), [(None, 0), (17, 1), (40, 2), (30, 0)])
def test_a_layer_takes_the_order_of_its_window_or_that_of_full_attention(window: int | None, index: int) -> None:
    some = backend(windows=(40, None, 17))
    launches = some.launches(64, 4, AttendOptions(1.0, window))
    sections = some.sections(64, 4)
    assert [launch.section for launch in launches] == [of_class[index] for of_class in sections]
    assert some.planned_windows == (None, 17, 40)


@pytest.mark.parametrize(
    "kind", [WINDOWED_INT8, pytest.param(WINDOWED, marks=pytest.mark.slow)], ids=["int8, all features", "bfloat16"]
)
def test_pages_that_the_window_has_left_may_be_null(kind: dict[str, Any]) -> None:
    run_beyond_the_window(world(**kind), num_steps=3, chunk=9)


@pytest.mark.slow
def test_pages_that_a_window_of_one_has_left_may_be_null() -> None:
    run_beyond_the_window(world(options={"window": 1}, made_with={"windows": (1,)}), num_steps=3, chunk=9)


@pytest.mark.slow
def test_groups_have_their_own_pages_and_layers_their_own_places() -> None:
    run_three_steps(world(**TWO_GROUPS))


@pytest.mark.slow
def test_a_single_token_step() -> None:
    """A step of one token launches no large tiles."""
    run_single_tokens(world(**PAIR))


@pytest.mark.slow
def test_a_layer_without_keys_reads_those_of_the_layer_it_names() -> None:
    run_layer_without_keys(world(**PAIR))


def test_a_plan_for_longer_contexts_does_for_the_steps_before() -> None:
    """Several steps on the device share the plan of the last: pieces end where the lengths say."""
    some = world_of_pieces(options=WINDOW_AND_SINKS)
    some.add_row()
    some.step({0: 150})
    plan = plan_of(some.shape.backend, [1], [300], some.shape.num_tokens, some.shape.num_rows)
    run = some.run
    some.run = lambda cache, q, k, v, step: run(cache, q, k, v, dataclasses.replace(step, plan=jnp.asarray(plan)))
    some.step({0: 1})
    some.step({0: 1})


@pytest.mark.parametrize("error", [-1, 1])
def test_a_window_off_by_one_would_be_noticed(error: int) -> None:
    check_that_a_wrong_window_is_noticed(world(**WINDOWED_INT8), error)


def test_drawn_raggedness_matches_the_oracle() -> None:
    """Rows are cut into pieces, without a window and sinks, which other tests of pieces have."""
    steps = ragged_steps(most_steps=3, most_tokens=80, most_context=300, lengths=(15, 16, 17, 63, 65))
    check_any_order(lambda seed: world_of_pieces(seed=seed), steps, max_examples=3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FEATURES["all of them"]], ids=["plain", "all"])
def test_drawn_raggedness_matches_the_oracle_in_many_examples(options: dict[str, Any]) -> None:
    steps = ragged_steps(most_steps=3, most_tokens=80, most_context=128, lengths=(15, 16, 17, 33))
    check_any_order(lambda seed: world(made_with=CUT, options=options, seed=seed), steps, max_examples=40)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_ampere_reads_a_byte_by_its_bits_as_others_do_by_instruction(dtype: Any) -> None:
    stored = jnp.arange(256, dtype=jnp.uint8).view(dtype)
    ampere, others = (np.asarray(to_compute_dtype(stored, Chip(has_tma=tma)), np.float32) for tma in (False, True))
    np.testing.assert_array_equal(ampere, others)
    np.testing.assert_array_equal(others, np.asarray(stored, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float32"},
            r"kv_cache_dtype: got float32, the pallas-gpu backend takes bfloat16, int8, fp8; use --dtype bfloat16",
        ),
        ({"head_size": 72}, "head_size: got 72, the pallas-gpu backend takes 64, 80, 96, 128, 192, 256"),
        (
            {"head_size": 96, "dtype": "int8"},
            "kv_cache_dtype: got int8 with head size 96, .* with 64, 128, 256 only; leave kv_cache_dtype out",
        ),
        ({"head_size": 96, "dtype": "float8_e4m3fn"}, "kv_cache_dtype: got fp8 with head size 96"),
        ({"page_size": 128}, "block_size: got 128, the pallas-gpu backend takes 16, 32, 64"),
    ],
)
def test_a_layout_that_is_not_taken_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    check_that_a_layout_is_refused(backend(), message, **{"dtype": "bfloat16", **options})


def test_ampere_refuses_pages_of_16_at_head_size_80_by_name() -> None:
    ampere = backend(capability=(8, 0))
    check_that_a_layout_is_refused(ampere, "block_size: got 16, .* takes 32, 64;", dtype="bfloat16", head_size=80)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": "tcgen05"},
        {"prefill": "wgmma", "head_size": 96},
        {"prefill": "wgmma", "head_size": 256},
        {"prefill": "wgmma", "capability": (8, 0)},
        {"prefill": "wgmma", "capability": (10, 0)},
    ],
    ids=str,
)
def test_an_instruction_for_prefill_that_is_not_there_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"prefill: got {options['prefill']} with head size .* mma or wgmma"):
        backend(**options)


def test_heads_that_the_backend_was_not_made_for_are_refused_by_number() -> None:
    some = World(shape_of(16, backend=backend(8, 2), slot_axes=(2, 2), dtype="bfloat16"))
    some.add_row()
    with pytest.raises(ValueError, match=r"got 4 query heads, 2 KV heads and head size 64, .* made for 8, 2 and 64"):
        some.step({0: 1})


@pytest.mark.parametrize(("planned", "wanted"), [((), (1024,)), ((1024,), ())], ids=str)
def test_a_plan_of_a_backend_with_other_windows_is_refused_by_its_length(planned: Any, wanted: Any) -> None:
    """The order of a window that it lacks would be read from behind it."""
    some, maker = world(made_with={"windows": wanted}), backend(windows=planned)
    some.add_row()
    run, room = some.run, (some.shape.num_tokens, some.shape.num_rows)
    plan = jnp.asarray(plan_of(maker, [1], [1], *room))
    some.run = lambda cache, q, k, v, step: run(cache, q, k, v, dataclasses.replace(step, plan=plan))
    wanted_len = some.shape.backend.plan_len(*room)
    with pytest.raises(ValueError, match=f"got a plan of {len(plan)} numbers, .* takes {wanted_len} for 80 tokens"):
        some.step({0: 1})


def test_queries_of_float32_are_refused_by_name() -> None:
    """Rounded to bfloat16 they would come out as float32 that is none."""
    some = world()
    some.add_row()
    run = some.run
    some.run = lambda cache, q, k, v, step: run(cache, q.astype("float32"), k, v, step)
    with pytest.raises(ValueError, match=r"got queries of float32, .* compute in bfloat16; use --dtype bfloat16"):
        some.step({0: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 9}, "num_heads: got 9 with 2 KV heads"),
        ({"num_heads": 0}, "num_heads: got 0 with 2 KV heads"),
        ({"num_kv_heads": 0}, "num_heads: got 8 with 0 KV heads"),
        ({"num_sms": 0}, "num_sms: got 0"),
        ({"block_memory": 0}, "block_memory: got 0"),
        ({"min_share": 0}, "min_share: got 0"),
        ({"windows": (None, 8, 0)}, "windows: got 0"),
        ({"num_stages": 1}, "num_stages: got 1, the pallas-gpu backend takes 2, 3, 4; leave it at 2"),
        ({"max_tile_kv": 128}, "max_tile_kv: got 128, the pallas-gpu backend takes 32, 64; leave it at 64"),
    ],
    ids=str,
)
def test_numbers_that_no_chip_and_no_model_has_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GpuBackend(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, **options})
