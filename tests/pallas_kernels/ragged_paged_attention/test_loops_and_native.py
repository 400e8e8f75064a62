"""The `xla` and `native` backends against the dense oracle: ragged rows, windows, NaN wherever nothing may be read."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.pallas_kernels.ragged_paged_attention.interface import AttendOptions, AttentionShape, Backend, KVShape
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import Tiles, XlaBackend
from jpaged.pallas_kernels.ragged_paged_attention.xla.pages import XlaPages

from ...paged_steps import metadata, plan_of
from .dense_attention import dense_attention
from .paged_world import ATOL, Shape, World, shape_of
from .scenarios import (
    TWO_GROUPS,
    check_any_order,
    check_that_a_wrong_window_is_noticed,
    features,
    ragged_steps,
    run_beyond_the_window,
    run_layer_without_keys,
    run_ragged,
    run_shared_pages,
    run_single_tokens,
)

FEATURES = features(page_size=8)
FAST_FEATURES = ("window 1", "window of a page and one", "sinks", "all of them")
"""Others are windows between these, or a cap, which is among `all of them`."""


XLA = XlaBackend(Tiles(kv_splits=24, decode_keys=64, queries=16, prefill_keys=16, shared_rows=8), platform="gpu")
BACKENDS = {
    "native": {},
    "native, bfloat16": {"page_size": 32, "dtype": "bfloat16"},
    "xla": {"backend": XLA, "slot_axes": (2, 2)},
}
FEW_LOOPS = replace(XLA, tiles=replace(XLA.sizes, has_few_loops=True))
WITH_FEW_LOOPS = {**BACKENDS, "xla, few loops": {"backend": FEW_LOOPS, "slot_axes": (2, 2)}}
"""Also plain XLA as it is compiled for devices, whose other loops are the same."""
SIZED = [pytest.param("native", marks=pytest.mark.slow), "native, bfloat16", "xla"]
"""For sizes, which `native/test_attention.py` goes through in float32."""


@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.parametrize("page_size", [12, 16, 128])
def test_ragged_rows_match_the_oracle_at_every_page_size(page_size: int, kind: str) -> None:
    run_ragged(World(shape_of(**{**BACKENDS[kind], "page_size": page_size})))


@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (16, 2), (5, 1)])
def test_every_ratio_of_query_to_kv_heads(num_heads: int, num_kv_heads: int, kind: str) -> None:
    run_ragged(World(shape_of(num_heads=num_heads, num_kv_heads=num_kv_heads, **BACKENDS[kind])))


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_step_with_room_for_more_rows_than_tokens(kind: str) -> None:
    some = World(replace(shape_of(**BACKENDS[kind]), num_tokens=4, num_rows=16))
    some.add_rows(2)
    for work in ({0: 3, 1: 1}, {0: 1, 1: 1}, {1: 4}):
        some.step(work)


@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.parametrize("head_size", [24, 80, 128])
def test_every_head_size(head_size: int, kind: str) -> None:
    run_ragged(World(shape_of(head_size=head_size, **BACKENDS[kind])))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(name, "xla", marks=[pytest.mark.slow] * (name not in FAST_FEATURES)) for name in FEATURES),
        # `native/test_attention.py` goes through windows and caps.
        *(pytest.param(name, "native", marks=[pytest.mark.slow] * (name != "all of them")) for name in FEATURES),
    ],
)
def test_window_soft_cap_and_sinks(name: str, kind: str) -> None:
    run_ragged(World(shape_of(options=FEATURES[name], **BACKENDS[kind])))


BFLOAT16_PAGES = {
    "uint32": BACKENDS["native"],
    "bfloat16": BACKENDS["xla"],
    "uint16": {**BACKENDS["xla"], "backend": replace(XLA, platform="cpu")},
}


@pytest.mark.parametrize("stored", BFLOAT16_PAGES)
@pytest.mark.parametrize("step_dtype", ["bfloat16", "float32"])
def test_pages_of_bfloat16(stored: str, step_dtype: str) -> None:
    """Native code stores pairs, XLA on a CPU bits, others plain numbers; unwritten slots hold NaN."""
    options: dict[str, Any] = dict(dtype="bfloat16", step_dtype=step_dtype, options=FEATURES["all of them"])
    world = World(shape_of(**options, **BFLOAT16_PAGES[stored]))
    assert world.cache.pages[0].dtype == stored
    run_ragged(world)


@pytest.mark.parametrize("kind", WITH_FEW_LOOPS)
@pytest.mark.parametrize("window", [1, pytest.param(8, marks=pytest.mark.slow), 20])
def test_pages_that_the_window_has_left_may_be_null(window: int, kind: str) -> None:
    world = World(shape_of(options={"window": window}, **WITH_FEW_LOOPS[kind]))
    run_beyond_the_window(world, num_steps=10, chunk=world.shape.page_size // 4)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_single_token_step(kind: str) -> None:
    """A step of one token compiles no prefill code."""
    run_single_tokens(World(shape_of(**BACKENDS[kind])))


def test_more_rows_than_a_tile_and_no_multiple_of_it() -> None:
    world = World(Shape(num_tokens=7, num_rows=7, options={"scale": 0.125}))
    world.add_rows(7)
    for count in (7, 6, 5, 4, 1, 7):
        world.step(dict.fromkeys(range(count), 1))


@pytest.mark.parametrize(("backend", "slot_axes"), [(NativeBackend(), (3, 2)), (XlaBackend(), (2, 2))])
def test_default_tiles_over_a_long_context(backend: Backend, slot_axes: tuple[int, int]) -> None:
    sizes: dict[str, Any] = dict(page_size=64, num_tokens=512, num_rows=9, table_len=20, options={"scale": 0.125})
    world = World(Shape(**sizes, backend=backend, slot_axes=slot_axes))
    world.add_rows(9)
    world.step({0: 512})
    world.step({0: 490, 1: 13, 2: 1, 3: 1})
    world.step({0: 1, 1: 1, 2: 1, 3: 300, 4: 64, 5: 65, 6: 63, 7: 1, 8: 1})
    world.step(dict.fromkeys(range(9), 1))


@pytest.mark.parametrize("kind", BACKENDS)
def test_rows_that_share_their_first_pages(kind: str) -> None:
    run_shared_pages(World(shape_of(**BACKENDS[kind])))


@pytest.mark.parametrize("kind", BACKENDS)
def test_groups_have_their_own_pages_and_layers_their_own_places(kind: str) -> None:
    run_ragged(World(shape_of(**TWO_GROUPS, **BACKENDS[kind]), num_pages=96))


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_layer_without_keys_reads_those_of_the_layer_it_names(kind: str) -> None:
    run_layer_without_keys(World(shape_of(**BACKENDS[kind])))


def test_keys_without_values_are_refused_by_name() -> None:
    world = World(shape_of())
    step = metadata(world.shape.backend, [1], [1], [[[5]]], page_size=8, num_tokens=8, num_rows=4, table_len=4)
    q, k = jnp.zeros((8, 4, 64)), jnp.zeros((8, 2, 64))
    with pytest.raises(ValueError, match="one of k and v"):
        world.cache.attend(0, q, k, None, step, scale=0.125)
    with pytest.raises(ValueError, match="one of k and v"):
        world.cache.attend(0, q, None, k, step, scale=0.125)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_a_key_is_refused_by_number(window: int) -> None:
    """Before any backend sees it."""
    world = World(shape_of(options={"window": window}))
    world.add_row()
    with pytest.raises(ValueError, match=f"got a window of {window}, wanted at least 1"):
        world.step({0: 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": (8, 5, 64)}, r"queries \[8, 5, 64\], wanted .* a multiple of 2 heads"),
        ({"q": (8, 4, 32)}, r"queries \[8, 4, 32\], wanted \[tokens, heads, 64\]"),
        ({"k": (8, 1, 64)}, r"k \[8, 1, 64\], wanted one of 2 KV heads of 64 for each of 8 tokens"),
        ({"v": (7, 2, 64)}, r"v \[7, 2, 64\], wanted"),
        ({"sinks": (2,)}, r"sinks \[2\], wanted one for each of 4 query heads"),
        ({"soft_cap": 0.0}, r"soft cap of 0.0, wanted a positive number"),
        ({"layer": 1}, r"layer 1, wanted one of the cache's 1, from 0 on"),
        ({"layer": -1}, r"layer -1, wanted one of the cache's 1"),
    ],
)
def test_what_does_not_fit_the_cache_is_refused_before_any_backend_sees_it(given: dict, message: str) -> None:
    world = World(shape_of())
    step = metadata(world.shape.backend, [1], [1], [[[5]]], page_size=8, num_tokens=8, num_rows=4, table_len=4)
    arrays = {"q": (8, 4, 64), "k": (8, 2, 64), "v": (8, 2, 64), **given}
    soft_cap, layer = arrays.pop("soft_cap", None), arrays.pop("layer", 0)
    arguments = {name: jnp.zeros(shape) for name, shape in arrays.items()}
    with pytest.raises(ValueError, match=message):
        world.cache.attend(layer, step=step, scale=0.125, soft_cap=soft_cap, **arguments)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("error", [-1, 1])
def test_a_window_off_by_one_would_be_noticed(error: int, kind: str) -> None:
    check_that_a_wrong_window_is_noticed(World(shape_of(options={"window": 12}, **BACKENDS[kind])), error)


def test_a_causal_mask_off_by_one_would_be_noticed() -> None:
    """A key too many is NaN and spreads; a key too few moves a mean over 500 keys by 50 × the tolerance."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(500, 1, 64)).astype(np.float32) for _ in range(3))
    whole = dense_attention(q[-1:], [k], [v], [1], scale=0.125)
    short = dense_attention(q[-1:], [k[:-1]], [v[:-1]], [1], scale=0.125)
    assert np.abs(whole - short).max() > 50 * ATOL


