"""Products of bfloat16 by the matrix unit of an x86 processor (AMX): two tiles of 16 rows by the 32 columns of a panel.

Rows are packed in tiles, each 1 KiB from end to end: [R ÷ 16, K ÷ 32, 16, 32]. Rows at their usual distance, of 3,072
bytes say, would share a quarter of the level-1 cache's sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from llvmlite import ir

from ..amx import TILE, Matrix, MatrixUnit, Tiles
from ..llvm import I32, I64, LONG_LANES, Code
from .multiplier import Batch, Batches, DepthBlock, Panel
from .panels import DEPTH, PANEL

TILE_WORDS = TILE * DEPTH
"""bfloat16 values of a tile."""
CHUNK_WORDS = 64
"""Words of a panel that are prefetched together: 4 cache lines."""
CHUNKS_OF_STEP = PANEL * TILE // CHUNK_WORDS
"""Chunks of a panel's step."""
MAX_BLOCK_ROWS, MAX_BLOCK_BYTES = 256, 1 << 20
"""Rows that a unit of work multiplies at most, and bytes of them: they stay in the level-2 cache."""


@dataclass(frozen=True)
class MatrixUnitMultiplier:
    """What the multipliers of the matrix unit share: batches of two tiles of rows, and K in steps of 32 values."""

    depth: int
    """K."""
    value_bytes: ClassVar[int]
    """Bytes of a value in a packed row."""

    @property
    def num_steps(self) -> int:
        """Return how many steps go over K: the 32 values that one instruction multiplies."""
        return -(-self.depth // DEPTH)

    @property
    def max_batch_rows(self) -> int:
        return 2 * TILE

    @property
    def row_alignment(self) -> int:
        """See `Multiplier.row_alignment`: tiles are found by a batch's index."""
        return self.max_batch_rows

    @property
    def batches_per_block(self) -> int:
        max_rows = min(MAX_BLOCK_ROWS, MAX_BLOCK_BYTES // (self.value_bytes * DEPTH * self.num_steps))
        return max(1, max_rows // self.max_batch_rows)

    @property
    def takes_words(self) -> bool:
        return False

    @property
    def pads_depth(self) -> bool:
        return True

    def num_batches(self, code: Code, num_rows: ir.Value) -> ir.Value:
        return code.build.sdiv(code.build.add(num_rows, I64(self.max_batch_rows - 1)), I64(self.max_batch_rows))

    def batch(self, code: Code, batches: Batches, index: ir.Value, num_rows: ir.Value) -> Batch:
        first_row = code.build.mul(index, I64(self.max_batch_rows))
        batch_rows = code.min(code.build.sub(num_rows, first_row), I64(self.max_batch_rows))
        return batches.batch(code, index, first_row, batch_rows)

    def end_pack(self, code: Code, rows: ir.Value, row: ir.Value, begin: ir.Value, num_values: int) -> None:
        """See `Multiplier.end_pack`: values are packed as they come."""

    def end(self, code: Code) -> None:
        MatrixUnit(code).release()


@dataclass(frozen=True)
class TileMultiplier(MatrixUnitMultiplier):
    """Multiplies bfloat16 by tiles. See `Multiplier` for the methods."""

    has_avx512_bf16: bool
    value_bytes = 2

    @property
    def name(self) -> str:
        return "tiles"

    @property
    def num_depth_blocks(self) -> int:
        return 1

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        return (-(-num_rows // TILE), self.num_steps, TILE, DEPTH), jnp.bfloat16

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        build, add, mul = code.build, code.build.add, code.build.mul
        tile = add(mul(build.udiv(row, I64(TILE)), I64(self.num_steps)), build.udiv(column, I64(DEPTH)))
        in_tile = add(mul(build.urem(row, I64(TILE)), I64(DEPTH)), build.urem(column, I64(DEPTH)))
        is_whole = self.has_avx512_bf16 and values.type.count == LONG_LANES
        code.store_rounded(values, rows, add(mul(tile, I64(TILE_WORDS)), in_tile), has_avx512_bf16=is_whole)

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return code.build.gep(panels, [code.build.mul(index, I64(2 * PANEL * DEPTH * self.num_steps))])

    def begin(self, code: Code) -> MatrixUnit:
        matrix_unit = MatrixUnit(code)
        matrix_unit.configure()
        return matrix_unit

    @property
    def num_task_steps(self) -> int:
        return self.num_steps

    def depth_block(self, code: Code, block: ir.Value) -> DepthBlock:
        return DepthBlock(I64(0), I64(DEPTH * self.num_steps))

    def takes_steps(self, code: Code, batch: Batch) -> ir.Value | None:
        return code.build.icmp_signed("==", batch.num_batches, I64(1))

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """See `Multiplier.multiply`. A batch of more than 16 rows is two tiles, whose last rows may hold anything."""
        build, tile_bytes, matrix_unit = code.build, 2 * TILE_WORDS, panel.tools
        add, mul = build.add, build.mul
        rows_bytes = mul(batch.index, I64(2 * self.num_steps * tile_bytes))
        row_tiles = Tiles(
            build.gep(rows, [rows_bytes]), I64(2 * DEPTH), I64(self.num_steps * tile_bytes), I64(tile_bytes)
        )
        column_tiles = Matrix(panel.begin, I64(4 * PANEL)).column_tiles(code)

        step_words = PANEL * TILE
        # All batches of the unit share the chunks of the panel ahead.
        chunks_per_step = build.udiv(add(build.sub(batch.num_batches, I64(1)), I64(CHUNKS_OF_STEP)), batch.num_batches)

        def finish_part(step: ir.Value) -> None:
            if panel.step_task is not None:
                panel.step_task(step)

        def prefetch_step(step: ir.Value) -> None:
            if panel.ahead is not None:
                code.prefetch(panel.ahead, mul(step, I64(step_words)), I32, step_words)

        def provide_next(step: ir.Value) -> None:
            assert panel.provide_step is not None
            # The last step is provided twice.
            panel.provide_step(code.min(add(step, I64(1)), I64(self.num_steps - 1)))

        def prefetch_share(step: ir.Value) -> None:
            ahead = panel.ahead
            if ahead is None:
                finish_part(step)
                return
            begin = mul(add(mul(batch.number, I64(self.num_steps)), step), chunks_per_step)
            end = code.min(add(begin, chunks_per_step), I64(CHUNKS_OF_STEP * self.num_steps))

            def prefetch_chunk(chunk: ir.Value) -> None:
                code.prefetch(ahead, mul(chunk, I64(CHUNK_WORDS)), I32, CHUNK_WORDS)

            code.loop(begin, end, prefetch_chunk)
            finish_part(step)

        def multiply_tiles(num_tiles: int) -> None:
            matrix_unit.clear_sums(num_tiles)
            if panel.provide_step is not None:
                provided_tiles = column_tiles._replace(num_places=2)
                panel.provide_step(I64(0))
                matrix_unit.multiply(row_tiles, provided_tiles, num_tiles, 0, self.num_steps, beside=provide_next)
                matrix_unit.store_sums(Matrix(sums, I64(4 * PANEL)), num_tiles)
                return
            with build.if_else(build.icmp_signed("==", batch.num_batches, I64(1))) as (is_only, is_one_of_several):
                with is_only:
                    matrix_unit.multiply(row_tiles, column_tiles, num_tiles, 0, self.num_steps, beside=prefetch_step)
                with is_one_of_several:
                    matrix_unit.multiply(row_tiles, column_tiles, num_tiles, 0, self.num_steps, beside=prefetch_share)
            matrix_unit.store_sums(Matrix(sums, I64(4 * PANEL)), num_tiles)

        by_tiles(code, batch, multiply_tiles)


def by_tiles(code: Code, batch: Batch, body: Callable[[int], None]) -> None:
    """Emit `body`(number of tiles): two tiles of rows for a batch of more than 16 rows, else one."""
    with code.build.if_else(code.build.icmp_signed(">", batch.num_rows, I64(TILE))) as (has_two, has_one):
        with has_two:
            body(2)
        with has_one:
            body(1)
