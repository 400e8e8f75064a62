"""The order of work of the GPU kernels, read by a plain interpreter that counts who does what."""

import dataclasses
import itertools
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu

from jpaged.pallas_kernels.ragged_paged_attention import GpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.gpu_deal import UNIT_COST, deal
from jpaged.pallas_kernels.ragged_paged_attention.gpu_plan import (
    ALIGN,
    GRANULE,
    MERGE_FIELDS,
    NO_END,
    PIECE_FIELDS,
    GpuPlanner,
    Order,
)


def planner(num_heads: int = 8, num_kv_heads: int = 2, **options: Any) -> GpuPlanner:
    defaults = {"head_size": 64, "windows": (), "num_sms": 6, "block_memory": 232448, "is_cut": True, "least_share": 2}
    return GpuPlanner(num_heads=num_heads, num_kv_heads=num_kv_heads, **{**defaults, **options})


def made(some: GpuPlanner, query_lens: list[int], context_lens: list[int], *, spare: int = 0) -> np.ndarray:
    """The plan of these rows in a step with room for `spare` more tokens and rows, over what another step has left."""
    num_tokens, num_rows = sum(query_lens) + spare, len(query_lens) + spare
    out = np.full(some.plan_len(num_tokens, num_rows), -7, np.int32)
    lens = np.array(query_lens, np.int32), np.array(context_lens, np.int32)
    some.plan(*lens, num_tokens=num_tokens, num_rows=num_rows, out=out)
    return out


