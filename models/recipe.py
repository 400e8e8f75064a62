"""How the tensors of a checkpoint become weights, and weights tensors: blocks of the ones at places of the others.

A weight's recipe lists pieces. All places are counted in rows and columns of Wᵀ [out, in], as most checkpoints store a
matrix; a vector has rows only. What no piece covers is zero. Reading a recipe backwards saves a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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
    """Name of the checkpoint's module; {i} stands for the layer."""
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


@dataclass(frozen=True)
class Recipes:
    """The recipes of all weights of a model, and the shapes of the tensors that they are made of."""

    pieces: Mapping[Path, tuple[Piece, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor → its shape in the checkpoint."""
    stacked: Mapping[str, tuple[str, int | None]]
    """Tensor → its name without a layer's number, and that number: trees may hold the layers of a kind in one array
    [L, …]. The name itself, and None, for a tensor that belongs to no layer."""


def make_recipes(
    state: Any, sources: Mapping[str, Source], stored_name: Callable[[str], str] = lambda name: name
) -> Recipes:
    """Return the recipes of the weights in `state`, an nnx state of arrays or shapes.

    `sources` maps a module's path to its place in checkpoints; in both, {i} stands for the layer. `stored_name` turns a
    tensor's name into the one that a checkpoint has for it.
    """
    pieces: dict[Path, tuple[Piece, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stacked: dict[str, tuple[str, int | None]] = {}
    for path, leaf in nnx.to_flat_state(state):
        metadata = leaf.get_metadata()
        num_rows, *rest = metadata["matrix"][::-1] if "matrix" in metadata else leaf.shape
        parts, num_shards = metadata.get("parts", ((None, num_rows),)), metadata.get("num_shards", 1)
        column_runs = metadata.get("columns") or [(0, 0, width) for width in rest]
        true_rest = [_true_size(column_runs)] if rest else []
        # Where columns are, in the tensor and in the weight; a vector has none.
        columns = [(((t, t + n),), ((s, s + n),)) for s, t, n in column_runs] if rest else [((), ())]
        first_row, found = 0, []
        for part, size in parts:
            runs = dict(metadata.get("rows", ())).get(part) or ((0, 0, size),)
            module = path[:-1] if part is None else (*path[:-2], part)
            source, layer = _source(sources, module)
            tensor = stored_name(f"{source.name.format(i=layer)}.{path[-1]}")
            stacked[tensor] = stored_name(f"{source.name.replace('{i}.', '')}.{path[-1]}"), layer
            blocks = source.blocks or ((0, _true_size(runs)),)
            is_transposed = source.is_transposed and bool(rest)
            length = max(stop for _, stop in blocks)
            known = shapes.get(tensor, (0, 0))[1 if is_transposed else 0]
            shape = (max(known, length), *true_rest)
            shapes[tensor] = shape[::-1] if is_transposed else shape
            shard_rows = size // num_shards
            for rows, target in _cut(blocks, runs, shard_rows, first_row, num_rows // num_shards):
                found += [Piece(tensor, (rows, *of), (target, *to), is_transposed) for of, to in columns]
            first_row += shard_rows
        pieces[path] = tuple(found)
    return Recipes(pieces, shapes, stacked)


def _source(sources: Mapping[str, Source], module: Path) -> tuple[Source, int | None]:
    """Return the source of a module, and its layer's number, if it is in one."""
    layer = next((part for part in module if isinstance(part, int)), None)
    return sources[".".join("{i}" if isinstance(part, int) else part for part in module)], layer


def _true_size(runs: Iterable[Run]) -> int:
    """Return how many rows or columns the model has, of which these runs say where they are stored."""
    return max(true + count for _, true, count in runs)


def _cut(
    blocks: tuple[Bounds, ...], runs: tuple[Run, ...], shard_rows: int, first: int, stride: int
) -> Iterator[tuple[Bounds, Bounds]]:
    """Yield (rows of the tensor, rows of the weight) for the rows of a part, which the weight holds in shards.

    A weight for several devices holds each device's shard of every part, of `shard_rows` rows: shard i begins at row
    first + i × stride of the weight. `blocks` are the part's rows in the tensor, in order, and `runs` say which of them
    are where in the part as it is stored.
    """
    for stored, true, count in runs:
        for start, stop, offset in _within(blocks, true, count):
            row = stored + offset
            while start < stop:
                index, ahead = divmod(row, shard_rows)
                size = min(stop - start, shard_rows - ahead)
                target = first + index * stride + ahead
                yield (start, start + size), (target, target + size)
                start, row = start + size, row + size


def _within(blocks: tuple[Bounds, ...], first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, offset) for the rows from `first` on of a part whose rows are these blocks of a tensor."""
    done = 0
    for start, stop in blocks:
        low, high = max(first, done), min(first + count, done + stop - start)
        if low < high:
            yield start + low - done, start + high - done, low - first
        done += stop - start


def read_rows(
    checkpoint: Checkpoint, pieces: tuple[Piece, ...], bounds: tuple[Bounds, ...], max_values: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, values) for the slice `bounds` of Wᵀ, or of a vector, in order, at most `max_values` at a time.

    Raises ModelLoadError for a NaN or an infinity.
    """
    (first, last), *rest = bounds
    width = rest[0][1] - rest[0][0] if rest else 1
    num_rows = max(1, max_values // max(1, width))
    edges = {edge for piece in pieces for edge in piece.target[0] if first < edge < last}
    for start, stop in pairwise(sorted({first, last, *edges})):
        covering = [piece for piece in pieces if piece.target[0][0] <= start and stop <= piece.target[0][1]]
        for row in range(start, stop, num_rows):
            yield row, _read_block(checkpoint, covering, ((row, min(row + num_rows, stop)), *rest))


def _read_block(checkpoint: Checkpoint, pieces: list[Piece], bounds: tuple[Bounds, ...]) -> np.ndarray:
    """Return a slice of Wᵀ all rows of which lie in these pieces: one tensor's own values where one piece covers it."""
    if len(pieces) == 1 and _overlap(pieces[0], bounds) == bounds:
        return _read_piece(checkpoint, pieces[0], bounds)
    out = np.zeros([stop - start for start, stop in bounds], np.float32)
    for piece in pieces:
        if (part := _overlap(piece, bounds)) is not None:
            where = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, bounds, strict=True))
            out[where] = _read_piece(checkpoint, piece, part)
    return out


def _overlap(piece: Piece, bounds: tuple[Bounds, ...]) -> tuple[Bounds, ...] | None:
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.target, bounds, strict=True))
    return found if all(start < stop for start, stop in found) else None


def _read_piece(checkpoint: Checkpoint, piece: Piece, bounds: tuple[Bounds, ...]) -> np.ndarray:
    """Return the values of a piece at these rows and columns of the weight, all of which it covers."""
    shifts = [source[0] - target[0] for source, target in zip(piece.source, piece.target, strict=True)]
    axes = [slice(start + shift, stop + shift) for (start, stop), shift in zip(bounds, shifts, strict=True)]
    values = checkpoint.read(piece.tensor, *(axes[::-1] if piece.is_transposed else axes))
    if not np.isfinite(values).all():
        rows = axes[-1 if piece.is_transposed else 0]
        where = f"rows {rows.start} to {rows.stop - 1}"
        raise ModelLoadError(
            f"{checkpoint.path}: tensor {piece.tensor} holds a NaN or an infinity in {where}; fetch it again"
        )
    return values.T if piece.is_transposed else values
