"""Checks that the tests of `gpu_check` and `tpu_check` share: a run without a chip, and its findings."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend

SCRIPTS = Path(__file__).parents[2] / "scripts"
Script = Callable[[str], ModuleType]
"""Name → that module of the folder `scripts`."""
ITEMS = (
    "correctness", "experts", "copy", "K1", "K2", "K3", "K5", "K6", "K4", "step", "engine-small", "engine-smollm2",
    "engine-8b", "scores",
)  # fmt: skip
"""Items that both scripts have."""


def blind(backend: type[Backend]) -> type[Backend]:
    """Return a backend that ignores windows and is otherwise this one."""

    class Blind(backend):
        def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
            return super().attend(pages, layout, replace(inputs, options=replace(inputs.options, window=None)))

    return Blind


def report_here(script: Script, items: list[Any], goals: dict[str, Any], folder: Path) -> int:
    """Do items in this process, as a worker does, and report; return the exit status. The report is `found.json`."""
    run, folder = script("device_checks.run"), folder
    (folder / "events.jsonl").unlink(missing_ok=True)
    argv = ["--seed", "7", "--interpret", "--output", str(folder / "found.json")]
    args = script("device_checks.items").arguments("A run.", argv, items)
    report = script("device_checks.report").Report(items, goals, args.output, seed=args.seed)
    supervisor = run.Supervisor(args, Path(), report, folder)
    args.events, args.deadline = supervisor.events, supervisor.deadline
    assert script("device_checks.worker").work(args, lambda args: None) == 0
    supervisor.take_events({item.name: item for item in items})
    return int(not report.close())


def run_interpreted(
    script: Path, output: Path, *options: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a script interpreted, with these options; return the ended process and its report."""
    command = [sys.executable, str(script), "--interpret", "--seed", "7", "--output", str(output), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, **environment})
    return ended, json.loads(output.read_text())


def check_interpreted_run(script: Script, name: str, cases: set[str], items: Sequence[str], tmp_path: Path) -> None:
    """Check that the script `name` does all its `items`, finds these cases right, and says and writes that."""
    ended, found = run_interpreted(SCRIPTS / f"{name}.py", tmp_path / "found.json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "passed"
    assert found["passed"]
    assert found["interpreted"]
    assert (found["not_done"], found["hung"], found["running"]) == ([], [], [])
    others = {"engine-small, xla", "experts, bfloat16", "experts, int8"}
    assert set(found["checks"]) == cases | others
    assert all(0 < found["checks"][case] <= script("device_checks.kernel_check").MOST_ERROR for case in cases)
    done = set(found["measured"]) | set(found["checks"]) | set(found["skipped"])
    assert found["items"] == sorted(items) == sorted(item.name for item in script(name).ITEMS)
    assert set(items) - done == {"correctness", "engine-small", "engine-smollm2"}
    assert set(found["skipped"]) == {"K6", "engine-smollm2, xla"}
    assert "plain xla" in found["measured"]["K1"]["times ours"], "K1 does not run the interpreted kernels"


def check_item(name: str, item: str, *, is_after_crash: bool, tmp_path: Path) -> None:
    """Check that the script `name` does this item alone, and also in a new process after one that was ended."""
    output = tmp_path / "found.json"
    if is_after_crash:
        script = Path(__file__).parent / "after_crash.py"
        ended, found = run_interpreted(script, output, "--only", "crash", item, CHECK=name)
        assert found["measured"].pop("crash").startswith("its process ended with SIGSEGV")
        assert "broken: crash" in ended.stdout.splitlines()
    else:
        ended, found = run_interpreted(SCRIPTS / f"{name}.py", output, "--only", item)
    assert ended.returncode == int(is_after_crash), ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == ("failed" if is_after_crash else "passed")
    assert found["passed"] is not is_after_crash
    assert (found["not_done"], found["hung"], found["running"]) == ([], [], [])
    assert found["machine"]["device"] == "cpu"
    results = {**found["checks"], **found["measured"], **found["skipped"]}
    assert results
    assert set(found["seconds_of"]) - {"crash"} == set(results)
    assert not [each for each in (*found["checks"].values(), *found["measured"].values()) if isinstance(each, str)]


def check_measurements(
    script: Script, session: Any, goals: set[str], ratios: dict[str, set[str]], others: dict[str, set[str]], name: str
) -> None:
    """Check that every kernel item of the script `name` gives its `ratios`, which `goals` name.

    `others`: item → ratios that need a program which is not installed here; the measurement says why.
    """
    items = {item.name: item for item in script(name).ITEMS}
    for item, wanted in ratios.items():
        (part,) = items[item].parts(session).values()
        found = part.run()
        assert {key for key in found if key in goals} == wanted, item
        missing = others.get(item, set())
        assert {key for key in wanted if found[key] is None} == missing, item
        assert all(isinstance(found[key], float) for key in wanted - missing), item
        assert found.get("refused") or not missing
        assert not [each for each in found.get("times ours", {}).values() if isinstance(each, str)], item


def check_first_light(script: Script, name: str, num_cases: str) -> None:
    """Check that the runs of docs/first_light.md take every item of the script once, and that each fits its time.

    The line before each says the sum of its estimates. `num_cases`: what that page says of the number of
    cases, those of `engine-small` and `experts` among them.
    """
    text = (SCRIPTS.parent / "docs" / "first_light.md").read_text()
    command = rf"^About (\S+) minutes.*\n\n *python scripts/{name}\.py --only (.*) --output \S+$"
    runs = [(minutes, words.split()) for minutes, words in re.findall(command, text, re.MULTILINE)]
    items = {item.name: item for item in script(name).ITEMS}
    assert num_cases in text
    assert len(runs) == 3
    assert sorted(word for _, words in runs for word in words) == sorted(items)
    for minutes, words in runs:
        total = sum(items[word].minutes for word in words)
        assert total <= script("device_checks.items").DEFAULT_MINUTES
        assert minutes == f"{total:.1f}"
