"""The kill suite: stages that a mutant has to get through, each mutant in a process of its own.

The parent process imports the libraries and never the code under test. Each mutant is a fork of it, which finds the
mutated module under its real name and runs the stages in order up to the first failure. A mutant is killed by a
failure, a crash, or by using much more time than the code as it is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import selectors
import shlex
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from mutations import Mutant

MIN_LIMIT_S = 2.0
LIMIT_FACTOR = 6.0
"""Processor time of a stage, as a multiple of what the unchanged code takes."""
MEMORY_BYTES = 4 << 30
"""What a mutant may allocate: one that appends for ever ends before the machine does."""


@dataclass(frozen=True)
class NamedMutant:
    """A bug with a name, or a change that no test may object to."""

    id: str
    file: str
    text: str
    expect: str

    def compile(self, filename: str) -> CodeType:
        return compile(self.text, filename, "exec")


@dataclass(frozen=True)
class Result:
    """How one mutant fared. `stage` is the one that killed it; a survivor has none."""

    id: str
    stage: str | None
    detail: str
    seconds: float
    stage_seconds: tuple[float, ...]
    """Processor time of the stages that it went through: what else the machine does is not in it."""
    output: str


@dataclass
class Child:
    """A fork at work on one mutant."""

    mutant: Mutant | NamedMutant | None
    pid: int
    pipe: int
    log: Any
    deadline: float
    started: float
    received: bytes = b""


class Suite:
    """The stages that a mutant has to get through, and the time each may take."""

    def __init__(self, root: Path, stages: list[str], *, limit_s: float, jobs: int):
        self.root = root
        self.stages = stages
        self.limit_s = limit_s
        self.jobs = jobs
        self.stage_limits = [0.0] * len(stages)
        """Seconds of processor time; 0: none."""
        self.baseline: tuple[float, ...] = ()
        self.files: list[str] = []

    def prepare(self, files: list[str], libraries: list[str]) -> None:
        """Import the libraries, and run the unchanged code, which has to pass, to learn what each stage takes."""
        sys.path[:] = [str(self.root), *(path for path in sys.path if path not in ("", str(Path(__file__).parent)))]
        os.chdir(self.root)
        # The profile under which hypothesis tries the same examples each time.
        os.environ.update(CI="true", JAX_PLATFORMS="cpu", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        for name in libraries:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        self.files = files
        [result] = self.run([None])
        if result.stage:
            raise SystemExit(f"the unchanged code fails in {result.stage}: {result.detail}\n{result.output}")
        self.baseline = result.stage_seconds
        self.stage_limits = [min(self.limit_s, max(MIN_LIMIT_S, LIMIT_FACTOR * taken)) for taken in self.baseline]

    def run(self, mutants: Iterable[Mutant | NamedMutant | None]) -> Iterator[Result]:
        """The results, in the order in which they come; None stands for the unchanged code."""
        todo = iter(mutants)
        children: dict[int, Child] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while True:
                    while len(children) < self.jobs and (mutant := next(todo, self)) is not self:
                        child = self._fork(mutant)  # type: ignore[arg-type]
                        children[child.pipe] = child
                        selector.register(child.pipe, selectors.EVENT_READ)
                    if not children:
                        return
                    for key, _ in selector.select(timeout=0.5):
                        child = children[key.fd]
                        if received := os.read(child.pipe, 1 << 16):
                            child.received += received
                            child.deadline = time.monotonic() + self.limit_s
                            continue
                        selector.unregister(child.pipe)
                        del children[child.pipe]
                        yield self._reap(child)
                    for child in children.values():
                        if time.monotonic() > child.deadline:
                            os.killpg(child.pid, signal.SIGKILL)
            finally:
                for child in children.values():
                    self._reap(child)

    def _fork(self, mutant: Mutant | NamedMutant | None) -> Child:
        reader, writer = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child is)
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.setpgid(0, 0)
            self._work(mutant, writer, log.fileno())
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        now = time.monotonic()
        return Child(mutant, pid, reader, log, deadline=now + self.limit_s, started=now)

    def _work(self, mutant: Mutant | NamedMutant | None, writer: int, log: int) -> None:
        """In the child: run the stages, report on the pipe, never return."""
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + MEMORY_BYTES,) * 2)
            if mutant:
                sys.meta_path.insert(0, _MutatedFinder(self.root, mutant))
            for index, stage in enumerate(self.stages):
                # The default action of SIGPROF ends the process, also inside a loop that never comes back.
                signal.setitimer(signal.ITIMER_PROF, self.stage_limits[index])
                started = time.process_time()
                failure = _run_stage(stage)
                report = {"stage": index, "seconds": time.process_time() - started, "failure": failure}
                os.write(writer, json.dumps(report).encode() + b"\n")
                if failure:
                    break
            else:
                loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
                missing = [file for file in self.files if str(self.root / file) not in loaded]
                if missing and mutant is None:
                    raise ImportError(f"the stages never import {', '.join(missing)}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _reap(self, child: Child) -> Result:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)  # What it may have started; itself it has ended.
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pipe)
        reports = [json.loads(line) for line in child.received.splitlines()]
        child.log.seek(0)
        output = child.log.read().decode(errors="replace")
        child.log.close()
        failure = reports[-1]["failure"] if reports else ""
        stage = len(reports) - bool(failure)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            limited = number in (signal.SIGPROF, signal.SIGKILL)
            failure = "no end" if limited else f"signal {signal.Signals(number).name}"
        elif status:
            failure = failure or (output.strip().splitlines() or ["exit"])[-1]
        return Result(
            child.mutant.id if child.mutant else "unchanged",
            self.stages[min(stage, len(self.stages) - 1)] if failure else None,
            failure,
            time.monotonic() - child.started,
            tuple(report["seconds"] for report in reports),
            output,
        )


class _MutatedFinder(importlib.abc.MetaPathFinder):
    """Finds one module, under its real name and file, with other code in it."""

    def __init__(self, root: Path, mutant: Mutant | NamedMutant):
        self.name = module_name(root, mutant.file)
        self.filename = str(root / mutant.file)
        self.code = mutant.compile(self.filename)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.filename, loader=_Loader(name, self))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, finder: _MutatedFinder):
        super().__init__(name, finder.filename)
        self.code = finder.code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class _Watcher:
    """Tells which test failed; and failing is enough, hypothesis need not find the smallest example."""

    failed = ""

    def pytest_sessionstart(self) -> None:
        if "hypothesis" in sys.modules:
            from hypothesis import HealthCheck, Phase, settings

            settings.register_profile(
                "mutants",
                settings.get_profile("ci"),
                phases=[Phase.explicit, Phase.generate],
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"collecting {report.nodeid}"


def _run_stage(stage: str) -> str:
    """Why the stage failed; empty if it passed."""
    module, _, call = stage.partition(":")
    try:
        if "/" in module or "@" not in call:
            import pytest

            watcher = _Watcher()
            options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--assert=plain"]
            status = pytest.main([*shlex.split(stage), *options], plugins=[watcher])
            return watcher.failed or (f"pytest exits with {int(status)}" if status else "")
        function, _, numbers = call.partition("@")
        first, _, last = numbers.partition("-")
        run = getattr(importlib.import_module(module), function)
    except BaseException as error:
        traceback.print_exc()
        return _one_line(error)
    for number in range(int(first), int(last) + 1):
        try:
            run(number)
        except BaseException as error:
            traceback.print_exc()
            return f"{function}({number}): {_one_line(error)}"
    return ""


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def module_name(root: Path, file: str) -> str:
    """The name under which a file of the checkout is imported: pyproject.toml says which folder is which package."""
    folders = {}
    if (root / "pyproject.toml").is_file():
        tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
        folders = {Path(folder): package for package, folder in tools["setuptools"]["package-dir"].items()}
    path = Path(file).with_suffix("")
    for folder, package in folders.items():
        if path.is_relative_to(folder):
            return ".".join([package, *path.relative_to(folder).parts])
    return ".".join(path.parts)
