"""Products of a few rows with a panel of codes, both as integers: pairs of words of 16 bits, whose products are added up.

    sum over a run    S = Σ code × integer of the row, exact in int32
    sum over K        total + scale of the row × (S − zero × Σ) × scale of the group − minimum × Σ, rounded to float32

A run is a part of a group and of the 32 values that share a scale of the row. Its order is one for every number of rows
and every processor, and so are the bits of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import llvmlite.binding as llvm
from llvmlite import ir

from ....code_formats import CodeFormat
from ...llvm import F32, I8, I16, I32, I64, LONG_LANES, Code, constant, declare
from ...registry import link
from ..panels import DEPTH, PANEL
from .integer_rows import RECORD_WORDS, SCALE_WORD, SUM_FACTOR, sum_word
from .panels import BlockLayout, block_layout
from .scales import GroupScales

PAIRS = DEPTH // 2
"""Pairs of a step."""
WORDS = PANEL
"""Words of a vector: those of 16 columns."""
VECTOR_BYTES = 2 * WORDS
PAIRS_TOGETHER = 4
"""Pairs whose products are written one behind the other."""
MAX_ROWS_OF_BOTH = 6
HALVES = 0, 1
"""The two vectors of a panel's columns."""

_words, _floats, _integers = (ir.VectorType(*each) for each in ((I16, WORDS), (F32, LONG_LANES), (I32, LONG_LANES)))


class RunKind(NamedTuple):
    """What a run is computed by, beside its codes."""

    length: int
    """Values of K."""
    zero: int
    has_minima: bool
    has_zeros: bool

    @property
    def num_per_step(self) -> int:
        return DEPTH // self.length

    @property
    def num_vectors(self) -> int:
        """Return how many numbers a column has in a group: its scale, and its minimum or its zero."""
        return 1 + (self.has_minima or self.has_zeros)

    @property
    def step_bytes(self) -> int:
        """Return the bytes of a step that is unpacked: words [16, 32 columns, 2], then for each run its numbers."""
        return 2 * DEPTH * PANEL + self.num_per_step * self.num_vectors * 4 * PANEL


def run_kind(code_format: CodeFormat) -> RunKind:
    """Return how runs of a format are computed."""
    return RunKind(code_format.run_len, code_format.zero, code_format.has_minima, code_format.has_zeros)


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


class _Run(NamedTuple):
    """The codes of a run, and the numbers of its group."""

    numbers: list[list[ir.Value]]
    """The scales, then the minima or the zeros: two vectors of 16 columns of each, float32."""
    each_pair: Callable[[Callable[..., list[ir.Value]], list[ir.Value]], list[ir.Value]]
    """(body, carried values): emits `body(pair, vectors of words, *carried)` for each pair of the run."""


class _Steps(Protocol):
    """Where the words of steps come from."""

    kind: RunKind

    def runs(self, step: ir.Value) -> Iterator[_Run]:
        """Emit what the runs of a step have, one after the other."""


def emit_product(code: Code, code_format: CodeFormat, num_rows: int, has_avx512: bool, given: ProductArguments) -> None:
    """Emit a call that multiplies `num_rows` rows by steps of a panel of codes."""

    def steps(new_code: Code, arguments: ProductArguments) -> _Steps:
        return _PackedSteps(new_code, block_layout(code_format), has_avx512, arguments.panel, arguments.ahead)

    _call_product(code, code_format.key, num_rows, has_avx512, given, steps)


