"""The lines of a prompt file or a pipe, read while requests run; and which ids they have had.

Knows bytes, numbers and JSON of lines; no prompt, no request.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import stat
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from ...checks import RepeatedKeyError, refusal, shown, told, unique_keys
from ...errors import ConfigError, InvalidRequestError

READ_BYTES = 1 << 18
"""Bytes that are read at a time, at most."""
STDIN = "-"
"""The name of a prompt file that stands for stdin."""
LineFormat = Literal["txt", "jsonl"]


def line_digest(line: bytes) -> int:
    """Return a 64-bit hash of a line's bytes that is the same in every process, unlike Python's `hash`."""
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest())


def decoded_line(line: bytes) -> str:
    """Return a line as text, without a byte-order mark; InvalidRequestError if it is not UTF-8."""
    try:
        return line.decode("utf-8-sig")  # Some editors begin a file with a byte-order mark.
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"line: is not UTF-8 ({error}); save the file as UTF-8") from error


def json_object(line: str, allowed: str) -> dict[str, Any]:
    """Return the JSON object of a line, whose keys and values are not checked.

    Raise InvalidRequestError if the line is no JSON object, or if the object or one inside it has a key twice.
    `allowed` says what is wanted, such as "an object with one of prompt, messages".
    """
    try:
        record = json.loads(line, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        fault = f"{shown(error.key)}: stands twice in one object; leave one of them out"
        raise InvalidRequestError(fault, param=error.key[:100]) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"line: is not JSON ({error}); give one JSON object per line") from error
    if not isinstance(record, dict):
        raise InvalidRequestError(f"line: got {told(record)}, allowed: {allowed}")
    return record


class LineSource:
    """Lines of a file or a pipe, one after the other. Lines of a pipe need not be there yet."""

    def __init__(self, name: str, *, flag: str = "--prompt-file"):
        """Open a file, or stdin for the name `-`. Errors call it by `flag`.

        Nothing is read yet. `format` is "txt", a prompt per line, if the name ends in .txt, and else "jsonl", a JSON
        object per line, also for pipes. Raises ConfigError if the file cannot be opened, or if it is no pipe and its
        name ends in neither .txt nor .jsonl.
        """
        self.name, self._flag = name, flag
        self._descriptor, self.format = _open(name, flag)
        self.is_pipe = not stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        """Whether it is no regular file, so that reading may have to wait for lines."""
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._lines: deque[bytes] = deque()
        self._parts: list[bytes] = []
        """The beginning of a line whose end has not been read yet."""
        self._is_at_end = False
        self._number = 0
        """The number of the last line that was yielded or skipped."""
        self._wait_s: Callable[[], float | None] = lambda: None

    def wait_for(self, wait_s: Callable[[], float | None]) -> None:
        """Set the function that returns how many seconds to wait when a pipe has no data.

        It is called before each read. If it returns None, the read waits for data or the end of the input; this is also
        the behaviour before the first call of `wait_for`.
        """
        self._wait_s = wait_s

    def __iter__(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield (number, bytes without the line end) for each line that is not blank.

        Numbers begin at 1 and count blank lines too; a second iterator goes on behind the lines of the first. Yields
        None when a wait, limited by `wait_for`, has ended without data. Closes the file at its end. Raises ConfigError
        if a read fails.
        """
        while True:
            if not self._lines:
                if self._is_at_end:
                    break
                if not self._read():
                    yield None
                continue
            self._number += 1
            line = self._lines.popleft()
            if line.strip():
                yield self._number, line.rstrip(b"\r\n")
        self.close()

    def close(self) -> None:
        """Close the file; stdin stays open. A second call does nothing."""
        if self._descriptor > 0:  # 0 is stdin, which this object has not opened.
            os.close(self._descriptor)
        self._descriptor, self._is_at_end = -1, True

    def _read(self) -> bool:
        """Read up to READ_BYTES into `_lines` and `_parts`; return False if the wait has ended without data.

        Complete lines go to `_lines`, without their newline, and the beginning of the next line to `_parts`. At the end
        of the input `_is_at_end` is set, and what `_parts` holds becomes the last line. Example: after b"ab" and
        b"c\nd", `_lines` has b"abc" and `_parts` b"d". Raises ConfigError if the read fails.
        """
        wait_s = self._wait_s()
        try:
            # `poll` takes milliseconds; None waits without a limit.
            if not self._poll.poll(None if wait_s is None else wait_s * 1000):
                return False
            data = os.read(self._descriptor, READ_BYTES)
        except OSError as error:
            raise ConfigError(f"{self._flag}: {self.name} cannot be read ({error}); give a readable file") from error
        # An empty read is the end. If `_parts` is empty then, so is the last line, and `__iter__` skips it as blank.
        self._is_at_end = not data
        *lines, rest = data.split(b"\n")
        if lines or self._is_at_end:  # The line that `_parts` has begun ends here.
            self._parts.append(lines[0] if lines else b"")
            self._lines.append(b"".join(self._parts))
            self._lines.extend(lines[1:])
            self._parts.clear()
        if rest:
            self._parts.append(rest)
        return True


