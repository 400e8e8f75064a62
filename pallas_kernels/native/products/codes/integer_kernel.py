"""Products of a few rows with a panel of codes, both as integers.

    of a run    S = Σ code × integer of the row, exact: one sum in int32 for each plane of bytes
    of K        total += scale of the row × (S × scale of the group), then total += (−Σ) × minimum of the group

A run is a part of a group and of the 32 values that share a scale of the row, and Σ is the sum of the row's values over
it. Totals are float32, and each of the two additions rounds once. Runs are added in one order for every number of rows
and every processor, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from llvmlite import ir

from ....code_formats import CodeFormat
from ...linked_calls import call_linked
from ...llvm import F32, I32, I64, LONG_LANES, Code, constant, declare
from ..panels import PANEL
from .integer_rows import PLANE_SLOTS, RECORD_SLOTS, SCALE_SLOT, sum_slot
from .integer_steps import (
    COLUMN_HALVES,
    FLOAT_VECTOR,
    INTEGER_VECTOR,
    VALUES_PER_QUAD,
    PackedSteps,
    Run,
    StepSource,
    UnpackedSteps,
    cut_in_two,
    joined,
    unpack_step,
)
from .panels import block_layout

MAX_VECTORS, MAX_VECTORS_AVX2 = 28, 6
"""Vectors of sums and totals of 16 columns that stay in registers at most; in AVX2 each takes two."""


class ProductArguments(NamedTuple):
    """The arguments of a function that multiplies some rows by steps of a panel, 32 values of K each."""

    rows: ir.Value
    """Address of the first row's records."""
    row_slots: ir.Value
    """Slots from one row to the next."""
    panel: ir.Value
    """Address of the panel, or of its unpacked steps."""
    ahead: ir.Value
    """Address of the panel that is prefetched; not used for steps that are unpacked."""
    sums: ir.Value
    """Address of the sums, float32 [rows, 32]. They start at zero if `begin` is 0."""
    begin: ir.Value
    end: ir.Value
    """The steps `begin` … `end` − 1 are multiplied."""


