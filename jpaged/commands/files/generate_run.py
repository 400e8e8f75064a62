"""The run of `jpaged generate`: a request for each line, whose result or error stands in the output file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequestError
from .jobs import BadLine, Job, error_record
from .results import dump_line, output_record
from .run import Run

if TYPE_CHECKING:
    from ...messages import NewRequest
    from ...outputs import RequestOutput
    from ...text.parsed_outputs import OutputParser
    from ..summary import SamplingSummary
    from .run import MessageEngine


class GenerateRun(Run[Job]):
    """Results are the samples of prompts, as `output_record` has them."""

    _parser: OutputParser | None = None
    """What reads the calls in answers to lines with tools."""

    def requests_of(self, engine: MessageEngine, job: Job, sampling: SamplingSummary) -> list[NewRequest]:
        """Return the request of a job; its id is the job's line number. The engine was sized for the first jobs."""
        sampling.note(job.params)
        if job.prompt.tools is not None:
            self._parser = engine.output_parser()
        try:
            new = engine.builder.build_encoded(str(job.number), job.prompt, job.checked, number=job.number)
            return [engine.checked_message(new)]
        except InvalidRequestError as error:  # A later job that does not fit.
            self._fail(job, error)
            return []

    def end(self, job: Job, outputs: Sequence[RequestOutput]) -> None:
        (output,) = outputs
        if output.error is None:
            self.record(job.number, output_record(job, output, self.options, self._parser))
        else:
            self._fail(job, output.error)

    def fail_line(self, line: BadLine) -> None:
        self._fail(line, line.error)

    def record(self, number: int, record: dict[str, Any]) -> None:
        """Write the result of line `number` to the output file, and give it to the printer."""
        if self.results is not None:
            self.write(self.results, number, dump_line(record))
        if self.printer is not None:
            self.printer.give(number, record)

    def _fail(self, line: Job | BadLine, error: InvalidRequestError | str) -> None:
        """Record an error as the result of a line."""
        self.note_failure(line.id, error)
        self.record(line.number, error_record(line.id, error))
