"""A run of a check script survives kernels that crash, hang or fail, and tells of each what happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).parent / "toy_check.py"


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOY), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def found_by(output: Path, *items: str) -> dict:
    run("--only", *items, "--seed", "7", "--jobs", "4", "--output", str(output))
    return json.loads(output.read_text())


def test_unknown_items_are_refused_with_the_known_ones_and_all_are_listed_with_their_minutes() -> None:
    refused = run("--only", "measured", "nope", "other")
    assert refused.returncode == 2
    known = "cases, first, measured, crash, device, lost, memory, hang, skip, variable, ahead, slow, last"
    assert refused.stderr.splitlines()[-1].endswith(f"--only: got nope, other, allowed: {known}")
    listed = run("--list", "--only", "crash")
    assert listed.returncode == 0
    lines = listed.stdout.splitlines()
    assert lines[0].split() == ["cases", "0.0", "min", "cases", "in", "threads"]
    assert len(lines) == 14


def test_what_comes_after_a_crash_and_a_hang_is_done(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    ended = run("--only", "crash", "hang", "last", "--seed", "7", "--output", str(output))
    found = json.loads(output.read_text())
    assert ended.returncode == 1
    assert set(found["measured"]) == {"crash", "hang", "last"}
    assert found["measured"]["crash"].startswith("its process ended with SIGSEGV")
    assert found["measured"]["hang"].startswith("hung: no result after 0 s")
    assert found["hung"] == ["hang"]
    assert isinstance(found["measured"]["last"]["pid"], int)
    assert not found["running"]
    assert ended.stdout.splitlines()[-3:] == ["broken: crash, hang", "hung: hang", "failed"]


def test_a_machine_that_is_not_the_right_one_ends_the_run_in_one_line(tmp_path: Path) -> None:
    ended = run("--only", "last", "--seed", "7", TOY_FAULT="yes")
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["toy_check: the driver is 1.0, wanted 2.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "wanted", "is_same_process"),
    [
        ("device", "JaxRuntimeError: INTERNAL: an illegal memory access was encountered", True),
        ("lost", "JaxRuntimeError: INTERNAL: an illegal memory access was encountered", False),
        ("memory", "JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory", True),
    ],
)
def test_an_error_of_the_device_is_told_and_another_process_goes_on_where_the_device_answers_no_more(
    tmp_path: Path, item: str, wanted: str, is_same_process: bool
) -> None:
    found = found_by(tmp_path / "found.json", "first", item, "last")["measured"]
    assert found[item] == wanted
    assert (found["first"]["pid"] == found["last"]["pid"]) == is_same_process


def test_what_an_item_asks_for_is_done_before_its_process_opens_the_device(tmp_path: Path) -> None:
    assert found_by(tmp_path / "found.json", "measured", "ahead")["measured"]["ahead"] == {"opened": [False]}


@pytest.mark.slow
def test_of_cases_that_run_together_the_one_that_ends_the_process_is_found(tmp_path: Path) -> None:
    found = found_by(tmp_path / "found.json", "cases", "last")
    assert found["checks"].pop("crash in threads").startswith("its process ended with SIGSEGV")
    assert found["checks"] == {f"case {i}": 0.001 for i in range(4)}
    assert "pid" in found["measured"]["last"]


@pytest.mark.slow
def test_a_skipped_item_and_a_ratio_to_another_library_do_not_fail_a_run(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    ended = run("--only", "measured", "skip", "variable", "last", "--output", str(output))
    found = json.loads(output.read_text())
    assert ended.returncode == 0
    assert found["passed"]
    assert found["skipped"] == {"skip": "5 bytes are missing"}
    assert found["measured"]["variable"] == {"variable": "set"}
    assert "not measured, but no fault of ours: theirs" in ended.stdout.splitlines()


@pytest.mark.slow
def test_an_item_that_would_be_over_too_late_is_listed_as_not_done_and_one_that_runs_on_is_ended(
    tmp_path: Path,
) -> None:
    output = tmp_path / "found.json"
    ended = run("--only", "slow", "last", "--minutes", "0.25", "--output", str(output))
    found = json.loads(output.read_text())
    assert ended.returncode == 1
    assert found["measured"]["slow"] == "hung: no result when the run's 0.25 minutes were over"
    assert found["not_done"] == ["last"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "wanted"),
    [("crashes", "its process ended with SIGSEGV"), ("hangs", "hung: the device is not open after 2 s")],
)
def test_a_process_that_fails_before_its_first_item_is_not_started_for_ever(
    tmp_path: Path, how: str, wanted: str
) -> None:
    output, broken = tmp_path / "found.json", {"TOY_BROKEN": how, "TOY_OPEN_LIMIT_S": "2"}
    assert run("--only", "measured", "last", "--output", str(output), **broken).returncode == 1
    found = json.loads(output.read_text())
    assert all(each.startswith(wanted) for each in found["measured"].values())
    assert set(found["measured"]) == {"measured", "last"}
