"""The run of `jpaged batch`: what a server would answer to each line, and a file of its own for errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ...checks import refusal
from ...serving.protocols.generation_request import GenerationRequest
from ...serving.protocols.http_errors import HTTPError, http_error
from ...serving.protocols.request_parser import RequestParser
from ...serving.protocols.table import GENERATION_ROUTES, protocol_of
from ..progress import say
from .batch_lines import OK, BadBatchLine, BatchJob, line_error_record, response_record
from .jobs import BadLine
from .results import ResultFile
from .resume import FinishedRecords, resume_key
from .run import Run

if TYPE_CHECKING:
    from ...messages import NewRequest
    from ...outputs import RequestOutput
    from ..summary import SamplingSummary
    from .run import MessageEngine

MAX_WARNINGS = 100
"""Different warnings that are told. A file may have as many as it has lines."""
LINE_BITS = 32
"""The number of a request, which is part of its seed, has that of its line below so many bits, above them its place."""


@dataclass
class ServedAs:
    """What the responses say of the model."""

    names: tuple[str, ...]
    """What bodies may call it."""
    created: int
    """When the responses are said to be made, in seconds since 1970."""
    is_strict: bool


class BatchRun(Run[BatchJob]):
    """Results are the responses of the server's protocols to bodies.

    They depend on nothing but the line and the options, so that a run that was killed and resumed has the same file:
    ids are made of both, `created` is that of all responses, and cached tokens, which depend on the requests before,
    are not counted.
    """

    def __init__(
        self, results: ResultFile, errors: ResultFile, finished: FinishedRecords | None, options: str, served: ServedAs
    ):
        """Write responses to the file `results`, and errors to `errors`; the other arguments are those of `Run`."""
        super().__init__(results, None, finished, options)
        self.errors, self.served = errors, served
        self._parser: RequestParser | None = None
        self._asked: dict[int, tuple[GenerationRequest, list[str]]] = {}
        """Line number → what its body asks for, and the ids of its requests, until they have ended."""
        self._warnings: set[str] = set()
        """Those that were told, at most MAX_WARNINGS."""

    def start(self) -> None:
        """Open both files; that of errors is empty, since lines with errors run again."""
        if not self._is_started:
            self.errors.start(0)
        super().start()

    def finish(self) -> None:
        """Put both files in order. One without errors is removed."""
        super().finish()
        if self.errors.is_empty:
            self.errors.remove()
        else:
            self.errors.finish()

    def requests_of(self, engine: MessageEngine, job: BatchJob, sampling: SamplingSummary) -> list[NewRequest]:
        if self._parser is None:
            self._parser = RequestParser(engine.builder, self.served.names, is_strict=self.served.is_strict)
        try:
            asked = GENERATION_ROUTES[job.url].parse(self._parser, bytearray(job.body))
            if asked.is_stream:
                raise refusal("stream", "true", "false, since a batch has whole responses", "leave it out")
            requests, ids = [], []
            for index, new in enumerate(asked.new_requests):
                sampling.note(new.params)
                key = resume_key(self.options, job.digest)
                ids.append(f"{key}-{index}" if index else key)
                number = job.number + (index << LINE_BITS)
                new = msgspec.structs.replace(new, request_id=ids[-1], number=number)
                requests.append(engine.checked_message(new))
        except Exception as error:  # `http_error` logs those that are defects.
            self._refuse(job, http_error(error))
            return []
        self._warn(job, asked.warnings)
        self._asked[job.number] = asked, ids
        return requests

    def end(self, job: BatchJob, outputs: Sequence[RequestOutput]) -> None:
        asked, ids = self._asked.pop(job.number)
        if failed := next((output.error for output in outputs if output.error is not None), None):
            self._refuse(job, HTTPError(500, failed))
            return
        assert self._parser is not None
        encoder = GENERATION_ROUTES[job.url].encoder_type(
            asked,
            ids,
            self._parser.tokenizer,
            created=self.served.created,
            fingerprint=f"fp_{self.options[:12]}",
            answer_format=self._parser.builder.encoder.answer_format,
            clock=lambda: self.served.created,
        )
        body = encoder.body({output.request_id: replace(output, num_cached_tokens=0) for output in outputs})
        assert self.results is not None
        self.write(self.results, job.number, response_record(job, self.options, OK, body))

    def fail_line(self, line: BadLine) -> None:
        assert isinstance(line, BadBatchLine)
        self.note_failure(line.id, line.error)
        self.write(self.errors, line.number, line_error_record(line, self.options))

    def _refuse(self, job: BatchJob, error: HTTPError) -> None:
        """Record the response by which a server refuses a request."""
        body = protocol_of(job.url, ()).error_body(error, resume_key(self.options, job.digest))
        self.note_failure(job.id, error.message)
        self.write(self.errors, job.number, response_record(job, self.options, error.status, body))

    def _warn(self, job: BatchJob, warnings: Sequence[str]) -> None:
        """Tell each warning of the parser once."""
        for warning in warnings:
            if warning not in self._warnings and len(self._warnings) < MAX_WARNINGS:
                self._warnings.add(warning)
                say(f"warning: {job.id}: {warning} (this is said once)")
