"""The entry of `python -m jpaged.generate …`, which is `jpaged generate …`."""

from __future__ import annotations

from collections.abc import Sequence

from .__main__ import main as end_with_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged generate` in this process and return its exit status; `argv` of None is `sys.argv[1:]`."""
    from .commands.generate import main

    return main(argv)


if __name__ == "__main__":
    end_with_command("generate")
