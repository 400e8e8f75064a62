"""The process of a check script that has the device: does items, and appends a line of JSON for each event to a file.

    {"machine": {…}}   {"begin": part, "item": name}   {"end": part, "result": …}   {"done": item}   {"not_done": item}

It ends itself after an error of the device, which may leave every later call failing; `check_run` then starts another.
Parts whose end stands in the file are not done again.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from . import ROOT
from .items import Item, Part, Skipped

DEVICE_FAILED = 3
"""Exit status after an error of the device."""


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


class Worker:
    """Does items one after the other."""

    def __init__(self, args: argparse.Namespace, session_of: Callable[[argparse.Namespace], Any]):
        """`session_of` makes what parts need of the device; SystemExit if it is not the right one."""
        self.args, self.lock, self.done = args, threading.Lock(), _ended(args.events)
        for item in args.only:
            if item.before_opening and not args.interpret:
                item.before_opening()
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
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(lambda pair: self._do(item, *pair, is_alone=jobs == 1), left))
        self.emit(done=item.name)

    def _do(self, item: Item, name: str, part: Part, *, is_alone: bool) -> None:
        """Do one part. After an error of the device, end this process; the error counts only if nothing ran beside."""
        self.emit(begin=name, item=item.name)
        start = time.monotonic()
        try:
            result = part.run()
            outcome = {"result": result, "most_error": part.most_error}
            json.dumps(outcome, allow_nan=False)  # JSON has no NaN; a result with one is an error.
        except Exception as error:
            outcome = _outcome(part, error)
            if is_device_error(error):
                if is_alone:
                    self.emit(end=name, **outcome)
                os._exit(DEVICE_FAILED)
        self.emit(end=name, seconds=round(time.monotonic() - start, 2), **outcome)


def is_device_error(error: Exception) -> bool:
    """Return whether an error may have left the device unusable: any that XLA reports but a lack of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)


def _outcome(part: Part, error: Exception) -> dict[str, Any]:
    """Return the event's fields for a part that raised `error`."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Skipped):
        return {"result": text, "is_skipped": True}
    return {"result": f"{type(error).__name__}: {text}", "most_error": part.most_error}


def _ended(events: Path) -> set[str]:
    """Return the parts whose end stands in the file of events."""
    lines = events.read_text().splitlines() if events.exists() else []
    return {event["end"] for event in map(json.loads, lines) if "end" in event}


def work(args: argparse.Namespace, session_of: Callable[[argparse.Namespace], Any]) -> int:
    """Do the items that `args` name. Returns the exit status of the process."""
    worker = Worker(args, session_of)
    for item in args.only:
        worker.do(item)
    return 0