def counts(
    some: GpuPlanner,
    plan: np.ndarray,
    window: int | None,
    query_lens: list[int],
    context_lens: list[int],
    all_orders: list[list[Order]],
) -> list[np.ndarray]:
    """Per row [query rows, keys]: how often each pair that the mask allows is computed; lengths as on the device."""
    starts = np.cumsum([0, *(-(-length * some.group // ALIGN) * ALIGN for length in query_lens)])
    found = [np.zeros((n * some.group, s), int) for n, s in zip(query_lens, context_lens, strict=True)]
    for orders in all_orders:
        order = orders[some.planned_windows.index(window)]
        tiles = order.tiles
        lists = plan[order.list_starts : order.num_merges]
        assert lists[0] == 0
        assert (np.diff(lists) >= 0).all()
        pieces = plan[order.pieces : order.merges].reshape(PIECE_FIELDS, -1)[:, : lists[-1]].T
        slots: dict[int, tuple[int, int]] = {}
        whole = set()
        for row, first, place, begin, end, slot in pieces.tolist():
            assert place == starts[row] + first
            num_rows = min(tiles.tile_rows, query_lens[row] * some.group - first)
            position = context_lens[row] - query_lens[row] + np.arange(first, first + num_rows)[:, None] // some.group
            key = np.arange(context_lens[row])[None, :]
            is_seen = (key <= position) & (key > position - (window or NO_END))
            found[row][first : first + num_rows] += is_seen & (key >= begin) & (key < end)
            if slot < 0:
                assert (begin, end) == (0, NO_END)
                assert place not in whole
                whole.add(place)
            else:
                assert slot not in slots
                slots[slot] = place, num_rows
        assert all(slot < tiles.num_slots for slot in slots)
        merges = plan[order.merges : order.end].reshape(MERGE_FIELDS, -1)[:, : plan[order.num_merges]].T
        merged = [
            (slot, (place, n)) for place, n, first, count in merges.tolist() for slot in range(first, first + count)
        ]
        assert sorted(merged) == sorted(slots.items())
        assert not whole & {place for place, _ in slots.values()}
    return found


def assert_each_pair_once(some: GpuPlanner, query_lens: list[int], context_lens: list[int], *, spare: int, later: int):
    """`later`: the plan is made for contexts that many tokens longer, of rows with one query."""
    planned = [s + later if n == 1 else s for n, s in zip(query_lens, context_lens, strict=True)]
    plan = made(some, query_lens, planned, spare=spare)
    orders = some.orders(sum(query_lens) + spare, len(query_lens) + spare)
    for window in some.planned_windows:
        for row, got in enumerate(counts(some, plan, window, query_lens, context_lens, orders)):
            position = context_lens[row] - query_lens[row] + np.arange(len(got))[:, None] // some.group
            key = np.arange(context_lens[row])[None, :]
            is_seen = (key <= position) & (key > position - (window or NO_END))
            assert np.array_equal(got, is_seen)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    num_rows = draw(st.integers(0, 7))
    query_lens = sorted(
        (draw(st.sampled_from([1, 1, 1, 2, 5, 16, 17, 40, 130])) for _ in range(num_rows)), key=lambda n: n > 1
    )
    return query_lens, [n + draw(st.sampled_from([0, 1, 62, 63, 64, 65, 300, 1000])) for n in query_lens]


@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (9, 3), (24, 1), (40, 1), (71, 1)], ids=str)
@settings(max_examples=40, deadline=None)
@given(step=steps(), spare=st.integers(0, 3), later=st.integers(0, 70), is_cut=st.booleans(), num_sms=st.integers(1, 9))
def test_every_pair_of_query_and_key_is_computed_once(
    heads: tuple[int, int], step: Any, spare: int, later: int, is_cut: bool, num_sms: int
) -> None:
    some = planner(*heads, windows=(None, 100), is_cut=is_cut, num_sms=num_sms)
    assert_each_pair_once(some, *step, spare=spare, later=later)


@settings(max_examples=300, deadline=None)
@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    num_lists=st.integers(1, 40),
    max_cuts=st.integers(0, 40),
    least_share=st.sampled_from([1, 6]),
)
def test_lists_are_in_order_and_none_is_longer_than_without_cuts(
    lens: list[int], num_lists: int, max_cuts: int, least_share: int
) -> None:
    max_cuts = min(max_cuts, num_lists - 1)
    begin, end = np.arange(len(lens)), np.arange(len(lens)) + np.array(lens)
    dealt = deal(begin, end, num_lists=num_lists, max_cuts=max_cuts, least_share=least_share)
    assert len(dealt.cut_units) == len(dealt.cut_granules) <= max_cuts
    assert (dealt.cut_granules > begin[dealt.cut_units]).all()
    assert (dealt.cut_granules < end[dealt.cut_units]).all()
    ends = np.cumsum(end - begin + UNIT_COST)
    at_cuts = ends[dealt.cut_units] - end[dealt.cut_units] + dealt.cut_granules
    places = np.concatenate([[0], ends, at_cuts])[dealt.starts]
    edges = np.concatenate([[0], places, ends[-1:]])
    assert (np.diff(edges) >= 0).all()
    assert np.diff(edges).max() == dealt.longest
    whole = deal(begin, end, num_lists=num_lists, max_cuts=0, least_share=least_share)
    assert dealt.longest <= whole.longest


def test_an_uncut_plan_has_no_pieces() -> None:
    some = planner(is_cut=False, num_sms=50)
    plan = made(some, [1, 1], [5000, 100])
    assert all(plan[orders[0].num_merges] == 0 for orders in some.orders(2, 2))


ONE = [1] * 64
RAGGED = [4096, 2500, 1000, 333, 200, 63] * 2
BALANCED_STEPS = {
    "rows of decode, some of them long": (ONE, [32768] * 6 + [500] * 58),
    "rows of decode, equally long": (ONE, [4096] * 64),
    "rows of decode, one longer than the other": (ONE, [1000 + 50 * row for row in range(64)]),
    "one row of decode": ([1], [100_000]),
    "1,024 tokens of prefill": ([1024], [1024]),
    "2,048 tokens of prefill": ([2048], [2048]),
    "8,192 tokens of prefill": ([8192], [8192]),
    "ragged prefill": (RAGGED, RAGGED),
    "a chunk of a long prompt": ([512], [8704]),
}


@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 4, 256), (32, 32, 128)], ids=str)
@pytest.mark.parametrize(("query_lens", "context_lens"), BALANCED_STEPS.values(), ids=BALANCED_STEPS.keys())
def test_no_list_is_much_longer_than_the_mean(
    heads: tuple[int, int, int], query_lens: list[int], context_lens: list[int]
) -> None:
    """Work is what takes time, so a step is as long as its longest list: on 132 multiprocessors, with
    what the planner takes a piece to cost.

    Of 1,024 tokens of prefill a list gets a few hundred keys, which are cut at multiples of 64; tiles of a chunk of a
    long prompt are whole and equally long where they are nearly as many as lists.
    """
    some = planner(*heads[:2], head_size=heads[2], num_sms=132, least_share=6)
    num_tokens, num_rows = sum(query_lens), len(query_lens)
    plan = made(some, query_lens, context_lens)
    most = 1.35 if num_tokens in (512, 1024) else 1.15
    for (order,) in some.orders(num_tokens, num_rows):
        lists = plan[order.list_starts : order.num_merges]
        if not lists[-1]:
            continue
        row, first, _, begin, end, _ = plan[order.pieces : order.merges].reshape(PIECE_FIELDS, -1)[:, : lists[-1]]
        position = (np.array(context_lens) - query_lens)[row] + (first + order.tiles.tile_rows - 1) // some.group
        work = np.minimum(np.minimum(end, position + 1), np.array(context_lens)[row]) - begin + UNIT_COST * GRANULE
        loads = np.array([work[a:b].sum() for a, b in itertools.pairwise(lists)])
        assert loads.max() <= max(most * loads.mean(), GRANULE * some.least_share)


