"""The report of a run of `gpu_check` or `tpu_check`: results by name, the table of ratios, and whether the run passed.

The file is written after each result, as a whole: earlier results survive whatever ends the run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .items import Goals, Item


class Report:
    """The results so far, of `items` with these goals."""

    def __init__(self, items: Sequence[Item], goals: Goals, output: Path | None, **found: Any):
        self.items, self.output, self.began = items, output, time.monotonic()
        chosen = {item.name for item in items}
        self.goals = {name: goal for name, goal in goals.items() if goal.item in chosen}
        self.most_errors: dict[str, float] = {}
        self.found: dict[str, Any] = {"machine": None, **found, "items": sorted(chosen), "passed": False}
        self.found |= {
            "running": [],
            "checks": {},
            "measured": {},
            "skipped": {},
            "hung": [],
            "not_done": [],
            "stderr": [],
            "seconds_of": {},
        }
        self.write()

    @property
    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.began

    def begin(self, part: str) -> None:
        """Record that a part has begun."""
        self.found["running"].append(part)
        self.write()

    def end(
        self,
        part: str,
        result: Any,
        *,
        most_error: float | None = None,
        is_skipped: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Record the result of a part and its seconds, or as a text what went wrong, or why the part was skipped."""
        self.found["seconds_of"][part] = seconds
        if most_error is not None:
            self.most_errors[part] = most_error
        into = "skipped" if is_skipped else "measured" if most_error is None else "checks"
        self.found[into][part] = result
        self.forget(part)
        shown = (
            {name: each for name, each in result.items() if isinstance(each, float)}
            if isinstance(result, dict)
            else result
        )
        print(f"{part}: {'skipped: ' if is_skipped else ''}{shown}", flush=True)

    def forget(self, part: str) -> None:
        """Record that a part no longer runs."""
        self.found["running"] = [name for name in self.found["running"] if name != part]
        self.write()

    def close(self) -> bool:
        """Print the table and return whether the run passed: nothing wrong, broken or left out, own ratios measured."""
        found, checks = self.found, self.found["checks"]
        wrong = [
            name for name, error in checks.items() if isinstance(error, str) or not error <= self.most_errors[name]
        ]
        broken = [name for name, measured in found["measured"].items() if isinstance(measured, str)]
        figures = found["figures"] = self._figures()
        missing = [figure for figure in figures if figure["found"] is None]
        unmeasured = sorted({figure["name"] for figure in missing if figure["is_own"]})
        of_others = sorted({figure["name"] for figure in missing if not figure["is_own"]})
        found["passed"] = not (wrong or broken or found["hung"] or found["not_done"] or unmeasured)
        found["seconds"] = round(self.seconds, 1)
        self.write()
        for figure in figures:
            value = "not measured" if figure["found"] is None else f"{figure['found']:.3f}"
            short = "  short of it" if figure["is_met"] is False else ""
            note = f"  ({figure['note']})" if "note" in figure else ""
            print(f"{figure['name']:16} {value:>12}  goal {figure['goal']:<8} {figure['from'] or ''}{short}{note}")
        if checks:
            print(f"{len(checks) - len(wrong)} of {len(checks)} cases right in {found['seconds']} s")
        titles = {"wrong": wrong, "broken": broken, "not measured": unmeasured, "hung": found["hung"]}
        titles |= {"not done": found["not_done"], "skipped": list(found["skipped"])}
        titles["not measured, but no fault of ours"] = of_others
        for title, names in titles.items():
            if names:
                print(f"{title}: {', '.join(names)}")
        print("passed" if found["passed"] else "failed")
        sys.stdout.flush()
        return bool(found["passed"])

    def _figures(self) -> list[dict[str, Any]]:
        """Return an entry for each ratio with a goal and each measurement of it; without any, its `found` is None.

        A ratio of an item that was skipped has no entry. A measurement's `notes`, by name of a ratio, are printed
        beside it.
        """
        figures = []
        for key, (relation, bound, item, is_own) in self.goals.items():
            measured = self.found["measured"].items()
            having = {name: each for name, each in measured if isinstance(each, dict) and key in each}
            if not having and item in self.found["skipped"]:
                continue
            for name, each in (having or {None: {}}).items():
                value = each.get(key)
                is_met = None if value is None else value >= bound if relation == "≥" else value <= bound
                figure = {"name": key, "goal": f"{relation} {bound}", "found": value, "is_met": is_met, "from": name}
                if note := each.get("notes", {}).get(key):
                    figure["note"] = note
                figures.append({**figure, "is_own": is_own})
        return figures

    def write(self) -> None:
        """Replace the report's file as a whole: the old one stays if this fails."""
        if self.output:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.output.with_name(self.output.name + ".part")
            unfinished.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
            unfinished.replace(self.output)
