"""The entry of `python -m jpaged.serve …`, which is `jpaged serve …`."""

from __future__ import annotations

from collections.abc import Sequence

from .__main__ import main as end_with_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged serve` in this process and return its exit status; `argv` of None is `sys.argv[1:]`."""
    from .commands.serve import main

    return main(argv)


if __name__ == "__main__":
    end_with_command("serve")
