"""Rows that choose their matrices: their choices sorted by expert, and cut into the blocks that units of work multiply.

    T rows × k choices ──▶ packed rows, those of one expert side by side ──▶ blocks of rows with one expert each

Only experts that a row has chosen have blocks, so work follows the choices and not the number of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from ..llvm import I32, I64, Code
from .multiplier import Multiplier

BLOCK_WORDS = 3
"""Numbers of a block in memory, int32: its expert, its first packed row, and how many rows it has."""


class GroupShape(NamedTuple):
    """How the rows of experts are packed and cut, for all products of a chain."""

    num_experts: int
    block_rows: int
    """Rows of a block at most."""
    alignment: int
    """The rows of an expert begin at a multiple of it; what is between them may hold anything."""

    def max_packed_rows(self, num_choices: int) -> int:
        """Return how many packed rows `num_choices` choices need at most, whichever experts they are of."""
        return num_choices + min(self.num_experts, num_choices) * (self.alignment - 1)

    def table_shapes(self, num_choices: int) -> list[tuple[int, ...]]:
        """Return the shapes of the int32 tables that `emit_groups` fills: `GroupTables`, in this order."""
        max_blocks = min(self.num_experts, num_choices) + num_choices // self.block_rows
        return [(num_choices,), (self.max_packed_rows(num_choices),), (max_blocks, BLOCK_WORDS)]


def group_shape(num_experts: int, multipliers: Sequence[Multiplier]) -> GroupShape:
    """Return how rows are grouped for a chain of products by these multipliers, of one processor."""
    (batch_rows,) = {multiplier.max_batch_rows for multiplier in multipliers}
    block_rows = batch_rows * min(multiplier.batches_per_block for multiplier in multipliers)
    return GroupShape(num_experts, block_rows, max(multiplier.row_alignment for multiplier in multipliers))


class GroupTables(NamedTuple):
    """Addresses of int32 tables."""

    places: ir.Value
    """The packed row of each choice, −1 for a choice of no expert: [T, k]."""
    choices: ir.Value
    """The choice of each packed row, counted over all rows: row × k + its number among the row's."""
    blocks: ir.Value
    """[blocks, `BLOCK_WORDS`]."""


class Groups(NamedTuple):
    """The choices of a call, sorted."""

    num_per_row: ir.Value
    """k, int64."""
    num_blocks: ir.Value
    """int64."""
    factors: ir.Value | None
    """Address of the factors of results, float32 [T, k], if these are added up."""
    tables: GroupTables


class RowBlock(NamedTuple):
    """Rows that a unit of work multiplies by one expert's matrix. Each field is an int64."""

    expert: ir.Value
    first_row: ir.Value
    num_rows: ir.Value


def load_block(code: Code, groups: Groups, index: ir.Value) -> RowBlock:
    """Return block `index`."""
    start = code.build.mul(index, I64(BLOCK_WORDS))
    return RowBlock(*(code.load_index(groups.tables.blocks, code.build.add(start, I64(i))) for i in range(BLOCK_WORDS)))


def emit_groups(
    code: Code, shape: GroupShape, experts: ir.Value, num_choices: ir.Value, tables: GroupTables
) -> ir.Value:
    """Emit a counting sort of choices by expert, which fills the tables; return the number of blocks.

    `experts` is the address of int32 [T, k]; numbers that are no expert's stand for none. Choices of one expert stay in
    order. Example with at most 2 rows in a block: experts 5, 1, 5, 5 get the packed rows 1, 0, 2, 3, and the blocks
    are (1, 0, 1), (5, 1, 2) and (5, 3, 1).
    """
    build = code.build
    next_rows = code.allocate(I32, shape.num_experts)  # At first the number of choices of each expert.
    code.loop(0, shape.num_experts, lambda expert: code.store(I32(0), next_rows, expert))

    def take_row(expert: ir.Value) -> ir.Value:
        """Count an expert's next row up; return it, int32."""
        row = code.load(next_rows, expert, I32)
        code.store(build.add(row, I32(1)), next_rows, expert)
        return row

    def is_expert(expert: ir.Value) -> ir.Value:
        return build.icmp_unsigned("<", expert, I64(shape.num_experts))

    def count_choice(choice: ir.Value) -> None:
        expert = code.load_index(experts, choice)
        with build.if_then(is_expert(expert)):
            take_row(expert)

    def cut_expert(expert: ir.Value, first_row: ir.Value, first_block: ir.Value) -> list[ir.Value]:
        """Write the blocks of an expert; return the first row and the first block of the next one."""
        num_rows = code.load_index(next_rows, expert)
        code.store(build.trunc(first_row, I32), next_rows, expert)
        num_blocks = build.sdiv(build.add(num_rows, I64(shape.block_rows - 1)), I64(shape.block_rows))

        def write_block(index: ir.Value) -> None:
            row = build.mul(index, I64(shape.block_rows))
            block_rows = code.min(build.sub(num_rows, row), I64(shape.block_rows))
            start = build.mul(build.add(first_block, index), I64(BLOCK_WORDS))
            for offset, word in enumerate((expert, build.add(first_row, row), block_rows)):
                code.store(build.trunc(word, I32), tables.blocks, build.add(start, I64(offset)))

        code.loop(0, num_blocks, write_block)
        aligned_rows = build.and_(build.add(num_rows, I64(shape.alignment - 1)), I64(-shape.alignment))
        return [build.add(first_row, aligned_rows), build.add(first_block, num_blocks)]

    def place_choice(choice: ir.Value) -> None:
        expert = code.load_index(experts, choice)
        code.store(I32(-1), tables.places, choice)
        with build.if_then(is_expert(expert)):
            row = take_row(expert)
            code.store(row, tables.places, choice)
            code.store(build.trunc(choice, I32), tables.choices, build.sext(row, I64))

    code.loop(0, num_choices, count_choice)
    _, num_blocks = code.loop(0, shape.num_experts, cut_expert, carried=[I64(0), I64(0)])
    code.loop(0, num_choices, place_choice)
    return num_blocks
