"""How the tensors of a checkpoint become the weights of a model, and, read backwards to save it, the other way round.

A weight's recipe lists pieces: each is a block of a tensor and its place in the weight. All places are counted in rows
and columns of Wᵀ [out, in], as most checkpoints store a matrix; a vector has rows only. What no piece covers is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from .config.shares import Run
from .errors import ModelLoadError
from .formats.checkpoint import Checkpoint

Bounds = tuple[int, int]
"""Start and stop of a range of rows or columns."""
Path = tuple[Any, ...]
"""Path of a weight in its model, such as ("layers", 3, "mlp", "down_proj", "weight")."""


@dataclass(frozen=True)
class Source:
    """Where a checkpoint keeps the weight and the bias of one module, or of one part of a fused module."""

    name: str
    """Name of the checkpoint's module; {i} stands for the layer, {e} for an expert."""
    blocks: tuple[Bounds, ...] | None = None
    """Ranges of the tensor's rows [out] that make up the rows of the part, in order; None for all rows."""
    is_transposed: bool = False
    """Whether the checkpoint stores its matrix as W [in, out]."""


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, and its place in a weight: bounds of rows and, for a matrix, of columns of Wᵀ."""

    tensor: str
    source: tuple[Bounds, ...]
    target: tuple[Bounds, ...]
    is_transposed: bool = False
    """Whether the tensor is stored as W, so that its axes are swapped."""


class StackedName(NamedTuple):
    """The name of a tensor in trees that hold the layers of a kind in one array [L, …]."""

    name: str
    """The tensor's name without the layer's number."""
    layer: int | None
    """The layer's number; None for a tensor that belongs to no layer, which is no part of such an array."""


