"""The requests of one `generate` on their way through the engine, and their results on the way to a file or stdout."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import one_line
from ..errors import InvalidRequestError
from .jobs import BadLine, DoneLine, Job, error_record
from .progress import ProgressReport, say
from .results import ResultFile, dump_line, output_record
from .resume import FinishedRecords

if TYPE_CHECKING:
    from ..engine import Engine
    from ..outputs import SampleDelta
    from ..request import Request
    from .summary import SamplingSummary

MAX_IN_A_ROW = 1000
"""Lines without a request that are dealt with between two steps."""
MAX_HELD = 10_000
"""Errors of lines that are held back until the engine has started; with more, the output file is opened before."""
MAX_UNPRINTED = 10_000
"""Results that may wait for an earlier one to be printed: while there are more, no further line is read."""


class RunTimes(NamedTuple):
    """How long a run took."""

    elapsed_s: float
    """Seconds without those of compilation."""
    first_token_time: float | None
    """When the first token came, in seconds of `time.monotonic()`; None if none came."""


class Run:
    """The results of one command, and where they go: to a file, to stdout, or to both."""

    def __init__(
        self, results: ResultFile | None, printer: Printer | None, finished: FinishedRecords | None, options: str
    ):
        """`finished` are the results of earlier runs, where one is gone on with; `options` is `resume.options_key`."""
        self.results, self.printer, self.finished, self.options = results, printer, finished, options
        self.num_lines = self.num_failed = self._num_kept = 0
        self._is_started = results is None
        self._are_all_made = False
        """Whether every line that is no error has become a request."""
        self._held: list[tuple[int, dict[str, Any]]] = []
        """Numbers and records of lines that failed before the file was started."""
        self._job_of: dict[str, Job] = {}
        """The job of each request that was made and has not ended."""

    @property
    def is_busy(self) -> bool:
        """Return whether the engine has anything to do."""
        return bool(self._job_of)

    def jobs(self, items: Iterator[Job | BadLine | DoneLine | None]) -> Iterator[Job | None]:
        """Yield the jobs among `items`, and give the others their results.

        None is yielded where no item is there yet, while too many results wait to be printed, and now and then among
        many items that are no jobs, so that steps are computed meanwhile.
        """
        num_in_a_row = 0
        for item in items:
            num_in_a_row = 0 if isinstance(item, Job) else num_in_a_row + 1
            if item is None or (num_in_a_row % MAX_IN_A_ROW == 0 and num_in_a_row):
                yield None
            if item is None:
                continue
            while self.printer is not None and self.printer.num_waiting > MAX_UNPRINTED:
                yield None
            self.num_lines += 1
            if self.printer is not None:
                self.printer.expect(item.number)
            if isinstance(item, Job):
                yield item
            elif isinstance(item, BadLine):
                self.fail(item.id, item.number, item.error)
            else:
                self._keep(item)
        if self.finished is not None:
            say(f"resume: {self._num_kept} of {self.num_lines} are there already{self._others}")

    @property
    def _others(self) -> str:
        """Return what is said of the lines of the output file that the resumed run drops, once all lines are read."""
        assert self.results is not None
        assert self.finished is not None
        num_results = len(self.finished) - self._num_kept
        dropped = [
            f"{num_results} of other prompts" if num_results else "",
            f"{self.finished.num_foreign} lines that are no results" if self.finished.num_foreign else "",
        ]
        if not any(dropped):
            return ""
        return f"; {' and '.join(filter(None, dropped))} are dropped, {self.results.backup.name} keeps them"

    def finish(self) -> None:
        """Replace the output file, if there is one, by one with all results in the order of their lines."""
        if self.results is not None:
            self.results.finish(keeps_old=self.finished is not None and bool(self._others))

    def start(self) -> None:
        """Open the output file, if there is one and it is not open yet."""
        if self._is_started or self.results is None:
            return
        self.results.start(0 if self.finished is None else self.finished.end)
        self._is_started = True
        for number, record in self._held:
            self._append(number, record)
        self._held.clear()

    def compute(
        self, engine: Engine, head: deque[Job], rest: Iterator[Job | None], sampling: SamplingSummary
    ) -> RunTimes:
        """Run all jobs, those of `head` first, and record each result as it comes."""
        compiled_s, start = engine.stats()["compile_seconds"], time.monotonic()
        first_token_time: float | None = None
        num_done = 0
        stream = self.printer.stream if self.printer is not None and self.printer.is_stream else None
        with closing(ProgressReport()) as progress:
            requests = self._requests(engine, chain(_drained(head), rest), sampling)
            for request, output in engine.run_requests(requests, stream=stream, on_error="return"):
                num_done += 1
                if (time_s := request.first_token_time) is not None:
                    first_token_time = time_s if first_token_time is None else min(first_token_time, time_s)
                job = self._job_of.pop(output.request_id)
                if output.error is None:
                    self.record(job.number, output_record(job, output, self.options))
                else:
                    engine.log_failure(request, is_repeat_logged=False)  # The error itself is said below.
                    self.fail(job.id, job.number, _message_with_cause(output.error, request.failure))
                if stream is None:
                    progress("requests", num_done, num_done + len(self._job_of) if self._are_all_made else None)
        elapsed_s = time.monotonic() - start - (engine.stats()["compile_seconds"] - compiled_s)
        return RunTimes(elapsed_s, first_token_time)

    def _requests(
        self, engine: Engine, jobs: Iterator[Job | None], sampling: SamplingSummary
    ) -> Iterator[Request | None]:
        """Yield a request for each job, and None where `jobs` has it.

        A job that does not fit into the engine, which was sized by earlier ones, gets an error as its result.
        """
        for job in jobs:
            if job is None:
                yield None
                continue
            sampling.note(job.params)
            try:
                request = engine.prepare_request(str(job.number), job.prompt, job.checked, number=job.number)
            except InvalidRequestError as error:
                self.fail(job.id, job.number, error)
                continue
            self._job_of[request.request_id] = job
            yield request
        self._are_all_made = True

    def fail(self, id_: str | int | None, number: int, error: InvalidRequestError | str) -> None:
        """Record an error as the result of a line, and say it on stderr."""
        self.num_failed += 1
        say(f"error: {error}" if id_ is None else f"error: {id_}: {error}")
        self.record(number, error_record(id_, error))

    def record(self, number: int, record: dict[str, Any]) -> None:
        """Note the result of a line."""
        if not self._is_started:
            self._held.append((number, record))
            if len(self._held) > MAX_HELD:
                self.start()
        else:
            self._append(number, record)
        if self.printer is not None:
            self.printer.give(number, record)

    def _append(self, number: int, record: dict[str, Any]) -> None:
        if self.results is not None:
            self.results.append(number, record)

    def _keep(self, line: DoneLine) -> None:
        """Take over the result of an earlier run."""
        assert self.results is not None
        assert self.finished is not None
        span = self.finished.span(line.entry)
        self._num_kept += 1
        self.results.keep(line.number, span)
        if self.printer is not None:
            self.printer.give(line.number, partial(self.results.read, span))


class Printer:
    """Prints results on stdout in the order in which their lines were read."""

    def __init__(self, *, is_json: bool):
        self.is_json = is_json
        self.is_stream = False
        """Whether the text of the only sample of the only job is printed as it comes."""
        self._has_many = True
        """Whether there are several jobs, whose texts are labelled."""
        self._is_ascii = is_json and not _knows_unicode(sys.stdout)
        self._expected: deque[int] = deque()
        self._ready: dict[int, dict[str, Any] | Callable[[], bytes]] = {}

    @property
    def num_waiting(self) -> int:
        """Return the number of results that an earlier one, which is not there yet, keeps from being printed."""
        return len(self._ready)

    def expect_no_more(self, *, has_one_sample: bool) -> None:
        """Note that the job that was read is the only one: its text has no label, and that of one sample streams."""
        self._has_many = False
        self.is_stream = has_one_sample and not self.is_json

    def expect(self, number: int) -> None:
        """Note that this line comes next; lines are printed in this order."""
        self._expected.append(number)

    def stream(self, deltas: Iterable[SampleDelta]) -> None:
        """Print what is new in the text of the only sample."""
        for delta in deltas:
            print(delta.text, end="", flush=True)

    def give(self, number: int, record: dict[str, Any] | Callable[[], bytes]) -> None:
        """Print the result of a line, and those that waited for it. A function reads a record as a line of JSON."""
        self._ready[number] = record
        while self._expected and self._expected[0] in self._ready:
            self._print(self._ready.pop(self._expected.popleft()))

    def _print(self, result: dict[str, Any] | Callable[[], bytes]) -> None:
        record: dict[str, Any] = json.loads(result()) if callable(result) else result
        if self.is_json:
            print(dump_line(record, is_ascii=self._is_ascii), flush=True)
        elif self.is_stream:
            print(end="" if "error" in record else "\n", flush=True)
        else:
            for output in record.get("outputs", ()):
                # The job's id and the sample's index label the text, each where there are several of it.
                labels = [(record["id"], self._has_many), (output["index"], len(record["outputs"]) > 1)]
                label = ".".join(str(name) for name, is_needed in labels if is_needed)
                print(f"[{label}] {output['text']}", flush=True)


def _drained(jobs: deque[Job]) -> Iterator[Job]:
    """Yield the jobs, and keep none that was yielded."""
    while jobs:
        yield jobs.popleft()


def _knows_unicode(stream: Any) -> bool:
    """Return whether a text stream writes UTF-8, or keeps text as it is."""
    encoding = getattr(stream, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name == "utf-8"


def _message_with_cause(error: str, failure: Exception | None) -> str:
    """Return an output's error with the text of the exception behind it, which the command's own user may see."""
    return error if failure is None or not str(failure) else f"{error}: {one_line(failure)}"
