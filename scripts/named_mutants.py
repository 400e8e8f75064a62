"""Check that the tests notice known bugs: put each named mutant into a copy of the checkout and run its tests.

    python scripts/named_mutants.py                       # every suite of tests/mutants
    python scripts/named_mutants.py host_core tpu
    python scripts/named_mutants.py tpu --sample 4        # four of its mutants, evenly spread

A suite is a file tests/mutants/SUITE.toml. Its `stages` run in order until one fails, so the cheapest comes first; a
stage is the arguments of pytest, or `simulate FIRST:END` for seeds of scripts/simulate.py. Each `[[mutant]]` replaces
`old`, which must stand in `file` exactly once, by `new`. One stage must then fail; a mutant with a field `passes`,
the reason why no stage can see it, must pass them all. `needs` names a flag of /proc/cpuinfo without which a
mutant is skipped, `min_jax` a version of JAX without which a suite is.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
MAX_JOBS = 2
PYTEST = "-m pytest -x -q --tb=no -p no:cacheprovider --hypothesis-profile=first_failure"
ENVIRONMENT = {
    "CI": "true",  # Hypothesis then tries the same examples each time.
    "JAX_PLATFORMS": "cpu",
    "OPENBLAS_NUM_THREADS": "1",
    # Python would mix up the compiled files of two mutants of the same size, written in the same second.
    "PYTHONDONTWRITEBYTECODE": "1",
}
LIMIT_FACTOR = 6.0
"""A stage may take this multiple of the unchanged code's processor time, and `LIMIT_S` more."""
LIMIT_S = 10.0
IDLE_S = 60.0
"""A stage that has used less than a tenth of a second of processor time in so many seconds hangs."""
MAX_MEMORY_BYTES = 8 << 30
BROKEN = re.compile(r"NameError|ImportError|(?<!'NoneType' object )has no attribute|unexpected keyword argument")
"""Errors of a mutant whose text no longer fits the code around it: such a kill proves nothing."""


class SuiteError(Exception):
    """The suite itself is wrong: a stale `old`, or the unchanged code fails."""


def used(group: int) -> tuple[float, int]:
    """Return the processor time in seconds and the resident bytes of a process group, ended children included."""
    ticks = pages = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
                pages += int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def run_stage(stage: str, checkout: Path, limit_s: float) -> tuple[str, float]:
    """Run one stage; return why it failed (empty if it passed) and its processor time in seconds."""
    words = shlex.split(stage)
    simulate = words[0] == "simulate"
    arguments = ["scripts/simulate.py", "--seeds", words[1]] if simulate else [*shlex.split(PYTEST), *words]
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, **ENVIRONMENT}
        child = subprocess.Popen(
            [sys.executable, *arguments], cwd=checkout, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        seconds, ended, active_s, active_at = 0.0, "", 0.0, time.monotonic()
        while child.poll() is None and not ended:
            time.sleep(0.1)
            now_s, num_bytes = used(child.pid)
            seconds = max(seconds, now_s)
            if seconds > active_s + 0.1:
                active_s, active_at = seconds, time.monotonic()
            if seconds > limit_s:
                ended = f"takes more than {limit_s:.0f} s of processor time"
            elif time.monotonic() > active_at + IDLE_S:
                ended = f"hangs: no processor time in {IDLE_S:.0f} s"
            elif num_bytes > MAX_MEMORY_BYTES:
                ended = "takes too much memory"
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or [""]
    if ended or not child.returncode:
        return ended, seconds
    reasons = [line for line in lines if re.match(r"FAILED|ERROR|[\w.]*(Error|Exception)\b", line)]
    return (reasons or lines[-1:])[0], seconds


def run_stages(stages: list[str], checkout: Path, limits_s: list[float]) -> tuple[str, list[float]]:
    """Run the stages up to the first that fails; return its failure and each stage's processor time in seconds."""
    failure, taken = "", []
    for stage, limit_s in zip(stages, limits_s, strict=True):
        failure, seconds = run_stage(stage, checkout, limit_s)
        taken.append(seconds)
        if failure:
            break
    return failure, taken


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def mutated(root: Path, mutant: dict[str, Any]) -> str:
    """Return the text of the mutant's file with the mutant in it."""
    source = (root / mutant["file"]).read_text()
    if (count := source.count(mutant["old"])) != 1:
        raise SuiteError(f"{mutant['name']}: its old text stands {count} times in {mutant['file']}, not once")
    text = source.replace(mutant["old"], mutant["new"])
    compile(text, mutant["file"], "exec")
    return text


@contextmanager
def copies(root: Path, num: int) -> Iterator[SimpleQueue[Path]]:
    """Yield a queue of copies of the checkout."""
    ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "*.egg-info", ".*_cache", ".hypothesis")
    with tempfile.TemporaryDirectory() as folder:
        queue: SimpleQueue[Path] = SimpleQueue()
        for index in range(num):
            shutil.copytree(root, Path(folder, str(index)), ignore=ignore)
            queue.put(Path(folder, str(index)))
        yield queue


