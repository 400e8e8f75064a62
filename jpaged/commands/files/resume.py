"""Which results of an earlier run a resumed one takes over: those of the same model, options and line.

Each record has a `resume_key` with the keys of both: in the files of `generate` among its metrics, in those of `batch`
as part of its `id`.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...checks import refusal, shown
from ...errors import ConfigError
from .lines import IdTable, id_hash

KEY_CHARS = 16
"""Hexadecimal digits of the key of a run's options, the first half of a `resume_key`."""

_RESUME_KEY = re.compile(f"([0-9a-f]{{{KEY_CHARS}}})([0-9a-f]{{16}})")


def resume_key(options: str, digest: int) -> str:
    """Return the `resume_key` of a result, 32 hexadecimal digits.

    The first half is `options`, the `options_key` of the run; the second is `digest`, the `line_digest` of the line.
    """
    return f"{options}{digest:016x}"


def options_key(options: Mapping[str, Any]) -> str:
    """Return a hash, 16 hexadecimal digits, of the options that results depend on. Key order does not matter."""
    text = json.dumps(options, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_CHARS // 2).hexdigest()


class WrittenRecord(NamedTuple):
    """What a resumed run reads of a line that an earlier run wrote."""

    id: str | int
    resume_key: str
    """Empty for a result that has none."""
    is_result: bool = True
    """False for the error of a request, which runs again."""


ERROR_RECORD = WrittenRecord("", "", is_result=False)


class _RecordMetrics(msgspec.Struct, gc=False):
    resume_key: str | None = None


class _RecordHead(msgspec.Struct, gc=False):
    """What a resumed run reads of a record."""

    id: str | int | None = None
    outputs: msgspec.Raw = msgspec.Raw()
    metrics: _RecordMetrics | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_outputs(self) -> bool:
        """Return whether this is the record of a request that succeeded: with outputs, an id and metrics."""
        outputs = bytes(self.outputs)
        has_items = outputs.startswith(b"[") and outputs != b"[]"
        return has_items and self.id is not None and self.metrics is not None

    @property
    def is_error(self) -> bool:
        """Return whether this is the record of a request that failed: its `error` is a JSON object."""
        return bytes(self.error).startswith(b"{")


_RECORD_HEAD_DECODER = msgspec.json.Decoder(_RecordHead)


class RecordSpan(NamedTuple):
    """Where a record is in an output file, its newline included."""

    offset: int
    num_bytes: int


class FinishedRecords:
    """The results that an output file has from earlier runs, sorted by the hash of their ids: 36 bytes for each.

    Only the `lines.id_hash` of an id is stored. A result's index in this order is called its entry.
    """

    def __init__(self, path: Path, options: str, read: Callable[[bytes], WrittenRecord | None] | None = None):
        """Read the results of an output file; a file that does not exist has none.

        `options` is the `options_key` of the run that resumes. `read` reads one complete line, and returns None for one
        that is no record; by default it is `generated_record`. Error records are left out, so that their requests run
        again. An incomplete last line and lines that are no records are left out too. Raises ConfigError if the file
        cannot be read, or if it holds results of other options or results without a `resume_key`.
        """
        self._id_hashes, self._digests = array("Q"), array("Q")
        """The hash of each result's id, ascending once all are read, and the digest of its line."""
        self._offsets, self._lengths = array("q"), array("I")
        self.end = 0
        """Bytes of the file up to the end of its last complete line."""
        self.num_foreign = 0
        """Complete lines that are neither results nor errors."""
        self._num_of_other_options = self._num_without_key = 0
        try:
            self._read(path, options, read or generated_record)
        except OSError as error:
            raise ConfigError(f"--resume: {path} cannot be read ({error}); give a readable file") from error
        if self._num_without_key:
            got = f"{path}, with {self._num_without_key} results without a resume_key, which earlier versions wrote"
            raise refusal("--resume", got, "results of this version", "give another --output", error=ConfigError)
        if self._num_of_other_options:
            got = f"{path}, with {self._num_of_other_options} results of other options"
            allowed = "results of this run's model, sampling and chat flags"
            way_out = "give the flags of that run, or another --output"
            raise refusal("--resume", got, allowed, way_out, error=ConfigError)
        # All four columns are put in ascending order of the hashes, so that `take` can search by bisection.
        order = np.argsort(np.frombuffer(self._id_hashes, np.uint64), kind="stable")
        for column in (self._id_hashes, self._digests, self._offsets, self._lengths):
            column[:] = array(column.typecode, np.asarray(column)[order].tobytes())
        self._takers = array("q", bytes(8 * len(order)))
        """The number of the line that has taken each result; 0 for one that is not taken."""

    def _read(self, path: Path, options: str, read: Callable[[bytes], WrittenRecord | None]) -> None:
        """Read all complete lines: add the results of these `options` in file order, and count the other lines.

        Sets `end` and the counts of foreign lines, of results without a key and of results of other options. Error
        records are neither added nor counted. Reading stops at a last line without a newline, which is incomplete, so
        that `end` is where it begins. Nothing changes if the file does not exist.
        """
        if not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # The run was killed while it wrote its last line.
                    break
                offset, self.end = self.end, self.end + len(line)
                record = read(line)
                if record is None or not record.is_result:
                    self.num_foreign += record is None  # An error's request runs again.
                    continue
                key = _RESUME_KEY.fullmatch(record.resume_key)
                if key is None:
                    self._num_without_key += 1
                elif key[1] != options:
                    self._num_of_other_options += 1
                else:
                    self._id_hashes.append(id_hash(record.id))
                    self._digests.append(int(key[2], 16))
                    self._offsets.append(offset)
                    self._lengths.append(len(line))

    def __len__(self) -> int:
        return len(self._offsets)

    def take(self, id_: str | int, digest: int, number: int) -> int | None:
        """Assign an unused stored result to line `number`; return the result's index (entry), None without a match.

        A result matches if it has the hash of `id_`, the line's id, and `digest`, the line's `lines.line_digest`. Ids
        with the same hash do no harm: the digest tells lines of different text apart. Entries index parallel arrays
        sorted by hash, so the results with one hash are neighbours. Each result is assigned once. `number` is at least
        1, because 0 in `_takers` marks an unused result.
        """
        hashes, hash_ = self._id_hashes, id_hash(id_)
        entry = bisect_left(hashes, hash_)
        while entry < len(hashes) and hashes[entry] == hash_:
            if self._digests[entry] == digest and not self._takers[entry]:
                self._takers[entry] = number
                return entry
            entry += 1
        return None

    def taker_of(self, id_: str | int) -> int | None:
        """Return the number of the line that has taken a result with this id; None if no line has.

        The results with the hash of the id are the entries from `first` to `end` − 1.
        """
        hashes, hash_ = self._id_hashes, id_hash(id_)
        first, end = bisect_left(hashes, hash_), bisect_right(hashes, hash_)
        return next((number for number in self._takers[first:end] if number), None)  # 0 marks one that is not taken.

    def span(self, entry: int) -> RecordSpan:
        """Return where the result `entry` is in the file."""
        return RecordSpan(self._offsets[entry], self._lengths[entry])


class LineIds:
    """Which ids the lines of a file have had, and which results of an earlier run they take over."""

    def __init__(self, finished: FinishedRecords | None):
        """`finished` are the results of an earlier run, None without `--resume`."""
        self._finished, self._ids = finished, IdTable()
        """The ids of lines without such a result, and their numbers."""

    def finished_entry(self, id_: str | int, digest: int, number: int) -> int | None:
        """Return the index among the earlier results of that for line `number`; None without one.

        The result is marked as taken by this line, so that no other line gets it. `digest` is the `line_digest` of the
        line, which finds no result if the line has changed. Returns None also for an id that an earlier line without a
        result has: `enter` then reports the error.
        """
        if self._finished is None or self._ids.get(id_) is not None:
            return None
        return self._finished.take(id_, digest, number)

    def first_line_with(self, id_: str | int, number: int) -> int:
        """Enter the id of line `number`, and return the number of the first line that has it: this one or another.

        An id whose result was taken over is not entered, since the earlier results know it.
        """
        first = None if self._finished is None else self._finished.taker_of(id_)
        return self._ids.set_default(id_, number) if first is None else first

    def enter(self, id_: str | int, number: int) -> None:
        """Enter the id of line `number`; InvalidRequestError if an earlier line has the same id."""
        if (first := self.first_line_with(id_, number)) != number:
            raise refusal("id", f"{shown(id_)}, which line {first} has too", "an id of its own for each line")


def generated_record(line: bytes) -> WrittenRecord | None:
    """Return what a resumed run reads of a line of `jpaged generate`; None for a line that is no record."""
    head = _decode_head(line)
    if head is not None and head.has_outputs:
        assert head.metrics is not None
        assert head.id is not None
        return WrittenRecord(head.id, head.metrics.resume_key or "")
    return ERROR_RECORD if head is not None and head.is_error else None


def _decode_head(line: bytes) -> _RecordHead | None:
    """Return the fields of an output line that a resumed run needs.

    `outputs` and `error` are kept as JSON text, since only how they begin is asked for. None for a line that is no JSON
    object, or whose `id` or `metrics` have another type than in a record.
    """
    try:
        return _RECORD_HEAD_DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # Python takes what msgspec refuses, such as lone surrogates and huge integers.
            record = json.loads(line)
            raw = {name: msgspec.Raw(json.dumps(record.get(name)).encode()) for name in ("outputs", "error")}
            known = msgspec.convert({name: record.get(name) for name in ("id", "metrics")}, _RecordHead)
            return msgspec.structs.replace(known, **raw)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
