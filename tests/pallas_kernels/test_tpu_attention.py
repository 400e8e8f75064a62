"""The TPU kernels against the dense oracle, in an interpreter that knows the TPU's memories, copies and semaphores.

Memory that was never written is NaN, and so is every slot that no token was given. Copies happen as late as they may
(`on_wait`: one that is not waited for was never made) or at once, where races between copies and accesses are reported.
"""

from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jpaged.pallas_kernels.ragged_paged_attention import LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.tpu import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu_decode_kernel import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuSizes, write_height

from ..paged_steps import plan_of
from .paged_world import World, shape_of
from .scenarios import (
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
)

MODES = ("on_wait", "eager")
FEATURES = features(page_size=16)


def slow(*values: Any) -> list[Any]:
    """Values of a parameter that are tried with the slow tests only."""
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def backend(mode: str = "eager", *, tile: int = 32, piece: int = 16, dtype: str = "float32") -> TpuBackend:
    """Tiles of a few tokens, so that rows of a few dozen have many."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode=mode)
    decode = DecodeSizes(tile=tile, full=tile, tail=piece, most_rows=8, height=write_height("v6e", dtype))
    return TpuBackend(sizes=TpuSizes(decode, tile_kv=tile, sub_kv=piece), tile_q=16, interpret=params)


def world(page_size: int = 16, *, mode: str = "eager", tile: int = 32, seed: int = 0, **changes: Any) -> World:
    some = backend(mode, tile=tile, piece=page_size, dtype=changes.get("dtype", "float32"))
    return World(shape_of(page_size, backend=some, slot_axes=(3,), **changes), seed=seed)


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
    some.add_rows(4)
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
    run_ragged(world(32, dtype="int8", options=FEATURES["all of them"]))


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
def test_window_soft_cap_and_sinks(options: dict[str, Any]) -> None:
    run_ragged(world(options=options))


@pytest.mark.parametrize("window", [1, 15, 17, 40])
def test_pages_that_the_window_has_left_may_be_null(window: int) -> None:
    run_beyond_the_window(world(options={"window": window}), num_steps=4, chunk=9)


def test_rows_that_share_their_first_pages() -> None:
    run_shared_pages(world())


def test_groups_have_their_own_pages_and_layers_their_own_places() -> None:
    run_ragged(world(**TWO_GROUPS))


def test_a_single_token_step() -> None:
    """No prefill code at all."""
    run_single_tokens(world())


def test_a_layer_without_keys_reads_those_of_the_layer_it_names() -> None:
    run_layer_without_keys(world())


@pytest.mark.parametrize("error", [-1, 1])
def test_a_window_off_by_one_would_be_noticed(error: int) -> None:
    check_that_a_wrong_window_is_noticed(world(options={"window": 12}), error)


@pytest.mark.parametrize("options", [{}, FEATURES["all of them"]], ids=["plain", "all"])
def test_any_order_of_chunks_and_decodes(options: dict[str, Any]) -> None:
    steps = ragged_steps(most_steps=3, most_tokens=60, most_context=100, lengths=(15, 16, 17, 33))
    check_any_order(lambda seed: world(options=options, seed=seed), steps, max_examples=10)


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
    check_that_a_layout_is_refused(TpuBackend(), message, **{"dtype": "float32", **options})
