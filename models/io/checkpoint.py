"""What every checkpoint offers, whatever its format: tensors by their Hugging Face names, a block at a time.

And what every format's writer takes: tensors by the same names, which are made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

WHOLE = slice(None)


class Checkpoint(Protocol):
    """The tensors of one checkpoint, with the names and shapes that the model's Hugging Face class gives them."""

    path: Path
    """The directory or the file, which errors name."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors, including those that no model uses."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        ...

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis and `columns` of the second (both without a step) of a vector or a matrix.

        In the dtype that the format stores, float32 for numbers that are stored quantized. The array may be a
        read-only view of the file.
        """
        ...


@dataclass(frozen=True)
class UnsavedTensor:
    """A tensor that a checkpoint will hold. Its values exist only from a call of `make` on."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], np.ndarray]


def bounds_of(part: slice, size: int) -> tuple[int, int]:
    """Return the start and the stop of a slice of an axis of `size` elements; ValueError for a step."""
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError(f"{part}: wanted a range without a step")
    return start, max(start, stop)
