"""The interface of every checkpoint, whatever its format: tensors by their Hugging Face names, a block at a time.

Writers of all formats take `UnsavedTensor`s under the same names, which are made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ModelLoadError

WHOLE = slice(None)
DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that tensors are read and written in."""
COMPARED_VALUES = 1 << 20
"""Values of each of two matrices that are compared at once."""


class Checkpoint(Protocol):
    """The tensors of one checkpoint, with the names and shapes that the model's Hugging Face class gives them."""

    path: Path
    """The directory or the file, which errors name."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors, including those that no model uses."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""

    def dtype(self, name: str) -> str:
        """Return the dtype, of DTYPES, that `read` gives; raise ModelLoadError for a tensor stored as anything else."""

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis and `columns` of the second (both without a step) of a vector or a matrix.

        A tensor [E, R, C] counts as a matrix [E × R, C], and `rows` are some of one of its E matrices, or whole ones.
        `columns` are ignored for a vector. The dtype is the stored one, or float32 for numbers that are stored
        quantized. The array may be a read-only view of the file.
        """

    def files(self) -> list[Path]:
        """Return the paths that tensors are read from: files, and folders whose files are all read."""


class CheckpointView:
    """The tensors of another checkpoint, unchanged; subclasses change what they say of them."""

    def __init__(self, checkpoint: Checkpoint):
        self.path, self._checkpoint = checkpoint.path, checkpoint

    def names(self) -> Collection[str]:
        """Return the names of all tensors, as in `Checkpoint`."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> str:
        """Return the tensor's dtype, as in `Checkpoint`."""
        return self._checkpoint.dtype(name)

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return a block of the tensor, as in `Checkpoint`."""
        return self._checkpoint.read(name, rows, columns)

    def files(self) -> list[Path]:
        """Return the files of the whole checkpoint."""
        return self._checkpoint.files()


class Subtree(CheckpointView):
    """The tensors of a checkpoint whose names begin with `prefix`, under their names without it."""

    def __init__(self, checkpoint: Checkpoint, prefix: str):
        super().__init__(checkpoint)
        self._prefix = prefix

    def names(self) -> Collection[str]:
        """Return the names of all tensors of the subtree."""
        names = self._checkpoint.names()
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(self._prefix + name)

    def dtype(self, name: str) -> str:
        return super().dtype(self._prefix + name)

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        return super().read(self._prefix + name, rows, columns)


@dataclass(frozen=True)
class UnsavedTensor:
    """A tensor that a checkpoint will hold. Its values exist only from a call of `make` on."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], np.ndarray]


def are_equal(
    checkpoint: Checkpoint,
    first: str,
    second: str,
    comparable: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> bool:
    """Return whether the matrices `first` and `second` of a checkpoint, which must have the same shape, are equal.

    They are read and compared in blocks of rows of about COMPARED_VALUES values, and the first block that differs ends
    it. `comparable` turns a block of the first and the same block of the second into the two arrays that are compared,
    for example after a conversion. A NaN in these arrays equals nothing. Matrices without values are equal.
    """
    num_rows, width = checkpoint.shape(first)
    rows_per_block = max(1, COMPARED_VALUES // max(1, width))  # At least one row, however wide.
    # Each thread reads only one of the matrices, because OrbaxCheckpoint caches one decoded tensor per thread.
    with ThreadPoolExecutor(1) as first_reader, ThreadPoolExecutor(1) as second_reader:
        for row in range(0, num_rows, rows_per_block):
            rows = slice(row, row + rows_per_block)
            first_read = first_reader.submit(checkpoint.read, first, rows)
            second_read = second_reader.submit(checkpoint.read, second, rows)
            if not np.array_equal(*comparable(first_read.result(), second_read.result())):
                return False
    return True


def bounds_of(part: slice, size: int) -> tuple[int, int]:
    """Return the start and the stop of a slice of an axis of `size` elements; ValueError for a step.

    Both are clipped to the axis, and an empty slice gives two equal bounds. With `size` 5, the slice 2: gives (2, 5),
    -2:9 gives (3, 5), and 4:1 gives (4, 4).
    """
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError(f"{part}: wanted a range without a step")
    return start, max(start, stop)


def block_of(shape: tuple[int, ...], rows: slice, columns: slice) -> tuple[slice, ...]:
    """Return the index of a block of a tensor, one slice per axis, with its start and stop; a vector has rows only.

    A tensor [E, R, C] counts as a matrix [E × R, C]. A block of it has rows of one of the E matrices, or all rows of
    several: `as_matrix` makes two axes of what the index gives. Raises ValueError for other rows.
    """
    if len(shape) != 3:
        return tuple(slice(*bounds_of(*pair)) for pair in zip((rows, columns), shape, strict=False))
    num_matrices, height, width = shape
    start, stop = bounds_of(rows, num_matrices * height)
    first, first_row = divmod(start, max(1, height))
    last = -(-stop // max(1, height))  # Behind the last matrix.
    of_matrix = slice(first_row, first_row + stop - start)
    if last - first > 1:
        if first_row or stop % height:
            raise ValueError(f"{rows}: wanted rows of one matrix of {height} rows, or whole matrices")
        of_matrix = slice(0, height)
    return slice(first, max(first, last)), of_matrix, slice(*bounds_of(columns, width))


def as_matrix(block: np.ndarray) -> np.ndarray:
    """Return a block of a tensor [E, R, C] as rows [rows, C], and any other as it is."""
    return block.reshape(-1, block.shape[-1]) if block.ndim == 3 else block


def shape_of_rows(shape: tuple[int, ...], *, is_transposed: bool) -> tuple[int, ...]:
    """Return the shape of a tensor as Wᵀ [out, in], or [E, out, in] of all experts; it is stored as W if so."""
    return (*shape[:-2], *shape[:-3:-1]) if is_transposed else shape


def rows_among_experts(rows: slice, expert: int, shape: tuple[int, ...]) -> slice:
    """Return where `rows` of one expert's matrix are among the E × R rows of a tensor of this `shape`, [E, R, C]."""
    first_row = expert * shape[1]
    return slice(first_row + rows.start, first_row + rows.stop, rows.step)


def read_finite(checkpoint: Checkpoint, name: str, rows: slice, *columns: slice) -> np.ndarray:
    """Return a block of a tensor. Raises ModelLoadError, which names it and the rows, for a NaN or an infinity."""
    values = checkpoint.read(name, rows, *columns)
    if not np.isfinite(values).all():
        where = f"rows {rows.start} to {rows.stop - 1}"
        raise ModelLoadError(f"{checkpoint.path}: tensor {name} holds a NaN or an infinity in {where}; fetch it again")
    return values
