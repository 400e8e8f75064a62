"""Rows of a weight, read from the tensors of a checkpoint by the weight's recipe: a block of rows at a time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from ..formats.checkpoint import Checkpoint, read_finite, rows_among_experts
from ..recipe import Piece
from ..sources import Bounds


class OrderedPieces:
    """The pieces of a weight in the order of their rows, so that those of some rows are found by bisection.

    Pieces have the same rows, as those of several runs of columns do, or none in common.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.target[0])
        self._starts = [piece.target[0][0] for piece in self._pieces]
        self._stops = [piece.target[0][1] for piece in self._pieces]

    def between(self, first_row: int, end_row: int) -> list[Piece]:
        """Return the pieces that have some of the weight's rows `first_row` to `end_row` − 1."""
        return self._pieces[bisect_right(self._stops, first_row) : bisect_left(self._starts, end_row)]


def read_rows(
    checkpoint: Checkpoint, pieces: OrderedPieces, bounds: tuple[Bounds, ...], max_values: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, values) for the slice `bounds` of a weight, block of rows by block of rows, in order.

    `pieces` are the weight's recipe. `bounds` are (start, stop) of the rows and, for a matrix, of the columns of Wᵀ.
    Each block has at most `max_values` values, but at least one row; `row` is its first row in the weight. Rows and
    columns that no piece covers are zeros. Values are in the tensor's dtype, or float32 where several pieces or zeros
    make up the block. Raises ModelLoadError for a NaN or an infinity. Example: rows 0 to 5 of width 2, pieces for rows
    0 to 3 and 4 to 5, and `max_values` 6 give blocks of the rows 0 to 2, 3, and 4 to 5.
    """
    (first_row, end_row), *column_bounds = bounds
    width = math.prod(stop - start for start, stop in column_bounds)  # A vector has one value per row.
    num_rows = max(1, max_values // max(1, width))  # The inner `max` is for a slice without columns.
    # Edges are the rows at which a piece begins or ends. Between two of them, all rows are covered by the same pieces.
    in_bounds = pieces.between(first_row, end_row)
    edges = {edge for piece in in_bounds for edge in piece.target[0] if first_row < edge < end_row}
    for start, stop in pairwise(sorted({first_row, end_row, *edges})):
        covering = pieces.between(start, stop)
        for row in range(start, stop, num_rows):
            yield row, _read_block(checkpoint, covering, ((row, min(row + num_rows, stop)), *column_bounds))


def _read_block(checkpoint: Checkpoint, pieces: list[Piece], bounds: tuple[Bounds, ...]) -> np.ndarray:
    """Return the slice `bounds` of a weight, whose rows all lie in each of these `pieces`.

    `bounds` are (start, stop) of the rows and, for a matrix, of the columns of Wᵀ. Pieces may still cover only some of
    the columns, or there may be none. If one piece covers the whole slice, the result is what the checkpoint gives,
    without a copy. Otherwise it is a float32 array, which is zero where no piece lies.
    """
    if len(pieces) == 1 and _overlap(pieces[0], bounds) == bounds:
        return _read_piece(checkpoint, pieces[0], bounds)
    values = np.zeros([stop - start for start, stop in bounds], np.float32)
    for piece in pieces:
        if (overlap := _overlap(piece, bounds)) is not None:
            # The overlap is counted in the weight; in `values` it begins where the slice does.
            indices = tuple(
                slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(overlap, bounds, strict=True)
            )
            values[indices] = _read_piece(checkpoint, piece, overlap)
    return values


def _overlap(piece: Piece, bounds: tuple[Bounds, ...]) -> tuple[Bounds, ...] | None:
    """Return the bounds of what a piece covers of the slice `bounds` of a weight; None if that is empty."""
    overlap = tuple(
        (max(piece_bounds[0], slice_bounds[0]), min(piece_bounds[1], slice_bounds[1]))
        for piece_bounds, slice_bounds in zip(piece.target, bounds, strict=True)
    )
    return overlap if all(start < stop for start, stop in overlap) else None


def _read_piece(checkpoint: Checkpoint, piece: Piece, bounds: tuple[Bounds, ...]) -> np.ndarray:
    """Return the values of a piece at the rows and columns `bounds` of the weight, which the piece must cover.

    The result is [rows, columns] of Wᵀ, also for a tensor that is stored transposed. Example: a piece that takes rows
    10 to 14 of its tensor to rows 0 to 4 of the weight reads the tensor's rows 12 and 13 for the weight's rows 2 and 3.
    Raises ModelLoadError, which names the tensor and the rows as it is stored, for a NaN or an infinity.
    """
    rows = piece.rows(*bounds[0])
    axes = [slice(rows.start, rows.stop)]  # Checkpoints read without a step.
    for (start, stop), source, target in zip(bounds[1:], piece.source[1:], piece.target[1:], strict=True):
        axes.append(slice(start + source[0] - target[0], stop + source[0] - target[0]))
    if len(axes) == 3:  # Matrices of experts, of a tensor that is taken as it is.
        experts, *of_matrix = axes
        shape = checkpoint.shape(piece.tensor)
        matrices = [
            read_finite(checkpoint, piece.tensor, rows_among_experts(of_matrix[0], expert, shape), of_matrix[1])
            for expert in range(experts.start, experts.stop)
        ]
        return np.stack(matrices)
    axes = axes[::-1] if piece.is_transposed else axes
    if piece.expert is not None and len(axes) == 1:  # Biases [E, out].
        axes = [slice(piece.expert, piece.expert + 1), *axes]
    elif piece.expert is not None:
        axes[0] = rows_among_experts(axes[0], piece.expert, checkpoint.shape(piece.tensor))
    values = read_finite(checkpoint, piece.tensor, *axes)
    values = values[0] if len(axes) > len(bounds) else values
    return (values.T if piece.is_transposed else values)[:: piece.step]