@dataclass(frozen=True)
class Recipes:
    """The recipes of all weights of a model, and the shapes of the tensors that they are made of."""

    pieces: Mapping[Path, tuple[Piece, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor → its shape in the checkpoint."""
    stacked: Mapping[str, StackedName]
    """Tensor → its name in trees that hold the layers of a kind in one array."""


def make_recipes(
    state: Any, sources: Mapping[str, Source], stored_name: Callable[[str], str] = lambda name: name
) -> Recipes:
    """Return the recipes of all weights in `state`, an nnx state of arrays or abstract shapes.

    `sources` maps a module's dotted path to its place in checkpoints; in both, {i} stands for the layer and {e} for an
    expert. `stored_name` maps a tensor's usual name to the name in the checkpoint at hand.

    A fused weight has several parts, such as queries, keys and values, which are modules of their own in checkpoints.
    The metadata of a variable say how it is laid out: `matrix` is (in, out) of a matrix, `parts` are (name, rows) of a
    fused weight, `num_shards` is the number of devices, and `rows` and `columns` are the runs that the model has, where
    padding surrounds them. A run (stored, true, count) puts `count` rows of the model, from row `true` on, at row
    `stored` of the padded part. The rows of each part are cut so that a piece lies within one block of the tensor, one
    run and one device's shard. Raises KeyError for a module that `sources` lacks.

    Example: parts k and v of 4 rows each, on 2 devices. The weight has the rows 0 and 1 of k, then of v, then the rows
    2 and 3 of k, then of v. So the recipe is four pieces: rows (0, 2) and (2, 4) of the tensor of k at rows (0, 2) and
    (4, 6) of the weight, and those of the tensor of v at rows (2, 4) and (6, 8).
    """
    pieces: dict[Path, tuple[Piece, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stacked: dict[str, StackedName] = {}
    for path, leaf in nnx.to_flat_state(state):
        # A matrix W [in, out] is counted as Wᵀ, so its (in, out) is reversed; tables and vectors are counted as they
        # are. `widths` holds the number of columns, and is empty for a vector, which has rows only.
        metadata = leaf.get_metadata()
        # The scales of a quantized matrix have its metadata, and are made of the same rows and columns.
        is_matrix = "matrix" in metadata
        num_rows, *widths = metadata["matrix"][::-1] if is_matrix else metadata.get("table", leaf.shape)
        tensor_part = metadata.get("tensor", path[-1])
        # A weight without runs has no padding, so one run covers all columns or rows.
        column_runs = metadata.get("columns") or [(0, 0, width) for width in widths]
        tensor_widths = [_true_size(column_runs)] if widths else []
        # Parts of a fused weight lie one after the other within each device's shard of the weight.
        parts, num_shards = metadata.get("parts", ((None, num_rows),)), metadata.get("num_shards", 1)
        weight_pieces = list[Piece]()
        # The experts of a sparse MLP lie one after the other, each as a weight of its own.
        stored_experts = metadata.get("num_experts", 1)
        rows_of_expert = num_rows // stored_experts
        for expert in range(metadata["true_experts"]) if "num_experts" in metadata else (None,):
            part_start, first_row = 0, (expert or 0) * rows_of_expert
            for part, part_rows in parts:
                row_runs = dict(metadata.get("rows", ())).get(part) or ((0, 0, part_rows),)
                module = path[:-1] if part is None else (*path[:-2], part)
                if expert is not None:
                    module = (*module[:-1], expert, module[-1])
                source, numbers = _source(sources, module)
                tensor = stored_name(f"{source.name.format(**numbers)}.{tensor_part}")
                # A tree that holds all layers in one array has no layer number in the array's name.
                stacked_name = stored_name(f"{source.name.replace('{i}.', '').format(**numbers)}.{tensor_part}")
                stacked[tensor] = StackedName(stacked_name, numbers.get("i"))
                blocks = source.blocks or ((0, _true_size(row_runs)),)  # Without blocks the part is a whole tensor.
                is_transposed = source.is_transposed and bool(widths)  # The bias of such a module is a vector.
                # Several parts may be blocks of one tensor, which has as many rows as the last of them needs.
                min_rows = max(stop for _, stop in blocks)
                known_rows = shapes.get(tensor, (0, 0))[1 if is_transposed else 0]
                shape = (max(known_rows, min_rows), *tensor_widths)
                shapes[tensor] = shape[::-1] if is_transposed else shape
                shards = _ShardRows(first_row + part_start, part_rows // num_shards, rows_of_expert // num_shards)
                weight_pieces += [
                    Piece(tensor, (rows.tensor, *columns.tensor), (rows.weight, *columns.weight), is_transposed)
                    for rows in _cut(blocks, row_runs, shards)
                    for columns in _column_ranges(column_runs, is_vector=not widths)
                ]
                part_start += shards.part_rows
        pieces[path] = tuple(weight_pieces)
    return Recipes(pieces, shapes, stacked)


def _source(sources: Mapping[str, Source], module: Path) -> tuple[Source, dict[str, int]]:
    """Return the source of a module, and the layer and the expert in its path, as `numbers_in` does.

    Raises KeyError if no template in `sources` matches the path.
    """
    for template, source in sources.items():
        if (numbers := numbers_in(template, module)) is not None:
            return source, numbers
    raise KeyError(module)


def numbers_in(template: str, module: Path) -> dict[str, int] | None:
    """Return the layer and the expert in a module's path under the keys "i" and "e"; None if the template differs.

    A name of the template must equal the path's part, and {i} and {e} stand for any integer. A template without {i} and
    {e} that matches gives an empty dictionary.

    Example: "layers.{i}.experts.{e}.up_proj" and ("layers", 3, "experts", 7, "up_proj") give {"i": 3, "e": 7}.
    """
    names, numbers = template.split("."), dict[str, int]()
    for name, part in zip(names, module, strict=False):  # Different lengths are found below.
        if isinstance(part, int) and name in ("{i}", "{e}"):
            numbers[name[1:-1]] = part
        elif name != part:
            return None
    return numbers if len(names) == len(module) else None


def _true_size(runs: Iterable[Run]) -> int:
    """Return how many rows or columns the model has, without padding: one more than the last that a run covers."""
    return max(true + count for _, true, count in runs)


class _ShardRows(NamedTuple):
    """Where the rows of one part lie in a weight that holds each device's shard of every part."""

    part_start: int
    """Rows in each shard before the part's rows."""
    part_rows: int
    """Rows of the part in each shard."""
    shard_stride: int
    """Rows of all parts in each shard, which is the distance between the same rows of two shards."""


class _RowRanges(NamedTuple):
    """Rows of a tensor, and the equally many rows of the weight that they become."""

    tensor: Bounds
    weight: Bounds


class _ColumnRanges(NamedTuple):
    """Columns of a tensor, and the equally many columns of the weight that they become; both are () for a vector."""

    tensor: tuple[Bounds, ...]
    weight: tuple[Bounds, ...]


def _column_ranges(runs: Iterable[Run], *, is_vector: bool) -> list[_ColumnRanges]:
    """Return, for each run, the columns of the tensor and of the weight; one empty entry for a vector."""
    if is_vector:
        return [_ColumnRanges((), ())]
    return [_ColumnRanges(((true, true + count),), ((stored, stored + count),)) for stored, true, count in runs]


def _cut(blocks: tuple[Bounds, ...], runs: tuple[Run, ...], shards: _ShardRows) -> Iterator[_RowRanges]:
    """Yield where the rows of a part go in its weight, cut so that each range lies in one block and one shard.

    `blocks` are the ranges of tensor rows that make up the part, in order. Each run (stored, true, count) puts `count`
    rows of the part, from row `true` on, at row `stored` of the padded part. `shards` say where rows of the padded part
    lie in the weight.

    Example: a part of 4 rows, rows 10 to 13 of its tensor, in 2 shards of 2 part rows that begin at rows 6 and 16 of
    the weight (part_start 6, shard_stride 10): tensor rows 10 and 11 become rows 6 and 7, tensor rows 12 and 13 become
    rows 16 and 17.
    """
    for stored, true, count in runs:
        for start, stop, offset in _tensor_ranges(blocks, true, count):
            part_row = stored + offset
            while start < stop:
                shard, row_in_shard = divmod(part_row, shards.part_rows)
                num_rows = min(stop - start, shards.part_rows - row_in_shard)
                weight_row = shards.part_start + shard * shards.shard_stride + row_in_shard
                yield _RowRanges((start, start + num_rows), (weight_row, weight_row + num_rows))
                start, part_row = start + num_rows, part_row + num_rows


def _tensor_ranges(blocks: tuple[Bounds, ...], part_row: int, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges of tensor rows that hold the part's rows `part_row` to `part_row` + `num_rows` − 1.

    The part consists of the tensor's rows in `blocks`, one block after the other. Each range is (start, stop, offset):
    `offset` is the number of rows in the ranges before it. Example: rows 1 to 3 of blocks ((10, 12), (20, 24)) are
    (11, 12, 0) and (20, 22, 1).
    """
    num_before = 0  # Rows of the part in the blocks before this one.
    for start, stop in blocks:
        first_row = max(part_row, num_before)
        end_row = min(part_row + num_rows, num_before + stop - start)
        if first_row < end_row:
            yield start + first_row - num_before, start + end_row - num_before, first_row - part_row
        num_before += stop - start


def read_rows(
    checkpoint: Checkpoint, pieces: tuple[Piece, ...], bounds: tuple[Bounds, ...], max_values: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, values) for the slice `bounds` of a weight, block of rows by block of rows, in order.

    `pieces` are the weight's recipe. `bounds` are (start, stop) of the rows and, for a matrix, of the columns of Wᵀ.
    Each block has at most `max_values` values, but at least one row; `row` is its first row in the weight. Rows and
    columns that no piece covers are zeros. Values are in the tensor's dtype, or float32 where several pieces or zeros
    make up the block. Raises ModelLoadError for a NaN or an infinity. Example: rows 0 to 5 of width 2, pieces for rows
    0 to 3 and 4 to 5, and `max_values` 6 give blocks of the rows 0 to 2, 3, and 4 to 5.
    """
    (first_row, end_row), *column_bounds = bounds
    width = column_bounds[0][1] - column_bounds[0][0] if column_bounds else 1  # A vector has one value per row.
    num_rows = max(1, max_values // max(1, width))  # The inner `max` is for a slice without columns.
    # Edges are the rows at which a piece begins or ends. Between two of them, all rows are covered by the same pieces.
    edges = {edge for piece in pieces for edge in piece.target[0] if first_row < edge < end_row}
    for start, stop in pairwise(sorted({first_row, end_row, *edges})):
        covering = [piece for piece in pieces if piece.target[0][0] <= start and stop <= piece.target[0][1]]
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
    # Added to a row or column of the weight, a shift gives that of the tensor, both counted in Wᵀ.
    shifts = [source[0] - target[0] for source, target in zip(piece.source, piece.target, strict=True)]
    axes = [slice(start + shift, stop + shift) for (start, stop), shift in zip(bounds, shifts, strict=True)]
    values = read_finite(checkpoint, piece.tensor, *(axes[::-1] if piece.is_transposed else axes))
    return values.T if piece.is_transposed else values


def read_finite(checkpoint: Checkpoint, name: str, rows: slice, *columns: slice) -> np.ndarray:
    """Return a block of a tensor. Raises ModelLoadError, which names it and the rows, for a NaN or an infinity."""
    values = checkpoint.read(name, rows, *columns)
    if not np.isfinite(values).all():
        where = f"rows {rows.start} to {rows.stop - 1}"
        raise ModelLoadError(f"{checkpoint.path}: tensor {name} holds a NaN or an infinity in {where}; fetch it again")
    return values