def emit_unpacked_product(
    code: Code, kind: RunKind, num_rows: int, has_avx512: bool, given: ProductArguments
) -> None:
    """Emit a call that multiplies `num_rows` rows by steps that `emit_unpacking` has stored, of which the first is
    step `begin`."""

    def steps(new_code: Code, arguments: ProductArguments) -> _Steps:
        return _UnpackedSteps(new_code, kind, arguments.panel, arguments.begin)

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

    def emit(new_code: Code, panel: ir.Value, target: ir.Value, begin: ir.Value, end: ir.Value, ahead: ir.Value) -> None:
        source, kind = _PackedSteps(new_code, block_layout(code_format), has_avx512, panel, ahead), run_kind(code_format)
        build = new_code.build

        def store_step(step: ir.Value) -> None:
            words = build.gep(target, [build.mul(build.sub(step, begin), I64(kind.step_bytes))])
            numbers = build.gep(words, [I64(2 * DEPTH * PANEL)])
            for index, run in enumerate(source.runs(step)):
                first_vector = index * kind.length // 2 * len(HALVES)

                def store_pair(pair: int, vectors: list[ir.Value], first_vector: int = first_vector) -> list[ir.Value]:
                    for half, vector in enumerate(vectors):
                        place = first_vector + pair * len(HALVES) + half
                        new_code.store_vector(vector, words, I64(place * WORDS))
                    return []

                run.each_pair(store_pair, [])
                flat = [vector for vectors in run.numbers for vector in vectors]
                for place, vector in enumerate(flat, index * len(flat)):
                    new_code.store_vector(vector, numbers, I64(place * LONG_LANES))

        new_code.loop(begin, end, store_step)

    name = f"unpack_{code_format.key}_{'avx512' if has_avx512 else 'avx2'}"
    _call(code, name, [panel, target, *steps, ahead], emit)


