"""The TPU kernels against the dense oracle, in an interpreter that knows the TPU's memories, copies and semaphores.

Memory that was never written is NaN, and so is every slot that no token was given. Copies happen as late as they may
(`on_wait`: one that is not waited for was never made) or at once, where races between copies and accesses are reported.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jpaged.pallas_kernels.ragged_paged_attention import LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.tpu import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu_decode_kernel import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuSizes, write_height

from ..paged_steps import metadata, plan_of
from .paged_world import World, run_ragged, shape_of

MODES = ("on_wait", "eager")


def slow(*values: Any) -> list[Any]:
    """Values of a parameter that are tried with the slow tests only."""
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def backend(mode: str = "eager", *, tile: int = 32, piece: int = 16, dtype: str = "float32") -> TpuBackend:
    """Tiles of a few tokens, so that rows of a few dozen have many."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode=mode)
    decode = DecodeSizes(tile=tile, full=tile, tail=piece, most_rows=8, height=write_height("v6e", dtype))
    return TpuBackend(sizes=TpuSizes(decode, tile_kv=tile, sub_kv=piece), tile_q=16, interpret=params)


def world(page_size: int = 16, *, mode: str = "eager", tile: int = 32, **changes: Any) -> World:
    some = backend(mode, tile=tile, piece=page_size, dtype=changes.get("dtype", "float32"))
    return World(shape_of(page_size, backend=some, slot_axes=(3,), **changes))


@pytest.fixture(autouse=True)
def no_races():
    yield
    assert interpreter.races is None or not interpreter.races.races_found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_ragged_rows_match_the_oracle(page_size: int, mode: str) -> None:
    run_ragged(world(page_size, mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_tiles_of_many_pages_and_rows_of_many_tiles(mode: str) -> None:
    """Rows at and beside the edges of a tile of 64 keys, while others decode."""
    some = world(16, mode=mode, tile=64, num_heads=2, num_kv_heads=2, table_len=16)
    for _ in range(4):
        some.add_row()
    for length in (63, 64, 65):
        some.step({0: length})
    some.step({1: 64, 0: 1})
    some.step({2: 63, 1: 1, 0: 1})
    for _ in range(3):
        some.step({2: 1, 1: 1, 0: 1, 3: 5})


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (16, 1), (5, 1), *slow((3, 3), (16, 8))])
def test_every_ratio_of_query_to_kv_heads(num_heads: int, num_kv_heads: int) -> None:
    run_ragged(world(num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        *((80, "bfloat16"), (128, "bfloat16"), (192, "float32"), (256, "bfloat16")),
        *slow(
            (80, "float32"), (128, "float32"), (192, "bfloat16"), (256, "float32"), (64, "bfloat16"), (96, "bfloat16")
        ),
    ],
)
def test_every_head_size(head_size: int, dtype: str) -> None:
    run_ragged(world(head_size=head_size, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "head_size"), [("int8", 64), ("float8_e4m3fn", 128), *slow(("int8", 128), ("float8_e4m3fn", 64))]
)
def test_pages_of_one_byte_a_number(dtype: str, head_size: int) -> None:
    """Every head and layer has scales of its own; dead slots hold the largest number, or NaN."""
    layers = (LayerPlace(0, 0), LayerPlace(0, 1))
    run_ragged(world(32, dtype=dtype, head_size=head_size, layers=layers, num_group_layers=2))


def test_pages_of_one_byte_with_all_features() -> None:
    options = {"window": 21, "soft_cap": 1.5, "sinks": jnp.array([-1.0, 0.0, 2.0, 3.0])}
    run_ragged(world(32, dtype="int8", options=options))


FEATURES = {
    "window 1": {"window": 1},
    "window of a page less one": {"window": 15},
    "window of a page and one": {"window": 17},
    "window beyond the context": {"window": 1000},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": jnp.array([-1.0, 0.0, 2.0, 30.0])},
    "all of them": {"window": 21, "soft_cap": 1.5, "sinks": jnp.array([-1.0, 0.0, 2.0, 3.0])},
}


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
def test_window_soft_cap_and_sinks(options: dict[str, Any]) -> None:
    run_ragged(world(options=options))


