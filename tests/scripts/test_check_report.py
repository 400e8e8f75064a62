"""The report of a check script: what it prints last, and what its file holds however the run ends."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .check_scripts import Script, report_here


def measuring(script: Script, measures: dict[str, Callable[[], Any]]) -> list[Any]:
    """Return an item of one measurement for each name."""
    return [
        script("device_checks.kernel_items").one(name, 0.1, "", lambda _, do=do: do()) for name, do in measures.items()
    ]


def goals(script: Script, **items: str) -> dict[str, Any]:
    """Return a goal of at most 0.5 for each ratio, measured by the item of that name; theirs* need another library."""
    goal = script("device_checks.items").Goal
    return {name: goal("≤", 0.5, item, is_own=not name.startswith("theirs")) for name, item in items.items()}


def test_what_was_found_is_written_after_each_item(script: Script, tmp_path: Path) -> None:
    output = tmp_path / "sub" / "found.json"
    report = script("device_checks.report").Report([], {}, output, seed=7)
    report.begin("first")
    assert json.loads(output.read_text())["running"] == ["first"]
    report.end("first", 0.001, most_error=0.01)
    found = json.loads(output.read_text())
    assert (found["running"], found["checks"], found["passed"]) == ([], {"first": 0.001}, False)
    assert report.close()
    assert json.loads(output.read_text())["passed"]


def test_a_machine_without_git_has_no_commit(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script("device_checks.worker").machine()["commit"] is None
    (tmp_path / "git").write_text("#!/bin/sh\necho 0fce6e5\n")
    (tmp_path / "git").chmod(0o755)
    assert script("device_checks.worker").machine()["commit"] == "0fce6e5"


def test_a_checkout_has_changes_where_a_tracked_file_differs_and_not_for_a_report(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, code = script("device_checks.worker"), tmp_path / "code.py"
    monkeypatch.setattr(worker, "ROOT", tmp_path)
    code.write_text("one = 1\n")
    author = ("-c", "user.name=author", "-c", "user.email=author@example.com")
    for command in (("init", "--quiet"), ("add", "code.py"), (*author, "commit", "--quiet", "--message", "Add one")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu_1.json").write_text("{}\n")
    assert worker.machine()["has_changes"] is False
    code.write_text("one = 2\n")
    assert worker.machine()["has_changes"] is True


def test_cases_are_counted_only_where_there_are_any(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = script("device_checks.items")
    measured = measuring(script, {"decode": lambda: {"K1": 0.4}})
    assert report_here(script, measured, {}, tmp_path) == 0
    assert "cases right" not in capsys.readouterr().out
    case = items.Item("cases", 0.1, "", lambda _: {"case": items.Part(lambda: 0.001, 0.01)})
    assert report_here(script, [case, *measured], {}, tmp_path) == 0
    assert "1 of 1 cases right" in capsys.readouterr().out


def test_a_ratio_of_ours_that_was_not_measured_fails_a_run_and_one_to_another_library_does_not(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("no memory")

    wanted = goals(script, K1="decode", theirs="decode", K5="window", K6="left out")
    items = measuring(script, {"decode": lambda: {"K1": 0.4, "theirs": None}})
    assert report_here(script, items, wanted, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["not measured, but no fault of ours: theirs", "passed"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [figure["name"] for figure in found["figures"]] == ["K1", "theirs"], "of the chosen items only"
    wanted_figure = {"name": "K1", "goal": "≤ 0.5", "found": 0.4, "is_met": True, "from": "decode", "is_own": True}
    assert found["figures"][0] == wanted_figure
    items += measuring(script, {"window": broken})
    assert report_here(script, items, wanted, tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-4:-1] == [
        "broken: window",
        "not measured: K5",
        "not measured, but no fault of ours: theirs",
    ]


def test_a_ratio_short_of_its_goal_says_so_with_its_note_and_passes(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures = {"decode": lambda: {"K1": 0.6, "K5": 0.5, "notes": {"K5": "of a slow copy"}}}
    assert report_here(script, measuring(script, measures), goals(script, K1="decode", K5="decode"), tmp_path) == 0
    first, second = capsys.readouterr().out.splitlines()[-3:-1]
    assert first.endswith("decode  short of it")
    assert second.endswith("decode  (of a slow copy)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_wrong_or_broken_and_the_file_stays_json(
    script: Script, tmp_path: Path, value: float
) -> None:
    items = script("device_checks.items")
    case = items.Item("cases", 0.1, "", lambda _: {"case": items.Part(lambda: value, 0.01)})
    assert report_here(script, [case, *measuring(script, {"decode": lambda: {"K1": value}})], {}, tmp_path) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=refuse)
    assert found["checks"]["case"].startswith("ValueError")
    assert found["measured"]["decode"].startswith("ValueError")


def test_an_item_whose_parts_cannot_be_made_is_broken(script: Script, tmp_path: Path) -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("no such shape")

    assert report_here(script, [script("device_checks.items").Item("odd", 0.1, "", refuse)], {}, tmp_path) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["measured"] == {"odd": "ValueError: no such shape"}


def test_a_driver_older_than_its_cuda_is_named_with_the_one_that_is_needed(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check: ModuleType = script("device_checks.driver")
    version = tmp_path / "version"
    about = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Nov  5 00:21:55 UTC 2024\nGCC version: 12\n"
    monkeypatch.setattr(check, "installed_plugin", lambda: "jax-cuda13-plugin")
    version.write_text(about.format("550.127.05"))
    wanted = "the NVIDIA driver is 550.127.05, the CUDA 13 of jax-cuda13-plugin needs 580.65 or later: update it"
    assert check.find_driver_fault(version).startswith(wanted)
    version.write_text(about.format("580.65.06"))
    assert check.find_driver_fault(version) is None
    monkeypatch.setattr(check, "installed_plugin", lambda: "jax-cuda12-plugin")
    version.write_text(about.format("525.60.13"))
    assert check.find_driver_fault(version) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.find_driver_fault(tmp_path / "none") == "there is no NVIDIA driver; CUDA 12 needs 525.60 or later"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 470.82.01\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert check.find_driver_fault(tmp_path / "none").startswith("the NVIDIA driver is 470.82.01, the CUDA 12")
    monkeypatch.setattr(check, "installed_plugin", lambda: None)
    assert check.find_driver_fault(version).startswith("JAX is installed without CUDA")
