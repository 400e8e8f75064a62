"""The codes that are multiplied as integers: step by step as a panel is stored, or once they are unpacked.

A step is 32 values of K, and a run a part of it in one group. A quad is four values of K of each of 32 columns, as
bytes that have no sign: two vectors of 16 columns. A weight is byte × scale − minimum, for all formats: a byte is a
code, or what a code stands for by a table of the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

from llvmlite import ir

from ....code_tables import code_table
from ...llvm import F32, I8, I32, I64, LONG_LANES, Code, constant, declare
from ..panels import DEPTH, PANEL
from .panels import BlockLayout, CodeField
from .scales import GroupScales, emit_block

VALUES_PER_QUAD = 4
"""Values of K that one instruction multiplies and adds up."""
COLUMN_HALVES = 0, 1
"""The two vectors of a panel's columns."""
VECTOR_BYTES = 64
"""Bytes of a vector: a quad of 16 columns."""
BYTE_VECTOR = ir.VectorType(I8, VECTOR_BYTES)
FLOAT_VECTOR = ir.VectorType(F32, LONG_LANES)
INTEGER_VECTOR = ir.VectorType(I32, LONG_LANES)


def unpacked_bytes(run_len: int) -> int:
    """Return the bytes of a step that is unpacked: codes [8 quads, 32 columns, 4], then what each run's group has."""
    return DEPTH * PANEL + DEPTH // run_len * len(GroupTerms._fields) * 4 * PANEL


class GroupTerms(NamedTuple):
    """What the weights of a group share, in float32: two vectors of 16 columns each."""

    scales: list[ir.Value]
    minima: list[ir.Value]


class Run(NamedTuple):
    """The codes of a run, and the terms of its group."""

    terms: GroupTerms
    quads: Iterator[list[ir.Value]]
    """The codes of each quad: two vectors of bytes. What loads a quad is emitted as it is taken."""


class StepSource(Protocol):
    """Where the codes of steps come from."""

    @property
    def run_len(self) -> int:
        """Return the values of K of a run."""

    def runs(self, step: ir.Value) -> Iterator[Run]:
        """Emit what the runs of a step have, one after the other. Take all quads of a run before the next run."""


class _FieldOfStep(NamedTuple):
    """A field of the codes of a step, in vectors of 16 columns."""

    begin: ir.Value
    """Address of its first vector; those of both halves of the columns take turns."""
    field: CodeField


