"""The console script: `jpaged COMMAND …`. Commands are imported when they are called."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from .. import not_available
from ..checks import check_name
from ..errors import ConfigError, JpagedError, ModelLoadError
from .progress import say

COMMANDS = {
    "generate": "complete prompts from the command line or a file",
    "bench": "measure: bench latency, throughput, kernels, scheduler",
    "tune": "find the best tile sizes of the TPU kernels for a shape",
}
BENCHES = ("latency", "throughput", "kernels", "scheduler")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())
        print(f"usage: jpaged COMMAND …\n\ncommands:\n{commands}\n\njpaged COMMAND --help tells more.")
        return 0 if args else 1
    if args[0] == "--version":
        from .. import __version__

        print(__version__)
        return 0
    try:
        return _run(args[0], args[1:])
    except (JpagedError, ModelLoadError) as error:
        say(f"error: {error}")
        return 1


def _run(command: str, args: list[str]) -> int:
    _check(command, COMMANDS, "command", not_available.COMMANDS)
    if command == "generate":
        from .generate import main as generate

        return generate(args)
    if command == "tune":
        from .bench.tune import main as tune

        return tune(args)
    name = args[0] if args else ""
    if name in ("-h", "--help"):
        print(f"usage: jpaged bench {'|'.join(BENCHES)} …\n\njpaged bench scheduler --help tells more, and so on.")
        return 0
    _check(name, BENCHES, "bench", not_available.BENCHES)
    if name in ("latency", "throughput"):
        from .bench.throughput import main as bench_engine

        return bench_engine(name, args[1:])
    if name == "kernels":
        from .bench.kernels import main as bench_kernels

        return bench_kernels(args[1:])
    from .bench.scheduler import main as bench_scheduler

    return bench_scheduler(args[1:])


def _check(name: str, known: Collection[str], kind: str, missing: Collection[str]) -> None:
    """Refuse a name that is no command or no bench."""
    allowed = f"allowed: {', '.join(known)}"
    check_name(name, known, kind, not_available=missing, way_out=allowed, error=ConfigError)
