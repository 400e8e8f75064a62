"""The process of a check script that has the device: does items, and appends a line of JSON for each event to a file.

    {"opening": true}  {"machine": {…}}  {"begin": part, "item": name}  {"end": part, "result": …}  {"done": item}
    {"not_done": item}

It ends itself after an error that leaves the device unusable; run.py then starts another. Parts whose end stands in the
file are not done again, and those that run.py calls suspect run alone.
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import ROOT
from .items import Item, Part, Skipped

DEVICE_FAILED = 3
"""Exit status where the device answers no more."""


def machine() -> dict[str, Any]:
    """Return the device, its versions, the commit and the date, for the report."""
    device = jax.devices()[0]

    def git(*args: str) -> str | None:
        try:
            run = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None  # No git: the checkout was copied here.
        return run.stdout.strip() if run.returncode == 0 else None

    # Reports and profiles lie in the checkout as untracked files, and are no change of the code.
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": git("rev-parse", "HEAD"),
        "has_changes": None if changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class Worker:
    """Does items one after the other."""

    def __init__(self, args: argparse.Namespace, session_of: Callable[[argparse.Namespace], Any]):
        """`session_of` makes what parts need of the device; SystemExit if it is not the right one."""
        self.args, self.lock = args, threading.Lock()
        self.done, self.suspects = _parts(args.events, "end"), _parts(args.events, "suspect")
        for item in args.only:
            if item.before_opening and not args.interpret:
                item.before_opening()
        self.emit(opening=True)
        try:
            self.session = session_of(args)
        except SystemExit as error:
            self.emit(fault=str(error))
            raise
        self.emit(machine=machine())

    def emit(self, **event: Any) -> None:
        """Append an event to the file."""
        with self.lock, self.args.events.open("a") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")

    def do(self, item: Item) -> None:
        """Do an item, unless it would not be over in time."""
        # Estimates are those of a device; interpreted items have shapes of their own.
        minutes = 0 if self.args.interpret else item.minutes
        if time.time() + 60 * minutes > self.args.deadline:
            self.emit(not_done=item.name)
            return
        try:
            parts = item.parts(self.session)
        except Exception as error:
            self.emit(begin=item.name, item=item.name)
            self.emit(end=item.name, **_outcome(Part(lambda: None), error))
            parts = {}
        left = [(name, part) for name, part in parts.items() if name not in self.done]
        jobs = self.args.jobs if item.in_threads and not self.args.interpret else 1  # Interpreters keep global state.
        self._do_parts(item, {name: part for name, part in left if name in self.suspects}, jobs=1)
        self._do_parts(item, {name: part for name, part in left if name not in self.suspects}, jobs)
        self.emit(done=item.name)

    def _do_parts(self, item: Item, parts: Mapping[str, Part], jobs: int) -> None:
        jobs = min(jobs, max(len(parts), 1))
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(lambda name: self._do(item, name, parts[name], is_alone=jobs == 1), parts))

    def _do(self, item: Item, name: str, part: Part, *, is_alone: bool) -> None:
        """Do one part. If the device is lost then, end this process; the result counts only if nothing ran beside."""
        self.emit(begin=name, item=item.name)
        start = time.monotonic()
        try:
            result = part.run()
            outcome = {"result": result, "most_error": part.most_error}
            json.dumps(outcome, allow_nan=False)  # JSON has no NaN; a result with one is an error.
        except Exception as error:
            outcome = _outcome(part, error)
        is_lost = not device_answers()
        if is_alone or not is_lost:
            self.emit(end=name, seconds=round(time.monotonic() - start, 2), **outcome)
        if is_lost:
            os._exit(DEVICE_FAILED)


def device_answers() -> bool:
    """Return whether the device still computes: after an error of a compiler it does, after one of a kernel it may."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except Exception:
        return False


def _outcome(part: Part, error: Exception) -> dict[str, Any]:
    """Return the event's fields for a part that raised `error`."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Skipped):
        return {"result": text, "is_skipped": True}
    return {"result": f"{type(error).__name__}: {text}", "most_error": part.most_error}


def _parts(events: Path, kind: str) -> set[str]:
    """Return the parts of a kind of events, "end" or "suspect", in the file."""
    lines = events.read_text().splitlines() if events.exists() else []
    return {event[kind] for event in map(json.loads, lines) if kind in event}


def work(args: argparse.Namespace, session_of: Callable[[argparse.Namespace], Any]) -> int:
    """Do the items that `args` name. Returns the exit status of the process."""
    worker = Worker(args, session_of)
    for item in args.only:
        worker.do(item)
    return 0
