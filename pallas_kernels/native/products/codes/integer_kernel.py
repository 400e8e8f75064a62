"""Products of a few rows with a panel of codes, both as integers of 16 bits.

    sum over a run    S = Σ code × integer of the row, exact in int32
    sum over K        total + scale of the row × (S − zero × Σ) × scale of the group − minimum × Σ, rounded to float32

A run is a part of a group and of the 32 values that share a scale of the row, and Σ is the sum of the row's values over
it. Runs are added in one order for every number of rows and every processor, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from ....code_formats import CodeFormat
from ...llvm import F32, I16, I32, I64, LONG_LANES, Code, constant, declare
from ...registry import link
from ..panels import DEPTH, PANEL
from .integer_rows import RECORD_WORDS, SCALE_WORD, SUM_FACTOR, sum_word
from .integer_steps import (
    FLOAT_VECTOR,
    HALVES,
    INTEGER_VECTOR,
    WORD_VECTOR,
    WORDS,
    PackedSteps,
    Run,
    RunKind,
    Steps,
    UnpackedSteps,
    cut_in_two,
    joined,
)
from .panels import block_layout

MAX_ROWS_OF_BOTH = 6
"""Rows whose sums and totals of all 32 columns stay in registers at most (AVX-512).

More rows are multiplied by one half of the columns after the other.
"""


class ProductArguments(NamedTuple):
    """The arguments of a function that multiplies some rows by steps of a panel, 32 values of K each."""

    rows: ir.Value
    """Address of the first row's records."""
    row_words: ir.Value
    """Words of 4 bytes of a row."""
    panel: ir.Value
    """Address of the panel, or of its unpacked steps."""
    ahead: ir.Value
    """Address of the panel that is prefetched, if this one is not unpacked."""
    sums: ir.Value
    """Address of the sums, float32 [rows, 32]. They start at zero if `begin` is 0."""
    begin: ir.Value
    end: ir.Value
    """The steps `begin` … `end` − 1 are multiplied."""


def emit_product(code: Code, code_format: CodeFormat, num_rows: int, has_avx512: bool, given: ProductArguments) -> None:
    """Emit a call that multiplies `num_rows` rows by steps of a panel of codes."""

    def steps(new_code: Code, arguments: ProductArguments) -> Steps:
        return PackedSteps(new_code, block_layout(code_format), has_avx512, arguments.panel, arguments.ahead)

    _call_product(code, code_format.key, num_rows, has_avx512, given, steps)


def emit_unpacked_product(code: Code, kind: RunKind, num_rows: int, has_avx512: bool, given: ProductArguments) -> None:
    """Emit a call that multiplies `num_rows` rows by steps that `emit_unpacking` has stored.

    The first of these is step `begin`.
    """

    def steps(new_code: Code, arguments: ProductArguments) -> Steps:
        return UnpackedSteps(new_code, kind, arguments.panel, arguments.begin)

    name = "_".join(["unpacked", *(str(int(each)) for each in kind)])
    _call_product(code, name, num_rows, has_avx512, given, steps)


def emit_unpacking(
    code: Code,
    code_format: CodeFormat,
    has_avx512: bool,
    panel: ir.Value,
    target: ir.Value,
    steps: tuple[ir.Value, ir.Value],
    ahead: ir.Value,
) -> None:
    """Emit a call that stores steps of a panel to `target`, see `RunKind.step_bytes`."""

    def emit(new_code: Code, *values: ir.Value) -> None:
        new_panel, new_target, begin, end, new_ahead = values
        source = PackedSteps(new_code, block_layout(code_format), has_avx512, new_panel, new_ahead)
        build, step_bytes = new_code.build, source.kind.step_bytes

        def store_step(step: ir.Value) -> None:
            words = build.gep(new_target, [build.mul(build.sub(step, begin), I64(step_bytes))])
            numbers = build.gep(words, [I64(2 * DEPTH * PANEL)])
            for index, run in enumerate(source.runs(step)):
                run_words = build.gep(words, [I64(2 * index * source.kind.length * PANEL)])
                run.each_pair(partial(_store_pair, new_code, run_words), [])
                of_group = [vector for vectors in run.numbers for vector in vectors]
                for place, vector in enumerate(of_group, index * len(of_group)):
                    new_code.store_vector(vector, numbers, I64(place * LONG_LANES))

        new_code.loop(begin, end, store_step)

    name = f"unpack_{code_format.key}_{'avx512' if has_avx512 else 'avx2'}"
    _call(code, name, [panel, target, *steps, ahead], emit)


def _store_pair(code: Code, run_words: ir.Value, pair: int, vectors: list[ir.Value]) -> list[ir.Value]:
    """Emit the stores of the words of a pair, where `UnpackedSteps` finds them; nothing is carried."""
    for half, vector in enumerate(vectors):
        code.store_vector(vector, run_words, I64((pair * len(HALVES) + half) * WORDS))
    return []


def _call_product(
    code: Code,
    name: str,
    num_rows: int,
    has_avx512: bool,
    given: ProductArguments,
    steps: Callable[[Code, ProductArguments], Steps],
) -> None:
    def emit(new_code: Code, *values: ir.Value) -> None:
        arguments = ProductArguments(*values)
        # Without AVX-512, 16 columns take as many registers as 32 with it.
        for halves in [HALVES] if has_avx512 and num_rows <= MAX_ROWS_OF_BOTH else [(half,) for half in HALVES]:
            _Product(new_code, num_rows, has_avx512, halves, arguments).emit(steps(new_code, arguments))

    _call(code, f"product_{name}_{num_rows}_{'avx512' if has_avx512 else 'avx2'}", [*given], emit)


