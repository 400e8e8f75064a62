"""The output file of `jpaged generate`: JSON lines as requests end, in input order at the end, read by `--resume`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..outputs import CompletionOutput, Logprob, RequestOutput
from .jobs import BadLine, Job

MIN_LOGPROB = -9999.0
"""Written for logprobs of −∞, which JSON does not have; vLLM and OpenAI write the same."""


def output_record(job: Job, output: RequestOutput) -> dict[str, Any]:
    """Return the JSON object of one finished request."""
    record: dict[str, Any] = {
        "id": job.id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_completion_record(completion) for completion in output.outputs],
        "metrics": asdict(output.metrics),
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entries and _entries_record(entries) for entries in output.prompt_logprobs]
    return record


def dump_line(record: dict[str, Any]) -> str:
    """Return a record as one line of JSON, without its newline; a lone surrogate, which is no UTF-8, is escaped."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace").decode()


class ResultFile:
    """The JSON lines of one run. A record appears whole or not at all, whenever the process is killed."""

    def __init__(self, path: Path, *, prompt_file: Path | None = None):
        """Check the path; raise ConfigError if it cannot be written. Nothing is created or changed before `start`."""
        self.path = path.resolve()
        folder = self.path.parent
        if not path.name or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"--output: {str(path)!r} cannot be written; give a file in an existing, writable folder")
        if self.path.exists():
            if not self.path.is_file() or not os.access(self.path, os.W_OK):
                raise ConfigError(f"--output: {path} is no regular file that can be written; give another name")
            if prompt_file is not None and prompt_file.exists() and self.path.samefile(prompt_file):
                raise ConfigError(f"--output: {path} is the prompt file; give another name")
        self._descriptor: int | None = None

    def finished_records(self, jobs: Sequence[Job | BadLine]) -> tuple[dict[int, dict[str, Any]], int]:
        """Return the file's results for these jobs by the jobs' numbers, and the count of results of other prompts.

        A result belongs to a job if its id and its prompt's token ids are those of the job. Errors are left out, so
        that they are tried again; so are a torn last line and any line that is no record.
        """
        wanted = {repr(job.id): job for job in jobs if isinstance(job, Job)}
        found: dict[int, dict[str, Any]] = {}
        num_others = 0
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}, 0
        except OSError as error:
            raise ConfigError(f"--resume: {self.path} cannot be read ({error}); give a readable file") from error
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict) or not record.get("outputs") or "metrics" not in record:
                continue
            job = wanted.get(repr(record.get("id")))
            if job is not None and record.get("prompt_token_ids") == job.prompt.token_ids:
                found[job.number] = record
            else:
                num_others += 1
        return found, num_others

    def start(self, kept: Sequence[dict[str, Any]]) -> None:
        """Replace the file by one that holds the kept records, and open it for `append`."""
        self._replace(kept)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record as a line."""
        assert self._descriptor is not None, "start comes before append"
        data = dump_line(record).encode() + b"\n"
        while data:  # A full disk or a signal may cut a write short.
            data = data[os.write(self._descriptor, data) :]

    def finish(self, records: Sequence[dict[str, Any]]) -> None:
        """Replace the file by one with all records in their final order, in one atomic step."""
        self.close()
        self._replace(records)

    def close(self) -> None:
        """Close the file; appended records stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, records: Sequence[dict[str, Any]]) -> None:
        """Write the records to a temporary file and rename it to the path; file permissions stay."""
        mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), mode)
                file.writelines(dump_line(record) + "\n" for record in records)
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


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