def test_the_oracle_is_the_definition() -> None:
    """Equal scores give the mean of the visible values, computed by hand; a sink of the same score takes one share."""
    q, k = np.zeros((3, 1, 2)), np.zeros((4, 1, 2))
    v = np.array([1.0, 2.0, 4.0, 8.0])[:, None, None] * np.ones((4, 1, 2))
    mean = dense_attention(q, [k], [v], [3], scale=1.0)
    assert mean[:, 0, 0] == pytest.approx([3 / 2, 7 / 3, 15 / 4])
    windowed = dense_attention(q, [k], [v], [3], scale=1.0, window=2, sinks=np.zeros(1))
    assert windowed[:, 0, 0] == pytest.approx([3 / 3, 6 / 3, 12 / 3])
    q[2], k[3] = 100.0, 100.0
    capped = dense_attention(q, [k], [v], [3], scale=1.0, soft_cap=np.log(3.0))
    assert capped[2, 0, 0] == pytest.approx((1 + 2 + 4 + 3 * 8) / 6)


FUZZED = {
    "plain": {},
    "window": {"window": 13},
    "all": {"window": 6, "soft_cap": 2.0, "sinks": jnp.array([0.5, -0.5, 1.0, 0.0])},
}


@pytest.mark.parametrize("kind", WITH_FEW_LOOPS)
@pytest.mark.parametrize(
    "options",
    [pytest.param(FUZZED["plain"], marks=pytest.mark.slow), FUZZED["window"], FUZZED["all"]],
    ids=FUZZED.keys(),
)
def test_any_order_of_chunks_and_decodes(options: dict[str, Any], kind: str) -> None:
    steps = ragged_steps(most_steps=4, most_tokens=40, most_context=64, lengths=(7, 8, 9))
    shape = shape_of(options=options, **WITH_FEW_LOOPS[kind])
    check_any_order(lambda seed: World(shape, seed=seed), steps, max_examples=10)


