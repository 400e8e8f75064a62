"""Products of float32 by the matrix unit for bfloat16 (AMX), by three exact parts.

A float32 has 24 bits. Cut off 8 at a time, each part is a bfloat16 without rounding: x = x₁ + x₂ + x₃, with x₁ the
upper half of its word, x₂ that of x − x₁, and x₃ the rest. Six products of tiles are summed in float32:

    x·w = x₃w₁ + x₂w₁ + x₂w₂ + x₁w₂ + x₁w₃ + x₁w₁        what is left out is below 2⁻²² of |x||w|

which is nearer to the exact sum than float32 products that are added one by one. Weights stay float32 in memory. A
panel is cut into parts as its first batch of rows is multiplied, and further batches find the parts in the level-2
cache. A single row is multiplied by vectors, which read weights faster, with the bits of the matrix unit.
Infinities become NaN (∞ − ∞), in their own rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from ..amx import TILE, TILE_BYTES, Matrix, MatrixUnit, Tiles
from ..linked_calls import call_linked
from ..llvm import F32, I16, I32, I64, Code, constant
from .depth_blocks import DepthBlocks
from .multiplier import Batch, DepthBlock, Panel
from .panels import DEPTH, PANEL
from .tiles import MatrixUnitMultiplier, by_tiles

PARTS = 3
TILE_SIZE = TILE * TILE_BYTES
"""Bytes of a tile of one part."""
STEP_BYTES = PARTS * 2 * TILE_SIZE
"""Bytes of the parts of 32 values of K of a panel: for each part two tiles of 16 columns."""
MAX_STEPS_PER_BLOCK = 24
"""Blocks of K have at most this many steps of 32 values: a panel's parts take 144 KiB of a thread's stack."""
UPPER_HALF = -1 << 16
PRODUCTS = (2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)
"""Parts of rows and of columns that are multiplied, small products first; each shares a part with the one before."""


class PartTools(NamedTuple):
    """What a unit of work has for one panel."""

    matrix_unit: MatrixUnit
    parts: ir.Value
    """Address of the parts of a block of the panel: [steps, parts, 2 halves, 16 pairs of K, 16 columns, 2]."""


@dataclass(frozen=True)
class PartMultiplier(MatrixUnitMultiplier):
    """Multiplies float32 by tiles of its parts. See `Multiplier` for the methods."""

    value_bytes = 2 * PARTS
    num_task_steps = 0

    @property
    def name(self) -> str:
        return "parts"

    @property
    def _blocks(self) -> DepthBlocks:
        return DepthBlocks(self.num_steps, MAX_STEPS_PER_BLOCK)

    @property
    def num_depth_blocks(self) -> int:
        return self._blocks.num_blocks

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        return (-(-num_rows // TILE), self.num_steps, PARTS, TILE, DEPTH), jnp.bfloat16

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        build, add, mul = code.build, code.build.add, code.build.mul
        step = add(mul(build.udiv(row, I64(TILE)), I64(self.num_steps)), build.udiv(column, I64(DEPTH)))
        in_tile = add(mul(build.urem(row, I64(TILE)), I64(DEPTH)), build.urem(column, I64(DEPTH)))
        bits_type, half_type = (ir.VectorType(type_, values.type.count) for type_ in (I32, I16))
        for part, numbers in enumerate(_parts(code, values)):
            bits = build.bitcast(numbers, bits_type)
            upper = build.trunc(build.lshr(bits, constant(bits_type, 16)), half_type)
            tile = add(mul(step, I64(PARTS)), I64(part))
            code.store_vector(upper, rows, add(mul(tile, I64(TILE * DEPTH)), in_tile))

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return code.build.gep(panels, [code.build.mul(index, I64(4 * PANEL * self.depth))])

    def begin(self, code: Code) -> PartTools:
        matrix_unit = MatrixUnit(code)
        matrix_unit.configure()
        return PartTools(matrix_unit, code.allocate(I32, (self._blocks.steps_per_block + 1) * STEP_BYTES // 4))

    def depth_block(self, code: Code, block: ir.Value) -> DepthBlock:
        return DepthBlock(*(code.build.mul(step, I64(DEPTH)) for step in self._blocks.steps(code, block)))

    def takes_steps(self, code: Code, batch: Batch) -> ir.Value | None:
        """See `FloatMultiplier.takes_steps`. A single row does: it cuts no panel into parts for others."""
        build = code.build
        is_only = build.icmp_signed("==", batch.num_batches, I64(1))
        return build.and_(is_only, build.icmp_signed("==", batch.num_rows, I64(1)))

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """See `Multiplier.multiply`. The first batch cuts the panel into parts, each step while the one before it is
        multiplied: a tile that has just been stored could not be loaded at once.

        A unit's only batch needs no parts again: two steps' places are used in turn, which stay in the level-1 cache.
        The loops over K are functions, which all products share.
        """
        build, mul, tools = code.build, code.build.mul, panel.tools
        first_step, end_step = self._blocks.steps(code, block)
        row_tiles_bytes = self.num_steps * PARTS * TILE_SIZE
        first_tiles = build.gep(rows, [mul(batch.index, I64(2 * row_tiles_bytes))])
        is_only = build.icmp_signed("==", batch.num_batches, I64(1))
        index_mask = build.select(is_only, I64(1), I64(-1))
        arguments = _StepArguments(
            rows=first_tiles,
            panel=panel.begin,
            ahead=panel.begin if panel.ahead is None else panel.ahead,
            parts=tools.parts,
            sums=sums,
            begin=first_step,
            end=end_step,
            row_tiles_bytes=I64(row_tiles_bytes),
            depth=I64(self.depth),
            index_mask=index_mask,
        )
        has_tail = self.depth % DEPTH > 0

        def call(name: str, emit: Callable[[_Steps], None], arguments: _StepArguments = arguments) -> None:
            def emit_body(new_code: Code, *values: ir.Value) -> None:
                emit(_Steps(new_code, has_tail, _StepArguments(*values)))

            call_linked(code, f"jpaged_parts_{name}{'_tail' * has_tail}", [*arguments], emit_body)

        def multiply_row_by(step: ir.Value) -> None:
            """Multiply a row by a step that is provided; the function counts addresses from the panel's begin on."""
            assert panel.provide_step is not None
            panel.provide_step(step)
            steps_before = build.sub(build.and_(step, I64(1)), step)
            begin = build.gep(panel.begin, [mul(steps_before, I64(4 * DEPTH * PANEL))])
            one_step = arguments._replace(panel=begin, begin=step, end=build.add(step, I64(1)))
            call("multiply_row", lambda steps: steps.multiply_row(), one_step)

        if panel.provide_step is not None:
            code.loop(first_step, end_step, multiply_row_by)
            return

        def multiply_tiles(num_tiles: int) -> None:
            with build.if_else(build.icmp_signed("==", batch.number, I64(0))) as (is_first, is_later):
                with is_first:
                    call(f"cut_{num_tiles}", lambda steps: steps.multiply_tiles(num_tiles, cuts_panel=True))
                with is_later:
                    call(f"multiply_{num_tiles}", lambda steps: steps.multiply_tiles(num_tiles, cuts_panel=False))

        with build.if_else(build.icmp_signed("==", batch.num_rows, I64(1))) as (is_single, has_more):
            with is_single:
                call("multiply_row", lambda steps: steps.multiply_row())
            with has_more:
                by_tiles(code, batch, multiply_tiles)


