"""The output file of `jpaged generate`: JSON lines as requests end, in input order at the end, read by `--resume`."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..checks import refusal
from ..errors import ConfigError
from ..outputs import CompletionOutput, Logprob, RequestOutput
from .jobs import Job
from .lines import hash_of

KEY_CHARS = 16
"""Hexadecimal digits of the key of a run's options, the first half of a record's `resume_key`."""

MIN_LOGPROB = -9999.0
"""Written for logprobs of −∞, which JSON does not have; vLLM and OpenAI write the same."""


def output_record(job: Job, output: RequestOutput, options_key: str) -> dict[str, Any]:
    """Return the JSON object of one finished request of a run with these options."""
    record: dict[str, Any] = {
        "id": job.id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_completion_record(completion) for completion in output.outputs],
        "metrics": {**asdict(output.metrics), "resume_key": f"{options_key}{job.digest:016x}"},
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


def options_key(options: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that stand for all that decides, beside its line, what a result is."""
    text = json.dumps(options, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_CHARS // 2).hexdigest()


class _RecordMetrics(msgspec.Struct, gc=False):
    resume_key: str | None = None


class _RecordHead(msgspec.Struct, gc=False):
    """What a resumed run reads of a record."""

    id: str | int | None = None
    outputs: msgspec.Raw = msgspec.Raw()
    metrics: _RecordMetrics | None = None


_record_head = msgspec.json.Decoder(_RecordHead)


class FinishedRecords:
    """The results that an output file has from earlier runs, by their ids: 36 bytes for each.

    An id is known by 64 bits of its hash, as in `lines.HashTable`.
    """

    def __init__(self, path: Path, options: str):
        """Read the file of a run whose options have the key `options`; there may be none.

        Errors are left out, so that they are tried again; so are a torn last line and any line that is no record. Raise
        ConfigError if the file cannot be read, or holds results of other options.
        """
        self._id_hashes, self._digests = array("Q"), array("Q")
        """Ascending hashes of the ids, and the digest of each result's line."""
        self._offsets, self._lengths = array("q"), array("I")
        self.end = 0
        """Bytes of the file up to the end of its last whole line."""
        try:
            num_strange = self._read(path, options)
        except OSError as error:
            raise ConfigError(f"--resume: {path} cannot be read ({error}); give a readable file") from error
        if num_strange:
            got = f"{path}, with {num_strange} results of other options"
            allowed = "results of this run's model, sampling and chat flags"
            way_out = "give the flags of that run, or another --output"
            raise refusal("--resume", got, allowed, way_out, error=ConfigError)
        order = np.argsort(np.frombuffer(self._id_hashes, np.uint64), kind="stable")
        for numbers in (self._id_hashes, self._digests, self._offsets, self._lengths):
            numbers[:] = array(numbers.typecode, np.asarray(numbers)[order].tobytes())
        self._takers = array("q", bytes(8 * len(order)))
        """The number of the line that has taken each result; 0 for one that is not taken."""

    def _read(self, path: Path, options: str) -> int:
        """Read the results of these options, and return how many there are of others."""
        if not path.exists():
            return 0
        num_strange = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset, self.end = self.end, self.end + len(line)
                if (head := _head(line)) is None or head.id is None or head.metrics is None:
                    continue
                key = head.metrics.resume_key or ""
                try:
                    digest = int(key[KEY_CHARS:], 16)
                except ValueError:
                    digest = None
                if key[:KEY_CHARS] != options or digest is None:
                    num_strange += 1
                    continue
                self._id_hashes.append(hash_of(repr(head.id)))
                self._digests.append(digest)
                self._offsets.append(offset)
                self._lengths.append(len(line))
        return num_strange

    def __len__(self) -> int:
        return len(self._offsets)

    def take(self, id_: str | int, digest: int, number: int) -> int | None:
        """Return the entry of the result of line `number`, which no other line takes then; None if it has none.

        `id_` is the line's id, `digest` its `lines.line_digest`.
        """
        hashes, hash_ = self._id_hashes, hash_of(repr(id_))
        entry = bisect_left(hashes, hash_)
        while entry < len(hashes) and hashes[entry] == hash_:
            if self._digests[entry] == digest and not self._takers[entry]:
                self._takers[entry] = number
                return entry
            entry += 1
        return None

    def taker_of(self, id_: str | int) -> int | None:
        """Return the number of the line with this id whose result was taken; None if there is none."""
        hashes, hash_ = self._id_hashes, hash_of(repr(id_))
        first, end = bisect_left(hashes, hash_), bisect_right(hashes, hash_)
        return next((number for number in self._takers[first:end] if number), None)

    def place(self, entry: int) -> tuple[int, int]:
        """Return the offset and the length of a result in the file, in bytes."""
        return self._offsets[entry], self._lengths[entry]


def _head(line: bytes) -> _RecordHead | None:
    """Return what is read of a record with outputs; None for any other line."""
    try:
        head = _record_head.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # Python takes what msgspec refuses, such as lone surrogates and huge integers.
            record = json.loads(line)
            head = msgspec.convert({name: record[name] for name in ("id", "metrics")}, _RecordHead)
            head.outputs = msgspec.Raw(json.dumps(record["outputs"]).encode())
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
    return head if bytes(head.outputs) not in (b"", b"[]", b"null") else None


class ResultFile:
    """The JSON lines of one run. A record appears whole or not at all, whenever the process is killed.

    Of a record that was written, only its line's number and its place in the file are kept: 20 bytes.
    """

    def __init__(self, path: Path, *, prompt_file: Path | None = None):
        """Check the path; raise ConfigError if it cannot be written. Nothing is created or changed before `start`."""
        is_file = path.is_file() or not path.exists()
        self.path = path.resolve()
        folder = self.path.parent
        if not is_file or (path.exists() and not os.access(path, os.W_OK)):
            way_out = "give another name, or --json to write the lines to stdout"
            raise ConfigError(f"--output: {path} is no regular file that can be written; {way_out}")
        if not path.name or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"--output: {str(path)!r} cannot be written; give a file in an existing, writable folder")
        if path.exists() and prompt_file is not None and prompt_file.exists() and self.path.samefile(prompt_file):
            raise ConfigError(f"--output: {path} is the prompt file; give another name")
        self._descriptor: int | None = None
        self._end = 0
        self._numbers, self._offsets, self._lengths = array("q"), array("q"), array("I")

    def start(self, kept_bytes: int | None) -> None:
        """Open the file for `append`, with its first `kept_bytes` bytes; None for a new file in its place."""
        if kept_bytes is None or not self.path.exists():
            self._replace([])
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._end = kept_bytes or 0
        os.ftruncate(self._descriptor, self._end)

    def append(self, number: int, record: dict[str, Any]) -> None:
        """Write the record of this line's number behind the others."""
        assert self._descriptor is not None, "start comes before append"
        data = dump_line(record).encode() + b"\n"
        self.keep(number, (self._end, len(data)))
        self._end += len(data)
        while data:  # A full disk or a signal may cut a write short.
            data = data[os.write(self._descriptor, data) :]

    def keep(self, number: int, place: tuple[int, int]) -> None:
        """Note that the result of a line lies at this offset of the file, with this length in bytes."""
        self._numbers.append(number)
        self._offsets.append(place[0])
        self._lengths.append(place[1])

    def read(self, place: tuple[int, int]) -> bytes:
        """Return the bytes of a record at this offset, of this length."""
        assert self._descriptor is not None, "start comes before read"
        return os.pread(self._descriptor, place[1], place[0])

    def finish(self) -> None:
        """Replace the file by one with all records in the order of their numbers, in one atomic step."""
        order = np.argsort(np.frombuffer(self._numbers, np.int64), kind="stable")
        self._replace(self.read((self._offsets[entry], self._lengths[entry])) for entry in map(int, order))
        self.close()

    def close(self) -> None:
        """Close the file; appended records stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Write lines to a temporary file and rename it to the path; file permissions stay."""
        mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o666 & ~_umask()
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


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
