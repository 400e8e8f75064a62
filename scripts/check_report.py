"""The run of `gpu_check` and `tpu_check`: one item after another, the report, and the time limit.

The report is written after each item, and a run that hangs is ended: earlier results must survive a kernel that waits
for ever.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
LAST_START_S, END_S = 7 * 60, 7 * 60 + 45
"""Seconds after which no item begins, and after which the process ends: a run takes at most 8 minutes."""

Goals = Mapping[str, tuple[str, float]]
"""Name of a ratio → (≥ or ≤, the goal)."""
Checks = Mapping[str, tuple[Callable[[], float], float]]
"""Name → (the function that returns an error, the largest error allowed)."""
Measures = Mapping[str, Callable[[], dict[str, Any]]]


def arguments(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags of both scripts; without `--seed`, draw one. The seed is printed."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="anywhere: a few tiny cases, step by step")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; a new one each time if not given")
    parser.add_argument("--output", type=Path, help="write what was found here, as JSON")
    args = parser.parse_args(argv)
    if args.seed is None:
        args.seed = int(np.random.SeedSequence().entropy % 2**32)  # type: ignore[operator]
    print(f"seed {args.seed}", flush=True)
    return args


def machine() -> dict[str, Any]:
    """Return the device, its versions, the commit and the date, for the report."""
    device = jax.devices()[0]
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""  # No git: the checkout was copied here.
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class Report:
    """The results so far. Two threads write it: the one that checks, and the timer that ends the process."""

    def __init__(self, args: argparse.Namespace, most_errors: Mapping[str, float], goals: Goals):
        self.output, self.most_errors, self.goals = args.output, most_errors, goals
        self.began, self.lock = time.monotonic(), threading.Lock()
        self.found: dict[str, Any] = {"machine": machine(), "seed": args.seed, "interpreted": args.interpret}
        self.found |= {"passed": False, "running": None, "checks": {}, "measured": {}, "not_done": []}

    @property
    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.began

    def attempt(self, into: str, name: str, do: Callable[[], Any], last_start_s: float) -> None:
        """Run one item unless it is too late, and record its result or its error under `found[into][name]`."""
        if self.seconds > last_start_s:
            self.found["not_done"].append(name)
            return
        with self.lock:
            self.found["running"] = name
            self._write()
        try:
            found = do()
            json.dumps(found, allow_nan=False)  # JSON has no NaN; a result with one is an error.
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with self.lock:
            self.found[into][name], self.found["running"] = found, None
            self._write()
        print(f"{name}: {found}", flush=True)

    def give_up(self) -> None:
        """Print the table and end the process, even while a kernel hangs."""
        with self.lock:
            self._close()
            os._exit(1)

    def close(self) -> bool:
        """Print the table and return whether the run passed."""
        with self.lock:
            return self._close()

    def _close(self) -> bool:
        found, checks = self.found, self.found["checks"]
        wrong = [
            name for name, error in checks.items() if isinstance(error, str) or not error <= self.most_errors[name]
        ]
        broken = [name for name, measured in found["measured"].items() if isinstance(measured, str)]
        hung = [found["running"]] if found["running"] else []
        figures = found["figures"] = self._figures()
        unmeasured = sorted({figure["name"] for figure in figures if figure["found"] is None})
        found["passed"] = not (wrong or broken or hung or found["not_done"] or unmeasured)
        found["seconds"] = round(self.seconds, 1)
        self._write()
        for figure in figures:
            value = "not measured" if figure["found"] is None else f"{figure['found']:.3f}"
            short = "  short of it" if figure["is_met"] is False else ""
            note = f"  ({figure['note']})" if "note" in figure else ""
            print(f"{figure['name']:16} {value:>12}  goal {figure['goal']:<8} {figure['from'] or ''}{short}{note}")
        print(f"{len(checks) - len(wrong)} of {len(checks)} cases right in {found['seconds']} s")
        titles = {"wrong": wrong, "broken": broken, "not measured": unmeasured, "given up": hung}
        for title, names in {**titles, "not done": found["not_done"]}.items():
            if names:
                print(f"{title}: {', '.join(names)}")
        sys.stdout.flush()
        return bool(found["passed"])

    def _figures(self) -> list[dict[str, Any]]:
        """Return an entry for each ratio with a goal and each measurement of it; without any, its `found` is None.

        A measurement's `notes`, by name of a ratio, are printed beside it.
        """
        figures = []
        for key, (relation, goal) in self.goals.items():
            measured = self.found["measured"].items()
            having = {name: each for name, each in measured if isinstance(each, dict) and key in each}
            for name, each in (having or {None: {}}).items():
                value = each.get(key)
                is_met = None if value is None else value >= goal if relation == "≥" else value <= goal
                figure = {"name": key, "goal": f"{relation} {goal}", "found": value, "is_met": is_met, "from": name}
                if note := each.get("notes", {}).get(key):
                    figure["note"] = note
                figures.append(figure)
        return figures

    def _write(self) -> None:
        """Replace the report's file as a whole: the old one stays if this fails."""
        if self.output:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.output.with_name(self.output.name + ".part")
            unfinished.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
            unfinished.replace(self.output)


def run(
    args: argparse.Namespace,
    checks: Checks,
    measures: Measures,
    goals: Goals,
    *,
    last_start_s: float = LAST_START_S,
    end_s: float = END_S,
) -> int:
    """Check everything, then measure, and print the table last. Returns the exit status of the process.

    The run passes if no case is wrong and every ratio of `goals` was measured, met or not. No item begins after
    `last_start_s`. After `end_s` the item that still runs is named, and the process ends.
    """
    report = Report(args, {name: most for name, (_, most) in checks.items()}, goals)
    end = threading.Timer(end_s, report.give_up)
    end.daemon = True
    end.start()
    for name, (check, _) in checks.items():
        report.attempt("checks", name, check, last_start_s)
    for name, measure in measures.items():
        report.attempt("measured", name, measure, last_start_s)
    end.cancel()
    return int(not report.close())
