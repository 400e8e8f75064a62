"""The script for a machine with a GPU, as far as it goes without one: interpreted, on tiny shapes."""

from pathlib import Path

import pytest

from jpaged.pallas_kernels.ragged_paged_attention import GpuBackend

from .check_scripts import Script, blind, check_interpreted_run, check_measurements, tiny_sizes


def test_it_checks_prints_and_writes_what_it_found(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_interpreted_run(script, "gpu_check", {"plain", "cut often"}, tmp_path, capsys)


def test_a_wrong_result_is_more_than_is_forgiven(script: Script) -> None:
    check, gpu = script("kernel_check"), script("gpu_check")
    case = check.Case("window", num_heads=2, num_kv_heads=1, head_size=64, window=9, rows=check.TINY)
    right = gpu.backend_of(gpu.interpreted())(case)
    bench = check.Bench(lambda case: blind(GpuBackend)(**vars(right)), 1)
    assert bench.error(case) > 10 * case.most_error


def test_without_a_gpu_it_says_so(script: Script) -> None:
    with pytest.raises(SystemExit, match="the first device is a cpu, not a GPU; try --interpret"):
        script("gpu_check").main([])


def test_every_value_of_every_feature_is_in_some_case(script: Script) -> None:
    cases = script("gpu_check").cases()
    assert {case.head_size for case in cases} == {64, 128, 256}
    assert {case.dtype for case in cases} == {"bfloat16", "int8", "float8_e4m3fn"}
    assert {case.page_size for case in cases} == {16, 32, 64}
    assert {(case.num_heads, case.num_kv_heads) for case in cases} >= {(8, 2), (9, 3), (8, 8), (71, 1)}
    assert {"windows", "is_cut", "least_share"} <= {name for case in cases for name in case.backend}


@pytest.mark.slow
def test_every_measurement_runs_and_gives_its_ratios(script: Script) -> None:
    """Interpreted, on tiny shapes: what the ratios are means nothing, and cuDNN is not there."""
    check, gpu = script("kernel_check"), script("gpu_check")
    bench = check.Bench(gpu.backend_of(gpu.interpreted()), 1)
    case = check.Case("tiny", num_heads=2, num_kv_heads=1, head_size=64)
    check_measurements(
        gpu.measures(bench, case, tiny_sizes(script), is_hopper=False),
        set(gpu.GOALS),
        {"decode": {"K1", "K2"}, "prefill": {"K3", "K4"}, "window": {"K5"}, "bytes": {"K6"}},
        refused={"prefill": ("K4", "cudnn")},
    )