def run_suite(root: Path, name: str, *, jobs: int = MAX_JOBS, sample: int = 0) -> int:
    """Run a suite, print one line per mutant, and return how many came out other than they should."""
    suite = tomllib.loads((root / f"tests/mutants/{name}.toml").read_text())
    stages, mutants = suite["stages"], suite["mutant"]
    if version_of(version("jax")) < version_of(suite.get("min_jax", "0")):
        print(f"{name}: skipped, needs JAX {suite['min_jax']}")
        return 0
    texts = {mutant["name"]: mutated(root, mutant) for mutant in mutants}  # All of them, also those not run.
    if sample:
        mutants = [mutants[index * len(mutants) // sample] for index in range(sample)]
    flags = Path("/proc/cpuinfo").read_text().split()
    with copies(root, jobs) as checkouts, ThreadPoolExecutor(jobs) as pool:
        checkout = checkouts.get()
        failure, taken = run_stages(stages, checkout, [math.inf] * len(stages))
        if failure:
            raise SuiteError(f"{name}: the unchanged code fails: {failure}")
        checkouts.put(checkout)
        print(f"{name}: unchanged, {' + '.join(f'{seconds:.0f}' for seconds in taken)} s", flush=True)
        limits_s = [LIMIT_S + LIMIT_FACTOR * seconds for seconds in taken]

        def run(mutant: dict[str, Any]) -> bool:
            if mutant.get("needs", "") not in ("", *flags):
                print(f"{name}: {mutant['name']}: skipped, this processor has no {mutant['needs']}", flush=True)
                return True
            checkout = checkouts.get()
            file = checkout / mutant["file"]
            source = file.read_text()
            file.write_text(texts[mutant["name"]])
            failure, taken = run_stages(stages, checkout, limits_s)
            file.write_text(source)
            checkouts.put(checkout)
            verdict = f"killed by {failure[:160]}" if failure else "passes"
            is_right = bool(failure) != ("passes" in mutant) and not BROKEN.search(failure)
            fault = "" if is_right else "FAULT: "
            print(f"{fault}{name}: {mutant['name']}: {verdict} ({sum(taken):.0f} s)", flush=True)
            return is_right

        return sum(not is_right for is_right in pool.map(run, mutants))


def main() -> int:
    names = sorted(path.stem for path in (ROOT / "tests/mutants").glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--jobs", type=int, choices=range(1, MAX_JOBS + 1), default=MAX_JOBS)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="run N mutants of each suite, evenly spread")
    args = parser.parse_args()
    started, num_faults = time.monotonic(), 0
    for name in args.suites or names:
        num_faults += run_suite(ROOT, name, jobs=args.jobs, sample=args.sample)
    print(f"{num_faults} faults, {time.monotonic() - started:.0f} s")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
