"""The run of `gpu_check` and `tpu_check`: starts processes that have the device, and ends those that hang.

    this process ─▶ a worker for items that may share one ─▶ a worker for each item with variables of its own
         ▲────────── lines of JSON (worker.py) ───────────────┘

This process never opens the device. So a kernel that hangs, or brings down its process or the device's context, costs
only its own result: another worker does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .items import Goals, Item, arguments, listing
from .report import Report
from .worker import work

POLL_S = 0.05
END_S = 10
"""Seconds before the end of the run at which the last worker is ended, and that a killed worker has to be gone."""
OPEN_LIMIT_S = 90.0
"""Seconds after which a worker that opens the device counts as hanging."""
MAX_LINES = 50
"""Last lines of each worker's stderr that go into the report."""
ALONE_LIMIT_S = 45.0
"""Seconds after which a part of several that runs alone counts as hanging, because others hung or crashed beside it."""


class Supervisor:
    """Starts workers for the items of a run and takes their events into the report."""

    def __init__(self, args: argparse.Namespace, script: Path, report: Report, folder: Path):
        self.args, self.script, self.report, self.folder = args, script, report, folder
        self.deadline = time.time() + 60 * args.minutes - END_S
        self.events, self.num_read = folder / "events.jsonl", 0
        self.events.touch()
        self.open: dict[str, tuple[Item, float]] = {}
        """Part that runs → its item, and the time.monotonic() at which it began."""
        self.opening: float | None = None
        """The time.monotonic() at which the worker began to open the device, while it does."""
        self.suspects: set[str] = set()
        """Parts that were under way together when a worker failed: from then on each of them runs alone."""
        self.finished: set[str] = set()
        """Items that are done, or that no worker begins any more."""
        self.fault: str | None = None
        """Why there is no device to check."""

    def run(self, items: Sequence[Item]) -> None:
        """Do the items: neighbours without an environment share a worker."""
        # Interpreted, items have nothing to read from an environment, and share a worker to save its start.
        shared = [None if item.environment is None or self.args.interpret else item.name for item in items]
        for _, pairs in groupby(zip(shared, items, strict=True), key=lambda pair: pair[0]):
            group = [item for _, item in pairs]
            self._run_group(group)
            if self.fault:
                return

    def _run_group(self, group: list[Item]) -> None:
        """Start workers until every item of the group is done, or is not done for want of time.

        If several parts were under way when a worker failed, the next one first does each of them alone, so that the
        one that fails is known; the others then run together again.
        """
        while left := [item for item in group if item.name not in self.finished]:
            if time.time() > self.deadline:
                self.report.found["not_done"] += [item.name for item in left]
                self.finished |= {item.name for item in left}
                return
            num_before = self.num_read
            status, why = self._worker(left)
            if self.fault:
                return
            if status == 0:
                continue
            under_way, self.open = self.open, {}
            for part, (item, _) in under_way.items():
                if len(under_way) == 1:
                    self._fail(item, part, why)
                else:
                    self._suspect(part)
            if not under_way and not self._has_progress(num_before):
                # It ended before it began anything, and so would the next one.
                for item in left:
                    self._fail(item, item.name, why)
                    self.finished.add(item.name)

    def _has_progress(self, num_before: int) -> bool:
        """Return whether a part ended among the events since that number of them."""
        lines = self.events.read_text().splitlines()[num_before:]
        return any("end" in json.loads(line) for line in lines)

    def _tell(self, **event: str) -> None:
        """Append an event of this process, for the next workers."""
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
        self.num_read += 1

    def _suspect(self, part: str) -> None:
        """Have a part done alone by the next worker."""
        self._tell(suspect=part)
        self.suspects.add(part)
        self.report.forget(part)

    def _fail(self, item: Item, part: str, why: str) -> None:
        """Record that a part failed, for later workers too."""
        self._tell(end=part, item=item.name, result=why)
        if "hung" in why:
            self.report.found["hung"].append(part)
        if part == item.name:
            self.finished.add(part)  # Its only part.
        self.report.end(part, why, most_error=0.0 if item.in_threads else None)

    def _worker(self, items: list[Item]) -> tuple[int, str]:
        """Let a worker do the items; return its exit status, 0 if it did all, and in words how it ended."""
        command = [sys.executable, str(self.script), "--only", *(item.name for item in items)]
        command += ["--events", str(self.events), "--deadline", str(self.deadline), "--jobs", str(self.args.jobs)]
        command += ["--seed", str(self.args.seed), *(["--interpret"] if self.args.interpret else [])]
        command += ["--output", str(self.args.output)] if self.args.output else []
        environment = {**os.environ, **(items[0].environment or {})}
        errors, self.opening = self.folder / "stderr", None
        with errors.open("w") as stderr:
            process = subprocess.Popen(command, env=environment, stderr=stderr)
            try:
                why = self._watch(process, {item.name: item for item in items})
            finally:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)  # A process that waits inside the driver cannot be killed.
        self.take_events({item.name: item for item in items})
        whole = self.events.read_text()
        self.events.write_text(whole[: whole.rfind("\n") + 1])  # What it was writing when it was ended.
        status, said = process.poll(), errors.read_text(errors="replace").strip().splitlines()
        self.report.found["stderr"].append(said[-MAX_LINES:])
        if status == 0:
            return 0, ""
        if self.fault:
            return status or 1, self.fault
        print("\n".join(said[-15:]), file=sys.stderr)
        if why is None:
            assert status is not None, "it ended by itself"
            name = signal.Signals(-status).name if status < 0 else f"status {status}"
            why = f"its process ended with {name}" + (f": {said[-1][:200]}" if said else "")
        return status or 1, why

    def _watch(self, process: subprocess.Popen[bytes], items: dict[str, Item]) -> str | None:
        """Take events until the process ends; return why it has to be ended before, or None."""
        while process.poll() is None:
            self.take_events(items)
            now = time.monotonic()
            for part, (item, began) in self.open.items():
                limit_s = min(item.limit_s, ALONE_LIMIT_S) if part in self.suspects else item.limit_s
                if now - began > limit_s:
                    return f"hung: no result after {limit_s:.0f} s ({part})"
            if self.opening is not None and now - self.opening > OPEN_LIMIT_S:
                return f"hung: the device is not open after {OPEN_LIMIT_S:.0f} s"
            if time.time() > self.deadline + END_S / 2:
                return f"hung: no result when the run's {self.args.minutes:g} minutes were over"
            time.sleep(POLL_S)
        return None

    def take_events(self, items: dict[str, Item]) -> None:
        """Take the events that were written since the last call; a line that is not whole yet waits."""
        text = self.events.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        for line in lines[self.num_read :]:
            event = json.loads(line)
            if "fault" in event:
                self.fault = event["fault"]
            elif "opening" in event:
                self.opening = time.monotonic()
            elif "machine" in event:
                self.opening = None
                self.report.found["machine"] = event["machine"]
            elif "begin" in event:
                self.open[event["begin"]] = items[event["item"]], time.monotonic()
                self.report.begin(event["begin"])
            elif "end" in event:
                self.open.pop(event["end"], None)
                options = {name: event[name] for name in ("most_error", "is_skipped", "seconds") if name in event}
                self.report.end(event["end"], event["result"], **options)
            else:
                self.finished.add(event.get("done") or event["not_done"])
                self.report.found["not_done"] += [event["not_done"]] if "not_done" in event else []
        self.num_read = len(lines)


def main(
    script: str,
    description: str,
    items: Sequence[Item],
    goals: Goals,
    session_of: Callable[[argparse.Namespace], Any],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a check script; return its exit status: 0 passed, 1 failed, 2 without the device that it checks.

    `session_of` is called in the processes that have the device, and makes what the items' parts take.
    """
    args = arguments(description, argv, items)
    if args.list:
        print(listing(items))
        return 0
    if args.events:
        return work(args, session_of)
    print(f"seed {args.seed}", flush=True)
    report = Report(args.only, goals, args.output, seed=args.seed, interpreted=args.interpret)
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(args, Path(script).resolve(), report, Path(folder))
        supervisor.run(args.only)
    if supervisor.fault:
        print(supervisor.fault, file=sys.stderr)
        return 2
    return int(not report.close())
