"""Pages that rows have in common, attended to once: who shares what, and that each finds what it would alone."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels.ragged_paged_attention.interface import LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.tile_plan import MAX_PREFIXES, shared_prefixes
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import Tiles, XlaBackend

from ...paged_steps import plan_of
from .paged_world import Shape, World

PAGE = 8
SHARING = NativeBackend(shared_rows=3, min_saved_tokens=1)
XLA_SHARING = XlaBackend(
    Tiles(kv_splits=48, decode_keys=64, queries=16, prefill_keys=16, shared_rows=3),
    share_prefixes=True,
    min_saved_tokens=1,
)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": jnp.array([-1.0, 0.0, 2.0, 30.0])},
    "window": {"window": 19},
}


BACKENDS = {"native": {"backend": SHARING}, "xla": {"backend": XLA_SHARING, "slot_axes": (2, 2)}}


def sharing_world(kind: str, **changes: Any) -> World:
    options = {"scale": 0.125, **changes.pop("options", {})}
    sizes: dict[str, Any] = dict(num_rows=12, num_tokens=64, table_len=8, options=options)
    return World(Shape(**sizes, **BACKENDS[kind], **changes), num_pages=120)


def family(world: World, num_children: int, num_shared: int) -> list[int]:
    """Add a row of six pages, and others that begin with its first `num_shared`; return their numbers."""
    parent = world.add_row()
    world.step({parent: 6 * PAGE - 3})
    children = [world.add_row(prefix_of=parent, num_shared=num_shared) for _ in range(num_children)]
    for index, child in enumerate(children):
        world.step({child: 1 + 3 * index})
    return [parent, *children]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("num_shared", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_rows_that_share_pages_match_the_oracle(options: dict[str, Any], num_shared: int, kind: str) -> None:
    """Eight rows in tiles of three, and one that shares nothing."""
    world = sharing_world(kind, options=options)
    rows = [*family(world, 7, num_shared), world.add_row()]
    world.step({rows[-1]: 20})
    for _ in range(3):
        world.step(dict.fromkeys(rows, 1))
    world.step({rows[1]: 1, rows[2]: 1, rows[5]: 9, rows[6]: 3})


@pytest.mark.parametrize("kind", BACKENDS)
def test_families_and_layers_of_two_groups_match_the_oracle(kind: str) -> None:
    world = sharing_world(kind, layers=(LayerPlace(0, 0), LayerPlace(1, 0)))
    rows = family(world, 3, 2) + family(world, 4, 5)
    for _ in range(10):  # Over the edge of a page.
        world.step(dict.fromkeys(rows, 1))


@st.composite
def families(draw: st.DrawFn) -> list[tuple[int | None, int, int]]:
    """Draw rows as (parent among earlier rows, or None; shared pages; own tokens)."""
    rows: list[tuple[int | None, int, int]] = []
    for index in range(draw(st.integers(2, 10))):
        parent = draw(st.sampled_from([None, *range(index)]))
        longest = 0 if parent is None else min(4, rows[parent][1] + rows[parent][2] // PAGE)
        num_shared = draw(st.integers(0, longest))
        rows.append((parent, num_shared, draw(st.integers(1, 3 * PAGE))))
    return rows


@pytest.mark.parametrize("kind", BACKENDS)
def test_any_tree_of_rows_matches_the_oracle(kind: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(rows=families(), seed=st.integers(0, 2**16))
    def check(rows: list[tuple[int | None, int, int]], seed: int) -> None:
        world = sharing_world(kind)
        world.rng = np.random.default_rng(seed)
        for parent, num_shared, num_own in rows:
            world.step({world.add_row(parent, num_shared): num_own})
        world.step(dict.fromkeys(range(len(rows)), 1))

    check()


tables_of_some_rows = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=6, max_size=6), st.integers(1, 6 * PAGE)), min_size=1, max_size=20
)


@given(rows=tables_of_some_rows)
def test_rows_of_a_group_have_its_pages_in_common_and_full(rows: list[tuple[list[int], int]]) -> None:
    tables, lens = np.array([[table for table, _ in rows]], np.int32), np.array([length for _, length in rows])
    taken: list[int] = []
    for members, num_pages in shared_prefixes(lens, tables, np.arange(len(rows)), PAGE):
        assert num_pages >= 1
        assert len(members) >= 2
        assert len(np.unique(tables[0, members, :num_pages], axis=0)) == 1
        assert (lens[members] > num_pages * PAGE).all()  # A query is behind all of them.
        taken += members.tolist()
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize(
    ("tables", "num_pages", "wanted"),
    [
        ([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 3, 7], [4, 5, 6, 6]], [4, 4, 4, 4], [([0, 1, 2], 3)]),
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 6, 6]], [4, 4, 4], [([0, 1], 3)]),  # 3 pages once, not 1 page twice.
        ([[1, 2, 9, 9], [1, 3, 9, 9], [1, 4, 9, 9]], [3, 3, 3], [([0, 1, 2], 1)]),
        ([[1, 2, 3, 4]] * 2 + [[1, 7, 8, 9]] * 2, [4] * 4, [([0, 1], 3), ([2, 3], 3)]),  # What is left shares too.
        ([[1, 2, 3, 4], [1, 0, 0, 0]], [4, 1], []),  # The last page is a row's own, even full.
        ([[1, 2], [3, 4]], [2, 2], []),
    ],
)
def test_groups_take_as_many_pages_as_save_most(
    tables: list[list[int]], num_pages: list[int], wanted: list[tuple[list[int], int]]
) -> None:
    lens = np.array(num_pages) * PAGE
    found = shared_prefixes(lens, np.array([tables], np.int32), np.arange(len(tables)), PAGE)
    assert [(members.tolist(), count) for members, count in found] == wanted


def test_a_prefix_is_shared_as_far_as_all_groups_have_the_same_pages() -> None:
    tables = np.array([[[1, 2, 3, 4], [1, 2, 3, 5]], [[6, 7, 8, 9], [6, 7, 8, 9]]], np.int32)
    ((members, num_pages),) = shared_prefixes(np.array([32, 32]), tables, np.arange(2), PAGE)
    assert (members.tolist(), num_pages) == ([0, 1], 3)
    tables[1, 1, 2] = 5
    ((_, num_pages),) = shared_prefixes(np.array([32, 32]), tables, np.arange(2), PAGE)
    assert num_pages == 2


def test_without_a_group_of_full_attention_nothing_is_shared() -> None:
    assert not plan_of(SHARING, [1] * 4, [30] * 4, 8, 4, np.ones((0, 4, 4), np.int32)).any()


def test_the_plan_names_tiles_rows_and_pages_seen_and_only_what_pays() -> None:
    """Five rows of one family in tiles of three; a pair that saves less than asked; a prefill row that shares."""
    tables = np.arange(10, 42, dtype=np.int32).reshape(1, 8, 4)
    tables[0, [0, 1, 3, 4, 6, 7], :2] = 1, 2
    tables[0, [2, 5], 0] = 3
    query_lens, context_lens = [1] * 7 + [5], [30, 29, 20, 20, 19, 18, 17, 30]
    backend = replace(SHARING, min_saved_tokens=2 * PAGE)
    plan = plan_of(backend, query_lens, context_lens, 16, 8, tables)
    sections = backend.planner.sections(plan, 16, 8)
    assert sections.num_shared_tiles == [2]
    assert sections.shared_tiles[:, :2].T.tolist() == [[0, 3, 2], [3, 2, 2]]
    assert sections.members[:5].tolist() == [0, 1, 3, 4, 6]
    assert sections.num_shared_pages.tolist() == [2, 2, 0, 2, 2, 0, 2, 0]
    assert plan[0] == 1  # The prefill row's tile.


def test_no_number_of_families_overflows_the_plan() -> None:
    tables = np.repeat(np.arange(1, 33, dtype=np.int32), 2)[None, :, None] * np.ones((1, 1, 4), np.int32)
    plan = plan_of(SHARING, [1] * 64, [30] * 64, 64, 64, tables)
    assert SHARING.planner.sections(plan, 64, 64).num_shared_tiles == [MAX_PREFIXES]


def test_without_sharing_nothing_is_looked_for() -> None:
    plan = plan_of(replace(SHARING, share_prefixes=False), [1] * 4, [30] * 4, 8, 4, np.ones((1, 4, 4), np.int32))
    assert not plan.any()
    assert not XlaBackend().share_prefixes