def _call(code: Code, name: str, arguments: Sequence[ir.Value], emit: Callable[..., None]) -> None:
    """Emit a call of a function whose body `emit` emits. It is compiled once, for all products."""
    name, types = f"jpaged_integer_{name}", [value.type for value in arguments]

    def build() -> ir.Module:
        module = ir.Module(name)
        module.triple = llvm.get_default_triple()
        new_code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), types), name))
        emit(new_code, *new_code.build.function.args)
        new_code.build.ret_void()
        return module

    code.build.call(declare(code.build.module, link(name, build), ir.VoidType(), *types), arguments)


@dataclass(frozen=True)
class _Product:
    """Emits the product of some rows with some halves of a panel's columns."""

    code: Code
    num_rows: int
    has_avx512: bool
    halves: Sequence[int]
    arguments: ProductArguments

    def emit(self, steps: Steps) -> None:
        """Emit a loop over steps. The totals are carried, one vector for each row and half."""
        code, build, (_, _, _, _, sums, begin, end) = self.code, self.code.build, self.arguments
        offsets = [I64(row * PANEL + half * LONG_LANES) for row in range(self.num_rows) for half in self.halves]
        has_sums = build.icmp_signed(">", begin, I64(0))
        stored = code.load_vectors(sums, offsets, F32, LONG_LANES)
        old_totals = [build.select(has_sums, each, constant(FLOAT_VECTOR, 0.0)) for each in stored]

        def add_step(step: ir.Value, *totals: ir.Value) -> list[ir.Value]:
            added = list(totals)
            for index, run in enumerate(steps.runs(step)):
                added = self._add_run(steps.kind, step, index, run, added)
            return added

        for offset, total in zip(offsets, code.loop(begin, end, add_step, carried=old_totals), strict=True):
            code.store_vector(total, sums, offset)

    def _add_run(
        self, kind: RunKind, step: ir.Value, index: int, run: Run, totals: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Return the totals with run `index` of a step added."""
        code, build = self.code, self.code.build
        first_record = build.mul(step, I64(RECORD_WORDS))
        records = [
            build.add(build.mul(self.arguments.row_words, I64(row)), first_record) for row in range(self.num_rows)
        ]
        first_word = index * kind.length // 2

        def of_row(record: ir.Value, word: ir.Value | int, element_type: ir.Type) -> ir.Value:
            """Return a word of a row's record, in all lanes."""
            offset = build.add(record, I64(word) if isinstance(word, int) else word)
            return code.broadcast(code.load(self.arguments.rows, offset, element_type), LONG_LANES)

        def add_pair(pair: ir.Value | int, vectors: list[ir.Value], *carried: ir.Value) -> list[ir.Value]:
            word = first_word + pair if isinstance(pair, int) else build.add(I64(first_word), pair)
            sums = list[ir.Value]()
            for row, record in enumerate(records):
                factor = build.bitcast(of_row(record, word, I32), WORD_VECTOR)
                old_sums = carried[row * len(self.halves) : (row + 1) * len(self.halves)]
                sums += [self._add_pairs(old, factor, vectors[h]) for h, old in zip(self.halves, old_sums, strict=True)]
            return sums

        def first_sum(record: ir.Value) -> ir.Value:
            """Return what is taken away for the codes' zero, which is 8 × a power of two."""
            if not kind.zero:
                return constant(INTEGER_VECTOR, 0)
            shift = (kind.zero // -SUM_FACTOR).bit_length() - 1
            sums = of_row(record, sum_word(kind.length, index, is_float=False), I32)
            return build.shl(sums, constant(INTEGER_VECTOR, shift)) if shift else sums

        sums = run.each_pair(add_pair, [first_sum(record) for record in records for _ in self.halves])
        added = list[ir.Value]()
        for place, (total, integer) in enumerate(zip(totals, sums, strict=True)):
            record, half = records[place // len(self.halves)], self.halves[place % len(self.halves)]
            value = build.fmul(build.sitofp(integer, FLOAT_VECTOR), of_row(record, SCALE_WORD, F32))
            row_sum = partial(of_row, record, sum_word(kind.length, index, is_float=True), F32)
            if kind.has_zeros:
                value = code.add_product(row_sum(), run.numbers[1][half], value)
            total = code.add_product(value, run.numbers[0][half], total)
            if kind.has_minima:
                total = code.add_product(row_sum(), run.numbers[1][half], total)
            added.append(total)
        return added

    def _add_pairs(self, sums: ir.Value, factors: ir.Value, words: ir.Value) -> ir.Value:
        """Return int32 sums plus the products of pairs of int16, both of a pair in one lane.

        LLVM makes one instruction of it where there is one (AVX512-VNNI, AVX-VNNI).
        """
        build = self.code.build
        if self.has_avx512:
            multiply = declare(build.module, "llvm.x86.avx512.pmaddw.d.512", INTEGER_VECTOR, WORD_VECTOR, WORD_VECTOR)
            return build.add(sums, build.call(multiply, [factors, words]))
        half_words, half_integers = ir.VectorType(I16, WORDS // 2), ir.VectorType(I32, LONG_LANES // 2)
        multiply = declare(build.module, "llvm.x86.avx2.pmadd.wd", half_integers, half_words, half_words)
        operands = zip(cut_in_two(self.code, factors), cut_in_two(self.code, words), strict=True)
        return build.add(sums, joined(self.code, [build.call(multiply, each) for each in operands]))