def stat_of(name: str) -> os.stat_result | None:
    """Return the `stat` of a prompt file, or of stdin for `-`; None if it cannot be had."""
    try:
        return os.fstat(0) if name == STDIN else os.stat(name)
    except OSError:
        return None


def _open(name: str, flag: str) -> tuple[int, LineFormat]:
    """Open a prompt file, or stdin for `-`; return its descriptor (0 for stdin) and the format of its lines.

    Stdin, FIFOs and paths below /dev, such as /dev/fd/63, may have any name. Raises ConfigError if the name of another
    file ends in neither .txt nor .jsonl, or if the file cannot be opened.
    """
    path = Path(name)
    if name == STDIN and sys.stdin is None:
        raise refusal(flag, "-, and stdin is closed", "a file or an open pipe", error=ConfigError)
    is_pipe = name == STDIN or path.is_fifo() or path.is_relative_to("/dev")
    if path.suffix not in (".txt", ".jsonl") and not is_pipe and not path.is_dir():
        allowed = "a name ending in .txt or .jsonl, or a pipe of JSON lines"
        raise refusal(flag, shown(name), allowed, error=ConfigError)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{name} is a directory")
        descriptor = 0 if name == STDIN else os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{flag}: {name} cannot be read ({error}); give a readable file") from error
    return descriptor, "txt" if path.suffix == ".txt" else "jsonl"


def id_hash(id_: str | int) -> int:
    """Return a 64-bit hash of an id, valid only within this process; the integer 2 and the string "2" differ.

    The hash is never 0, which marks an empty slot of IdTable. Among a million ids, the probability that any two have
    the same hash is 3e-8.
    """
    return hash(repr(id_)) & 0xFFFFFFFFFFFFFFFF or 1  # `hash` is signed; the mask makes it unsigned, as array "Q".


class IdTable:
    """Maps ids to line numbers in 24 to 48 bytes per entry; a dictionary would take over 100.

    It is a hash table with linear probing in two arrays. It stores only the `id_hash` of an id, not the id itself.
    """

    def __init__(self) -> None:
        self._num_entries = 0
        self._clear(1 << 10)

    def _clear(self, num_slots: int) -> None:
        """Make all slots empty. Their number must be a power of two: `_slot` masks with it."""
        self._hashes, self._values = array("Q", bytes(8 * num_slots)), array("q", bytes(8 * num_slots))

    def __len__(self) -> int:
        return self._num_entries

    def get(self, id_: str | int) -> int | None:
        """Return the line number of an id; None if the table does not have the id."""
        slot = self._slot(hash_ := id_hash(id_))
        return self._values[slot] if self._hashes[slot] == hash_ else None

    def set_default(self, id_: str | int, value: int) -> int:
        """Return the line number of an id; if the table does not have the id, enter it with `value` and return that.

        The table doubles when more than two thirds of its slots are taken.
        """
        hash_ = id_hash(id_)
        slot = self._slot(hash_)
        if self._hashes[slot] == hash_:
            return self._values[slot]
        self._hashes[slot], self._values[slot] = hash_, value
        self._num_entries += 1
        if 3 * self._num_entries > 2 * len(self._hashes):  # Linear probing becomes slow above two thirds.
            self._grow()
        return value

    def _slot(self, hash_: int) -> int:
        """Return the slot that holds a hash, or the empty slot where it would be put."""
        hashes, mask = self._hashes, len(self._hashes) - 1
        slot = hash_ & mask
        while hashes[slot] and hashes[slot] != hash_:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        """Double the number of slots and enter all hashes again, since a hash's slot depends on their number."""
        hashes, values = self._hashes, self._values
        self._clear(2 * len(hashes))
        for hash_, value in zip(hashes, values, strict=True):
            if hash_:
                slot = self._slot(hash_)
                self._hashes[slot], self._values[slot] = hash_, value
