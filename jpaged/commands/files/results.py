"""An output file of `jpaged generate` or `batch`: JSON lines as requests end, in input order at the end.

`--resume` reads it.
"""

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

from ...errors import ConfigError
from ...json_lines import escape_line_ends
from ...outputs import CompletionOutput, Logprob, RequestOutput
from ...sampling.sampling_params import SamplingParams
from ...text.parsed_outputs import OutputParser
from .jobs import Job
from .resume import RecordSpan, resume_key

MIN_LOGPROB = -9999.0
"""Written for logprobs of −∞, which JSON does not have; vLLM and OpenAI write the same."""


def output_record(job: Job, output: RequestOutput, options: str, parser: OutputParser | None = None) -> dict[str, Any]:
    """Return the JSON object that is written for one finished request.

    Each sample of a chat with tools has its `answer` too, of thoughts, content and tool calls, as `parser` reads it.
    `options` is the run's `resume.options_key`. With the digest of the request's line it forms `resume_key`, by which a
    resumed run recognizes the result. `prompt_logprobs` is a key only if the request asked for them.
    """
    record: dict[str, Any] = {
        "id": job.id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_completion_record(completion) for completion in output.outputs],
        "metrics": {**asdict(output.metrics), "resume_key": resume_key(options, job.digest)},
    }
    if job.prompt.tools is not None and parser is not None and isinstance(job.params, SamplingParams):
        is_skipping = job.params.skip_special_tokens
        for index, completion in enumerate(record["outputs"]):
            answer = parser.answer(output, index, tools=job.prompt.tools, skip_special_tokens=is_skipping)
            completion["answer"] = msgspec.to_builtins(answer)
    if output.prompt_logprobs is not None:
        # The first token has no logprobs: its entry is None, and `and` keeps it.
        record["prompt_logprobs"] = [entries and _entries_record(entries) for entries in output.prompt_logprobs]
    return record


def dump_line(record: dict[str, Any], *, is_ascii: bool = False) -> str:
    """Return a record as one line of JSON, without its newline.

    With `is_ascii`, all characters outside ASCII are escaped. Those that end a line for some readers are always
    escaped, and so is a lone surrogate, which UTF-8 cannot encode, as the six characters that JSON has for it.
    """
    line = json.dumps(record, ensure_ascii=is_ascii, separators=(",", ":"))
    return escape_line_ends(line.encode(errors="backslashreplace")).decode()


