"""The script for a machine with a GPU, as far as it goes without one: interpreted, on tiny shapes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


def test_it_checks_prints_and_writes_what_it_found(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--interpret", "--seed", "7", "--output", str(output)])
    assert script.main() == 0
    found = json.loads(output.read_text())
    assert found["passed"]
    assert found["seed"] == 7
    assert found["interpreted"]
    assert set(found["machine"]) == {"device", "platform", "jax", "python", "commit", "date"}
    assert all(0 < error <= script.MOST_ERROR for error in found["checks"].values())
    assert "2 of 2 cases right" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_result_is_named_and_fails(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is told of a window that the kernel knows nothing of."""
    dense = script.dense_attention
    monkeypatch.setattr(script, "dense_attention", lambda *args, **options: dense(*args, **{**options, "window": 9}))
    monkeypatch.setattr(script, "cases", lambda: [script.Case("plain"), script.Case("another")])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--interpret"])
    assert script.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "wrong: plain, another"


def test_what_would_begin_too_late_is_listed_as_not_done(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LAST_START_S", -1)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--interpret"])
    assert script.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not done: plain, cut often"


def test_without_a_gpu_it_says_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit, match="the first device is a cpu, not a GPU; try --interpret"):
        script.main()


def test_every_value_of_every_feature_is_in_some_case(script: ModuleType) -> None:
    cases = script.cases()
    assert {case.head_size for case in cases} == {64, 128, 256}
    assert {case.dtype for case in cases} == {"bfloat16", "int8", "float8_e4m3fn"}
    assert {case.page_size for case in cases} == {16, 32, 64}
    assert {(case.num_heads, case.num_kv_heads) for case in cases} >= {(8, 2), (9, 3), (8, 8), (71, 1)}
    assert {"windows", "is_cut", "least_share"} <= {name for case in cases for name in case.backend}


@pytest.mark.slow
def test_every_measurement_runs_and_gives_its_ratios(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, on tiny shapes: what the ratios are means nothing, and cuDNN is not there."""
    monkeypatch.setattr(script, "ROUNDS", 1)
    monkeypatch.setattr(script, "ROUND_S", 0.0)
    monkeypatch.setattr(script, "TRIAL_CALLS", 1)
    sizes = script.Sizes(
        decode=((40, 40),),
        skewed=(10, 70),
        prefill=20,
        ragged=(17, 3),
        window=2,
        windowed_rows=1,
        copied_bytes=64,
        matmul=8,
    )
    bench, case = script.Bench(interpret=True, seed=1), script.Case("tiny", num_heads=2, num_kv_heads=1, head_size=64)
    measures = {"measure_decode": "K1 K2", "measure_prefill": "K3 K4", "measure_window": "K5", "measure_bytes": "K6"}
    for name, ratios in measures.items():
        found = getattr(script, name)(bench, case, sizes)
        assert {key for key in found if key in script.GOALS} == set(ratios.split())
        assert all(isinstance(found[key], float) for key in ratios.split() if key != "K4")
        if name == "measure_prefill":
            assert found["K4"] is None
            assert found["cudnn_refused"]
