"""The lines of a file on their way through the engine, and their results on the way to a file or stdout.

`generate_run` and `batch_run` say what a line's requests and its results are.
"""

from __future__ import annotations

import codecs
import json
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from ..progress import ProgressReport, say
from .jobs import BadLine, DoneLine
from .results import ResultFile, dump_line
from .resume import FinishedRecords

if TYPE_CHECKING:
    from ...intake.request_builder import RequestBuilder
    from ...messages import NewRequest
    from ...outputs import ClusterSummary, EngineSummary, LastOutput, RequestOutput, SampleDelta
    from ...text.parsed_outputs import OutputParser
    from ..summary import SamplingSummary

MAX_IN_A_ROW = 1000
"""Lines without a request that are processed at most between two steps of the engine."""
MAX_HELD = 10_000
"""Errors of lines that stay in memory until the engine has started; if there are more, the output file is opened."""
MAX_UNPRINTED = 10_000
"""Results that may wait until an earlier one can be printed; while more wait, no further line is read."""


class RunTimes(NamedTuple):
    """How long a run took."""

    elapsed_s: float
    """Seconds without those of compilation."""
    first_token_time: float | None
    """When the first token came, in seconds of `time.monotonic()`; None if none came."""


class LineJob(Protocol):
    """What asks for requests."""

    @property
    def id(self) -> str | int: ...

    @property
    def number(self) -> int: ...


class MessageEngine(Protocol):
    """What computes the requests of a run: the calls of `Engine` that take and give plain values."""

    @property
    def builder(self) -> RequestBuilder:
        """Makes the messages of requests."""

    def output_parser(self) -> OutputParser:
        """Return what reads the outputs of the model."""

    def checked_message(self, new: NewRequest) -> NewRequest:
        """Return a message for `run_messages`; raise InvalidRequestError if its request can never fit."""

    def run_messages(
        self, messages: Iterable[NewRequest | None], *, stream: Callable[[list[SampleDelta]], None] | None = None
    ) -> Iterator[LastOutput]:
        """Compute the requests of messages, and yield the last output of each."""

    def stats(self) -> dict[str, Any]:
        """Return counters since the start."""

    def summary(self) -> EngineSummary | ClusterSummary:
        """Return what the engine is and has done."""


JobT = TypeVar("JobT", bound=LineJob)


@dataclass
class _OpenJob(Generic[JobT]):
    """A job whose requests have not all ended."""

    job: JobT
    outputs: dict[str, RequestOutput | None]
    """Request id → last output, in the order of the requests; None for one that has not ended."""
    num_left: int
    """Requests that have not ended."""


