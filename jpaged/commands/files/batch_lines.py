"""The lines of a file for `jpaged batch`, and the records of their results: both as OpenAI's Batch API has them.

    {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": "batch_req_…", "custom_id": …, "response": {"status_code", "request_id", "body"} or null, "error": … or null}

A record's `id` holds its `resume_key`. `error` is that of a line that is no request; a request that is refused or has
failed has a response.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ...checks import check_name, one_line, shown, told
from ...errors import InvalidRequestError
from ...json_lines import encode_json
from .jobs import MAX_ERROR_CHARS, BadLine, DoneLine
from .lines import LineSource, decoded_line, json_object, line_digest
from .results import dump_line
from .resume import ERROR_RECORD, FinishedRecords, LineIds, WrittenRecord, resume_key

ID_PREFIX = "batch_req_"
KEYS = ("custom_id", "method", "url", "body")
OK = 200
MAX_ID_CHARS = 1000


class BatchLineError(InvalidRequestError):
    """A line is no request. `line_code` is OpenAI's word for the fault."""

    def __init__(self, message: str, line_code: str, *, param: str | None = None):
        super().__init__(message, param=param)
        self.line_code = line_code


@dataclass(frozen=True)
class BatchJob:
    """A line that asks for something at a path of the server."""

    id: str
    """Its `custom_id`."""
    number: int
    """That of the line, from 1 on."""
    url: str
    body: bytes
    """JSON, not parsed yet."""
    digest: int
    """The `line_digest` of the line."""


@dataclass(frozen=True)
class BadBatchLine(BadLine):
    """A line that is no request, and why."""

    code: str
    digest: int


class _LineId(msgspec.Struct, gc=False):
    custom_id: str


class _Response(msgspec.Struct, gc=False):
    status_code: int


class _Record(msgspec.Struct, gc=False):
    """What a resumed run reads of a record."""

    id: str
    custom_id: str | None
    response: _Response | None = None


_LINE_ID_DECODER, _RECORD_DECODER = msgspec.json.Decoder(_LineId), msgspec.json.Decoder(_Record)


def batch_jobs(
    lines: LineSource, urls: Collection[str], finished: FinishedRecords | None
) -> Iterator[BatchJob | BadLine | DoneLine | None]:
    """Yield a BatchJob, BadBatchLine or DoneLine for each line, in order; None when a pipe has no line yet.

    `urls` are the paths that a line may name. A DoneLine is yielded, after reading no more of the line than its id, if
    `finished`, the results of an earlier run, have its result and the line has not changed since.
    """
    ids = LineIds(finished)
    for numbered in lines:
        if numbered is None:
            yield None
            continue
        number, line = numbered
        digest = line_digest(line)
        if finished is not None and (entry := _finished_entry(line, number, digest, ids)) is not None:
            yield DoneLine(number, entry)
            continue
        id_: str | None = None
        try:
            record = json_object(decoded_line(line), f"an object with {', '.join(KEYS)}")
            id_ = _custom_id(record)
            first = ids.first_line_with(id_, number)
            if first != number:
                fault = (
                    f"custom_id: got {shown(id_)}, which line {first} has too, allowed: one of its own for each line"
                )
                raise BatchLineError(fault, "duplicate_custom_id", param="custom_id")
            _check(record, urls)
            yield BatchJob(id_, number, record["url"], json.dumps(record["body"]).encode(), digest)
        except InvalidRequestError as error:
            code = error.line_code if isinstance(error, BatchLineError) else "invalid_json_line"
            if id_ is None:  # Nothing else would tell which line it is.
                error = InvalidRequestError(f"line {number}: {str(error).removeprefix('line: ')}", param=error.param)
            yield BadBatchLine(id_, number, error, code, digest)


def _finished_entry(line: bytes, number: int, digest: int, ids: LineIds) -> int | None:
    """Return the index of the earlier result for a line; None if there is none, or the line has no id."""
    try:
        return ids.finished_entry(_LINE_ID_DECODER.decode(line.removeprefix(b"\xef\xbb\xbf")).custom_id, digest, number)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _custom_id(record: dict[str, Any]) -> str:
    """Return the `custom_id` of a line; BatchLineError unless it is a text."""
    id_ = record.get("custom_id")
    if id_ is None:
        raise BatchLineError("custom_id: got none, allowed: a string", "missing_required_parameter", param="custom_id")
    if not isinstance(id_, str) or not 0 < len(id_) <= MAX_ID_CHARS or not _is_unicode(id_):
        allowed = f"a string of 1 to {MAX_ID_CHARS} characters"
        raise BatchLineError(f"custom_id: got {told(id_)}, allowed: {allowed}", "invalid_custom_id", param="custom_id")
    return id_


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, which JSON can write and no file in UTF-8 can hold."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check(record: dict[str, Any], urls: Collection[str]) -> None:
    """Raise an error for a line with an unknown key, or whose method, url or body is missing or wrong."""
    for key in record:
        try:
            check_name(key, KEYS, "key of a line")
        except InvalidRequestError as error:
            raise BatchLineError(str(error), "unknown_parameter", param=key[:100]) from None
    for key in KEYS:
        if record.get(key) is None:
            raise BatchLineError(f"{key}: got none, and each line needs it", "missing_required_parameter", param=key)
    if record["method"] != "POST":
        fault = f"method: got {shown(record['method'])}, allowed: POST"
        raise BatchLineError(fault, "invalid_method", param="method")
    if record["url"] not in urls:
        fault = f"url: got {shown(record['url'])}, allowed: {', '.join(urls)}"
        raise BatchLineError(fault, "invalid_url", param="url")
    if not isinstance(record["body"], dict):
        fault = f"body: got {told(record['body'])}, allowed: an object"
        raise BatchLineError(fault, "invalid_request", param="body")


def response_record(job: BatchJob, options: str, status: int, body: bytes) -> str:
    """Return the record of a request that has a response with this JSON as its body, as a line.

    `options` is the run's `resume.options_key`.
    """
    key = resume_key(options, job.digest)
    response = {"status_code": status, "request_id": key, "body": msgspec.Raw(body)}
    return encode_json({"id": ID_PREFIX + key, "custom_id": job.id, "response": response, "error": None}).decode()


def line_error_record(line: BadBatchLine, options: str) -> str:
    """Return the record of a line that is no request, as a line."""
    error = {"code": line.code, "message": one_line(line.error, MAX_ERROR_CHARS), "param": line.error.param}
    key = resume_key(options, line.digest)
    return dump_line({"id": ID_PREFIX + key, "custom_id": line.id, "response": None, "error": error})


def batch_record(line: bytes) -> WrittenRecord | None:
    """Return what a resumed run reads of a line of `jpaged batch`; None for a line that is no record."""
    try:
        record = _RECORD_DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not record.id.startswith(ID_PREFIX):
        return None
    if record.custom_id is None or record.response is None or record.response.status_code != OK:
        return ERROR_RECORD
    return WrittenRecord(record.custom_id, record.id.removeprefix(ID_PREFIX))