def test_plan_cuts_prefill_rows_into_tiles_in_token_order() -> None:
    backend = NativeBackend(tile_q=16)
    plan = plan_of(backend, [1, 1, 16, 17, 2], [9, 1, 16, 40, 50], 64, 5)
    sections = backend.planner.sections(plan, 64, 5)
    assert sections.num_query_tiles == [4]
    rows, starts, lens = sections.query_tiles[:, :4]
    assert rows.tolist() == [2, 3, 3, 4]
    assert starts.tolist() == [2, 18, 34, 35]
    assert lens.tolist() == [16, 16, 1, 2]


def test_plan_of_decode_rows_has_no_tile() -> None:
    assert plan_of(NativeBackend(), [1] * 8, range(1, 9), 8, 8)[0] == 0


def test_short_steps_and_many_query_heads_have_smaller_tiles() -> None:
    """Threads share the tiles of a short prompt; queries and sums of a tile fit the level-2 cache."""

    def tile_lens(num_heads: int, num_kv_heads: int, head_size: int) -> list[int]:
        shape = AttentionShape(num_heads, num_kv_heads, head_size)
        backend = NativeBackend.on(jax.devices(), shape, deterministic=False, tuned=())
        return [backend.planner.tile_len(num_tokens) for num_tokens in (1, 128, 256, 512, 4096)]

    assert tile_lens(9, 3, 64) == tile_lens(32, 8, 128) == [16, 16, 32, 64, 64]
    assert tile_lens(64, 8, 128) == [16, 16, 32, 32, 32]
    assert tile_lens(71, 1, 64) == [16] * 5


