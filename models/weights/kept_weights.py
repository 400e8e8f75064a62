"""Weights kept on disk as an engine on a CPU holds them: a later start reads the file and converts nothing.

A file has the arrays one after the other, in the order of the model's leaves, then a sum of each chunk, and a checksum
of these sums. Its name is a hash of what its bytes depend on: the model's files and config, how the engine stores
weights, our code, and the packages that read and convert.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, NamedTuple

import jax
import numpy as np

from ...pallas_kernels.kept_files import hash_of_sources, new_file
from .weight_memory import ALIGNMENT, NUM_READERS, WeightMemory
from .weight_state import flat_state, state_of
from .weights import Weights

logger = logging.getLogger("jpaged")

CHUNK_BYTES = 4 << 20
"""Bytes that are read and summed at once."""
MIN_BYTES = 64 << 20
"""Smaller weights are not kept: they are converted in less time than a file takes to be found useful."""
MAX_BYTES = 8 << 30
"""Bytes of all kept weights of a directory together; those that were used longest ago are removed."""
FREE_SHARE = 2
"""A file is written if the disk has this many times as many bytes."""
SUM_BYTES, CHECKSUM_BYTES = 8, 32
PREFIX = "weights_"
"""How the names of these files begin; others in the directory are left alone."""
PACKAGES = "jaxlib", "ml_dtypes", "numpy", "gguf", "safetensors"
"""Packages that read and convert weights."""
_SOURCES_HASH = hash_of_sources("jpaged.models", "jpaged.pallas_kernels")


class _Chunk(NamedTuple):
    """Part of an array, and where it is in the file."""

    array: int
    """The array's number."""
    start: int
    """The first byte within the array."""
    num_bytes: int
    offset: int
    """The first byte within the file."""


class FileState(NamedTuple):
    """A file as it was opened: these numbers change whenever its content may have changed.

    The time of the last change of an inode cannot be set by programs, as that of its content can.
    """

    path: Path
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def file_states(files: Sequence[Path]) -> tuple[FileState, ...]:
    """Return the state of each file; nothing if one of them is a folder, whose files may change beside it, or gone."""
    states = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            return ()
        if not stat.S_ISREG(found.st_mode):
            return ()
        numbers = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        states.append(FileState(file, *numbers))
    return tuple(states)


