"""The script for a TPU VM, as far as it goes without one: interpreted, on tiny shapes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jpaged.pallas_kernels.ragged_paged_attention.interface import KVShape
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, sizes_of

from . import check_scripts
from .check_scripts import Script, blind, check_first_light, check_interpreted_run, check_item, check_measurements

ITEMS = (*check_scripts.ITEMS, "v2")


@pytest.mark.slow
def test_it_does_every_item_without_a_tpu(script: Script, tmp_path: Path) -> None:
    check_interpreted_run(script, "tpu_check", {"all, int8", "only decode, all, int8"}, ITEMS, tmp_path)


@pytest.mark.slow
def test_it_does_one_item_without_a_tpu(tmp_path: Path) -> None:
    check_item("tpu_check", "K1", is_after_crash=False, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_after_crash", [False, True], ids=["alone", "after a crash"])
@pytest.mark.parametrize("item", ITEMS)
def test_each_item_is_done_alone_and_after_one_that_broke(item: str, is_after_crash: bool, tmp_path: Path) -> None:
    check_item("tpu_check", item, is_after_crash=is_after_crash, tmp_path=tmp_path)


@pytest.mark.slow
def test_a_wrong_result_is_more_than_is_forgiven(script: Script) -> None:
    check, tpu = script("device_checks.kernel_check"), script("tpu_check")
    case = check.Case("window", 2, 1, head_size=64, page_size=16, window=9, rows=check.TINY)
    bench = check.Bench(lambda case: blind(TpuBackend)(**vars(tpu.interpreted(case))), 1)
    assert bench.error(case) > 10 * case.most_error


def test_without_a_tpu_and_on_one_without_sizes_it_says_so(script: Script) -> None:
    with pytest.raises(SystemExit, match="the first device is a cpu, not a TPU; try --interpret"):
        script("tpu_check").session_of(script("device_checks.items").arguments("A run.", [], script("tpu_check").ITEMS))
    with pytest.raises(SystemExit, match="got TPU v3, the kernels have sizes for TPU v5 lite"):
        script("tpu_check").backend_of(SimpleNamespace(platform="tpu", device_kind="TPU v3"))


def test_every_value_of_every_feature_is_in_some_case(script: Script) -> None:
    cases = script("tpu_check").cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.head_size for case in cases} == {64, 80, 96, 112, 128, 192, 256}
    assert {case.dtype for case in cases} == {"bfloat16", "float32", "int8", "float8_e4m3fn"}
    assert {case.page_size for case in cases} == {16, 32, 64, 128, 256}
    assert {(case.num_heads, case.num_kv_heads) for case in cases} >= {(8, 2), (9, 3), (8, 8), (71, 1)}
    assert any(case.window and case.soft_cap and case.has_sinks for case in cases)
    assert any(set(case.rows.query_lens) == {1} and len(case.rows.query_lens) > 1 for case in cases)
    assert any(case.rows.num_tokens == 1 for case in cases)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x"])
def test_every_case_is_taken_and_has_full_tiles_and_tails(script: Script, chip: str) -> None:
    device = SimpleNamespace(platform="tpu", device_kind=f"TPU {chip}".replace("TPU v7x", "TPU7x"))
    backend_of = script("tpu_check").backend_of(device)
    for case in script("tpu_check").cases():
        backend = backend_of(case)
        assert backend.chip == chip
        heads = {"num_kv_heads": case.num_kv_heads, "head_size": case.head_size, "dtype": case.dtype}
        backend.layout(KVShape(num_layers=1, num_pages=1, page_size=case.page_size, **heads))
        shape = TpuShape(case.num_heads, case.num_kv_heads, case.head_size, case.dtype, case.page_size)
        sizes = sizes_of(chip, shape)
        assert max(case.rows.context_lens) > sizes.decode.tile, case
        assert max(case.rows.context_lens) % sizes.decode.tile, case


def test_runs_of_first_light_take_every_item_and_at_most_eight_minutes(script: Script) -> None:
    check_first_light(script, "tpu_check", f"{4 + len(script('tpu_check').cases())} on a TPU")


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x"])
def test_other_tiles_are_measured_beside_those_of_the_table(script: Script, chip: str) -> None:
    tpu, case = script("tpu_check"), replace(script("device_checks.kernel_speed").LLAMA, page_size=128)
    for names in (tpu.DECODE_SIZES, tpu.PREFILL_SIZES):
        found = tpu.variants(chip, case, names)
        assert len(found) >= 2
        shape = TpuShape(case.num_heads, case.num_kv_heads, case.head_size, case.dtype, case.page_size)
        assert sizes_of(chip, shape) not in [options["sizes"] for options in found.values()]


@pytest.mark.slow
def test_every_measurement_runs_and_gives_its_ratios(script: Script) -> None:
    """Interpreted, on tiny shapes: what the ratios are means nothing, and v2 is not there."""
    tpu = script("tpu_check")
    session = tpu.session_of(script("device_checks.items").arguments("A run.", ["--interpret"], tpu.ITEMS))
    session = replace(session, is_tiny=False, sizes=replace(session.sizes, ragged=(20, 3)))
    ratios = {
        "K1": {"K1"},
        "K2": {"K2"},
        "K3": {"K3"},
        "K4": {"prefill ÷ v2"},
        "v2": {"decode ÷ v2", "skewed ÷ v2"},
        "K5": {"K5"},
        "K6": {"K6"},
    }
    others = {"K4": {"prefill ÷ v2"}, "v2": {"decode ÷ v2", "skewed ÷ v2"}}
    check_measurements(script, session, set(tpu.GOALS), ratios, others, "tpu_check")
