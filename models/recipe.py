"""How the tensors of a checkpoint become the weights of a model, and, read backwards to save it, the other way round.

A weight's recipe lists pieces: each is a block of a tensor and its place in the weight. All places are counted in rows
and columns of Wᵀ [out, in], as most checkpoints store a matrix; a vector has rows only. What no piece covers is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config.shares import Run, true_size
from .formats.checkpoint import shape_of_rows
from .sources import Bounds, Source

Path = tuple[Any, ...]
"""Path of a weight in its model, such as ("layers", 3, "mlp", "down_proj", "weight")."""


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

    def rows_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the `shape` of the piece's tensor, counted in Wᵀ: [out, in], or [E, out, in] of all experts."""
        return shape_of_rows(shape, is_transposed=self.is_transposed)

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
    from flax import nnx  # A start whose weights are kept makes no recipes.

    pieces, tensors = dict[Path, tuple[Piece, ...]](), _Tensors(stored_name, frozenset(held))
    for path, leaf in nnx.to_flat_state(state):
        layout = _layout_of(path, leaf)
        parts = list(_parts_of(layout, sources, tensors))
        experts = (None,) if layout.num_experts is None else range(layout.num_experts)
        pieces[path] = tuple(
            piece for expert in experts for part in parts for piece in _pieces_of(part, layout, expert, tensors)
        )
    return Recipes(pieces, tensors.shapes, tensors.stacked)


class _Layout(NamedTuple):
    """The rows and columns of Wᵀ that a weight has, or each expert of it, with padding; a vector has rows only."""

    path: Path
    variable: str
    """What checkpoints call the variable: "weight", "bias" or another name."""
    num_rows: int
    parts: tuple[tuple[str | None, int], ...]
    """Name and number of rows of each part of a fused weight; one part without a name of any other weight."""
    row_runs: Mapping[str | None, tuple[Run, ...]]
    """Name of a part → the runs of its rows; the rows of a part that is not here are all the model's own."""
    column_runs: tuple[Run, ...]
    """The runs of the columns; () for a vector."""
    num_shards: int
    num_experts: int | None
    """Experts of the model whose rows lie one after the other; None for a weight that is not of experts."""

    def module(self, part: str | None) -> Path:
        """Return the path of a part's module, with expert 0 for a weight of experts."""
        module = self.path[:-1] if part is None else (*self.path[:-2], part)
        return module if self.num_experts is None else (*module[:-1], 0, module[-1])


def _layout_of(path: Path, leaf: Any) -> _Layout:
    """Return the layout of the weight `leaf` by its metadata, which `make_recipes` explains."""
    metadata = leaf.get_metadata()
    num_experts = metadata.get("true_experts")
    if "matrix" in metadata:  # Also of the scales of a quantized matrix, made of the same rows and columns.
        num_rows, *widths = metadata["matrix"][::-1]
    elif num_experts is not None:  # Biases [E, out] are counted as one vector.
        num_rows, *widths = (leaf.size,)
    else:
        num_rows, *widths = metadata.get("table", leaf.shape)
    num_rows = metadata.get("rows_of_expert", num_rows)
    return _Layout(
        path=path,
        variable=metadata.get("tensor", path[-1]),
        num_rows=num_rows,
        parts=metadata.get("parts", ((None, num_rows),)),
        row_runs={name: runs for name, runs in metadata.get("rows", ()) if runs},
        column_runs=tuple(metadata.get("columns") or ((0, 0, width) for width in widths)) if widths else (),
        num_shards=metadata.get("num_shards", 1),
        num_experts=num_experts,
    )


class _Part(NamedTuple):
    """A part of a fused weight, or the only one."""

    source: Source
    numbers: dict[str, int]
    """The layer, and 0 for the expert, by the letters that stand for them in names."""
    min_rows: int
    """Rows that its tensor has at least."""
    row_ranges: tuple[_RowRanges, ...]
    """Its rows, in weights of several experts those of the first one."""
    is_transposed: bool
    """Whether its tensor is stored as W [in, out]."""

    def expert_in_tensor(self, expert: int | None) -> int | None:
        """Return which matrix of its tensor is that of an expert; None if the tensor is that of the expert alone."""
        return None if "{e}" in self.source.name else expert