class _StepArguments(NamedTuple):
    """The arguments of a function that multiplies rows by some steps of a panel."""

    rows: ir.Value
    """Address of the rows' tiles."""
    panel: ir.Value
    ahead: ir.Value
    """Addresses of the panel and of the one that is prefetched."""
    parts: ir.Value
    """Address of the panel's parts, see `PartTools`."""
    sums: ir.Value
    """Address of the sums, float32 [rows, 32]."""
    begin: ir.Value
    end: ir.Value
    """The steps `begin` … `end` − 1 are multiplied."""
    row_tiles_bytes: ir.Value
    """Bytes from one tile of rows to the next."""
    depth: ir.Value
    """K."""
    index_mask: ir.Value
    """Which bits of a step's index say where its parts lie: all, or the lowest one if two places are used in turn."""


@dataclass(frozen=True)
class _Steps:
    """Emits a function that multiplies rows by steps of a panel, for any K.

    Sums start at zero if `begin` is 0, else at those in `sums`.
    """

    code: Code
    has_tail: bool
    """Whether K is no multiple of 32: zeros then take the place of rows of the panel behind the last one."""
    arguments: _StepArguments

    def multiply_tiles(self, num_tiles: int, *, cuts_panel: bool) -> None:
        """Multiply one or two tiles of rows by the panel's parts, which are cut first if `cuts_panel`."""
        code, build = self.code, self.code.build
        matrix_unit, c = MatrixUnit(code), Matrix(self.arguments.sums, I64(4 * PANEL))
        with build.if_else(build.icmp_signed("==", self.arguments.begin, I64(0))) as (is_new, is_begun):
            with is_new:
                matrix_unit.clear_sums(num_tiles)
            with is_begun:
                matrix_unit.load_sums(c, num_tiles)
        if cuts_panel:
            first_parts = self._parts_of(self.arguments.begin)
            code.loop(0, TILE, lambda pair: self._cut_pair(self.arguments.begin, pair, first_parts))

        def multiply_step(step: ir.Value) -> None:
            parts, next_step = self._parts_of(step), build.add(step, I64(1))
            # The last step is cut twice, into the place after its own.
            step_to_cut, cut_parts = (
                code.min(next_step, build.sub(self.arguments.end, I64(1))),
                self._parts_of(next_step),
            )
            rows_of_step = build.gep(self.arguments.rows, [build.mul(step, I64(PARTS * TILE_SIZE))])
            # Tile i of part p, and the two tiles of part p: a part is a step of these.
            a = Tiles(rows_of_step, I64(TILE_BYTES), self.arguments.row_tiles_bytes, I64(TILE_SIZE))
            b = Tiles(parts, I64(TILE_BYTES), I64(TILE_SIZE), I64(2 * TILE_SIZE))
            row_part, column_part = None, None
            for number, (new_row_part, new_column_part) in enumerate(PRODUCTS):
                if new_row_part != row_part:
                    matrix_unit.load_rows(a, num_tiles, I64(new_row_part))
                if new_column_part != column_part:
                    matrix_unit.load_columns(b, I64(new_column_part))
                matrix_unit.add_products(num_tiles)
                row_part, column_part = new_row_part, new_column_part
                if cuts_panel:
                    # A few pairs between the products: vectors and the matrix unit then work at the same time.
                    for pair in range(number, TILE, len(PRODUCTS)):
                        self._cut_pair(step_to_cut, I64(pair), cut_parts)

        code.loop(self.arguments.begin, self.arguments.end, multiply_step)
        matrix_unit.store_sums(c, num_tiles)

    def multiply_row(self) -> None:
        """Multiply the first row of a tile, in vectors of 16 columns.

        The sums are those of the instruction TDPBF16PS (Intel's manual, volume 2): the products of a step's even values
        of K are added one by one with one rounding each, those of the odd values too, then both sums, and their sum is
        added to the total. Numbers too small for a normal float32 count as 0.
        """
        code, build, mul = self.code, self.code.build, self.code.build.mul
        vector_type, halves = ir.VectorType(F32, TILE), range(PANEL // TILE)
        zeros = constant(vector_type, 0.0)
        row_parts = code.allocate(F32, MAX_STEPS_PER_BLOCK * 2 * PARTS * TILE)

        def expand_step(step: ir.Value) -> None:
            """Store the parts of the row's values of a step as float32: for each part the even ones, then the odd."""
            for part in range(PARTS):
                offset = build.add(mul(step, I64(PARTS * TILE_SIZE // 4)), I64(part * TILE_SIZE // 4))
                words = code.load_vector(self.arguments.rows, offset, I32, TILE)
                for odd in range(2):
                    target = build.add(mul(build.sub(step, self.arguments.begin), I64(2 * PARTS)), I64(2 * part + odd))
                    code.store_vector(code.half(words, odd), row_parts, mul(target, I64(TILE)))

        def add_pair(pair: ir.Value, step: ir.Value, partial_sums: Sequence[ir.Value]) -> list[ir.Value]:
            """Return the sums of a step, by half, product and even or odd K, with one pair of K added."""
            value = build.add(mul(step, I64(DEPTH)), mul(pair, I64(2)))
            code.prefetch(self.arguments.ahead, mul(value, I64(PANEL)), F32, 2 * PANEL)
            new_sums = list(partial_sums)
            for odd in range(2):
                first_factor = build.add(mul(build.sub(step, self.arguments.begin), I64(2 * PARTS * TILE)), pair)
                offsets = (build.add(first_factor, I64((2 * part + odd) * TILE)) for part in range(PARTS))
                factors = [code.broadcast(code.load(row_parts, offset, F32), TILE) for offset in offsets]
                for half in halves:
                    columns = _parts(code, self._load(build.add(value, I64(odd)), half))
                    for product, (row_part, column_part) in enumerate(PRODUCTS):
                        index = (half * len(PRODUCTS) + product) * 2 + odd
                        new_sums[index] = code.add_product(factors[row_part], columns[column_part], new_sums[index])
            return new_sums

        def add_step(step: ir.Value, *totals: ir.Value) -> list[ir.Value]:
            empty_sums = [zeros] * (2 * len(PRODUCTS) * len(halves))
            step_sums = code.loop(0, TILE, lambda pair, *carried: add_pair(pair, step, carried), carried=empty_sums)
            new_totals = list(totals)
            for index in range(0, len(step_sums), 2):
                half = index // (2 * len(PRODUCTS))
                new_totals[half] = build.fadd(new_totals[half], build.fadd(step_sums[index], step_sums[index + 1]))
            return new_totals

        code.loop(self.arguments.begin, self.arguments.end, expand_step)
        is_new = build.icmp_signed("==", self.arguments.begin, I64(0))
        stored = [code.load_vector(self.arguments.sums, I64(TILE * half), F32, TILE) for half in halves]
        old_totals = [build.select(is_new, zeros, old) for old in stored]
        with code.flushed_denormals():
            totals = code.loop(self.arguments.begin, self.arguments.end, add_step, carried=old_totals)
        for half, total in zip(halves, totals, strict=True):
            code.store_vector(total, self.arguments.sums, I64(TILE * half))

    def _parts_of(self, step: ir.Value) -> ir.Value:
        """Return the address of the parts of a step of the panel."""
        build = self.code.build
        place = build.and_(build.sub(step, self.arguments.begin), self.arguments.index_mask)
        return build.gep(self.arguments.parts, [build.mul(place, I64(STEP_BYTES))])

    def _cut_pair(self, step: ir.Value, pair: ir.Value, parts: ir.Value) -> None:
        """Emit the cut of a pair of K of a step into parts, and the prefetch of that pair of the panel ahead."""
        code, build = self.code, self.code.build
        first_value = build.add(build.mul(step, I64(DEPTH)), build.mul(pair, I64(2)))
        values = first_value, build.add(first_value, I64(1))
        code.prefetch(self.arguments.ahead, build.mul(first_value, I64(PANEL)), F32, 2 * PANEL)
        for half in range(2):
            first_parts, second_parts = (_parts(code, self._load(value, half)) for value in values)
            for part, parts_of_pair in enumerate(zip(first_parts, second_parts, strict=True)):
                first_word, second_word = (build.bitcast(x, ir.VectorType(I32, TILE)) for x in parts_of_pair)
                # The last part of a number too small for a normal one may have bits in its lower half.
                upper = build.and_(second_word, constant(second_word.type, UPPER_HALF))
                words = build.or_(build.lshr(first_word, constant(first_word.type, 16)), upper)
                offset = build.add(build.mul(pair, I64(TILE)), I64((2 * part + half) * TILE_SIZE // 4))
                code.store_vector(words, parts, offset)

    def _load(self, value: ir.Value, half: int) -> ir.Value:
        """Return 16 columns of row `value` of K of the panel: the first ones or, in half 1, the others."""
        code, build = self.code, self.code.build
        is_there = build.icmp_signed("<", value, self.arguments.depth)
        row = build.select(is_there, value, I64(0)) if self.has_tail else value
        loaded = code.load_vector(
            self.arguments.panel, build.add(build.mul(row, I64(PANEL)), I64(TILE * half)), F32, TILE
        )
        return build.select(is_there, loaded, constant(loaded.type, 0.0)) if self.has_tail else loaded


def _parts(code: Code, values: ir.Value) -> list[ir.Value]:
    """Return the three parts of a float32 vector as float32: the lower halves of their words are zeros."""
    build, bits_type = code.build, ir.VectorType(I32, values.type.count)
    parts = []
    for _ in range(PARTS - 1):
        upper = build.and_(build.bitcast(values, bits_type), constant(bits_type, UPPER_HALF))
        parts.append(build.bitcast(upper, values.type))
        values = build.fsub(values, parts[-1])
    return [*parts, values]