def test_a_window_has_an_order_of_its_own_of_which_every_list_gets_its_share() -> None:
    some = planner(32, 8, head_size=128, num_sms=132, windows=(1024,), least_share=6)
    context_lens = [32768] * 16
    plan = made(some, [1] * 16, context_lens)
    full, windowed = some.orders(16, 16)[0]

    def longest(order: Any) -> int:
        lists = plan[order.list_starts : order.num_merges]
        begin, end = plan[order.pieces : order.merges].reshape(PIECE_FIELDS, -1)[3:5, : lists[-1]]
        oldest = 0 if order is full else 32768 - 1024
        work = np.maximum(np.minimum(end, 32768) - np.maximum(begin, oldest), 0)
        return max(work[a:b].sum() for a, b in itertools.pairwise(lists))

    assert longest(windowed) <= 0.06 * longest(full)


@pytest.mark.parametrize(
    ("block_memory", "head_size", "blocks"),
    [
        (232448, 128, (3, 2)),
        (166912, 128, (2, 1)),
        (232448, 64, (3, 2)),
        (166912, 64, (3, 2)),
        (232448, 256, (3, 2)),
        (166912, 256, (2, 1)),
    ],
)
def test_as_many_blocks_are_planned_as_fit_on_a_multiprocessor(
    block_memory: int, head_size: int, blocks: tuple[int, int]
) -> None:
    some = planner(head_size=head_size, block_memory=block_memory)
    assert (some.blocks_per_sm(16), some.blocks_per_sm(some.large_rows)) == blocks


def test_plans_of_equal_lengths_are_equal() -> None:
    some = planner()
    assert np.array_equal(made(some, [1, 40], [500, 70]), made(some, [1, 40], [500, 70]))
    assert dataclasses.replace(some) == some


def test_the_backend_is_made_where_pallas_has_its_instructions_and_names_the_jax_it_needs_elsewhere() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    if jax.__version_info__ >= (0, 11):
        assert GpuBackend(**sizes).plan_len(16, 4) == GpuBackend(**sizes).planner.plan_len(16, 4)
    else:
        with pytest.raises(ValueError, match=r"got pallas-gpu with jax .*, its kernels need jax 0\.11 or later"):
            GpuBackend(**sizes)


@pytest.mark.parametrize(("version", "num_ignored"), [((0, 10, 2), 2), ((0, 11, 0), 2), ((0, 11, 2), 0), ((0, 12), 0)])
def test_the_gpu_kernels_tests_are_left_out_by_version_alone(
    version: tuple[int, ...], num_ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for want of a name, which a later JAX may have changed: then they fail."""
    monkeypatch.delattr(mosaic_gpu, "InterpretGPUParams", raising=False)
    monkeypatch.setattr(jax, "__version_info__", version)
    assert len(runpy.run_path(str(Path(__file__).with_name("conftest.py")))["collect_ignore"]) == num_ignored
