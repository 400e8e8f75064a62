"""Checks that the tests of `gpu_check` and `tpu_check` share: a run without a chip, and its findings."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend

SCRIPTS = Path(__file__).parents[2] / "scripts"
Script = Callable[[str], ModuleType]
"""Name → that module of the folder `scripts`."""


def blind(backend: type[Backend]) -> type[Backend]:
    """Return a backend that ignores windows and is otherwise this one."""

    class Blind(backend):
        def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
            return super().attend(pages, layout, replace(inputs, options=replace(inputs.options, window=None)))

    return Blind


def report_here(script: Script, items: list[Any], goals: dict[str, Any], folder: Path) -> int:
    """Do items in this process, as a worker does, and report; return the exit status. The report is `found.json`."""
    run, folder = script("check_run"), folder
    (folder / "events.jsonl").unlink(missing_ok=True)
    argv = ["--seed", "7", "--interpret", "--output", str(folder / "found.json")]
    args = script("check_items").arguments("A run.", argv, items)
    report = script("check_report").Report(items, goals, args.output, seed=args.seed)
    supervisor = run.Supervisor(args, Path(), report, folder)
    args.events, args.deadline = supervisor.events, supervisor.deadline
    assert script("check_worker").work(args, lambda args: None) == 0
    supervisor.take_events({item.name: item for item in items})
    return int(not report.close())


def interpreted_run(name: str, output: Path, *only: str) -> dict[str, Any]:
    """Run the script `name` interpreted, with all its items or `only` some; return its report, which has passed."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--interpret", "--seed", "7", "--output", str(output)]
    command += ["--only", *only] if only else []
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "passed"
    return json.loads(output.read_text())


def check_interpreted_run(script: Script, name: str, cases: set[str], tmp_path: Path) -> None:
    """Check that the script `name` does all its items, finds these cases right, and says and writes that."""
    found = interpreted_run(name, tmp_path / "found.json")
    assert found["passed"]
    assert found["interpreted"]
    assert (found["not_done"], found["hung"], found["running"]) == ([], [], [])
    engine = {"engine-small, xla"}
    assert set(found["checks"]) == cases | engine
    assert all(0 < found["checks"][case] <= script("kernel_check").MOST_ERROR for case in cases)
    done = set(found["measured"]) | set(found["checks"]) | set(found["skipped"])
    items = script(name).ITEMS
    assert {item.name for item in items} - done == {"correctness", "engine-small", "engine-smollm2"}
    assert set(found["skipped"]) == {"K6", "engine-smollm2, xla"}


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


def check_first_light(script: Script, name: str) -> None:
    """Check that the runs of docs/first_light.md take every item of the script once, and that each fits its time."""
    text = (SCRIPTS.parent / "docs" / "first_light.md").read_text()
    runs = re.findall(
        rf"^ *python scripts/{name}\.py --only (.*?) --output \S+$", text.replace("\\\n", ""), re.MULTILINE
    )
    items = {item.name: item for item in script(name).ITEMS}
    assert len(runs) == 3
    assert sorted(word for run in runs for word in run.split()) == sorted(items)
    for run in runs:
        assert sum(items[word].minutes for word in run.split()) <= script("check_items").DEFAULT_MINUTES
