"""Runs of the scripts for machines with a GPU or a TPU leave a report, however they end."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
HANGS = """
import sys, threading
import check_report
args = check_report.arguments("A run.", ["--seed", "7", "--output", sys.argv[1]])
checks = {"right": (lambda: 0.001, 0.01), "endless": (threading.Event().wait, 0.01), "later": (lambda: 0.0, 0.01)}
check_report.run(args, checks, {}, {}, end_s=0.2)
"""


@pytest.fixture
def report(script) -> ModuleType:
    return script("check_report")


def arguments(report: ModuleType, output: Path | None = None):
    return report.arguments("A run.", ["--seed", "7", *(["--output", str(output)] if output else [])])


def test_a_run_that_hangs_is_ended_and_tells_what_it_had_found_and_what_hung(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    child = [sys.executable, "-c", HANGS, str(output)]
    ended = subprocess.run(child, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": SCRIPTS})
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-2].startswith("1 of 1 cases right")
    assert ended.stdout.splitlines()[-1] == "given up: endless"
    found = json.loads(output.read_text())
    assert (found["passed"], found["running"], found["checks"]) == (False, "endless", {"right": 0.001})


def test_a_run_that_ends_in_time_is_not_ended(report: ModuleType) -> None:
    before = threading.active_count()
    assert report.run(arguments(report), {"right": (lambda: 0.0, 0.01)}, {}, {}, end_s=0.2) == 0
    time.sleep(0.3)
    assert threading.active_count() <= before


def test_what_was_found_is_written_after_each_item(report: ModuleType, tmp_path: Path) -> None:
    output, seen = tmp_path / "found.json", []

    def look() -> float:
        seen.append(json.loads(output.read_text()))
        return 0.001

    assert report.run(arguments(report, output), {"first": (look, 0.01), "second": (look, 0.01)}, {}, {}) == 0
    assert [(each["running"], each["passed"]) for each in seen] == [("first", False), ("second", False)]
    assert [each["checks"] for each in seen] == [{}, {"first": 0.001}]
    assert json.loads(output.read_text())["passed"]


def test_a_machine_without_git_has_no_commit(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.machine()["commit"] is None
    (tmp_path / "git").write_text("#!/bin/sh\necho 0fce6e5\n")
    (tmp_path / "git").chmod(0o755)
    assert report.machine()["commit"] == "0fce6e5"


def test_a_figure_that_was_not_measured_is_named_and_nothing_passes(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, goals = tmp_path / "found.json", {"K1": ("≥", 0.9), "K4": ("≤", 1.1), "K5": ("≤", 0.1), "K6": ("≤", 0.6)}

    def broken() -> dict[str, float]:
        raise RuntimeError("no memory")

    measures = {"decode": lambda: {"K1": 0.95}, "prefill": lambda: {"K4": None}, "window": broken}
    assert report.run(arguments(report, output), {}, measures, goals) == 1
    *_, broken_line, unmeasured_line = capsys.readouterr().out.splitlines()
    assert (broken_line, unmeasured_line) == ("broken: window", "not measured: K4, K5, K6")
    figures = {figure["name"]: figure for figure in json.loads(output.read_text())["figures"]}
    assert figures["K1"] == {"name": "K1", "goal": "≥ 0.9", "found": 0.95, "is_met": True, "from": "decode"}
    assert [figures[name]["found"] for name in ("K4", "K5", "K6")] == [None] * 3


def test_a_figure_short_of_its_goal_says_so_and_passes(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    goals = {"K1": ("≥", 0.9), "K5": ("≤", 0.1)}
    assert report.run(arguments(report), {}, {"decode": lambda: {"K1": 0.5, "K5": 0.1}}, goals) == 0
    short = {line.split()[0]: line.endswith("short of it") for line in capsys.readouterr().out.splitlines()[-3:-1]}
    assert short == {"K1": True, "K5": False}


def test_what_a_measurement_notes_of_a_figure_stands_beside_it(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    measures = {"decode": lambda: {"K1": 0.95, "K2": 1.0, "notes": {"K1": "of a slow copy"}}}
    assert report.run(arguments(report, output), {}, measures, {"K1": ("≥", 0.9), "K2": ("≥", 0.9)}) == 0
    first, second, _ = capsys.readouterr().out.splitlines()[-3:]
    assert first.endswith("decode  (of a slow copy)")
    assert second.endswith("decode")
    assert [figure.get("note") for figure in json.loads(output.read_text())["figures"]] == ["of a slow copy", None]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_wrong_or_broken_and_the_file_stays_json(
    report: ModuleType, tmp_path: Path, value: float
) -> None:
    output = tmp_path / "found.json"
    checks, measures = {"case": (lambda: value, 0.01)}, {"decode": lambda: {"K1": value}}
    assert report.run(arguments(report, output), checks, measures, {}) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(output.read_text(), parse_constant=refuse)
    assert found["checks"]["case"].startswith("ValueError")
    assert found["measured"]["decode"].startswith("ValueError")
