"""Code that the benches share: the flags of runs and of the report, the machine they ran on, the report file."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import refusal
from ...errors import ConfigError
from ..flags import FlagParser, check_positive

if TYPE_CHECKING:
    import jax


def add_report_flags(parser: FlagParser, num_runs: int, runs: str) -> None:
    """Add `--runs`, whose default is `num_runs` and whose help begins with the text `runs`, and `--output`."""
    parser.add_argument("--runs", type=int, default=num_runs, help=f"{runs}; medians are shown")
    parser.add_argument("-o", "--output", type=Path, help="write the JSON here")


def parse_bench(parser: FlagParser, argv: Sequence[str], *positive: str) -> Namespace:
    """Return the parsed flags of a bench.

    Raises ConfigError if `--runs` or one of the flags `positive` is below 1, or if the folder of `--output` does not
    exist: that is found before a measurement of minutes rather than after it.
    """
    args = parser.parse_args(list(argv))
    check_positive(args, "runs", *positive)
    if args.output and not args.output.absolute().parent.is_dir():
        raise refusal("--output", args.output, "a file in an existing folder", error=ConfigError)
    return args


def machine(device: jax.Device) -> dict[str, Any]:
    """Return the entries of a report that say on which device and machine, with which versions and when it was made.

    The date is that of today in ISO form, such as "2026-01-31".
    """
    import jax

    return {"device": device.device_kind, **host_machine(), "jax": jax.__version__}


def host_machine() -> dict[str, Any]:
    """Return the entries of `machine` that name no device."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def write_report(report: dict[str, Any], output: Path | None) -> None:
    """Write the report as JSON to the file `output`, or to stdout if that is None."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if output:
        output.write_text(text + "\n")
    else:
        print(text)


def _processor() -> str:
    """Return the processor's name from /proc/cpuinfo, or what Python knows of it elsewhere than on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