def _call_product(
    code: Code,
    name: str,
    num_rows: int,
    has_avx512: bool,
    given: ProductArguments,
    steps: Callable[[Code, ProductArguments], _Steps],
) -> None:
    def emit(new_code: Code, *values: ir.Value) -> None:
        arguments = ProductArguments(*values)
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

    def emit(self, steps: _Steps) -> None:
        """Emit a loop over steps. The totals are carried, one vector for each row and half."""
        code, build, (_, _, _, _, sums, begin, end) = self.code, self.code.build, self.arguments
        offsets = [I64(row * PANEL + half * LONG_LANES) for row in range(self.num_rows) for half in self.halves]
        has_sums = build.icmp_signed(">", begin, I64(0))
        stored = code.load_vectors(sums, offsets, F32, LONG_LANES)
        old_totals = [build.select(has_sums, each, constant(_floats, 0.0)) for each in stored]

        def add_step(step: ir.Value, *totals: ir.Value) -> list[ir.Value]:
            added = list(totals)
            for index, run in enumerate(steps.runs(step)):
                added = self._add_run(steps.kind, step, index, run, added)
            return added

        for offset, total in zip(offsets, code.loop(begin, end, add_step, carried=old_totals), strict=True):
            code.store_vector(total, sums, offset)

    def _add_run(
        self, kind: RunKind, step: ir.Value, index: int, run: _Run, totals: Sequence[ir.Value]
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
                factor = build.bitcast(of_row(record, word, I32), _words)
                old_sums = carried[row * len(self.halves) : (row + 1) * len(self.halves)]
                sums += [self._add_pairs(old, factor, vectors[h]) for h, old in zip(self.halves, old_sums, strict=True)]
            return sums

        def first_sum(record: ir.Value) -> ir.Value:
            """Return what is taken away for the codes' zero, which is 8 × a power of two."""
            if not kind.zero:
                return constant(_integers, 0)
            shift = (kind.zero // -SUM_FACTOR).bit_length() - 1
            sums = of_row(record, sum_word(kind.length, index, is_float=False), I32)
            return build.shl(sums, constant(_integers, shift)) if shift else sums

        sums = run.each_pair(add_pair, [first_sum(record) for record in records for _ in self.halves])
        added = list[ir.Value]()
        for place, (total, integer) in enumerate(zip(totals, sums, strict=True)):
            record, half = records[place // len(self.halves)], self.halves[place % len(self.halves)]
            value = build.fmul(build.sitofp(integer, _floats), of_row(record, SCALE_WORD, F32))
            row_sum = partial(of_row, record, sum_word(kind.length, index, is_float=True), F32)
            if kind.has_zeros:
                value = code.add_product(row_sum(), run.numbers[1][half], value)
            total = code.add_product(value, run.numbers[0][half], total)
            if kind.has_minima:
                total = code.add_product(row_sum(), run.numbers[1][half], total)
            added.append(total)
        return added

    def _add_pairs(self, sums: ir.Value, factors: ir.Value, words: ir.Value) -> ir.Value:
        """Return int32 sums plus the products of pairs of int16; LLVM makes one instruction of it where there is one."""
        code, build = self.code, self.code.build
        if self.has_avx512:
            multiply = declare(build.module, "llvm.x86.avx512.pmaddw.d.512", _integers, _words, _words)
            return build.add(sums, build.call(multiply, [factors, words]))
        half_words, half_integers = ir.VectorType(I16, WORDS // 2), ir.VectorType(I32, LONG_LANES // 2)
        multiply = declare(build.module, "llvm.x86.avx2.pmadd.wd", half_integers, half_words, half_words)
        products = []
        for first in (0, WORDS // 2):
            lanes = ir.Constant(ir.VectorType(I32, WORDS // 2), list(range(first, first + WORDS // 2)))
            products.append(build.call(multiply, [build.shuffle_vector(x, x, lanes) for x in (factors, words)]))
        lanes = ir.Constant(_integers, list(range(LONG_LANES)))
        return build.add(sums, build.shuffle_vector(*products, lanes))


@dataclass(frozen=True)
class _PackedSteps:
    """Steps of a panel as it is stored, `Order.WORDS`. Those of panel `ahead` are prefetched."""

    code: Code
    layout: BlockLayout
    has_avx512: bool
    panel: ir.Value
    ahead: ir.Value

    @property
    def kind(self) -> RunKind:
        return run_kind(self.layout.code_format)

    def runs(self, step: ir.Value) -> Iterator[_Run]:
        code, build, layout, format_ = self.code, self.code.build, self.layout, self.layout.code_format
        steps_per_block = format_.block // DEPTH
        step_bytes = -(-layout.num_bytes // steps_per_block)
        block_offset = build.mul(build.udiv(step, I64(steps_per_block)), I64(layout.num_bytes))
        step_in_block = build.urem(step, I64(steps_per_block))
        block, block_ahead = (build.gep(address, [block_offset]) for address in (self.panel, self.ahead))
        code.prefetch(block_ahead, build.mul(step_in_block, I64(step_bytes)), I8, step_bytes)
        scales = GroupScales(code, layout)
        super_scales = scales.of_super_groups(block)
        for index in range(self.kind.num_per_step):
            run = build.add(build.mul(step_in_block, I64(self.kind.num_per_step)), I64(index))
            group = build.udiv(run, I64(format_.group // format_.run_len))
            numbers = scales.of_group(block, group, super_scales)
            if format_.has_zeros:
                numbers.append(scales.zeros(block, group))
            if format_.mantissa_bits is not None:  # Codes stand for twice their numbers, see `_values`.
                numbers = [[build.fmul(each, constant(_floats, 0.5)) for each in vectors] for vectors in numbers]
            yield _Run(numbers, partial(self._each_pair, block, step_in_block, index * format_.run_len // 2))

    def _each_pair(
        self,
        block: ir.Value,
        step: ir.Value,
        first_pair: int,
        body: Callable[..., list[ir.Value]],
        carried: list[ir.Value],
    ) -> list[ir.Value]:
        for pair in range(self.kind.length // 2):
            vectors = [self._values(block, step, first_pair + pair, half) for half in HALVES]
            carried = body(pair, vectors, *carried)
        return carried

    def _values(self, block: ir.Value, step: ir.Value, pair: int, half: int) -> ir.Value:
        """Return what a pair of codes of each of 16 columns stand for, as words: integers, or small floats doubled."""
        build, bits = self.code.build, self.layout.code_format.bits
        if bits == 8:
            return self._bits(block, step, self.layout.low_bits, 8, pair, half, 0)
        if self.layout.code_format.mantissa_bits is not None:
            return self._looked_up(self._bits(block, step, self.layout.low_bits, 4, pair, half, 0))
        low = self._bits(block, step, self.layout.low_bits, 4, pair, half, 0)
        if bits == 4:
            return low
        return build.or_(low, self._bits(block, step, self.layout.high_bits, bits - 4, pair, half, 4))

    def _bits(
        self, block: ir.Value, step: ir.Value, begin: int, num_bits: int, pair: int, half: int, place: int
    ) -> ir.Value:
        """Return `num_bits` of a pair of codes of each of 16 columns, moved to bit `place` of words.

        `begin` is the first byte of these bits in the block.
        """
        code, build, codes_of_word = self.code, self.code.build, 16 // num_bits
        words_of_step = PAIRS // codes_of_word
        vector = build.add(build.mul(step, I64(words_of_step * len(HALVES))), I64(pair // codes_of_word * 2 + half))
        words = code.load_vector(build.gep(block, [I64(begin)]), build.mul(vector, I64(WORDS)), I16, WORDS)
        shift = pair % codes_of_word * num_bits - place
        if shift > 0:
            words = build.lshr(words, constant(_words, shift))
        elif shift < 0:
            words = build.shl(words, constant(_words, -shift))
        is_last = place == 0 and (pair + 1) % codes_of_word == 0
        return words if is_last else build.and_(words, constant(_words, ((1 << num_bits) - 1) << place))

    def _looked_up(self, codes: ir.Value) -> ir.Value:
        """Return twice the small floats that codes of 4 bits stand for."""
        code, build = self.code, self.code.build
        table = [int(value) for value in 2 * self.layout.code_format.code_values]
        if self.has_avx512:
            function = declare(build.module, "llvm.x86.avx512.permvar.hi.512", _words, _words, _words)
            return build.call(function, [ir.Constant(_words, table * 2), codes])
        # A table of bytes: the upper byte of each word is 0, and becomes 0, and then the lower one's sign.
        as_bytes, halves = ir.VectorType(I8, 32), list[ir.Value]()
        function = declare(build.module, "llvm.x86.avx2.pshuf.b", as_bytes, as_bytes, as_bytes)
        for first in (0, WORDS // 2):
            lanes = ir.Constant(ir.VectorType(I32, WORDS // 2), list(range(first, first + WORDS // 2)))
            indices = build.bitcast(build.shuffle_vector(codes, codes, lanes), as_bytes)
            found = build.call(function, [ir.Constant(as_bytes, table * 2), indices])
            halves.append(build.bitcast(found, ir.VectorType(I16, WORDS // 2)))
        lanes = ir.Constant(ir.VectorType(I32, WORDS), list(range(WORDS)))
        words = build.shuffle_vector(*halves, lanes)
        return build.ashr(build.shl(words, constant(_words, 8)), constant(_words, 8))


@dataclass(frozen=True)
class _UnpackedSteps:
    """Steps that `emit_unpacking` has stored, from `first_step` on."""

    code: Code
    kind: RunKind
    steps: ir.Value
    first_step: ir.Value

    def runs(self, step: ir.Value) -> Iterator[_Run]:
        code, build, kind = self.code, self.code.build, self.kind
        words = build.gep(self.steps, [build.mul(build.sub(step, self.first_step), I64(kind.step_bytes))])
        begin = build.gep(words, [I64(2 * DEPTH * PANEL)])
        for index in range(kind.num_per_step):
            places = range(index * kind.num_vectors, (index + 1) * kind.num_vectors)
            numbers = [
                code.load_vectors(begin, (I64((2 * place + half) * LONG_LANES) for half in HALVES), F32, LONG_LANES)
                for place in places
            ]
            yield _Run(numbers, partial(self._each_pair, build.gep(words, [I64(index * kind.length * VECTOR_BYTES)])))

    def _each_pair(
        self, words: ir.Value, body: Callable[..., list[ir.Value]], carried: list[ir.Value]
    ) -> list[ir.Value]:
        code, build = self.code, self.code.build

        def several(first: ir.Value, *values: ir.Value) -> list[ir.Value]:
            for number in range(PAIRS_TOGETHER):
                pair = build.add(first, I64(number))
                offsets = (build.mul(build.add(build.mul(pair, I64(2)), I64(half)), I64(WORDS)) for half in HALVES)
                values = tuple(body(pair, code.load_vectors(words, offsets, I16, WORDS), *values))
            return list(values)

        return code.loop(0, self.kind.length // 2, several, step=PAIRS_TOGETHER, carried=carried)