class Run(ABC, Generic[JobT]):
    """The results of one command, and where they go: to a file, to stdout, or to both."""

    def __init__(
        self, results: ResultFile | None, printer: Printer | None, finished: FinishedRecords | None, options: str
    ):
        """Write results to the file `results` and print them on stdout with `printer`; either may be None.

        `finished` are the results of earlier runs that a resumed run takes over, None without `--resume`. `options` is
        the run's `resume.options_key`. The output file is not opened before `start`.
        """
        self.results, self.printer, self.finished, self.options = results, printer, finished, options
        self.num_lines = self.num_failed = self._num_kept = 0
        self._is_started = results is None
        self._num_open = 0
        """Jobs that were made and have no result yet."""
        self._are_all_made = False
        """Whether the input is read to its end and its last request made, so that the total is known."""
        self._unwritten: list[tuple[ResultFile, int, str]] = []
        """Files, line numbers and records of errors from before the files were opened."""
        self._open_jobs: dict[str, _OpenJob[JobT]] = {}
        """Request id → job, for each request that was made and has not ended."""

    @property
    def is_busy(self) -> bool:
        """Return whether the engine has any unfinished request of this run."""
        return bool(self._open_jobs)

    def jobs(
        self, items: Iterator[JobT | BadLine | DoneLine | None], *, are_read_first: bool = False
    ) -> Iterator[JobT | None]:
        """Yield the jobs among `items`; record a BadLine's error, and take over a DoneLine's earlier result.

        A None tells the engine to compute a step before it asks again. It is yielded for a None in `items` (a pipe has
        no line yet), while more than MAX_UNPRINTED results wait to be printed, and after every MAX_IN_A_ROW items in a
        row that are no jobs. With `are_read_first` all items are read before the first request runs, so that no result
        is waited for. At the end a resumed run says on stderr how many results it took over.
        """
        num_in_a_row = 0
        for item in items:
            # Counts the items since the last job; the engine's steps must not wait for a long run of lines without one.
            num_in_a_row = num_in_a_row + 1 if isinstance(item, BadLine | DoneLine | None) else 0
            if item is None or (num_in_a_row % MAX_IN_A_ROW == 0 and num_in_a_row):
                yield None
            if item is None:
                continue
            # The steps that this asks for finish the earlier requests, and so let the printer go on.
            while self.printer is not None and self.printer.num_waiting > MAX_UNPRINTED and not are_read_first:
                yield None
            self.num_lines += 1
            if self.printer is not None:
                self.printer.expect(item.number)
            if isinstance(item, BadLine):
                self.fail_line(item)
            elif isinstance(item, DoneLine):
                self._keep(item)
            else:
                yield item
        if self.finished is not None:
            say(f"resume: {self._num_kept} of {self.num_lines} are there already{self._dropped_clause}")

    @property
    def _dropped_clause(self) -> str:
        """Return a clause on the lines of the output file that a resumed run drops, or "" if it drops none.

        Example: "; 2 of other prompts and 1 lines that are no results are dropped, out.jsonl.bak keeps them". It is
        only right once all lines of the input are read. `finished` must not be None.
        """
        assert self.results is not None
        assert self.finished is not None
        num_results = len(self.finished) - self._num_kept
        dropped = [
            f"{num_results} of other prompts" if num_results else "",
            f"{self.finished.num_foreign} lines that are no results" if self.finished.num_foreign else "",
        ]
        if not any(dropped):
            return ""
        # `filter` leaves out the empty one of the two.
        return f"; {' and '.join(filter(None, dropped))} are dropped, {self.results.backup.name} keeps them"

    def finish(self) -> None:
        """Sort the output file by line number, after a backup if a resumed run drops lines of it; then close the file.

        Does nothing without an output file.
        """
        if self.results is not None:
            self.results.finish(keeps_old=self.finished is not None and bool(self._dropped_clause))

    def start(self) -> None:
        """Open the output file and write the errors that came before; does nothing if it is open, or without a file.

        A resumed run keeps the complete lines of the file, any other run empties it. Raises ConfigError if another run
        writes the file.
        """
        if self._is_started or self.results is None:
            return
        self.results.start(0 if self.finished is None else self.finished.end)
        self._is_started = True
        for file, number, line in self._unwritten:
            file.append(number, line)
        self._unwritten.clear()

    def compute(
        self, engine: MessageEngine, head: deque[JobT], rest: Iterator[JobT | None], sampling: SamplingSummary
    ) -> RunTimes:
        """Run the jobs of `head` and then of `rest` on the engine; return how long that took.

        Each result is recorded as it comes, an error too; `sampling` notes the parameters of every job. `head` is empty
        afterwards. A None in `rest` lets the engine compute a step before the next job is asked for. The text of a
        single sample is streamed to stdout; otherwise a progress report goes to stderr, whose total is known once the
        input is read to its end. Seconds of compilation are not part of the elapsed time.
        """
        compiled_s, start = engine.stats()["compile_seconds"], time.monotonic()
        first_token_time: float | None = None
        num_done = 0
        write_deltas = self.printer.stream if self.printer is not None and self.printer.is_stream else None
        with closing(ProgressReport()) as progress:
            messages = self._messages(engine, chain(_drained(head), rest), sampling)
            for last in engine.run_messages(messages, stream=write_deltas):
                output = last.output
                if (time_s := output.metrics.first_token_time) is not None:
                    first_token_time = time_s if first_token_time is None else min(first_token_time, time_s)
                if last.failure:
                    output = replace(output, error=f"{output.error}: {last.failure}")
                num_done += self._take(output)
                if write_deltas is None:
                    progress("requests", num_done, num_done + self._num_open if self._are_all_made else None)
        # Programs that were compiled meanwhile would hide how fast the engine is.
        elapsed_s = time.monotonic() - start - (engine.stats()["compile_seconds"] - compiled_s)
        return RunTimes(elapsed_s, first_token_time)

    def _messages(
        self, engine: MessageEngine, jobs: Iterator[JobT | None], sampling: SamplingSummary
    ) -> Iterator[NewRequest | None]:
        """Yield the requests of each job, and a None for each None in `jobs`.

        `_open_jobs` has the job until its requests have ended. The engine was sized for the first jobs. A later job
        that does not fit gets an error as its result instead. At the end `_are_all_made` is set, so that the total of
        the progress report is known.
        """
        for job in jobs:
            if job is None:
                yield None
                continue
            requests = self.requests_of(engine, job, sampling)
            open_job = _OpenJob(job, dict.fromkeys(request.request_id for request in requests), len(requests))
            self._open_jobs |= dict.fromkeys(open_job.outputs, open_job)
            self._num_open += bool(requests)
            yield from requests
        self._are_all_made = True

    @abstractmethod
    def requests_of(self, engine: MessageEngine, job: JobT, sampling: SamplingSummary) -> list[NewRequest]:
        """Return the requests of a job, which the engine has checked; none if the job's error was recorded instead.

        Their ids belong to no other request of the run. `sampling` notes their parameters.
        """

    @abstractmethod
    def end(self, job: JobT, outputs: Sequence[RequestOutput]) -> None:
        """Record the result of a job, or its error, given the last outputs of its requests in order."""

    @abstractmethod
    def fail_line(self, line: BadLine) -> None:
        """Record why a line has become no job."""

    def _take(self, output: RequestOutput) -> bool:
        """Take the last output of a request; return whether it was the last one of its job, which then has a result."""
        open_job = self._open_jobs.pop(output.request_id)
        open_job.outputs[output.request_id] = output
        open_job.num_left -= 1
        if open_job.num_left:
            return False
        self._num_open -= 1
        self.end(open_job.job, [one for one in open_job.outputs.values() if one is not None])
        return True

    def note_failure(self, id_: str | int | None, error: object) -> None:
        """Count a line as failed, and print its error on stderr."""
        self.num_failed += 1
        say(f"error: {error}" if id_ is None else f"error: {id_}: {error}")

    def write(self, file: ResultFile, number: int, line: str) -> None:
        """Write the record of line `number`, a line of JSON, to one of the run's files.

        Before `start` it stays in memory. If there are more than MAX_HELD, this calls `start`, which opens the files
        and writes them.
        """
        if self._is_started:
            file.append(number, line)
            return
        self._unwritten.append((file, number, line))
        if len(self._unwritten) > MAX_HELD:
            self.start()

    def _keep(self, line: DoneLine) -> None:
        """Take over the result that an earlier run wrote for this line.

        The record stays where it is in the file: `finish` keeps it under the line's number, and the printer, if there
        is one, reads it from there when all earlier lines are printed.
        """
        # There are DoneLines only in a resumed run, which has an output file and its results.
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
        """Print JSON lines if `is_json`, escaped to ASCII unless stdout takes UTF-8; else the texts of the samples.

        They go to what is stdout now, whatever libraries print on later.
        """
        self.is_json = is_json
        self._file = sys.stdout
        self.is_stream = False
        """Whether text is printed token by token, for a single job with one sample."""
        self._has_many = True
        """Whether there may be several jobs, so that each text begins with its job's id."""
        self._is_ascii = is_json and not _knows_unicode(self._file)
        self._expected: deque[int] = deque()
        """Numbers of the lines whose results are still to be printed, in order."""
        self._ready: dict[int, dict[str, Any] | Callable[[], bytes]] = {}
        """Line number → result that waits for an earlier line; see `give`."""

    @property
    def num_waiting(self) -> int:
        """Return the number of results that wait until an earlier line has its result."""
        return len(self._ready)

    def expect_no_more(self, *, is_streamed: bool) -> None:
        """Record that the input has a single job: its text gets no job id and, with `is_streamed`, comes in deltas."""
        self._has_many = False
        self.is_stream = is_streamed and not self.is_json

    def expect(self, number: int) -> None:
        """Record that line `number` was read; results are printed in the order of these calls."""
        self._expected.append(number)

    def stream(self, deltas: Iterable[SampleDelta]) -> None:
        """Print the new text of the only sample."""
        for delta in deltas:
            print(delta.text, end="", flush=True, file=self._file)

    def give(self, number: int, record: dict[str, Any] | Callable[[], bytes]) -> None:
        """Take the result of line `number`, and print all results that no earlier line holds up any more.

        A result is a record, or a function that reads it from the output file as a line of JSON when it is printed.
        """
        self._ready[number] = record
        while self._expected and self._expected[0] in self._ready:
            self._print(self._ready.pop(self._expected.popleft()))

    def _print(self, result: dict[str, Any] | Callable[[], bytes]) -> None:
        """Print one result, as JSON or as one labelled text per sample, such as "[3.0] text" (job 3, sample 0).

        The label is "3" if each job has one sample, and "0" if there is a single job with several samples; a single job
        with one sample has none. A streamed text is printed already, so only its line end is. An error prints nothing
        as text; stderr has it.
        """
        record: dict[str, Any] = json.loads(result()) if callable(result) else result
        if self.is_json:
            print(dump_line(record, is_ascii=self._is_ascii), flush=True, file=self._file)
        elif self.is_stream:
            print(end="" if "error" in record else "\n", flush=True, file=self._file)
        else:
            for output in record.get("outputs", ()):
                # A label has the job's id if there are several jobs, and the sample's index if it has several samples.
                labels = [(record["id"], self._has_many), (output["index"], len(record["outputs"]) > 1)]
                label = ".".join(str(name) for name, is_needed in labels if is_needed)
                text = output["text"]
                print(f"[{label}] {text}" if label else text, flush=True, file=self._file)


def _drained(jobs: deque[JobT]) -> Iterator[JobT]:
    """Yield the jobs and remove each from the deque, so that the memory of a finished job can be freed."""
    while jobs:
        yield jobs.popleft()


def _knows_unicode(stream: Any) -> bool:
    """Return whether a text stream writes UTF-8, or has no encoding because it keeps text, as StringIO does."""
    encoding = getattr(stream, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name == "utf-8"
