"""The console script: `jpaged COMMAND …`. Commands are imported when they are called."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from .errors import ConfigError, JpagedError, ModelLoadError
from .progress import say

COMMANDS = {
    "generate": "complete prompts from the command line or a file",
    "bench": "measure: bench latency, throughput, kernels, scheduler",
    "tune": "find the best tile sizes of the TPU kernels for a shape",
}
UNBUILT = ("chat", "serve", "batch", "plan", "doctor", "trace")
BENCHES = ("latency", "throughput", "kernels", "scheduler")
UNBUILT_BENCHES = ("serve",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())
        print(f"usage: jpaged COMMAND …\n\ncommands:\n{commands}\n\njpaged COMMAND --help tells more.")
        return 0 if args else 1
    if args[0] == "--version":
        from . import __version__

        print(__version__)
        return 0
    if args[0] == "generate":
        from .generate import main as generate

        return generate(args[1:])
    if args[0] == "bench":
        return _bench(args[1:])
    if args[0] == "tune":
        return _tune(args[1:])
    if args[0] in UNBUILT:
        say(f"error: {args[0]}: not available in this version; allowed: {', '.join(COMMANDS)}")
        return 1
    near = difflib.get_close_matches(args[0], [*COMMANDS, *UNBUILT], n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(COMMANDS)}"
    say(f"error: {args[0]}: unknown command; {hint}")
    return 1


def _tune(args: list[str]) -> int:
    from .tune import main as tune

    try:
        return tune(args)
    except ConfigError as error:
        say(f"error: {error}")
        return 1


def _bench(args: list[str]) -> int:
    name = args[0] if args else ""
    if name in ("-h", "--help"):
        print(f"usage: jpaged bench {'|'.join(BENCHES)} …\n\njpaged bench scheduler --help tells more, and so on.")
        return 0
    if name not in BENCHES:
        why = "not available in this version" if name in UNBUILT_BENCHES else "unknown bench"
        say(f"error: bench: got {name!r}, {why}; allowed: {', '.join(BENCHES)}")
        return 1
    try:
        if name in ("latency", "throughput"):
            from .bench_engine import main as bench_engine

            return bench_engine(name, args[1:])
        if name == "kernels":
            from .bench_kernels import main as bench_kernels

            return bench_kernels(args[1:])
        from .bench_scheduler import main as bench_scheduler

        return bench_scheduler(args[1:])
    except (JpagedError, ModelLoadError) as error:
        say(f"error: {error}")
        return 1
