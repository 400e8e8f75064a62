"""Checks that the tests of `gpu_check` and `tpu_check` share: a run without a chip, and its findings."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend

Script = Callable[[str], ModuleType]
"""Name → that module of the folder `scripts`."""


def blind(backend: type[Backend]) -> type[Backend]:
    """Return a backend that ignores windows and is otherwise this one."""

    class Blind(backend):
        def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
            return super().attend(pages, layout, replace(inputs, options=replace(inputs.options, window=None)))

    return Blind


def check_interpreted_run(
    script: Script, name: str, cases: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the script `name` runs these cases, finds them right, prints that and writes it to its output."""
    output = tmp_path / "found.json"
    assert script(name).main(["--interpret", "--seed", "7", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["passed"]
    assert found["interpreted"]
    assert set(found["checks"]) == cases
    assert all(0 < error <= script("kernel_check").MOST_ERROR for error in found["checks"].values())
    assert f"{len(cases)} of {len(cases)} cases right" in capsys.readouterr().out.splitlines()[-1]


def tiny_sizes(script: Script) -> Any:
    """Return sizes of measurements that take no time; the measured ratios mean nothing."""
    return script("kernel_speed").Sizes(
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


def check_measurements(
    measures: dict[str, Callable[[], dict[str, Any]]],
    goals: set[str],
    ratios: dict[str, set[str]],
    *,
    refused: dict[str, set[str]],
) -> None:
    """Check that every measurement gives its `ratios`, which `goals` name.

    `refused`: measurement → ratios that need a program which is not installed here; the measurement says why.
    """
    assert set(measures) == set(ratios)
    for name, measure in measures.items():
        found, wanted = measure(), ratios[name]
        assert {key for key in found if key in goals} == wanted
        missing = refused.get(name, set())
        assert {key for key in wanted if found[key] is None} == missing
        assert all(isinstance(found[key], float) for key in wanted - missing)
        assert found.get("refused") or not missing
