"""The script for a machine with a GPU, as far as it goes without one: interpreted, on tiny shapes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.ragged_paged_attention.gpu.backend import GpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.interface import KVShape

from ..paged_steps import plan_of
from . import check_scripts
from .check_scripts import Script, blind, check_first_light, check_interpreted_run, check_item, check_measurements

ITEMS = (*check_scripts.ITEMS, "cudnn", "engine-8b-no-command-buffers")


@pytest.mark.slow
def test_it_does_every_item_without_a_gpu(script: Script, tmp_path: Path) -> None:
    check_interpreted_run(script, "gpu_check", {"plain", "cut often"}, ITEMS, tmp_path)


@pytest.mark.slow
def test_it_does_one_item_without_a_gpu(tmp_path: Path) -> None:
    check_item("gpu_check", "K1", is_after_crash=False, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_after_crash", [False, True], ids=["alone", "after a crash"])
@pytest.mark.parametrize("item", ITEMS)
def test_each_item_is_done_alone_and_after_one_that_broke(item: str, is_after_crash: bool, tmp_path: Path) -> None:
    check_item("gpu_check", item, is_after_crash=is_after_crash, tmp_path=tmp_path)


@pytest.mark.slow
def test_a_wrong_result_is_more_than_is_forgiven(script: Script) -> None:
    check, gpu = script("device_checks.kernel_check"), script("gpu_check")
    case = check.Case("window", num_heads=2, num_kv_heads=1, head_size=64, window=9, rows=check.TINY)
    right = gpu.backend_of(gpu.interpreted())(case)
    bench = check.Bench(lambda case: blind(GpuBackend)(**vars(right)), 1)
    assert bench.error(case) > 10 * case.most_error


def test_without_a_gpu_it_says_so(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = script("gpu_check")
    args = script("device_checks.items").arguments("A run.", [], gpu.ITEMS)
    monkeypatch.setattr(gpu, "find_driver_fault", lambda: None)
    with pytest.raises(SystemExit, match="the first device is a cpu, not a GPU; try --interpret"):
        gpu.session_of(args)
    monkeypatch.setattr(gpu, "find_driver_fault", lambda: "the NVIDIA driver is 1.0")
    with pytest.raises(SystemExit, match=r"gpu_check: the NVIDIA driver is 1\.0"):
        gpu.session_of(args)


@pytest.mark.parametrize(
    ("flags", "version", "wanted"),
    [
        ((), (0, 10, 2), "the kernels need 0.11 or later"),
        (("--interpret",), (0, 11, 1), "--interpret needs 0.11.2 or "),
    ],
)
def test_a_jax_that_is_too_old_is_named_with_the_one_that_is_needed(
    script: Script, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], version: tuple[int, ...], wanted: str
) -> None:
    gpu = script("gpu_check")
    monkeypatch.setattr(jax, "__version_info__", version)
    with pytest.raises(SystemExit, match=rf"gpu_check: got jax {jax.__version__}, {wanted}"):
        gpu.session_of(script("device_checks.items").arguments("A run.", flags, gpu.ITEMS))


def test_every_value_of_every_feature_is_in_some_case(script: Script) -> None:
    cases = script("gpu_check").cases()
    assert {case.head_size for case in cases} == {64, 80, 96, 128, 192, 256}
    assert {case.dtype for case in cases} == {"bfloat16", "int8", "float8_e4m3fn"}
    assert {case.page_size for case in cases} == {16, 32, 64}
    assert {(case.num_heads, case.num_kv_heads) for case in cases} >= {(8, 2), (9, 3), (8, 8), (71, 1)}
    assert {"windows", "split_kv", "min_share"} <= {name for case in cases for name in case.backend}
    assert {case.rows.num_tokens * case.num_heads // case.num_kv_heads <= 16 for case in cases} == {True, False}
    assert any(case.layer for case in cases)
    assert any(case.is_freed and case.window for case in cases)
    assert any(case.rows.sharing for case in cases)
    assert any(case.num_numbers >= 1 << 31 for case in cases)
    every = [case for case in cases + script("gpu_check").hopper_cases() if case.window and case.soft_cap]
    assert {(case.dtype, case.backend.get("prefill"), case.has_sinks) for case in every} >= {
        ("int8", None, True),
        ("bfloat16", "wgmma", True),
    }


def test_every_case_is_taken_and_groups_fill_tiles_of_every_size(script: Script) -> None:
    gpu = script("gpu_check")
    cases, sizes = gpu.cases() + gpu.hopper_cases(), set()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        backend = gpu.backend_of({})(case)
        heads = {"num_kv_heads": case.num_kv_heads, "head_size": case.head_size, "dtype": case.dtype}
        backend.layout(KVShape(num_layers=1, num_pages=1, page_size=case.page_size, **heads))
        sizes.add((backend.small_tile_rows, case.num_heads // case.num_kv_heads > 64))
    assert sizes == {(16, False), (32, False), (64, False), (64, True)}


def pieces_of(backend: GpuBackend, case: Any) -> list[np.ndarray]:
    """Return the numbers of pieces of small and of large tiles that each thread block of a KV head gets in the step."""
    rows, counts = case.rows, []
    room = {"num_tokens": rows.num_tokens, "num_rows": rows.num_rows}
    plan = plan_of(backend, rows.query_lens, rows.context_lens, **room)
    for sections in backend.sections(**room):
        windows = backend.planned_windows
        section = sections[windows.index(case.window) if case.window in windows else 0]
        counts.append(np.diff(plan[section.lists_offset : section.num_merges_offset]))
    return counts


@pytest.mark.parametrize("block_memory", [232448, 166912])
def test_thread_blocks_get_as_many_pieces_as_in_long_steps(script: Script, block_memory: int) -> None:
    """Pieces reuse stages, barriers and the tile of queries of the one before. If a whole H200 shared a step, a block
    would get two pieces of most cases."""
    gpu = script("gpu_check")
    chip = {"num_sms": 132, "block_memory": block_memory}
    crowded = [case for case in gpu.cases() + gpu.hopper_cases() if case.backend.get("num_sms")]
    for case in crowded:
        backend = gpu.backend_of(chip)(case)
        assert backend.num_sms == 4
        small, large = pieces_of(backend, case)
        assert min(small.max(), large.max()) > 8, case.name
    of_them = {(case.head_size, case.dtype, case.backend.get("prefill"), case.has_sinks) for case in crowded}
    assert of_them == {
        (128, "bfloat16", None, False),
        (256, "bfloat16", None, False),
        (64, "int8", None, True),
        (128, "bfloat16", "wgmma", False),
        (64, "int8", "wgmma", True),
    }
    assert any(case.window in case.backend.get("windows", ()) for case in crowded)


def test_one_case_gives_every_thread_block_of_a_chip_several_pieces(script: Script) -> None:
    """The case is run twice and must give equal bits, which blocks that disturb each other would change."""
    gpu = script("gpu_check")
    (case,) = (case for case in gpu.cases() if case.name == "full chip")
    backend = gpu.backend_of({"num_sms": 132})(case)
    assert backend.num_sms == 132
    for counts in pieces_of(backend, case):
        assert counts.min() >= 3
        assert counts.mean() >= 7


def test_the_rows_of_every_case_have_room_and_those_of_one_query_are_first(script: Script) -> None:
    gpu = script("gpu_check")
    for case in gpu.cases() + gpu.hopper_cases():
        rows = case.rows
        assert sum(rows.query_lens) <= rows.num_tokens, case.name
        assert len(rows.query_lens) == len(rows.context_lens) <= rows.num_rows, case.name
        assert sorted(rows.query_lens, key=lambda length: length != 1) == list(rows.query_lens), case.name
        assert all(new <= known for new, known in zip(rows.query_lens, rows.context_lens, strict=True)), case.name


def test_a_ratio_to_cudnn_is_never_needed_for_a_run_to_pass(script: Script) -> None:
    """cuDNN may refuse 64 × 512 pages, 2³¹ numbers of keys: if the ratio were needed, every run would fail."""
    goals = script("gpu_check").GOALS
    assert {name for name, goal in goals.items() if not goal.is_own} == {"K4", "prefill ÷ cuDNN", "decode ÷ cuDNN"}
    items = {item.name for item in script("gpu_check").ITEMS}
    assert {goal.item for goal in goals.values()} <= items


def test_runs_of_first_light_take_every_item_and_at_most_eight_minutes(script: Script) -> None:
    num_cases = 4 + len(script("gpu_check").cases())
    on_hopper = num_cases + len(script("gpu_check").hopper_cases())
    text = f"`{on_hopper} of {on_hopper} cases right` on a Hopper, {num_cases} on other GPUs"
    check_first_light(script, "gpu_check", text)


@pytest.mark.slow
def test_every_measurement_runs_and_gives_its_ratios(script: Script) -> None:
    """Interpreted, on tiny shapes, with every option that is measured: the ratios mean nothing, cuDNN is not there."""
    gpu = script("gpu_check")
    session = gpu.session_of(script("device_checks.items").arguments("A run.", ["--interpret"], gpu.ITEMS))
    variants = {"decode_variants": {"min_share 1": {"min_share": 1}}, "prefill_variants": {"mma": {"prefill": "mma"}}}
    session = replace(
        session,
        is_tiny=False,
        sizes=replace(session.sizes, ragged=(20, 3)),
        window_options={"windows": (2,)},
        **variants,
    )
    ratios = {
        "K1": {"K1"},
        "K2": {"K2"},
        "K3": {"K3"},
        "K4": {"K4", "prefill ÷ cuDNN"},
        "cudnn": {"decode ÷ cuDNN"},
        "K5": {"K5"},
        "K6": {"K6"},
    }
    others = {"K4": {"K4", "prefill ÷ cuDNN"}, "cudnn": {"decode ÷ cuDNN"}}
    check_measurements(script, session, set(gpu.GOALS), ratios, others, "gpu_check")


def decode_batch(script: Script, context_lens: list[int]) -> Any:
    check, gpu = script("device_checks.kernel_check"), script("gpu_check")
    case = check.Case("tiny", num_heads=8, num_kv_heads=2, head_size=64, page_size=16)
    bench = check.Bench(gpu.backend_of(gpu.interpreted()), 1)
    return bench.batch(case, [1] * len(context_lens), context_lens)


def test_cudnn_is_given_the_pages_that_the_kernels_read(script: Script) -> None:
    """Rows of different length, so that it wants more pages than there are."""
    batch = decode_batch(script, [16, 33, 70])
    *pages, query_lens, context_lens, tables = script("gpu_check").cudnn_rows(batch.cache.pages, batch.step)
    assert (query_lens == 1).all()
    assert (context_lens == jnp.array([16, 33, 70])).all()
    for theirs, ours in zip(pages, batch.cache.pages, strict=True):
        assert theirs.shape[0] == tables.size
        for row, count in enumerate((1, 3, 5)):
            of_row = batch.step.page_tables[0, row, :count]
            assert (theirs[tables[row, 0, :count, 0]] == ours[of_row]).all()


def test_cudnn_is_called_as_it_wants_to_be(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX checks the arguments; cuDNN itself is not here. A refused call would cost a figure on the device."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    batch, gpu = decode_batch(script, [16, 33, 70]), script("gpu_check")
    arguments = batch.q[:, :, None], *gpu.cudnn_rows(batch.cache.pages, batch.step)
    text = jax.jit(gpu.cudnn_call(64)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text
    assert "is_paged_attention\\22: true" in text
    assert "tensor<3x8x1x64xbf16>" in text
