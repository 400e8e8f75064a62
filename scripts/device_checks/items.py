"""The items of `gpu_check` and `tpu_check`: what can be asked for by name, and the flags that both scripts take.

An item is done in a process that has the device, as one part or several. Here nothing asks for a device: the process
that lists items or starts others must not open one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DEFAULT_MINUTES = 8.0
"""Minutes that one run takes at most."""


class Skipped(Exception):  # noqa: N818  (it is no error)
    """Raised by a part that this device has no place for; its text says why. The run passes all the same."""


class Part(NamedTuple):
    """A piece of an item with a result of its own."""

    run: Callable[[], Any]
    """Returns the error of a case as a float, or what was measured as a dictionary for JSON."""
    most_error: float | None = None
    """The largest error allowed of a case; None for a measurement."""


@dataclass(frozen=True)
class Item:
    """One thing that a script does."""

    name: str
    minutes: float
    """Estimate for the device, compilation included."""
    about: str
    parts: Callable[[Any], Mapping[str, Part]]
    """Takes what the script knows of the device, and returns the parts by name."""
    environment: Mapping[str, str] | None = None
    """Given to an item that needs a process of its own: variables that libraries read when they are loaded."""
    before_opening: Callable[[], None] | None = None
    """Done first in the item's process, which has not opened the device then. Only with an `environment`."""
    in_threads: bool = False
    """Whether its parts run several at a time, so that one compiles while others do. Nothing may be timed in them."""
    part_limit_s: float | None = None
    """Seconds after which a part counts as hanging; None: a minute, and three times the estimate."""

    @property
    def limit_s(self) -> float:
        """Return the seconds after which a part counts as hanging."""
        return 60 + 180 * self.minutes if self.part_limit_s is None else self.part_limit_s


class Goal(NamedTuple):
    """What a ratio should be."""

    relation: str
    """≥ or ≤."""
    bound: float
    item: str
    """The item that measures the ratio."""
    is_own: bool = True
    """Whether the run fails if the ratio was not measured. False where another library is needed."""


Goals = Mapping[str, Goal]
"""Name of a ratio → its goal."""


def arguments(description: str, argv: Sequence[str] | None, items: Sequence[Item]) -> argparse.Namespace:
    """Parse the flags; `only` becomes the chosen items in their own order, `seed` a number.

    An unknown item ends the process with a line that lists the known ones.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="do these items; default: all of them")
    parser.add_argument("--list", action="store_true", help="print every item with its estimated minutes, do nothing")
    parser.add_argument("--interpret", action="store_true", help="anywhere: tiny shapes, kernels step by step")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; a new one each time if not given")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="longest run; default 8")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="threads that compile; default: all cores"
    )
    parser.add_argument("--output", type=Path, help="write what was found here, as JSON, after each item")
    # The script starts itself with these: a file for its results, and the time.time() at which the run must be over.
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = [item.name for item in items]
    if unknown := [name for name in args.only or () if name not in names]:
        parser.error(f"--only: got {', '.join(unknown)}, allowed: {', '.join(names)}")
    for name in ("minutes", "jobs"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: got {getattr(args, name)}, allowed: more than 0")
    args.only = [item for item in items if args.only is None or item.name in args.only]
    if args.seed is None:
        args.seed = int(np.random.SeedSequence().entropy % 2**32)  # type: ignore[operator]
    return args


def listing(items: Sequence[Item]) -> str:
    """Return a line for each item, and one for their sum."""
    lines = [f"{item.name:24} {item.minutes:4.1f} min  {item.about}" for item in items]
    total = sum(item.minutes for item in items)
    return "\n".join([*lines, f"{'all':24} {total:4.1f} min  estimates, start of the device included"])