@dataclass(frozen=True)
class IntegerCalls:
    """Emits calls of functions that are compiled once for a format and a number of rows, for all products."""

    code: Code
    has_avx512: bool
    num_planes: int
    """Planes of bytes of the rows."""

    def multiply(self, code_format: CodeFormat, num_rows: int, given: ProductArguments) -> None:
        """Emit a call that multiplies `num_rows` rows by steps of a panel as it is stored."""

        def source(code: Code, arguments: ProductArguments) -> StepSource:
            return PackedSteps(code, block_layout(code_format), self.has_avx512, arguments.panel, arguments.ahead)

        self._multiply(code_format.key, num_rows, given, source)

    def multiply_unpacked(self, run_len: int, num_rows: int, given: ProductArguments) -> None:
        """Emit a call that multiplies `num_rows` rows by steps that `unpack` has stored, from step `begin` on."""

        def source(code: Code, arguments: ProductArguments) -> StepSource:
            return UnpackedSteps(code, run_len, arguments.panel, arguments.begin)

        self._multiply(f"unpacked_{run_len}", num_rows, given, source)

    def unpack(self, code_format: CodeFormat, given: ProductArguments, target: ir.Value) -> None:
        """Emit a call that stores codes and terms of a panel's steps to `target`, as `UnpackedSteps` finds them."""

        def emit(code: Code, panel: ir.Value, ahead: ir.Value, begin: ir.Value, end: ir.Value, place: ir.Value) -> None:
            source = PackedSteps(code, block_layout(code_format), self.has_avx512, panel, ahead)
            code.loop(begin, end, partial(unpack_step, code, source, place, begin))

        arguments = [given.panel, given.ahead, given.begin, given.end, target]
        call_linked(self.code, self._name(f"unpack_{code_format.key}"), arguments, emit)

    def _multiply(
        self,
        name: str,
        num_rows: int,
        given: ProductArguments,
        source: Callable[[Code, ProductArguments], StepSource],
    ) -> None:
        """Emit a call of the function that multiplies by the steps of a source, given by its name."""

        def emit(code: Code, *values: ir.Value) -> None:
            arguments = ProductArguments(*values)
            for rows, halves in self._passes(num_rows):
                _Product(code, self.has_avx512, self.num_planes, rows, halves, arguments).emit(source(code, arguments))

        call_linked(self.code, self._name(f"product_{name}_{num_rows}x{self.num_planes}"), [*given], emit)

    def _passes(self, num_rows: int) -> list[tuple[range, Sequence[int]]]:
        """Return the rows and the halves of the columns that are multiplied together, one pass after the other.

        A row has a sum for each plane, and a total. Example for three planes in AVX-512, where 7 rows of a half fit
        into registers: 3 rows are one pass, 12 rows are four, of 6 rows and a half each.
        """
        max_rows = (MAX_VECTORS if self.has_avx512 else MAX_VECTORS_AVX2) // (self.num_planes + 1)
        if len(COLUMN_HALVES) * num_rows <= max_rows:
            return [(range(num_rows), COLUMN_HALVES)]
        num_passes = -(-num_rows // max_rows)
        bounds = [num_rows * number // num_passes for number in range(num_passes + 1)]
        return [(range(begin, end), (half,)) for begin, end in pairwise(bounds) for half in COLUMN_HALVES]

    def _name(self, name: str) -> str:
        return f"jpaged_integer_{name}_{'avx512' if self.has_avx512 else 'avx2'}"


@dataclass(frozen=True)
class _Product:
    """Emits the product of some rows with some halves of a panel's columns.

    Totals are a list of vectors, row after row, one for each of the halves: with both halves, total 3 is that of row 1
    and the second half.
    """

    code: Code
    has_avx512: bool
    num_planes: int
    rows: range
    halves: Sequence[int]
    arguments: ProductArguments

    def emit(self, source: StepSource) -> None:
        """Emit a loop over steps that carries the totals, float32, and store them."""
        code, build, sums = self.code, self.code.build, self.arguments.sums
        offsets = [I64(row * PANEL + half * LONG_LANES) for row in self.rows for half in self.halves]
        has_sums = build.icmp_signed(">", self.arguments.begin, I64(0))
        stored = code.load_vectors(sums, offsets, F32, LONG_LANES)
        old_totals = [build.select(has_sums, each, constant(FLOAT_VECTOR, 0.0)) for each in stored]

        def add_step(step: ir.Value, *totals: ir.Value) -> list[ir.Value]:
            first_slot = build.mul(step, I64(RECORD_SLOTS))
            records = [build.add(build.mul(self.arguments.row_slots, I64(row)), first_slot) for row in self.rows]
            new_totals = list(totals)
            for index, run in enumerate(source.runs(step)):
                new_totals = self._add_run(source.run_len, index, run, records, new_totals)
            return new_totals

        totals = code.loop(self.arguments.begin, self.arguments.end, add_step, carried=old_totals)
        for offset, total in zip(offsets, totals, strict=True):
            code.store_vector(total, sums, offset)

    def _add_run(
        self, run_len: int, index: int, run: Run, records: list[ir.Value], totals: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Return the totals with run `index` of a step added; `records` are the first slots of the rows' records.

        The scale of the row comes last, so that no product is larger than the one of the weights and the row.
        """
        of_totals = [(record, half) for record in records for half in self.halves]
        sums = [[constant(INTEGER_VECTOR, 0)] * self.num_planes for _ in of_totals]
        for quad, codes in enumerate(run.quads, index * run_len // VALUES_PER_QUAD):
            for plane_sums, (record, half) in zip(sums, of_totals, strict=True):
                for plane in range(self.num_planes):
                    factors = self._in_all_lanes(record, plane * PLANE_SLOTS + quad, I32)
                    plane_sums[plane] = self._add_quads(plane_sums[plane], codes[half], factors)
        new_totals = list[ir.Value]()
        for plane_sums, (record, half), total in zip(sums, of_totals, totals, strict=True):
            scaled_sum = self.code.build.fmul(self._joined_planes(plane_sums), run.terms.scales[half])
            row_scale = self._in_all_lanes(record, SCALE_SLOT, F32)
            row_sum = self._in_all_lanes(record, sum_slot(run_len, index), F32)
            total = self.code.add_product(scaled_sum, row_scale, total)
            new_totals.append(self.code.add_product(row_sum, run.terms.minima[half], total))
        return new_totals

    def _joined_planes(self, sums: Sequence[ir.Value]) -> ir.Value:
        """Return the sums of all planes as one of float32: 256 × (256 × sums[0] + sums[1]) + sums[2].

        That of the first two is exact in int32: 32 codes of 8 bits times 16 bits are less than 2²⁹.
        """
        build = self.code.build
        first_two = build.add(build.shl(sums[0], constant(INTEGER_VECTOR, 8)), sums[1])
        value, *rest = (build.sitofp(each, FLOAT_VECTOR) for each in (first_two, *sums[2:]))
        for each in rest:
            value = self.code.add_product(value, constant(FLOAT_VECTOR, 256.0), each)
        return value

    def _in_all_lanes(self, record: ir.Value, slot: int, element_type: ir.Type) -> ir.Value:
        """Return a vector that holds a slot of a row's record in all lanes."""
        offset = self.code.build.add(record, I64(slot))
        return self.code.broadcast(self.code.load(self.arguments.rows, offset, element_type), LONG_LANES)

    def _add_quads(self, sums: ir.Value, codes: ir.Value, factors: ir.Value) -> ir.Value:
        """Return int32 sums plus the products of quads of bytes in each lane, by one instruction (VNNI)."""
        code, build = self.code, self.code.build
        words = build.bitcast(codes, INTEGER_VECTOR)
        if self.has_avx512:
            multiply = declare(build.module, "llvm.x86.avx512.vpdpbusd.512", *[INTEGER_VECTOR] * 4)
            return build.call(multiply, [sums, words, factors])
        short = ir.VectorType(I32, LONG_LANES // 2)
        multiply = declare(build.module, "llvm.x86.avx512.vpdpbusd.256", *[short] * 4)
        operands = zip(*(cut_in_two(code, each) for each in (sums, words, factors)), strict=True)
        return joined(code, [build.call(multiply, each) for each in operands])
