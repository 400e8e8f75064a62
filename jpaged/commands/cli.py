"""The commands of `jpaged COMMAND …`, as one table. Only the module of the called command is imported."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from .. import not_available
from ..checks import check_name
from ..errors import ConfigError
from .process import interrupts_held, run_command

SUMMARIES = {
    "generate": "complete prompts from the command line or a file",
    "chat": "talk to a model, in this process or behind a server's URL",
    "batch": "answer a file of requests in the form of OpenAI's Batch API",
    "serve": "serve a model by OpenAI's HTTP interface",
    "distill": "write a model's most likely tokens of many sequences, for a student",
    "bench": "measure: bench latency, throughput, serve",
    "tune": "find the best tile sizes of the TPU kernels for a shape",
}
"""What help says of each command."""
COMMANDS = {
    "generate": ".generate",
    "chat": ".chat",
    "batch": ".batch",
    "serve": ".serve",
    "distill": ".distill",
    "tune": ".bench.tune",
}
"""Command → its module in this folder, whose `main(argv)` returns the exit status."""
BENCHES = {name: f".bench.{name}" for name in ("latency", "throughput", "serve")}
"""NAME of `jpaged bench NAME` → its module in this folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv`, by default the process's own arguments, names; return its exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(args: list[str]) -> int:
    """Run the command that the first argument names, with the remaining arguments; return its exit status.

    `bench` takes a second name, such as `bench latency`. `--help` and `--version` print their text and return 0.
    Without arguments the usage is printed too, but the status is 1. Raises ConfigError if a name is unknown.
    """
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {command:10} {summary}" for command, summary in SUMMARIES.items())
        print(f"usage: jpaged COMMAND …\n\ncommands:\n{lines}\n\njpaged COMMAND --help tells more.")
        return 0 if args else 1
    if name == "--version":
        from .. import __version__

        print(__version__)
        return 0
    _check(name, SUMMARIES, "command", not_available.COMMANDS)
    commands, args = COMMANDS, args[1:]
    if name == "bench":
        name = args[0] if args else ""
        if name in ("-h", "--help"):
            print(f"usage: jpaged bench {'|'.join(BENCHES)} …\n\njpaged bench throughput --help tells more, and so on.")
            return 0
        _check(name, BENCHES, "bench", not_available.BENCHES)
        commands, args = BENCHES, args[1:]
    with interrupts_held():  # Benches import JAX, which would crash if an interrupt came during the import.
        module = import_module(commands[name], __package__)
    return module.main(args)


def _check(name: str, known: Collection[str], kind: str, missing: Collection[str]) -> None:
    """Raise ConfigError unless `name` is in `known`; names in `missing` are refused as not available yet."""
    check_name(name, known, kind, not_available=missing, way_out=f"allowed: {', '.join(known)}", error=ConfigError)