class ResultFile:
    """The output file of one run: `start` it, `append` records as requests finish, and `finish` it in input order.

    For each record in the file, memory holds only its number and its span: 20 bytes. If the process is killed, at most
    the last line of the file is incomplete, and a resumed run drops it.
    """

    def __init__(self, path: Path, *, prompt_file: os.stat_result | None = None, flag: str = "--output"):
        """Check the path, without creating or changing anything: `start` does that. Errors call it by `flag`.

        `prompt_file` is the `stat` of the prompt file, None without one. Raises ConfigError if `path` is no regular
        file in a writable folder, is the prompt file itself, or is locked by another run.
        """
        is_there, self.path, self._flag = path.exists(), path.resolve(), flag
        self.backup = self.path.with_name(f"{self.path.name}.bak")
        """Copy of the file before a resumed run dropped lines from it."""
        folder = self.path.parent
        if is_there and not (path.is_file() and os.access(path, os.W_OK)):
            way_out = "give another name, or --json to write the lines to stdout"
            raise ConfigError(f"{self._flag}: {path} is no regular file that can be written; {way_out}")
        if not path.name or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"{flag}: {str(path)!r} cannot be written; give a file in an existing, writable folder")
        if is_there and prompt_file is not None and os.path.samestat(path.stat(), prompt_file):
            raise ConfigError(f"{self._flag}: {path} is the prompt file; give another name")
        if is_there:
            with path.open("rb") as file:
                self._lock(file.fileno())
        self._descriptor: int | None = None
        self._end = 0
        # Line number, offset and bytes of each record that `finish` keeps.
        self._numbers, self._offsets, self._lengths = array("q"), array("q"), array("I")

    def start(self, kept_bytes: int) -> None:
        """Create or open the file for `append`, lock it, and cut it after its first `kept_bytes` bytes; 0 empties it.

        The kept bytes are the lines of an earlier run that is resumed. `close` and `finish` release the lock. Raises
        ConfigError if another run has locked the file, or if it is shorter than `kept_bytes` by now.
        """
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
        """Lock the file until `descriptor` is closed; ConfigError if another run has locked it.

        On a file system without locks nothing is locked, and no error is raised.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            way_out = "wait for its end, or give another name"
            raise ConfigError(f"{self._flag}: {self.path} is written by another run; {way_out}") from error
        except OSError:  # A file system without locks.
            return

    def _changed(self) -> ConfigError:
        """Return the error that says that another process has changed the file during this run."""
        way_out = "its lines stay as they are: go on with --resume"
        return ConfigError(f"{self._flag}: {self.path} was changed by others while this run wrote it; {way_out}")

    def append(self, number: int, line: str) -> None:
        """Write a line of JSON at the end of the file, and note its span.

        `number` is that of its input line, by which `finish` sorts.
        It is written as a whole before this returns, but not synced to disk. Raises OSError on a full disk.
        """
        assert self._descriptor is not None, "start comes before append"
        data = line.encode() + b"\n"
        self.keep(number, RecordSpan(self._end, len(data)))
        self._end += len(data)
        while data:  # A full disk or a signal may cut a write short.
            data = data[os.write(self._descriptor, data) :]

    def keep(self, number: int, span: RecordSpan) -> None:
        """Record that the file holds the result of line `number` at `span`, so that `finish` keeps it."""
        self._numbers.append(number)
        self._offsets.append(span.offset)
        self._lengths.append(span.num_bytes)

    def read(self, span: RecordSpan) -> bytes:
        """Return the line of JSON at `span`. The file is opened for it, so this works before `start` too."""
        with self.path.open("rb") as file:
            return self._record_at(file.fileno(), span)

    def finish(self, *, keeps_old: bool = False) -> None:
        """Replace the file, in one atomic step, by one with all records in the order of their numbers; then close it.

        With `keeps_old`, the file before this replacement is copied to `backup`. Lines of the file that were neither
        appended nor kept are dropped. Records of one number stay in the order in which they were added. `start` must
        have come before. Raises ConfigError, and replaces nothing, if another process has changed the file.
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
        """Return the line of JSON at `span`; ConfigError if there is no longer a line that ends where `span` does."""
        record = os.pread(descriptor, span.num_bytes, span.offset)
        if len(record) != span.num_bytes or not record.endswith(b"\n"):
            raise self._changed()
        return record

    @property
    def is_empty(self) -> bool:
        """Return whether no record is to be kept."""
        return not self._numbers

    def remove(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; appended records stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file by one with these lines: write a temporary file beside it, sync it to disk, and rename it.

        So a reader sees either the old file or the whole new one. The new file has the old one's permissions (`0o777`
        masks their bits). After an error the old file stays, and the temporary one is removed. `start` must have come
        before.
        """
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
    """Return the JSON object of one sample of a request.

    `logprobs` is null if the request asked for none; else it has one object per output token. `log_kept_masses` is a
    key only if the request asked for them, with one number per output token.
    """
    logprobs, masses = completion.logprobs, completion.log_kept_masses
    optional = {} if masses is None else {"log_kept_masses": list(masses)}
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": None if logprobs is None else [_entries_record(entries) for entries in logprobs],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **optional,
    }


def _entries_record(entries: dict[int, Logprob]) -> dict[str, Any]:
    """Return the logprobs of one position as a JSON object, by token id as a string.

    A token that a logit rule excludes has a logprob of −∞, which is written as MIN_LOGPROB.
    """
    return {
        str(token_id): msgspec.structs.asdict(entry) | {"logprob": max(entry.logprob, MIN_LOGPROB)}
        for token_id, entry in entries.items()
    }