def _parts_of(layout: _Layout, sources: Mapping[str, Source], tensors: _Tensors) -> Iterator[_Part]:
    """Yield the parts of a weight. Within each device's shard of the weight they lie one after the other."""
    part_start = 0
    for name, num_rows in layout.parts:
        source, numbers = _source(sources, layout.module(name))
        source = tensors.held_source(source, layout.variable, numbers)
        runs = layout.row_runs.get(name) or ((0, 0, num_rows),)
        blocks = source.blocks or ((0, true_size(runs)),)  # Without blocks the part is a whole tensor.
        rows_in_shard = num_rows // layout.num_shards
        shards = _ShardRows(part_start, rows_in_shard, layout.num_rows // layout.num_shards)
        ranges = tuple(_cut(blocks, source.step, runs, shards))
        is_transposed = source.is_transposed and bool(layout.column_runs)  # The bias of such a module is a vector.
        yield _Part(source, numbers, max(stop for _, stop in blocks), ranges, is_transposed)
        part_start += rows_in_shard


def _pieces_of(part: _Part, layout: _Layout, expert: int | None, tensors: _Tensors) -> Iterator[Piece]:
    """Yield the pieces of one part, of one expert for a weight of experts, and note their tensor among `tensors`."""
    tensor = tensors.add(part, layout, expert)
    expert_row = (expert or 0) * layout.num_rows
    # For each run of columns, the columns of the tensor and of the weight; nothing of both for a vector.
    columns: list[tuple[tuple[Bounds, ...], tuple[Bounds, ...]]] = [((), ())]
    if layout.column_runs:
        columns = [(((true, true + n),), ((stored, stored + n),)) for stored, true, n in layout.column_runs]
    options = part.is_transposed, part.expert_in_tensor(expert), part.source.step
    for rows in part.row_ranges:
        weight_rows = rows.weight[0] + expert_row, rows.weight[1] + expert_row
        for tensor_columns, weight_columns in columns:
            yield Piece(tensor, (rows.tensor, *tensor_columns), (weight_rows, *weight_columns), *options)


class _Tensors:
    """The tensors that recipes need, as a checkpoint names them."""

    def __init__(self, stored_name: Callable[[str], str], held: frozenset[str]) -> None:
        """`stored_name` gives a tensor's name in the checkpoint, which holds the names `held`."""
        self._stored_name, self._held = stored_name, held
        self.shapes = dict[str, tuple[int, ...]]()
        self.stacked = dict[str, StackedName]()
        """Both as in `Recipes`."""

    def held_source(self, source: Source, variable: str, numbers: Mapping[str, int]) -> Source:
        """Return the first of a source and its others whose tensor the checkpoint holds; the source itself if none is.

        Trees that hold the layers of a kind in one array have names without the layer.
        """
        for each in (source, *source.others) if source.others else ():
            names = (each.tensor(variable, numbers, has_layer=has_layer) for has_layer in (True, False))
            if not self._held.isdisjoint(map(self._stored_name, names)):
                return each
        return source

    def add(self, part: _Part, layout: _Layout, expert: int | None) -> str:
        """Note the shape of the tensor of a part, and its name in stacked trees; return its name in the checkpoint.

        Several parts may be blocks of one tensor, which has as many rows as the last of them needs.
        """
        numbers = part.numbers if expert is None else {**part.numbers, "e": expert}
        name = self._stored_name(part.source.tensor(layout.variable, numbers))
        stacked_name = self._stored_name(part.source.tensor(layout.variable, numbers, has_layer=False))
        experts_axis = () if part.expert_in_tensor(expert) is None else (layout.num_experts or 0,)
        known_rows = self.shapes.get(name, (0, 0, 0))[len(experts_axis) + part.is_transposed]
        widths = (true_size(layout.column_runs),) if layout.column_runs else ()
        shape = (max(known_rows, part.min_rows), *widths)
        self.shapes[name] = *experts_axis, *(shape[::-1] if part.is_transposed else shape)
        self.stacked[name] = StackedName(stacked_name, numbers.get("i"))
        return name


def _source(sources: Mapping[str, Source], module: Path) -> tuple[Source, dict[str, int]]:
    """Return a module's source, and the numbers in its path by `numbers_in`. Raises KeyError if no template matches."""
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