@given(
    query_lens=st.lists(st.integers(2, 40), min_size=1, max_size=8),
    num_decode_rows=st.integers(0, 4),
    tile_q=st.sampled_from([8, 64]),
)
def test_plan_covers_every_prefill_token_once_and_fits(
    query_lens: list[int], num_decode_rows: int, tile_q: int
) -> None:
    lens = [1] * num_decode_rows + query_lens
    backend = NativeBackend(tile_q=tile_q)
    plan = plan_of(backend, lens, [length + 3 for length in lens], sum(lens), len(lens))
    sections = backend.planner.sections(plan, sum(lens), len(lens))
    rows, starts, counts = sections.query_tiles[:, : sections.num_query_tiles[0]]
    owners = np.repeat(np.arange(len(lens)), lens)
    covered = [token for start, count in zip(starts, counts, strict=True) for token in range(start, start + count)]
    assert covered == list(range(num_decode_rows, sum(lens)))
    assert all((owners[s : s + c] == r).all() for r, s, c in zip(rows, starts, counts, strict=True))


OF_BYTES = {
    f"{kind}, {dtype}": {**BACKENDS[kind], "dtype": dtype}
    for kind in ("native", "xla")
    for dtype in ("int8", "float8_e4m3fn")
}


@pytest.mark.parametrize("kind", [*WITH_FEW_LOOPS, *OF_BYTES])
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    """Alone, among longer and shorter rows, in another place of another tile: not one bit differs."""
    world = World(shape_of(num_rows=12, table_len=8, **{**WITH_FEW_LOOPS, **OF_BYTES}[kind]))
    rng, layout = np.random.default_rng(0), world.layout
    in_one = layout.stored_dtype.itemsize // layout.dtype.itemsize
    numbers = [rng.normal(size=(*shape[:-1], shape[-1] * in_one)).astype(layout.dtype) for shape in layout.shapes]
    pages = tuple(jnp.asarray(array.view(layout.stored_dtype)) for array in numbers)
    world.cache = replace(world.cache, pages=pages)
    q = jnp.asarray(rng.normal(size=(1, 4, 64)), jnp.float32)
    others = jnp.asarray(rng.normal(size=(48, 4, 64)), jnp.float32)
    attend = jax.jit(lambda cache, q, step: cache.attend(0, q, None, None, step, scale=0.125)[0])
    found = []
    for place, lens in [(0, [29]), (1, [60, 29, 3]), (6, [64, 57, 50, 43, 36, 30, 29, 20, 1]), (10, [40] * 10 + [29])]:
        tables = [[[1 + (7 * row + page) % 60 for page in range(8)] for row in range(len(lens))]]
        tables[0][place] = [61, 5, 62, 63, 0, 0, 0, 0]
        step = metadata(
            world.shape.backend,
            [1] * len(lens),
            lens,
            tables,
            page_size=world.shape.page_size,
            num_tokens=48,
            num_rows=12,
            table_len=8,
        )
        out = attend(world.cache, others.at[place].set(q[0]), step)
        found.append(np.asarray(out[place]).view(np.int32))
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("heads", "head_size", "num_rows", "expected"),
    [
        ((9, 3), 64, 16, (16, 4, 2)),
        ((9, 3), 64, 1, (16, 16, 1)),
        ((32, 8), 128, 16, (4, 4, 2)),
        ((32, 32), 256, 64, (1, 1, 2)),
    ],
)
def test_a_batch_of_kv_splits_takes_as_many_pages_as_a_core_keeps(heads, head_size, num_rows, expected):
    layout = XlaBackend(platform="gpu").layout(KVShape(1, 1, 64, heads[1], head_size, "float32"))
    keys, values = (jax.ShapeDtypeStruct(shape, layout.dtype) for shape in layout.shapes)
    pages = XlaPages(keys, values, 0, AttendOptions(1.0))
    sizes = Tiles(64, 64, shared_rows=8, kv_splits=64, decode_keys=1024, split_keys=128, decode_bytes=1 << 20)
    splits = sizes.kv_splits_of(pages, num_rows)
    assert (splits.batch_size, splits.max_splits, splits.min_pages) == expected
