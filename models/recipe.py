"""How the tensors of a checkpoint become the weights of a model, and, read backwards to save it, the other way round.

A weight's recipe lists pieces: each is a block of a tensor and its place in the weight. All places are counted in rows
and columns of Wᵀ [out, in], as most checkpoints store a matrix; a vector has rows only. What no piece covers is zero.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """Name of the checkpoint's module; {i} stands for the layer, {e} for an expert. The source of an expert's module
    without {e} in its name is a tensor of all experts, [E, out, in] or, of biases, [E, out]."""
    blocks: tuple[Bounds, ...] | None = None
    """Ranges of the tensor's rows [out] that make up the rows of the part, in order; None for all rows."""
    is_transposed: bool = False
    """Whether the checkpoint stores its matrix as W [in, out]."""
    step: int = 1
    """Distance of the rows of a block: gates in the rows 0, 2, 4 and 6 of 8 are the block (0, 8) with the step 2."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Name of a variable → what follows `name`; a dot and the variable's own name if it is not here."""
    others: tuple[Source, ...] = ()
    """Where other checkpoints keep them: the first one whose tensor a checkpoint holds counts, if it lacks this one."""

    def tensor(self, variable: str, numbers: Mapping[str, int], *, has_layer: bool = True) -> str:
        """Return the usual name of the tensor of a variable, such as "weight"; without its layer if not `has_layer`."""
        template = self.name if has_layer else self.name.replace("{i}.", "")
        return template.format(**numbers) + self.ends.get(variable, f".{variable}")


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, and its place in a weight: bounds of rows and, for a matrix, of columns of Wᵀ."""

    tensor: str
    source: tuple[Bounds, ...]
    target: tuple[Bounds, ...]
    is_transposed: bool = False
    """Whether the tensor is stored as W, so that its axes are swapped."""
    expert: int | None = None
    """The expert whose matrix or vector the block is a part of, in a tensor of all experts; None for other tensors."""
    step: int = 1
    """Distance of the tensor's rows in the block, whose bounds reach from the first row to behind the last one."""

    def rows(self, start: int, stop: int) -> slice:
        """Return which rows of the tensor become the weight's rows `start` to `stop` − 1, with the piece's step."""
        first = self.source[0][0] + (start - self.target[0][0]) * self.step
        return slice(first, first + (stop - start - 1) * self.step + 1, self.step)

    def block_of(self, tensor: Any) -> Any:
        """Return the block of an array of numpy, as a view of it, or of JAX: [rows, columns] of Wᵀ, or rows."""
        values = tensor if self.expert is None else tensor[self.expert]
        steps = self.step, 1  # A scalar has no rows, and a vector no columns.
        block = tuple(slice(*bounds, step) for bounds, step in zip(self.source, steps, strict=False))
        return (values.T if self.is_transposed else values)[block]


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
    state: Any,
    sources: Mapping[str, Source],
    stored_name: Callable[[str], str] = lambda name: name,
    held: Collection[str] = (),
) -> Recipes:
    """Return the recipes of all weights in `state`, an nnx state of arrays or abstract shapes.

    `sources` maps a module's dotted path to its place in checkpoints; in both, {i} stands for the layer and {e} for an
    expert. `stored_name` maps a tensor's usual name to the name in the checkpoint at hand, which holds the names
    `held`: they decide where a source has others.

    A fused weight has several parts, such as queries, keys and values, which are modules of their own in checkpoints.
    The metadata of a variable say how it is laid out: `matrix` is (in, out) of a matrix, `parts` are (name, rows) of a
    fused weight, `num_shards` is the number of devices, and `rows` and `columns` are the runs that the model has, where
    padding surrounds them. A run (stored, true, count) puts `count` rows of the model, from row `true` on, at row
    `stored` of the padded part. The rows of each part are cut so that a piece lies within one block of the tensor, one
    run and one device's shard. A weight of `true_experts` experts has `rows_of_expert` rows for each, one expert after
    the other; biases [E, out] count as one vector. Raises KeyError for a module that `sources` lacks.

    Example: parts k and v of 4 rows each, on 2 devices. The weight has the rows 0 and 1 of k, then of v, then the rows
    2 and 3 of k, then of v. So the recipe is four pieces: rows (0, 2) and (2, 4) of the tensor of k at rows (0, 2) and
    (4, 6) of the weight, and those of the tensor of v at rows (2, 4) and (6, 8).
    """
    pieces: dict[Path, tuple[Piece, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stacked: dict[str, StackedName] = {}
    held = frozenset(held)
    for path, leaf in nnx.to_flat_state(state):
        # A matrix W [in, out] is counted as Wᵀ, so its (in, out) is reversed; tables and vectors are counted as they
        # are. `widths` holds the number of columns, and is empty for a vector, which has rows only.
        metadata = leaf.get_metadata()
        num_experts = metadata.get("true_experts")
        # The scales of a quantized matrix have its metadata, and are made of the same rows and columns.
        is_biases = num_experts is not None and "matrix" not in metadata
        table = (leaf.size,) if is_biases else metadata.get("table", leaf.shape)
        num_rows, *widths = metadata["matrix"][::-1] if "matrix" in metadata else table
        rows_of_expert = metadata.get("rows_of_expert", num_rows)
        variable = metadata.get("tensor", path[-1])
        # A weight without runs has no padding, so one run covers all columns or rows.
        column_runs = metadata.get("columns") or [(0, 0, width) for width in widths]
        tensor_widths = [_true_size(column_runs)] if widths else []
        columns = _column_ranges(column_runs, is_vector=not widths)
        # Parts of a fused weight lie one after the other within each device's shard of the weight.
        parts, num_shards, part_start = list[_Part](), metadata.get("num_shards", 1), 0
        for name, size in metadata.get("parts", ((None, num_rows if num_experts is None else rows_of_expert),)):
            module = path[:-1] if name is None else (*path[:-2], name)
            module = module if num_experts is None else (*module[:-1], 0, module[-1])
            source, numbers = _source(sources, module)
            source = _held_source(source, variable, numbers, stored_name, held)
            runs = dict(metadata.get("rows", ())).get(name) or ((0, 0, size),)
            blocks = source.blocks or ((0, _true_size(runs)),)  # Without blocks the part is a whole tensor.
            shards = _ShardRows(part_start, size // num_shards, rows_of_expert // num_shards)
            row_ranges = tuple(_cut(blocks, source.step, runs, shards))
            parts.append(_Part(source, numbers, max(stop for _, stop in blocks), row_ranges))
            part_start += size // num_shards
        weight_pieces = list[Piece]()
        for expert in (None,) if num_experts is None else range(num_experts):
            first_row = (expert or 0) * rows_of_expert
            for part in parts:
                source, numbers = part.source, part.numbers if expert is None else {**part.numbers, "e": expert}
                tensor = stored_name(source.tensor(variable, numbers))
                # A tree that holds all layers in one array has no layer number in the array's name.
                stacked_name = stored_name(source.tensor(variable, numbers, has_layer=False))
                stacked[tensor] = StackedName(stacked_name, numbers.get("i"))
                is_transposed = source.is_transposed and bool(widths)  # The bias of such a module is a vector.
                # Several parts may be blocks of one tensor, which has as many rows as the last of them needs.
                of_all = expert if "{e}" not in source.name else None
                experts_axis = () if of_all is None else (num_experts,)
                known_rows = shapes.get(tensor, (0, 0, 0))[len(experts_axis) + is_transposed]
                shape = (max(known_rows, part.min_rows), *tensor_widths)
                shapes[tensor] = *experts_axis, *(shape[::-1] if is_transposed else shape)
                for rows in part.row_ranges:
                    weight_rows = rows.weight[0] + first_row, rows.weight[1] + first_row
                    weight_pieces += [
                        Piece(
                            tensor, (rows.tensor, *each.tensor), (weight_rows, *each.weight),
                            is_transposed, of_all, source.step,
                        )
                        for each in columns
                    ]  # fmt: skip
        pieces[path] = tuple(weight_pieces)
    return Recipes(pieces, shapes, stacked)


class _Part(NamedTuple):
    """A part of a fused weight, or the only one."""

    source: Source
    numbers: dict[str, int]
    """The layer, and 0 for the expert, by the letters that stand for them in names."""
    min_rows: int
    """Rows that its tensor has at least."""
    row_ranges: tuple[_RowRanges, ...]
    """Its rows, in weights of several experts those of the first one."""


def _source(sources: Mapping[str, Source], module: Path) -> tuple[Source, dict[str, int]]:
    """Return the source of a module, and the layer and the expert in its path, as `numbers_in` does.

    Raises KeyError if no template in `sources` matches the path.
    """
    for template, source in sources.items():
        if (numbers := numbers_in(template, module)) is not None:
            return source, numbers
    raise KeyError(module)


def _held_source(
    source: Source,
    variable: str,
    numbers: Mapping[str, int],
    stored_name: Callable[[str], str],
    held: frozenset[str],
) -> Source:
    """Return the first of a source and its others whose tensor a checkpoint holds; the source itself if none does.

    Trees that hold the layers of a kind in one array have names without the layer.
    """
    for each in (source, *source.others) if source.others else ():
        names = (each.tensor(variable, numbers, has_layer=has_layer) for has_layer in (True, False))
        if not held.isdisjoint(map(stored_name, names)):
            return each
    return source


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


def _cut(blocks: tuple[Bounds, ...], step: int, runs: tuple[Run, ...], shards: _ShardRows) -> Iterator[_RowRanges]:
    """Yield where the rows of a part go in its weight, cut so that each range lies in one block and one shard.

    `blocks` are the ranges of tensor rows that make up the part, in order, of which it takes one row in `step`. Each
    run (stored, true, count) puts `count` rows of the part, from row `true` on, at row `stored` of the padded part.
    `shards` say where rows of the padded part lie in the weight.

    Example: a part of 4 rows, rows 10 to 13 of its tensor, in 2 shards of 2 part rows that begin at rows 6 and 16 of
    the weight (part_start 6, shard_stride 10): tensor rows 10 and 11 become rows 6 and 7, tensor rows 12 and 13 become
    rows 16 and 17.
    """
    for stored, true, count in runs:
        for start, num_left, offset in _tensor_ranges(blocks, step, true, count):
            part_row = stored + offset
            while num_left > 0:
                shard, row_in_shard = divmod(part_row, shards.part_rows)
                num_rows = min(num_left, shards.part_rows - row_in_shard)
                weight_row = shards.part_start + shard * shards.shard_stride + row_in_shard
                yield _RowRanges((start, start + (num_rows - 1) * step + 1), (weight_row, weight_row + num_rows))
                start, part_row, num_left = start + num_rows * step, part_row + num_rows, num_left - num_rows


def _tensor_ranges(
    blocks: tuple[Bounds, ...], step: int, part_row: int, num_rows: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges of tensor rows that hold the part's rows `part_row` to `part_row` + `num_rows` − 1.

    The part consists of one in `step` of the tensor's rows in `blocks`, one block after the other. Each range is
    (start, rows, offset): `rows` of the part from the tensor's row `start` on, behind `offset` rows in the ranges
    before it. Example: rows 1 to 3 of blocks ((10, 12), (20, 24)) are (11, 1, 0) and (20, 2, 1).
    """
    num_before = 0  # Rows of the part in the blocks before this one.
    for start, stop in blocks:
        rows_of_block = -(-(stop - start) // step)
        first_row = max(part_row, num_before)
        end_row = min(part_row + num_rows, num_before + rows_of_block)
        if first_row < end_row:
            yield start + (first_row - num_before) * step, end_row - first_row, first_row - part_row
        num_before += rows_of_block


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
            read_finite(checkpoint, piece.tensor, of_expert(of_matrix[0], expert, shape), of_matrix[1])
            for expert in range(experts.start, experts.stop)
        ]
        return np.stack(matrices)
    axes = axes[::-1] if piece.is_transposed else axes
    if piece.expert is not None and len(axes) == 1:  # Biases [E, out].
        axes = [slice(piece.expert, piece.expert + 1), *axes]
    elif piece.expert is not None:
        axes[0] = of_expert(axes[0], piece.expert, checkpoint.shape(piece.tensor))
    values = read_finite(checkpoint, piece.tensor, *axes)
    values = values[0] if len(axes) > len(bounds) else values
    return (values.T if piece.is_transposed else values)[:: piece.step]


def of_expert(rows: slice, expert: int, shape: tuple[int, ...]) -> slice:
    """Return rows of an expert's matrix in a tensor [E, R, C] as checkpoints count them: among its E × R rows."""
    first_row = expert * shape[1]
    return slice(first_row + rows.start, first_row + rows.stop, rows.step)


def read_finite(checkpoint: Checkpoint, name: str, rows: slice, *columns: slice) -> np.ndarray:
    """Return a block of a tensor. Raises ModelLoadError, which names it and the rows, for a NaN or an infinity."""
    values = checkpoint.read(name, rows, *columns)
    if not np.isfinite(values).all():
        where = f"rows {rows.start} to {rows.stop - 1}"
        raise ModelLoadError(f"{checkpoint.path}: tensor {name} holds a NaN or an infinity in {where}; fetch it again")
    return values
