"""The products of a chain as their code knows them: what they are compiled for, and where their arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from ..llvm import I64, Code
from ..norms import NormKind
from .groups import Groups, GroupTables, load_block
from .multiplier import Batch, Batches, Multiplier
from .panels import PANEL

ROWS_OF_UNIT = 4
"""Rows that a unit of work packs or norms."""


class HeadShape(NamedTuple):
    """What becomes of the heads in the first outputs of a stage: a norm of each head, then a rotation."""

    size: int
    """Lanes of a head."""
    num_rotated: int
    """Lanes that are rotated, the first ones of a head; 0 for none."""
    norms: tuple[NormKind | None, ...]
    """The norm of the heads in each of these outputs."""

    @property
    def num_vectors(self) -> int:
        """Return how many arrays there are for it: cosines and sines, and the vectors of the norms."""
        return 2 * (self.num_rotated > 0) + sum(norm.num_vectors for norm in self.norms if norm)

    @property
    def name(self) -> str:
        """Return it as part of a handler's name."""
        norms = (f"{norm.name}{norm.eps.hex()}" if norm else "plain" for norm in self.norms)
        return "_".join(["heads", str(self.size), str(self.num_rotated), *norms])


@dataclass(frozen=True)
class Stage:
    """What code is compiled for, of one product of a chain."""

    multiplier: Multiplier
    depth: int
    """K: the columns of the rows that are read."""
    num_results: int
    """Columns of the results: half of those of W if gates are among them."""
    parts: tuple[int, ...] = ()
    """Columns of each output array that the results are split into; empty if they are no outputs."""
    norm: NormKind | None = None
    """The norm of the rows that are read."""
    has_bias: bool = False
    activation: str | None = None
    is_gated: bool = False
    """W's columns are those of gates and then those that are gated: the results are activation(gate) × other."""
    norm_behind: NormKind | None = None
    """The norm of results before they are added to the stream."""
    heads: HeadShape | None = None
    """What becomes of the heads in the first outputs."""
    adds: bool = False
    """The results are added to the stream, which is also what the next product reads."""
    scale: float = 1.0
    """Factor of the results before they are added."""
    num_experts: int = 0
    """Matrices of which each row is multiplied by those that it has chosen; 0 for one that all rows are multiplied by.
    They lie side by side, each with zeros up to whole panels. What is added to the stream is the weighted sum of a
    row's results."""

    def array_shapes(self, num_rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of the float32 arrays that a chain of `num_rows` rows takes behind the panels, in order.

        They are the bias, the vectors of both norms, the cosines and sines, and the vectors of the norms of heads.
        """
        experts = (self.num_experts,) if self.num_experts else ()
        shapes: list[tuple[int, ...]] = [(*experts, self.num_columns)] * self.has_bias
        for norm, size in ((self.norm, self.depth), (self.norm_behind, self.num_results)):
            shapes += [(size,)] * (norm.num_vectors if norm else 0)
        if self.heads is not None:
            shapes += [(num_rows, self.heads.num_rotated // 2)] * (2 if self.heads.num_rotated else 0)
            shapes += [(self.heads.size,)] * sum(norm.num_vectors for norm in self.heads.norms if norm)
        return shapes

    def scratch_shapes(self, num_rows: int, num_packed_rows: int) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of the arrays that a chain writes for itself, in order: see `StageScratch`."""
        shapes = [self.multiplier.packed_shape(num_packed_rows)]
        if self.keeps_results:
            shapes.append(((num_packed_rows, self.num_results), jnp.float32))
        if self.keeps_sums:
            shapes.append(((num_rows, self.num_results), jnp.float32))
        return shapes

    @property
    def keeps_results(self) -> bool:
        """Return whether results wait in memory before they are added to the stream."""
        return self.adds and (self.num_experts > 0 or self.norm_behind is not None)

    @property
    def keeps_sums(self) -> bool:
        """Return whether weighted sums of results wait in memory before they are added to the stream."""
        return self.adds and self.num_experts > 0 and self.norm_behind is not None

    @property
    def num_columns(self) -> int:
        """Return the columns of the results and of what gates them."""
        return self.num_results * (2 if self.is_gated else 1)

    @property
    def num_panels(self) -> int:
        """Return the number of panels of results, of one matrix."""
        return -(-self.num_results // PANEL)

    @property
    def name(self) -> str:
        """Return the stage as part of a handler's name."""
        norms = [
            norm and f"{place}{norm.name}{norm.eps.hex()}"
            for place, norm in (("", self.norm), ("behind_", self.norm_behind))
        ]
        flags = [("bias", self.has_bias), ("gated", self.is_gated), ("adds", self.adds)]
        heads = self.heads and self.heads.name
        set_flags = (name for name, is_set in flags if is_set)
        experts = self.num_experts and f"of{self.num_experts}"
        words = [self.multiplier.name, *norms, self.activation, *set_flags, *self.parts, heads, experts]
        scale = [] if self.scale == 1.0 else [self.scale.hex()]
        return "_".join([f"{self.depth}x{self.num_results}", *(str(word) for word in words if word), *scale])


class Block(NamedTuple):
    """The rows of a unit of a product."""

    batches: Batches
    first_row: ir.Value
    """The packed row that batches count from, int64."""
    num_rows: ir.Value
    """The rows that are cut into batches, int64."""
    expert: ir.Value | None
    """int64; None if all rows are multiplied by one matrix."""

    def batch(self, code: Code, multiplier: Multiplier, index: ir.Value) -> Batch:
        """Return batch `index` of the rows, with its number and its first row among all packed rows."""
        batch = multiplier.batch(code, self.batches, index, self.num_rows)
        if self.expert is None:
            return batch
        first_index = code.build.sdiv(self.first_row, I64(multiplier.max_batch_rows))
        return batch._replace(
            index=code.build.add(index, first_index), first_row=code.build.add(batch.first_row, self.first_row)
        )


class Place(NamedTuple):
    """What a unit of a product multiplies, int64."""

    block: ir.Value
    """The number of its block of rows."""
    panel: ir.Value
    """The number of its panel of results."""
    num_blocks: ir.Value
    """The blocks that are multiplied in turns, panel by panel."""


class StageWeights(NamedTuple):
    """Addresses of the arrays that one stage is given: its stored matrix, and those of `Stage.array_shapes`."""

    matrix: ir.Value
    bias: ir.Value | None
    norm: list[ir.Value]
    norm_behind: list[ir.Value]
    """Vectors of both norms."""
    heads: list[ir.Value]
    """Cosines and sines, float32 [R, rotated lanes ÷ 2], if heads are rotated, then the vectors of their norms."""


class StageScratch(NamedTuple):
    """Addresses of the arrays that one stage writes for itself or for the next one: those of `Stage.scratch_shapes`."""

    packed: ir.Value
    """The rows as the multiplier reads them."""
    results: ir.Value | None
    """float32 [packed rows, results], if something becomes of them before they are added."""
    sums: ir.Value | None
    """float32 [R, results]: weighted sums of results, if they are normed before they are added."""


class ChainData(NamedTuple):
    """Addresses of a chain's arrays, in the order of arguments and results."""

    num_threads: ir.Value
    num_rows: ir.Value
    """R. With experts packed rows are more: one for each choice."""
    groups: Groups | None
    """The choices of the rows, if there are experts."""
    rows: ir.Value
    old_stream: ir.Value | None
    """float32 [R, D], to which the first stage that adds adds."""
    stream: ir.Value | None
    """float32 [R, D]: the stream after that."""
    outputs: list[ir.Value]
    weights: list[StageWeights]
    """Those of each stage."""
    scratch: list[StageScratch]
    """That of each stage."""


class _JobValues:
    """The values of a job, which are taken one after the other."""

    def __init__(self, values: Sequence[ir.Value]) -> None:
        self._values = iter(values)

    def next(self) -> ir.Value:
        """Take the next value."""
        return next(self._values)

    def next_if(self, is_there: bool) -> ir.Value | None:
        """Take the next value if the job has one for this; return None, and take nothing, if it has not."""
        return next(self._values) if is_there else None

    def several(self, count: int) -> list[ir.Value]:
        """Take the next `count` values."""
        return [next(self._values) for _ in range(count)]


def chain_data(stages: Sequence[Stage], values: Sequence[ir.Value]) -> ChainData:
    """Return the values of a job by their names: the number of rows, and the addresses of arguments and results.

    `values` come in the order of the lines below, without those that the stages have no use for. Example: a chain of
    one product with a bias, without experts and without a stream, has the values threads, R, rows, matrix, bias,
    output and packed rows.
    """
    adds, has_experts = any(stage.adds for stage in stages), stages[0].num_experts > 0
    taken = _JobValues(values)
    num_threads = taken.next()
    num_rows = taken.next()
    num_per_row = taken.next_if(has_experts)
    num_blocks = taken.next_if(has_experts)
    # From here on the addresses of the arguments.
    rows = taken.next()
    old_stream = taken.next_if(adds)
    taken.next_if(has_experts)  # The experts of the choices, which only the sort reads.
    factors = taken.next_if(has_experts and adds)
    weights = [_stage_weights(stage, taken) for stage in stages]
    # From here on the addresses of the results, scratch arrays among them.
    stream = taken.next_if(adds)
    outputs = taken.several(len(stages[-1].parts))
    groups: Groups | None = None
    if num_per_row is not None and num_blocks is not None:
        groups = Groups(num_per_row, num_blocks, factors, GroupTables(*taken.several(3)))
    scratch = [_stage_scratch(stage, taken) for stage in stages]
    return ChainData(num_threads, num_rows, groups, rows, old_stream, stream, outputs, weights, scratch)


def _stage_weights(stage: Stage, taken: _JobValues) -> StageWeights:
    """Take the addresses of the arrays that a stage is given, in the order of `StageWeights`."""
    return StageWeights(
        matrix=taken.next(),
        bias=taken.next_if(stage.has_bias),
        norm=taken.several(stage.norm.num_vectors if stage.norm else 0),
        norm_behind=taken.several(stage.norm_behind.num_vectors if stage.norm_behind else 0),
        heads=taken.several(stage.heads.num_vectors if stage.heads else 0),
    )


def _stage_scratch(stage: Stage, taken: _JobValues) -> StageScratch:
    """Take the addresses of the arrays that a stage writes, in the order of `StageScratch`."""
    return StageScratch(
        packed=taken.next(),
        results=taken.next_if(stage.keeps_results),
        sums=taken.next_if(stage.keeps_sums),
    )


@dataclass(frozen=True)
class StageCode:
    """One stage of a chain whose code is being written."""

    code: Code
    stages: Sequence[Stage]
    """All stages of the chain."""
    index: int
    """The number of this one."""
    data: ChainData

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]

    @property
    def weights(self) -> StageWeights:
        """Return the addresses of the arrays that the stage is given."""
        return self.data.weights[self.index]

    @property
    def scratch(self) -> StageScratch:
        """Return the addresses of the arrays that the stage writes."""
        return self.data.scratch[self.index]

    @property
    def following(self) -> StageCode | None:
        """Return the stage behind this one; None behind the last."""
        is_last = self.index + 1 == len(self.stages)
        return None if is_last else StageCode(self.code, self.stages, self.index + 1, self.data)

    @property
    def num_choices(self) -> ir.Value:
        """Return the number of rows that are packed, T × k with experts, those of no expert included."""
        groups, num_rows = self.data.groups, self.data.num_rows
        return num_rows if groups is None else self.code.build.mul(num_rows, groups.num_per_row)

    @property
    def num_blocks(self) -> ir.Value:
        """Return into how many blocks the packed rows are cut."""
        if self.data.groups is not None:
            return self.data.groups.num_blocks
        num_batches = self.stage.multiplier.num_batches(self.code, self.data.num_rows)
        return _ceil_div(self.code, num_batches, self.stage.multiplier.batches_per_block)

    @property
    def num_units(self) -> ir.Value:
        """Return the number of units of the product: a block of rows and a panel each."""
        return self.code.build.mul(self.num_blocks, I64(self.stage.num_panels))

    def place_of(self, unit: ir.Value) -> Place:
        """Return what a unit of the product multiplies.

        Threads take units in their order. As many blocks as there are threads take turns, so that a thread mostly
        stays with one of them: other rows would come from another core's cache. With 2 threads, 3 blocks and 18 panels,
        units 0 … 35 are those of blocks 0 and 1, first both of panel 0, and units 36 … 53 those of block 2. With
        experts, blocks follow one another.
        """
        code, build, num_panels = self.code, self.code.build, I64(self.stage.num_panels)
        if self.data.groups is not None:
            return Place(build.sdiv(unit, num_panels), build.srem(unit, num_panels), I64(1))
        num_threads = self.data.num_threads
        units_of_turns = build.mul(num_panels, num_threads)
        first_block = build.mul(build.sdiv(unit, units_of_turns), num_threads)
        num_blocks = code.min(num_threads, build.sub(self.num_blocks, first_block))
        number = build.srem(unit, units_of_turns)
        block = build.add(first_block, build.srem(number, num_blocks))
        return Place(block, build.sdiv(number, num_blocks), num_blocks)

    def rows_at(self, place: Place) -> Block:
        """Return the rows of a block of the product."""
        code, build, multiplier = self.code, self.code.build, self.stage.multiplier
        if self.data.groups is not None:
            rows = load_block(code, self.data.groups, place.block)
            batches = Batches(I64(0), multiplier.num_batches(code, rows.num_rows))
            return Block(batches, rows.first_row, rows.num_rows, rows.expert)
        first_batch = build.mul(place.block, I64(multiplier.batches_per_block))
        num_batches = multiplier.num_batches(code, self.data.num_rows)
        end_batch = code.min(build.add(first_batch, I64(multiplier.batches_per_block)), num_batches)
        return Block(Batches(first_batch, end_batch), I64(0), self.data.num_rows, None)

    def panels_at(self, place: Place) -> list[ir.Value]:
        """Return the numbers of a unit's panels in the stored array; a gated stage has two, see `Stage.is_gated`."""
        build, stage, groups, panel = self.code.build, self.stage, self.data.groups, place.panel
        if groups is not None:
            expert = load_block(self.code, groups, place.block).expert
            panel = build.add(panel, build.mul(expert, I64(stage.num_panels * (1 + stage.is_gated))))
        return [build.add(panel, I64(first)) for first in (0, stage.num_panels)[: 1 + stage.is_gated]]

    def each_row(self, unit: ir.Value, num_rows: ir.Value, body: Callable[[ir.Value], None]) -> None:
        """Emit `body` for each row of a unit of `ROWS_OF_UNIT` of `num_rows` rows; the last unit may have fewer."""
        code = self.code
        first_row = code.build.mul(unit, I64(ROWS_OF_UNIT))
        code.loop(first_row, code.min(code.build.add(first_row, I64(ROWS_OF_UNIT)), num_rows), body)

    def units_of(self, num_rows: ir.Value) -> ir.Value:
        """Return the number of units of `ROWS_OF_UNIT` rows."""
        return _ceil_div(self.code, num_rows, ROWS_OF_UNIT)


def _ceil_div(code: Code, number: ir.Value, divisor: int) -> ir.Value:
    return code.build.sdiv(code.build.add(number, I64(divisor - 1)), I64(divisor))
