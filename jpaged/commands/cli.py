"""Finds the commands of `jpaged COMMAND …` by the first lines of their modules.

A module of this folder or of `bench` is a command if its docstring begins with "`jpaged NAME`: HELP."; NAME is one
word, or `bench` and a word. Its `main(argv)` returns the exit status. Only the called module is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path

from .. import not_available
from ..checks import check_name
from ..errors import ConfigError
from .process import interrupts_held, run_command

FIRST = ("generate", "bench", "tune", "bench latency", "bench throughput", "bench kernels", "bench scheduler")
"""Commands that help texts name first, in this order; the others follow by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _find_commands() -> dict[str, tuple[str, str]]:
    """Return name → module and help of each command, from the files' first lines."""
    found = {}
    for folder in map(Path, sys.modules[__package__].__path__):
        for path in folder.rglob("*.py"):
            with path.open(encoding="utf-8") as file:
                if match := re.match(r'"""`jpaged ([\w -]+)`: (.+?)\.', file.readline()):
                    module = ".".join(path.relative_to(folder).with_suffix("").parts)
                    found[match[1]] = f".{module.removesuffix('.__init__')}", match[2]
    return {name: found[name] for name in [*FIRST, *sorted(found.keys() - FIRST)] if name in found}


def _run(args: list[str]) -> int:
    """Run the command that `args` begin with and return its exit status.

    Without a command the usage is printed and the status is 1. Raises ConfigError for an unknown name.
    """
    commands = _find_commands()
    name = args[0] if args else "--help"
    benches = [command.removeprefix("bench ") for command in commands if command.startswith("bench ")]
    summaries = {command: text for command, (_, text) in commands.items() if " " not in command}
    if name in ("-h", "--help"):
        summaries["bench"] += f": bench {', '.join(benches)}"
        lines = "\n".join(f"  {command:10} {text}" for command, text in summaries.items())
        print(f"usage: jpaged COMMAND …\n\ncommands:\n{lines}\n\njpaged COMMAND --help tells more.")
        return 0 if args else 1
    if name == "--version":
        from .. import __version__

        print(__version__)
        return 0
    _check(name, summaries, "command", not_available.COMMANDS)
    args = args[1:]
    if name == "bench":
        bench = args[0] if args else ""
        if bench in ("-h", "--help"):
            print(f"usage: jpaged bench {'|'.join(benches)} …\n\njpaged bench scheduler --help tells more, and so on.")
            return 0
        _check(bench, benches, "bench", not_available.BENCHES)
        name, args = f"bench {bench}", args[1:]
    module, _ = commands[name]
    with interrupts_held():  # Benches import JAX.
        command = import_module(module, __package__)
    return command.main(args)


def _check(name: str, known: Collection[str], kind: str, missing: Collection[str]) -> None:
    """Refuse a name that is no command or no bench."""
    check_name(name, known, kind, not_available=missing, way_out=f"allowed: {', '.join(known)}", error=ConfigError)
