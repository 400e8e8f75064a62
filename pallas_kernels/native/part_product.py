"""Products of float32 by the matrix unit for bfloat16 (AMX), by three exact parts.

A float32 has 24 bits. Cut off 8 at a time, each part is a bfloat16 without rounding: x = x₁ + x₂ + x₃, with x₁ the
upper half of its word, x₂ that of x − x₁, and x₃ the rest. Six products of tiles are summed in float32:

    x·w = x₃w₁ + x₂w₁ + x₂w₂ + x₁w₂ + x₁w₃ + x₁w₁        what is left out is below 2⁻²² of |x||w|

which is nearer to the exact sum than float32 products that are added one by one. Weights stay float32 in memory. A
panel is cut into parts as its first batch of rows is multiplied, and further batches find the parts in the level-2
cache. Infinities become NaN (∞ − ∞), in their own rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from .amx import TILE, TILE_BYTES, Matrix, MatrixUnit, Tiles
from .llvm import F32, I16, I32, I64, Code, constant
from .multiplier import Batch, Batches, Panel
from .panels import DEPTH, PANEL
from .tile_product import MAX_BLOCK_BYTES, MAX_BLOCK_ROWS, by_tiles

PARTS = 3
TILE_SIZE = TILE * TILE_BYTES
"""Bytes of a tile of one part."""
STEP_BYTES = PARTS * 2 * TILE_SIZE
"""Bytes of the parts of 32 values of K of a panel: for each part two tiles of 16 columns."""
MAX_STEPS_PER_BLOCK = 24
"""Blocks of K have at most this many steps of 32 values: a panel's parts take 144 KiB of a thread's stack."""
UPPER_HALF = -1 << 16


class PartTools(NamedTuple):
    """What a unit of work has for one panel."""

    matrix_unit: MatrixUnit
    parts: ir.Value
    """Address of the parts of a block of the panel: [steps, parts, 2 halves, 16 pairs of K, 16 columns, 2]."""


@dataclass(frozen=True)
class PartMultiplier:
    """Multiplies float32 by tiles of its parts. See `Multiplier` for the methods."""

    depth: int
    """K."""

    @property
    def name(self) -> str:
        return "parts"

    @property
    def num_steps(self) -> int:
        """Return how many steps of 32 values go over K."""
        return -(-self.depth // DEPTH)

    @property
    def steps_per_block(self) -> int:
        """Return the steps of a block of K; the last block may have fewer."""
        return -(-self.num_steps // self.num_depth_blocks)

    @property
    def max_batch_rows(self) -> int:
        return 2 * TILE

    @property
    def batches_per_block(self) -> int:
        max_rows = min(MAX_BLOCK_ROWS, MAX_BLOCK_BYTES // (2 * PARTS * DEPTH * self.num_steps))
        return max(1, max_rows // self.max_batch_rows)

    @property
    def num_depth_blocks(self) -> int:
        return -(-self.num_steps // MAX_STEPS_PER_BLOCK)

    @property
    def pads_depth(self) -> bool:
        return True

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        return (-(-num_rows // TILE), self.num_steps, PARTS, TILE, DEPTH), jnp.bfloat16

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        build, add, mul = code.build, code.build.add, code.build.mul
        step = add(mul(build.udiv(row, I64(TILE)), I64(self.num_steps)), build.udiv(column, I64(DEPTH)))
        in_tile = add(mul(build.urem(row, I64(TILE)), I64(DEPTH)), build.urem(column, I64(DEPTH)))
        bits_type, half_type = (ir.VectorType(type_, values.type.count) for type_ in (I32, I16))
        for part, words in enumerate(_parts(code, values)):
            upper = build.trunc(build.lshr(words, constant(bits_type, 16)), half_type)
            tile = add(mul(step, I64(PARTS)), I64(part))
            code.store_vector(upper, rows, add(mul(tile, I64(TILE * DEPTH)), in_tile))

    def num_batches(self, code: Code, num_rows: ir.Value) -> ir.Value:
        return code.build.sdiv(code.build.add(num_rows, I64(self.max_batch_rows - 1)), I64(self.max_batch_rows))

    def batch(self, code: Code, batches: Batches, index: ir.Value, num_rows: ir.Value) -> Batch:
        first_row = code.build.mul(index, I64(self.max_batch_rows))
        batch_rows = code.min(code.build.sub(num_rows, first_row), I64(self.max_batch_rows))
        return batches.batch(code, index, first_row, batch_rows)

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return code.build.gep(panels, [code.build.mul(index, I64(4 * PANEL * self.depth))])

    def begin(self, code: Code) -> PartTools:
        matrix_unit = MatrixUnit(code)
        matrix_unit.configure()
        return PartTools(matrix_unit, code.allocate(I32, self.steps_per_block * STEP_BYTES // 4))

    def end(self, code: Code) -> None:
        MatrixUnit(code).release()

    def multiply(
        self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value
    ) -> None:
        """See `Multiplier.multiply`. The first batch cuts the panel into parts, each step just before it is multiplied.

        A unit's only batch needs no parts again: those of each step take the place of the ones before, in the level-1
        cache.
        """
        build, mul, tools = code.build, code.build.mul, panel.tools
        first_step = mul(block, I64(self.steps_per_block))
        end_step = code.min(build.add(first_step, I64(self.steps_per_block)), I64(self.num_steps))
        tile_rows_bytes = self.num_steps * PARTS * TILE_SIZE
        first_tiles = build.gep(rows, [mul(batch.index, I64(2 * tile_rows_bytes))])
        kept_bytes = build.select(batch.is_only, I64(0), I64(STEP_BYTES))

        def multiply_step(step: ir.Value, num_tiles: int, cuts_panel: bool) -> None:
            parts = build.gep(tools.parts, [mul(build.sub(step, first_step), kept_bytes)])
            if cuts_panel:
                self._cut_step(code, panel, step, parts)
            rows_of_step = build.gep(first_tiles, [mul(step, I64(PARTS * TILE_SIZE))])
            # Tile i of part p, and the two tiles of part p: a part is a step of these.
            a = Tiles(rows_of_step, I64(TILE_BYTES), I64(tile_rows_bytes), I64(TILE_SIZE))
            b = Tiles(parts, I64(TILE_BYTES), I64(TILE_SIZE), I64(2 * TILE_SIZE))
            row_part, column_part = None, None
            # Small products first; each pair shares a part with the one before.
            for new_row_part, new_column_part in ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)):
                if new_row_part != row_part:
                    tools.matrix_unit.load_rows(a, num_tiles, I64(new_row_part))
                if new_column_part != column_part:
                    tools.matrix_unit.load_columns(b, I64(new_column_part))
                tools.matrix_unit.add_products(num_tiles)
                row_part, column_part = new_row_part, new_column_part

        def multiply_tiles(num_tiles: int) -> None:
            c = Matrix(sums, I64(4 * PANEL))
            if self.num_depth_blocks == 1:
                tools.matrix_unit.clear_sums(num_tiles)
            else:
                with build.if_else(build.icmp_signed("==", block, I64(0))) as (is_new, is_begun):
                    with is_new:
                        tools.matrix_unit.clear_sums(num_tiles)
                    with is_begun:
                        tools.matrix_unit.load_sums(c, num_tiles)
            with build.if_else(batch.is_first) as (first, other):
                for branch, cuts_panel in ((first, True), (other, False)):
                    with branch:
                        body = lambda step, cuts=cuts_panel: multiply_step(step, num_tiles, cuts)  # noqa: E731
                        code.loop(first_step, end_step, body)
            tools.matrix_unit.store_sums(c, num_tiles)

        by_tiles(code, batch, multiply_tiles)

    def _cut_step(self, code: Code, panel: Panel, step: ir.Value, parts: ir.Value) -> None:
        """Emit the cut of 32 values of K of a panel into parts, in pairs of K, and the prefetch of the panel ahead.

        If K is no multiple of 32, the last step has fewer values, and zeros take the place of the others.
        """
        build, add, mul = code.build, code.build.add, code.build.mul
        first_value = mul(step, I64(DEPTH))

        def load(value: ir.Value, half: int) -> ir.Value:
            """Return 16 columns of a row of the panel, zeros behind the last row."""
            if self.depth % DEPTH == 0:
                return code.load_vector(panel.begin, add(mul(value, I64(PANEL)), I64(TILE * half)), F32, TILE)
            is_there = build.icmp_signed("<", value, I64(self.depth))
            row = build.select(is_there, value, I64(0))
            loaded = code.load_vector(panel.begin, add(mul(row, I64(PANEL)), I64(TILE * half)), F32, TILE)
            return build.select(is_there, loaded, constant(loaded.type, 0.0))

        def cut_pair(pair: ir.Value) -> None:
            value = add(first_value, mul(pair, I64(2)))
            code.prefetch(panel.ahead, mul(value, I64(PANEL)), F32, 2 * PANEL)
            for half in range(2):
                pair_parts = [_parts(code, load(row, half)) for row in (value, add(value, I64(1)))]
                for part, (first, second) in enumerate(zip(*pair_parts, strict=True)):
                    words_type = first.type
                    lower = build.lshr(first, constant(words_type, 16))
                    words = build.or_(lower, build.and_(second, constant(words_type, UPPER_HALF)))
                    offset = add(mul(pair, I64(TILE)), I64((2 * part + half) * TILE_SIZE // 4))
                    code.store_vector(words, parts, offset)

        code.loop(0, TILE, cut_pair)


def _parts(code: Code, values: ir.Value) -> list[ir.Value]:
    """Return the three parts of a float32 vector as words, whose upper halves are the bfloat16 numbers.

    The lower halves of the last part are zeros, and those of the others hold bits that are not part of them.
    """
    build, bits_type = code.build, ir.VectorType(I32, values.type.count)
    words = []
    for part in range(PARTS):
        word = build.bitcast(values, bits_type)
        words.append(word)
        if part + 1 < PARTS:
            upper = build.bitcast(build.and_(word, constant(bits_type, UPPER_HALF)), values.type)
            values = build.fsub(values, upper)
    return words