class KeptWeights:
    """The weights of one model for one engine, in a file that may not exist yet."""

    def __init__(self, directory: Path, abstract: Weights, files: Sequence[FileState], identity: str) -> None:
        """Name the file in a `directory` that exists.

        `abstract` has the shapes of the weights, all on one CPU device. `files`, at least one, are those that the
        weights are read from, as they were when the model was opened. `identity` says how the engine stores weights.
        """
        self._files = files
        self._abstract, self._leaves = abstract, flat_state(abstract.state)
        sizes = [leaf.size * leaf.dtype.itemsize for _, leaf in self._leaves]
        self._chunks = list(_chunks(sizes))
        self.num_bytes = sum(chunk.num_bytes for chunk in self._chunks)
        """Bytes of all arrays together."""
        shapes = [
            (path, leaf.shape, str(leaf.dtype), *map(leaf.get_metadata().get, ("code_parts", "decoded_dtype", "held")))
            for path, leaf in self._leaves
        ]
        versions, states = [version(package) for package in PACKAGES], [file[1:] for file in files]
        parts = _SOURCES_HASH, versions, identity, shapes, states
        self.path = directory / f"{PREFIX}{hashlib.sha256(repr(parts).encode()).hexdigest()}"

    def load(self, progress: Callable[[int, int], None] | None = None) -> Weights | None:
        """Return the kept weights; None if the file is not there, or, with a line in the log, if it is torn.

        `progress(done, total)`, if given, is called with the numbers of chunks.
        """
        try:
            with self.path.open("rb") as file:
                os.utime(self.path)  # It is used now: `write` removes others first.
                arrays = self._read(file, progress)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("weights: the kept file cannot be used, the model's files are converted again: %s", error)
            return None
        made = {
            path: leaf.replace(_on_device(array, leaf.sharding))
            for (path, leaf), array in zip(self._leaves, arrays, strict=True)
        }
        return replace(self._abstract, state=state_of(made))

    def write(self, weights: Weights) -> None:
        """Keep weights of this model; a fault leaves a line in the log.

        Weights of other sizes than MIN_BYTES to MAX_BYTES are not kept, nor are those of files that have changed since
        the model was opened.
        """
        directory = self.path.parent
        if not MIN_BYTES <= self.num_bytes <= MAX_BYTES:
            sizes = self.num_bytes / 1e9, MIN_BYTES / 1e9, MAX_BYTES / 1e9
            logger.info("weights: %.3g GB are not kept, only %.3g to %.3g GB are", *sizes)
            return
        if file_states([file.path for file in self._files]) != tuple(self._files):
            logger.info("weights: not kept, the model's files have changed since they were opened")
            return
        try:
            _remove_oldest(directory, MAX_BYTES - self.num_bytes)
            if shutil.disk_usage(directory).free < FREE_SHARE * self.num_bytes:
                raise OSError(f"{directory} has no room for {self.num_bytes / 1e9:.3g} GB")
            with new_file(self.path) as file:
                self._write(file, [np.asarray(leaf[...]) for _, leaf in flat_state(weights.state)])
        except OSError as error:
            logger.warning("weights: not kept, each start converts the model's files anew: %s", error)

    def _read(self, file: IO[bytes], progress: Callable[[int, int], None] | None) -> list[np.ndarray]:
        """Return the arrays, read into large pages; ValueError if a checksum does not match.

        Pages of a file that is mapped lie in memory as they happened to be read: steps took up to a third longer.
        """
        end = max((chunk.offset + _padded(chunk.num_bytes) for chunk in self._chunks), default=0)
        trailer_bytes = len(self._chunks) * SUM_BYTES + CHECKSUM_BYTES
        if os.fstat(file.fileno()).st_size != end + trailer_bytes:
            raise ValueError(f"{self.path} is torn")
        trailer = os.pread(file.fileno(), trailer_bytes, end)
        sums, checksum = trailer[:-CHECKSUM_BYTES], trailer[-CHECKSUM_BYTES:]
        if checksum != hashlib.sha256(sums).digest():
            raise ValueError(f"{self.path} is torn")
        memory = WeightMemory()
        arrays = [memory.allocate(leaf.shape, leaf.dtype) for _, leaf in self._leaves]

        def read(chunk: _Chunk, wanted_sum: int) -> None:
            part, num_read = _part(arrays, chunk), 0
            # A file system may give fewer bytes than are asked for; at the end of the file it gives none.
            while num_new := os.preadv(file.fileno(), [part.data[num_read:]], chunk.offset + num_read):
                num_read += num_new
            if num_read != chunk.num_bytes or _sum(part) != wanted_sum:
                raise ValueError(f"{self.path} is torn at byte {chunk.offset}")

        with ThreadPoolExecutor(NUM_READERS) as readers:
            results = readers.map(read, self._chunks, np.frombuffer(sums, np.uint64).tolist())
            for num_done, _ in enumerate(results, 1):
                if progress is not None:
                    progress(num_done, len(self._chunks))
        return arrays

    def _write(self, file: IO[bytes], arrays: Sequence[np.ndarray]) -> None:
        """Write the arrays, the sums of their chunks and the checksum of these."""
        sums = []
        for chunk in self._chunks:
            part = _part(arrays, chunk)
            file.write(part.data)
            file.write(bytes(_padded(len(part)) - len(part)))
            sums.append(_sum(part))
        trailer = np.array(sums, np.uint64).tobytes()
        file.write(trailer + hashlib.sha256(trailer).digest())


def _on_device(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return an array of JAX that lies in the memory of a numpy array."""
    return jax.make_array_from_callback(array.shape, sharding, lambda _: array)


def _chunks(sizes: Sequence[int]) -> Iterator[_Chunk]:
    """Yield the chunks of arrays of these sizes in bytes; each begins in the file at a multiple of ALIGNMENT."""
    offset = 0
    for array, size in enumerate(sizes):
        for start in range(0, size, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, size - start)
            yield _Chunk(array, start, num_bytes, offset)
            offset += _padded(num_bytes)


def _part(arrays: Sequence[np.ndarray], chunk: _Chunk) -> np.ndarray:
    """Return a view of the bytes of a chunk."""
    return arrays[chunk.array].reshape(-1).view(np.uint8)[chunk.start : chunk.start + chunk.num_bytes]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _sum(data: np.ndarray) -> int:
    """Return the sum of the 64-bit words of some bytes, modulo 2⁶⁴: numpy adds as fast as memory is read."""
    num_whole = len(data) // 8 * 8
    total = int(data[:num_whole].view(np.uint64).sum(dtype=np.uint64)) + int.from_bytes(data[num_whole:].tobytes())
    return total % (1 << 64)


def _remove_oldest(directory: Path, max_bytes: int) -> None:
    """Remove the kept weights of a directory that were used longest ago, until the others have at most `max_bytes`.

    Files that other processes are writing, or have left unfinished, count as kept weights.
    """
    found = []
    for file in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # Another process may have removed it.
            found.append((file, file.stat()))
    newest_first = sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True)
    totals = itertools.accumulate(status.st_size for _, status in newest_first)
    for (file, _), total in zip(newest_first, totals, strict=True):
        if total > max_bytes:
            with contextlib.suppress(OSError):
                file.unlink()
