"""The output file of `jpaged generate`: JSON lines as requests end, in input order at the end, read by `--resume`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError
from ..outputs import CompletionOutput, Logprob, RequestOutput
from .jobs import Job
from .resume import RecordSpan, resume_key

MIN_LOGPROB = -9999.0
"""Written for logprobs of −∞, which JSON does not have; vLLM and OpenAI write the same."""


def output_record(job: Job, output: RequestOutput, options: str) -> dict[str, Any]:
    """Return the JSON object of one finished request of a run whose options have this `resume.options_key`."""
    record: dict[str, Any] = {
        "id": job.id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_completion_record(completion) for completion in output.outputs],
        "metrics": {**asdict(output.metrics), "resume_key": resume_key(options, job.digest)},
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entries and _entries_record(entries) for entries in output.prompt_logprobs]
    return record


def dump_line(record: dict[str, Any], *, is_ascii: bool = False) -> str:
    """Return a record as one line of JSON, without its newline.

    Other characters than those of ASCII are escaped with `is_ascii`, and a lone surrogate, which is no UTF-8, always.
    """
    line = json.dumps(record, ensure_ascii=is_ascii, separators=(",", ":"))
    return line.encode(errors="backslashreplace").decode()


class ResultFile:
    """The JSON lines of one run. A record appears whole or not at all, whenever the process is killed.

    Of a record that was written, only its line's number and its span in the file are kept: 20 bytes.
    """

    def __init__(self, path: Path, *, prompt_file: os.stat_result | None = None):
        """Check the path; raise ConfigError if it cannot be written, or is the prompt file, whose `stat` may be given.

        Nothing is created or changed before `start`.
        """
        is_there, self.path = path.exists(), path.resolve()
        self.backup = self.path.with_name(f"{self.path.name}.bak")
        """Where the lines go that a resumed run drops."""
        folder = self.path.parent
        if is_there and not (path.is_file() and os.access(path, os.W_OK)):
            way_out = "give another name, or --json to write the lines to stdout"
            raise ConfigError(f"--output: {path} is no regular file that can be written; {way_out}")
        if not path.name or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"--output: {str(path)!r} cannot be written; give a file in an existing, writable folder")
        if is_there and prompt_file is not None and os.path.samestat(path.stat(), prompt_file):
            raise ConfigError(f"--output: {path} is the prompt file; give another name")
        if is_there:
            with path.open("rb") as file:
                self._lock(file.fileno())
        self._descriptor: int | None = None
        self._end = 0
        self._numbers, self._offsets, self._lengths = array("q"), array("q"), array("I")

    def start(self, kept_bytes: int) -> None:
        """Open the file for `append`, with its first `kept_bytes` bytes alone. Raise ConfigError if others write it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock(descriptor)
            if os.fstat(descriptor).st_size < kept_bytes:
                raise self._changed()
            os.ftruncate(descriptor, kept_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._end = descriptor, kept_bytes

    def _lock(self, descriptor: int) -> None:
        """Lock the file until the descriptor is closed; ConfigError if another run has locked it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            way_out = "wait for its end, or give another name"
            raise ConfigError(f"--output: {self.path} is written by another run; {way_out}") from error
        except OSError:  # A file system without locks.
            return

    def _changed(self) -> ConfigError:
        way_out = "its lines stay as they are: go on with --resume"
        return ConfigError(f"--output: {self.path} was changed by others while this run wrote it; {way_out}")

    def append(self, number: int, record: dict[str, Any]) -> None:
        """Write the record of this line's number behind the others."""
        assert self._descriptor is not None, "start comes before append"
        data = dump_line(record).encode() + b"\n"
        self.keep(number, RecordSpan(self._end, len(data)))
        self._end += len(data)
        while data:  # A full disk or a signal may cut a write short.
            data = data[os.write(self._descriptor, data) :]

    def keep(self, number: int, span: RecordSpan) -> None:
        """Note that the result of a line is there in the file."""
        self._numbers.append(number)
        self._offsets.append(span.offset)
        self._lengths.append(span.num_bytes)

    def read(self, span: RecordSpan) -> bytes:
        """Return a record of the file, which need not have been opened by `start`."""
        with self.path.open("rb") as file:
            return self._record_at(file.fileno(), span)

    def finish(self, *, keeps_old: bool = False) -> None:
        """Replace the file by one with all records in the order of their numbers, in one atomic step.

        With `keeps_old` the file as it was becomes `backup`. Raise ConfigError, and replace nothing, if others have
        changed the file.
        """
        descriptor = self._descriptor
        assert descriptor is not None, "start comes before finish"
        if os.fstat(descriptor).st_size != self._end:
            raise self._changed()
        order = map(int, np.argsort(np.frombuffer(self._numbers, np.int64), kind="stable"))
        spans = (RecordSpan(self._offsets[entry], self._lengths[entry]) for entry in order)
        if keeps_old:
            shutil.copyfile(self.path, self.backup)
        self._replace(self._record_at(descriptor, span) for span in spans)
        self.close()

    def _record_at(self, descriptor: int, span: RecordSpan) -> bytes:
        """Return a record; ConfigError if a whole line is no longer there."""
        record = os.pread(descriptor, span.num_bytes, span.offset)
        if len(record) != span.num_bytes or not record.endswith(b"\n"):
            raise self._changed()
        return record

    def close(self) -> None:
        """Close the file; appended records stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Write lines to a temporary file and rename it to the path; file permissions stay."""
        assert self._descriptor is not None, "start comes before finish"
        mode = os.fstat(self._descriptor).st_mode & 0o777
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    logprobs, masses = completion.logprobs, completion.log_kept_masses
    asked = {} if masses is None else {"log_kept_masses": list(masses)}
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": None if logprobs is None else [_entries_record(entries) for entries in logprobs],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **asked,
    }


def _entries_record(entries: dict[int, Logprob]) -> dict[str, Any]:
    """Return the logprobs of one position as a JSON object by token id; a token that rules exclude has −∞."""
    return {
        str(token_id): msgspec.structs.asdict(entry) | {"logprob": max(entry.logprob, MIN_LOGPROB)}
        for token_id, entry in entries.items()
    }
