"""The script for a machine with a GPU, as far as it goes without one: interpreted, on tiny shapes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jpaged.pallas_kernels.ragged_paged_attention import GpuBackend

Script = Callable[[str], ModuleType]


class Blind(GpuBackend):
    """Kernels that know nothing of windows."""

    def attend(self, *args: Any, **options: Any) -> Any:
        return super().attend(*args, **{**options, "window": None})


def test_it_checks_prints_and_writes_what_it_found(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    assert script("gpu_check").main(["--interpret", "--seed", "7", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["passed"]
    assert found["interpreted"]
    assert set(found["checks"]) == {"plain", "cut often"}
    assert all(0 < error <= script("kernel_check").MOST_ERROR for error in found["checks"].values())
    assert "2 of 2 cases right" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_result_is_more_than_is_forgiven(script: Script) -> None:
    check, gpu = script("kernel_check"), script("gpu_check")
    case = check.Case("window", num_heads=2, num_kv_heads=1, head_size=64, window=9, rows=check.TINY)
    right = gpu.backend_of(gpu.interpreted())(case)
    bench = check.Bench(lambda case: Blind(**vars(right)), 1)
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
    check, gpu, speed = script("kernel_check"), script("gpu_check"), script("kernel_speed")
    sizes = speed.Sizes(
        decode=((40, 40),),
        skewed=(10, 70),
        prefill=20,
        ragged=(17, 3),
        window=2,
        windowed_rows=1,
        copied_bytes=64,
        matmul=8,
        rounds=1,
        trial_calls=1,
        round_s=0.0,
    )
    bench = check.Bench(gpu.backend_of(gpu.interpreted()), 1)
    measures = gpu.measures(
        bench, check.Case("tiny", num_heads=2, num_kv_heads=1, head_size=64), sizes, is_hopper=False
    )
    ratios = {"decode": "K1 K2", "prefill": "K3 K4", "window": "K5", "bytes": "K6"}
    assert set(measures) == set(ratios)
    for name, measure in measures.items():
        found = measure()
        assert {key for key in found if key in gpu.GOALS} == set(ratios[name].split())
        assert all(isinstance(found[key], float) for key in ratios[name].split() if key != "K4")
        if name == "prefill":
            assert found["K4"] is None
            assert found["refused"]["cudnn"]