@pytest.mark.parametrize("window", [1, 15, 17, 40])
def test_pages_that_the_window_has_left_may_be_null(window: int) -> None:
    some = world(options={"window": window})
    for _ in range(3):
        some.add_row()
    some.step({0: 30, 1: 17})
    for _ in range(4):
        for row in (0, 1):
            some.forget(row, max(0, len(some.keys[row][0]) - window + 1) // 16)
        some.step({0: 1, 1: 9, 2: 3})


def test_rows_that_share_their_first_pages() -> None:
    some = world()
    first = some.add_row()
    some.step({first: 41})
    second = some.add_row(prefix_of=first, num_shared=2)
    some.step({first: 1, second: 3})
    some.step({first: 1, second: 1})


def test_groups_have_their_own_pages_and_layers_their_own_places() -> None:
    layers = (LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(0, 1), LayerPlace(1, 1))
    run_ragged(world(layers=layers, num_group_layers=2))


def test_a_single_token_step() -> None:
    """The smallest bucket: one token, one row, no prefill code at all."""
    some = world()
    some.shape = dataclasses.replace(some.shape, num_tokens=1, num_rows=1)
    some.add_row()
    for _ in range(18):
        some.step({0: 1})


def test_a_layer_without_keys_reads_those_of_the_layer_it_names() -> None:
    some = world()
    some.add_row()
    some.add_row()
    some.step({0: 5})
    tables = [[some.tables[0][0], [some.free.pop()]]]
    step = metadata(some.shape.backend, [1, 9], [6, 9], tables, page_size=16, num_tokens=16, num_rows=4, table_len=8)
    q, k, v = (jnp.asarray(some._padded(10, heads)[0, :16]) for heads in (4, 2, 2))
    attend = jax.jit(lambda cache, k, v: cache.attend(0, q, k, v, step, scale=0.125))
    first, written = attend(some.cache, k, v)
    second, shared = attend(written, None, None)
    np.testing.assert_array_equal(np.asarray(first)[:10], np.asarray(second)[:10])
    np.testing.assert_array_equal(*(np.asarray(cache.pages[0]).view(np.int32) for cache in (written, shared)))


@pytest.mark.parametrize("error", [-1, 1])
def test_a_window_off_by_one_would_be_noticed(error: int) -> None:
    some = world(options={"window": 12})
    some.add_row()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        some.step({0: 40}, window=12 + error)


@st.composite
def ragged_steps(draw: st.DrawFn) -> list[dict[int, int]]:
    """Up to three steps over up to five rows; a step has 1 to 60 tokens and a row at most 100."""
    lens, steps = [0] * 5, []
    for _ in range(draw(st.integers(1, 3))):
        work: dict[int, int] = {}
        for row in draw(st.lists(st.integers(0, 4), min_size=1, unique=True)):
            most = min(60 - sum(work.values()), 100 - lens[row])
            if most > 0:
                work[row] = draw(st.sampled_from([1, most, *(length for length in (15, 16, 17, 33) if length < most)]))
                lens[row] += work[row]
        if work:
            steps.append(work)
    return steps


@pytest.mark.parametrize("options", [{}, FEATURES["all of them"]], ids=["plain", "all"])
def test_any_order_of_chunks_and_decodes(options: dict[str, Any]) -> None:
    run = None

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(steps=ragged_steps(), seed=st.integers(0, 2**16))
    def check(steps: list[dict[int, int]], seed: int) -> None:
        nonlocal run
        some = World(shape_of(16, backend=backend(), slot_axes=(3,), options=dict(options)), seed=seed)
        some.run = run = run or some.run  # One compilation for all examples.
        for _ in range(5):
            some.add_row()
        for work in steps:
            some.step(work)

    check()


def test_plan_cuts_prefill_rows_where_positions_are_multiples_of_a_tile() -> None:
    out = plan_of(TpuBackend(tile_q=16), [1, 1, 16, 17, 2], [9, 1, 16, 40, 50], 64, 5)
    rows, tokens, positions, lens = out[1:].reshape(4, -1)[:, : out[0]].tolist()
    assert (rows, lens) == ([2, 3, 3, 4], [16, 9, 8, 2])
    assert (tokens, positions) == ([2, 18, 27, 35], [0, 23, 32, 48])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_size": 100}, "head_size: got 100, the pallas-tpu backend takes 64, 80"),
        ({"dtype": "float16"}, "kv_cache_dtype: got float16"),
        ({"page_size": 48}, "block_size: got 48, the pallas-tpu backend takes powers of two from 16"),
    ],
    ids=str,
)
def test_what_the_kernels_cannot_take_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_size": 64}
    with pytest.raises(ValueError, match=message):
        TpuBackend().layout(**{**sizes, "dtype": "float32", **options})