@dataclass(frozen=True)
class PackedSteps:
    """Steps of a panel as it is stored, `Order.QUADS`. Those of panel `ahead` are prefetched."""

    code: Code
    layout: BlockLayout
    has_avx512: bool
    panel: ir.Value
    ahead: ir.Value
    shuffles_bytes: bool = True
    """Whether bytes are looked up by an instruction of AVX-512 or AVX2; else by blends, on any processor."""

    @property
    def run_len(self) -> int:
        return self.layout.code_format.run_len

    def runs(self, step: ir.Value) -> Iterator[Run]:
        code, build, layout, format_ = self.code, self.code.build, self.layout, self.layout.code_format
        block, step_in_block = emit_block(code, layout, self.panel, self.ahead, step, DEPTH)
        fields = self._fields(block, step_in_block)
        super_scales = GroupScales(code, layout).of_super_groups(block)
        runs_per_step = DEPTH // self.run_len
        for index in range(runs_per_step):
            run = build.add(build.mul(step_in_block, I64(runs_per_step)), I64(index))
            group = build.udiv(run, I64(format_.group // format_.run_len))
            terms = self._terms(block, group, super_scales)
            first_quad = index * self.run_len // VALUES_PER_QUAD
            if format_.values_per_code > 1:
                yield Run(terms, self._grid_quads(block, step_in_block, first_quad))
            else:
                yield Run(terms, self._quads(fields, first_quad))

    def _terms(self, block: ir.Value, group: ir.Value, super_scales: list[list[ir.Value]] | None) -> GroupTerms:
        """Return the terms of a group; a minimum is zero × scale where the format has none."""
        build, format_, groups = self.code.build, self.layout.code_format, GroupScales(self.code, self.layout)
        scales, *minima = groups.of_group(block, group, super_scales)
        if minima:
            return GroupTerms(scales, *minima)
        if format_.has_zeros:
            zeros = groups.zeros(block, group)
        else:
            zeros = [constant(FLOAT_VECTOR, float(format_.byte_zero))] * len(COLUMN_HALVES)
        if format_.mantissa_bits is not None:  # Floats of 4 bits are doubled in their table.
            scales = [build.fmul(each, constant(FLOAT_VECTOR, 0.5)) for each in scales]
        return GroupTerms(scales, [build.fmul(*pair) for pair in zip(zeros, scales, strict=True)])

    def _fields(self, block: ir.Value, step: ir.Value) -> list[_FieldOfStep]:
        """Return the fields of the codes of a step, which is given by its number in the block."""
        build, fields = self.code.build, list[_FieldOfStep]()
        for field in self.layout.code_fields:
            offset = build.add(build.mul(step, I64(DEPTH * PANEL * field.num_bits // 8)), I64(field.first_byte))
            fields.append(_FieldOfStep(build.gep(block, [offset]), field))
        return fields

    def _quads(self, fields: Sequence[_FieldOfStep], first_quad: int) -> Iterator[list[ir.Value]]:
        """Emit the codes of a run, which begins with quad `first_quad` of a step."""
        build, table = self.code.build, self.layout.code_format.byte_table
        for quad in range(first_quad, first_quad + self.run_len // VALUES_PER_QUAD):
            words = (
                reduce(build.or_, [self._code_bits(field, quad, half) for field in fields]) for half in COLUMN_HALVES
            )
            codes = (build.bitcast(each, BYTE_VECTOR) for each in words)
            yield [each if table is None else self._looked_up(each, table.tolist()) for each in codes]

    def _grid_quads(self, block: ir.Value, step: ir.Value, first_quad: int) -> Iterator[list[ir.Value]]:
        """Emit the bytes of a run of a grid, which begins with quad `first_quad` of a step, given by its number.

        An entry has one quad or two. Indices lie in quads themselves: lane c has in byte i the index i of column c.
        """
        build, values_per_code = self.code.build, self.layout.code_format.values_per_code
        quads_per_entry = values_per_code // VALUES_PER_QUAD
        first_entry, num_entries = first_quad // quads_per_entry, self.run_len // values_per_code
        for entry in range(first_entry, first_entry + num_entries):
            index_quad, byte = divmod(entry, VALUES_PER_QUAD)
            number = build.add(build.mul(step, I64(DEPTH // values_per_code // VALUES_PER_QUAD)), I64(index_quad))
            quads_of_halves = list[list[ir.Value]]()
            for half in COLUMN_HALVES:
                bits = [self._index_bits(block, field, number, byte, half) for field in self.layout.code_fields]
                quads_of_halves.append(self._entries(reduce(build.or_, bits)))
            for quad, halves in enumerate(zip(*quads_of_halves, strict=True), entry * quads_per_entry):
                yield [self._with_signs(block, step, quad, half, each) for half, each in enumerate(halves)]

    def _entries(self, indices: ir.Value) -> list[ir.Value]:
        """Return the bytes of 16 entries of the grid: a vector for each of their quads, one or two."""
        code, build, format_ = self.code, self.code.build, self.layout.code_format
        assert format_.table is not None, "a code has several values by a table alone"
        entry_type = {4: I32, 8: I64}[format_.values_per_code]
        entries = code_table(format_.table).view(f"<u{format_.values_per_code}").reshape(-1).tolist()
        grid = code.table(entries, entry_type)
        if entry_type is I32:
            return [build.bitcast(code.gather(grid, indices, I32, has_avx512=self.has_avx512), BYTE_VECTOR)]
        # Each gather has both quads of 8 columns beside each other.
        gathered = [
            build.bitcast(code.gather(grid, each, I64, has_avx512=self.has_avx512), INTEGER_VECTOR)
            for each in cut_in_two(code, indices)
        ]
        lanes = (ir.Constant(INTEGER_VECTOR, list(range(quad, 2 * LONG_LANES, 2))) for quad in range(2))
        return [build.bitcast(build.shuffle_vector(*gathered, each), BYTE_VECTOR) for each in lanes]

    def _index_bits(self, block: ir.Value, field: CodeField, index_quad: ir.Value, byte: int, half: int) -> ir.Value:
        """Return the bits of a field of an index of each of 16 columns, where indices have them.

        It is index `byte` of the quad of indices `index_quad` of the block.
        """
        build, (first_byte, num_bits, lowest_bit) = self.code.build, field
        quads_per_vector = I64(8 // num_bits)
        vector = build.mul(build.udiv(index_quad, quads_per_vector), I64(len(COLUMN_HALVES)))
        offset = build.mul(build.add(vector, I64(half)), I64(LONG_LANES))
        words = self.code.load_vector(build.gep(block, [I64(first_byte)]), offset, I32, LONG_LANES)
        shift = build.add(build.mul(build.urem(index_quad, quads_per_vector), I64(num_bits)), I64(8 * byte))
        shifted = build.lshr(words, self.code.broadcast(build.trunc(shift, I32), LONG_LANES))
        bits = build.and_(shifted, constant(INTEGER_VECTOR, (1 << num_bits) - 1))
        return build.shl(bits, constant(INTEGER_VECTOR, lowest_bit))

    def _with_signs(self, block: ir.Value, step: ir.Value, quad: int, half: int, entries: ir.Value) -> ir.Value:
        """Return the bytes of a quad of a step, from those of the entries: zero + x becomes zero − x by a sign bit."""
        field, build = self.layout.sign_field, self.code.build
        if field is None:
            return entries
        begin = build.gep(block, [I64(field.first_byte)])
        offset = build.add(build.mul(step, I64(DEPTH * PANEL // 8)), I64(half * VECTOR_BYTES))
        # Vector `half` has the bits of all quads of the step.
        signs = build.and_(self.code.load_vector(begin, offset, I8, VECTOR_BYTES), constant(BYTE_VECTOR, 1 << quad))
        negated = build.sub(constant(BYTE_VECTOR, 2 * self.layout.code_format.zero), entries)
        return build.select(build.icmp_unsigned("!=", signs, constant(BYTE_VECTOR, 0)), negated, entries)

    def _code_bits(self, of_step: _FieldOfStep, quad: int, half: int) -> ir.Value:
        """Return the bits of a field of quad `quad` of a step, where codes have them, of a half of the columns.

        Example for 4 bits: a vector has two quads, and the upper halves of its bytes are the second one.
        """
        build, (_, num_bits, lowest_bit) = self.code.build, of_step.field
        quads_per_vector = 8 // num_bits
        vector = quad // quads_per_vector * len(COLUMN_HALVES) + half
        words = self.code.load_vector(of_step.begin, I64(vector * LONG_LANES), I32, LONG_LANES)
        if num_bits == 8:
            return words
        shift = quad % quads_per_vector * num_bits - lowest_bit
        if shift > 0:
            words = build.lshr(words, constant(INTEGER_VECTOR, shift))
        elif shift < 0:
            words = build.shl(words, constant(INTEGER_VECTOR, -shift))
        mask = ((1 << num_bits) - 1) << lowest_bit
        return build.and_(words, constant(INTEGER_VECTOR, mask * 0x01010101))

    def _looked_up(self, codes: ir.Value, table: Sequence[int]) -> ir.Value:
        """Return the bytes of a table of 16 that codes of 4 bits stand for."""
        code, build = self.code, self.code.build
        if not self.shuffles_bytes:
            # Each bit of the codes halves the entries that are left, beginning with the lowest.
            entries = [constant(BYTE_VECTOR, value) for value in table]
            while len(entries) > 1:
                bit = build.and_(codes, constant(BYTE_VECTOR, len(table) // len(entries)))
                is_set = build.icmp_unsigned("!=", bit, constant(BYTE_VECTOR, 0))
                pairs = zip(entries[0::2], entries[1::2], strict=True)
                entries = [build.select(is_set, upper, lower) for lower, upper in pairs]
            return entries[0]
        if self.has_avx512:
            look_up = declare(build.module, "llvm.x86.avx512.pshuf.b.512", BYTE_VECTOR, BYTE_VECTOR, BYTE_VECTOR)
            return build.call(look_up, [ir.Constant(BYTE_VECTOR, [*table] * 4), codes])
        short = ir.VectorType(I8, VECTOR_BYTES // 2)
        look_up = declare(build.module, "llvm.x86.avx2.pshuf.b", short, short, short)
        halves = cut_in_two(code, codes)
        return joined(code, [build.call(look_up, [ir.Constant(short, [*table] * 2), each]) for each in halves])


@dataclass(frozen=True)
class UnpackedSteps:
    """Steps that are unpacked, from `first_step` on."""

    code: Code
    run_len: int
    steps: ir.Value
    first_step: ir.Value

    def runs(self, step: ir.Value) -> Iterator[Run]:
        code, build = self.code, self.code.build
        codes = build.gep(self.steps, [build.mul(build.sub(step, self.first_step), I64(unpacked_bytes(self.run_len)))])
        begin = build.gep(codes, [I64(DEPTH * PANEL)])
        num_terms = len(GroupTerms._fields)
        for index in range(DEPTH // self.run_len):
            terms = GroupTerms(
                *(
                    code.load_vectors(
                        begin, (I64((2 * term + half) * LONG_LANES) for half in COLUMN_HALVES), F32, LONG_LANES
                    )
                    for term in range(index * num_terms, (index + 1) * num_terms)
                )
            )
            yield Run(terms, self._quads(build.gep(codes, [I64(index * self.run_len * PANEL)])))

    def _quads(self, codes: ir.Value) -> Iterator[list[ir.Value]]:
        """Emit the loads of the codes of a run, from an address on."""
        for quad in range(self.run_len // VALUES_PER_QUAD):
            offsets = (I64((quad * len(COLUMN_HALVES) + half) * VECTOR_BYTES) for half in COLUMN_HALVES)
            yield self.code.load_vectors(codes, offsets, I8, VECTOR_BYTES)


def unpack_step(code: Code, source: PackedSteps, target: ir.Value, first_step: ir.Value, step: ir.Value) -> None:
    """Emit the stores of a step, where `UnpackedSteps` finds it: its codes, then the terms of its runs."""
    build = code.build
    codes = build.gep(target, [build.mul(build.sub(step, first_step), I64(unpacked_bytes(source.run_len)))])
    terms = build.gep(codes, [I64(DEPTH * PANEL)])

    for index, run in enumerate(source.runs(step)):
        run_codes = build.gep(codes, [I64(index * source.run_len * PANEL)])
        for number, vector in enumerate(vector for vectors in run.quads for vector in vectors):
            code.store_vector(vector, run_codes, I64(number * VECTOR_BYTES))
        run_terms = build.gep(terms, [I64(index * len(GroupTerms._fields) * 4 * PANEL)])
        for number, vector in enumerate(vector for vectors in run.terms for vector in vectors):
            code.store_vector(vector, run_terms, I64(number * LONG_LANES))


def cut_in_two(code: Code, vector: ir.Value) -> list[ir.Value]:
    """Return the lower and the upper half of a vector: two vectors of AVX2."""
    size = vector.type.count // 2
    lanes = (ir.Constant(ir.VectorType(I32, size), list(range(first, first + size))) for first in (0, size))
    return [code.build.shuffle_vector(vector, vector, each) for each in lanes]


def joined(code: Code, halves: Sequence[ir.Value]) -> ir.Value:
    """Return two vectors as one."""
    size = 2 * halves[0].type.count
    return code.build.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, size), list(range(size))))
