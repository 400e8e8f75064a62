"""Runs `jpaged generate` as a user calls it, in this process or in one of its own."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jpaged.commands.generate import main

ROOT = Path(__file__).parents[3]
NUM_LINES = 64
BAD_LINE = 17
"""Lines of the fixture `prompt_file`, and the place of the one that is wrong."""


class Run(NamedTuple):
    """The exit status and the streams of one run."""

    returncode: int
    stdout: str
    stderr: str


def generate(*args: Any, stdin: str = "") -> Run:
    """Run the command in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with redirect_stderr(io.StringIO()) as err:
            status = main([str(arg) for arg in args])
    return Run(status, out.getvalue(), err.getvalue())


def command(*args: Any) -> list[str]:
    """Return the command line of a process of its own."""
    return [sys.executable, "-m", "jpaged.generate", *map(str, args)]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_metrics(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "metrics"} for record in records(path)]
