"""Decodes panels of codes: to float32, or rounded to bfloat16 in pairs, as products read them (see `codes.panels`).

Codes in chunks, which lie as the numbers will, become floats at once (`Decoder`). Those that always lie in quads are
unpacked to bytes first, as for products of integers (`decode_quads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from ....code_formats import CodeFormat
from ...linked_calls import call_linked
from ...llvm import BFLOAT16, F32, I8, I16, I32, I64, Code, constant, declare
from ..panels import DEPTH, PANEL
from .integer_steps import VALUES_PER_QUAD, PackedSteps
from .panels import VECTOR_COLUMNS, BlockLayout, block_layout
from .scales import GroupScales, emit_block

CHUNKS_TOGETHER = 2
"""Chunks of 32 codes of an iteration: a pair of bfloat16 rows."""


class Vectors(NamedTuple):
    """What numbers are decoded to, and by which instructions."""

    in_pairs: bool
    """Whether they are rounded to bfloat16, in pairs."""
    has_avx512: bool
    has_avx512_bf16: bool


class Steps(NamedTuple):
    """Steps of a panel, of 32 values of K each, and where their numbers go. Each field is an int64."""

    begin: ir.Value
    end: ir.Value
    """The steps `begin` … `end` − 1 are decoded."""
    place_mask: ir.Value
    """Which bits of a step's number say its place: −1 for all, or 1 if two places are used in turn."""


def emit_decode(
    code: Code,
    code_format: CodeFormat,
    vectors: Vectors,
    panel: ir.Value,
    target: ir.Value,
    steps: Steps,
    ahead: ir.Value,
) -> None:
    """Emit a call that decodes steps of a panel to `target`, and prefetches the bytes of these steps of panel `ahead`.

    The function is compiled once for a format and an order, for all products.
    """
    name = "_".join(["jpaged_decode", code_format.key, *(name for name, has in vectors._asdict().items() if has)])

    def emit(new_code: Code, *values: ir.Value) -> None:
        new_panel, new_target, begin, end, place_mask, new_ahead = values
        layout, new_steps = block_layout(code_format), Steps(begin, end, place_mask)
        if code_format.is_in_quads:
            source = PackedSteps(
                new_code, layout, vectors.has_avx512, new_panel, new_ahead, shuffles_bytes=vectors.has_avx512
            )
            decode_quads(new_code, source, vectors, new_target, new_steps)
        else:
            Decoder(new_code, layout, vectors).emit(new_panel, new_target, new_steps, new_ahead)

    call_linked(code, name, [panel, target, *steps, ahead], emit)


@dataclass(frozen=True)
class Decoder:
    """Emits the code that decodes one panel."""

    code: Code
    layout: BlockLayout
    vectors: Vectors

    @property
    def format(self) -> CodeFormat:
        return self.layout.code_format

    @property
    def _scales(self) -> GroupScales:
        return GroupScales(self.code, self.layout)

    def emit(self, panel: ir.Value, target: ir.Value, steps: Steps, ahead: ir.Value) -> None:
        """Emit a loop over steps of 32 values of K, each of which is a run of one group, or several of small groups.

        `panel`, `target` and `ahead` are addresses: of the panel's bytes, of the decoded numbers, and of the panel
        whose bytes are prefetched. Example for Q6_K, with blocks of 256 and groups of 16: step 9 is groups 2 and 3 of
        block 1. With blocks and groups of 128, it is the second quarter of the only group of block 2.
        """
        code, build, format_ = self.code, self.code.build, self.format
        runs_per_step = DEPTH // format_.run_len
        value_bytes = 2 if self.vectors.in_pairs else 4

        def decode_step(step: ir.Value) -> None:
            """Emit the decoding of one step's runs, and the prefetch of as many bytes of the panel ahead."""
            block, step_in_block = emit_block(code, self.layout, panel, ahead, step, DEPTH)
            target_step = build.and_(step, steps.place_mask)
            step_numbers = build.gep(target, [build.mul(target_step, I64(DEPTH * PANEL * value_bytes))])
            super_scales = self._scales.of_super_groups(block)
            for run_in_step in range(runs_per_step):
                run = build.add(build.mul(step_in_block, I64(runs_per_step)), I64(run_in_step))
                run_bytes = format_.run_len * PANEL * value_bytes
                run_numbers = build.gep(step_numbers, [I64(run_in_step * run_bytes)])
                self._store_run(run_numbers, self._prepare_run(block, run, super_scales))

        code.loop(steps.begin, steps.end, decode_step)

    def _store_run(self, begin: ir.Value, numbers_of: Callable[[ir.Value, int], list[ir.Value]]) -> None:
        """Emit the stores of the numbers of a run, from an address on."""

        def store_chunks(index: ir.Value) -> None:
            """Emit two chunks of 32 codes: two values of K, or both halves of a pair's columns."""
            for offset in range(CHUNKS_TOGETHER):
                chunk = self.code.build.add(index, I64(offset))
                store_numbers(
                    self.code, self.vectors, begin, self.code.build.mul(chunk, I64(PANEL)), numbers_of(chunk, offset)
                )

        self.code.loop(0, self.format.run_len, store_chunks, step=CHUNKS_TOGETHER)

    def words(self, panel: ir.Value, run: ir.Value, ahead: ir.Value) -> Callable[[ir.Value], list[ir.Value]]:
        """Emit what the numbers of run `run` of a panel share; return what emits the vectors of one of its words.

        That takes the word's number in the run, and returns two vectors of words, in all 32 columns. As many bytes of
        the panel `ahead` are prefetched as the run has.
        """
        build = self.code.build
        block, run_in_block = emit_block(self.code, self.layout, panel, ahead, run, self.format.run_len)
        numbers_of = self._prepare_run(block, run_in_block, self._scales.of_super_groups(block))

        def words_of(word: ir.Value) -> list[ir.Value]:
            if not self.vectors.in_pairs:
                return numbers_of(word, 0)
            first_chunk = build.mul(word, I64(2))
            chunks = (numbers_of(build.add(first_chunk, I64(half)), half) for half in range(2))
            return [build.bitcast(_rounded(self.code, numbers), _vector(I32)) for numbers in chunks]

        return words_of

    def _prepare_run(
        self, block: ir.Value, run: ir.Value, super_scales: list[list[ir.Value]] | None
    ) -> Callable[[ir.Value, int], list[ir.Value]]:
        """Emit what the numbers of run `run` of a block share; return what emits the numbers of one of its chunks.

        That takes the chunk's number, counted from the run's first one, and whether it is even (0) or odd (1), and
        returns two vectors of float32. Scales, and what is added or taken away, stay in registers for all 32 columns.
        """
        code, build, format_ = self.code, self.code.build, self.format
        group = build.udiv(run, I64(format_.group // format_.run_len))
        scales = self._scales.of_group(block, group, super_scales)
        factors, zeros, added = scales[0], list[ir.Value](), list[ir.Value]()
        if format_.has_minima:
            added = [build.fneg(each) for each in scales[1]]
        elif format_.has_zeros:
            zeros = self._scales.zeros(block, group)
            if format_.scale != "float32":  # Zeros × scales of fewer bits are exact.
                added = [build.fneg(build.fmul(*pair)) for pair in zip(zeros, factors, strict=True)]
                zeros = []
        elif format_.zero:
            added = [build.fmul(each, constant(each.type, -float(format_.zero))) for each in factors]
        if format_.float16_bits is not None:
            factors = [build.fmul(each, constant(each.type, format_.float16_bits.factor)) for each in factors]
        if self.vectors.in_pairs:  # A chunk of 32 codes has two of each of 16 columns.
            factors, zeros, added = (self._doubled(each) for each in (factors, zeros, added))
        first_chunk = build.mul(run, I64(format_.run_len))

        def numbers_of(chunk: ir.Value, half_of_pair: int) -> list[ir.Value]:
            first_vector = 2 * half_of_pair if self.vectors.in_pairs else 0
            numbers = []
            for vector, floats in enumerate(self._codes(block, build.add(first_chunk, chunk)), first_vector):
                if added:
                    numbers.append(code.add_product(floats, factors[vector], added[vector]))
                else:
                    shifted = build.fsub(floats, zeros[vector]) if zeros else floats
                    numbers.append(build.fmul(shifted, factors[vector]))
            return numbers

        return numbers_of

    def _doubled(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """Return two vectors of 16 columns as four, in which each column comes twice."""
        lanes = [
            ir.Constant(_vector(I32), [first + i // 2 for i in range(VECTOR_COLUMNS)])
            for first in (0, VECTOR_COLUMNS // 2)
        ]
        return [self.code.build.shuffle_vector(each, each, which) for each in vectors for which in lanes]

    def _codes(self, block: ir.Value, chunk: ir.Value) -> list[ir.Value]:
        """Return the 32 codes of a chunk of a block as two vectors of float32.

        Lower bits are the two halves of 16 bytes. Codes that are floats are ÷ the factor of `float16_bits`.
        """
        code, build, bits = self.code, self.code.build, self.format.bits
        low_bits = build.gep(block, [I64(self.layout.low_bits)])
        if bits == 8:
            loaded = self._scales.load_columns(low_bits, build.mul(chunk, I64(PANEL)), I8)
            if self.format.float16_bits is not None:
                return [self._small_floats(build.zext(each, _vector(I16))) for each in loaded]
            return [build.uitofp(each, _vector(F32)) for each in loaded]
        packed = code.load_vector(low_bits, build.mul(chunk, I64(VECTOR_COLUMNS)), I8, VECTOR_COLUMNS)
        words = build.zext(packed, _vector(I32))
        upper = build.lshr(words, constant(_vector(I32), 4))
        if self.vectors.has_avx512:
            low = [self._looked_up(words), self._looked_up(upper)]
            return self._with_high_bits(block, chunk, low) if bits > 4 else low
        halves = [build.and_(words, constant(_vector(I32), 15)), upper]
        if self.format.float16_bits is not None:
            return [self._small_floats(build.trunc(each, _vector(I16))) for each in halves]
        low = [build.sitofp(each, _vector(F32)) for each in halves]
        return self._with_high_bits(block, chunk, low) if bits > 4 else low

    def _with_high_bits(self, block: ir.Value, chunk: ir.Value, low: list[ir.Value]) -> list[ir.Value]:
        """Return the codes of a chunk, from what their lower 4 bits stand for: a fifth bit adds 16, a sixth one 32.

        A fifth bit is a lane of a mask of 32. Fifth and sixth bits of 16 codes are a word, which is shifted by twice
        the lane.
        """
        code, build = self.code, self.code.build
        high_bits = build.gep(block, [I64(self.layout.high_bits)])
        codes = list[ir.Value]()
        if self.format.bits == 5:
            mask = build.bitcast(code.load(high_bits, chunk, I32), ir.VectorType(ir.IntType(1), PANEL))
            for half, floats in enumerate(low):
                lanes = ir.Constant(_vector(I32), list(range(half * VECTOR_COLUMNS, (half + 1) * VECTOR_COLUMNS)))
                is_set = build.shuffle_vector(mask, mask, lanes)
                codes.append(build.select(is_set, build.fadd(floats, constant(_vector(F32), 16.0)), floats))
            return codes
        shifts = ir.Constant(_vector(I32), [2 * i for i in range(VECTOR_COLUMNS)])
        for half, floats in enumerate(low):
            word = code.load(high_bits, build.add(build.mul(chunk, I64(2)), I64(half)), I32)
            shifted = build.lshr(code.broadcast(word, VECTOR_COLUMNS), shifts)
            if self.vectors.has_avx512:
                high = self._looked_up(shifted, [16.0 * (i & 3) for i in range(VECTOR_COLUMNS)])
            else:
                pairs = build.shl(build.and_(shifted, constant(_vector(I32), 3)), constant(_vector(I32), 4))
                high = build.sitofp(pairs, _vector(F32))
            codes.append(build.fadd(floats, high))
        return codes

    def _small_floats(self, codes: ir.Value) -> ir.Value:
        """Return codes that are floats, words of 16 bits, as float32 ÷ the factor of `float16_bits`.

        As float16 they have the same sign, exponent and mantissa, at the upper ends of their fields. A processor
        converts float16 exactly, the smallest numbers too.
        """
        build, bits, shifts = self.code.build, self.format.bits, self.format.float16_bits
        assert shifts is not None
        word = _vector(I16)
        sign = build.and_(build.shl(codes, constant(word, shifts.sign)), constant(word, 0x8000))
        magnitude = build.and_(codes, constant(word, (1 << (bits - 1)) - 1))
        float16 = build.or_(sign, build.shl(magnitude, constant(word, shifts.magnitude)))
        return build.fpext(build.bitcast(float16, _vector(ir.HalfType())), _vector(F32))

    def _looked_up(self, words: ir.Value, table: Sequence[float] | None = None) -> ir.Value:
        """Return what the lowest 4 bits of each word stand for, by a table of 16.

        Without a table these are codes, ÷ the factor of `float16_bits` if codes are floats. It is one instruction
        (AVX-512) that reads no other bits.
        """
        name, type_ = "llvm.x86.avx512.permvar.sf.512", _vector(F32)
        function = declare(self.code.build.module, name, type_, type_, _vector(I32))
        if table is None:
            small_floats = self.format.float16_bits
            values = self.format.code_values[:VECTOR_COLUMNS]
            table = (values / (1.0 if small_floats is None else small_floats.factor)).tolist()
        return self.code.build.call(function, [ir.Constant(type_, list(table)), words])


def decode_quads(code: Code, source: PackedSteps, vectors: Vectors, target: ir.Value, steps: Steps) -> None:
    """Emit a loop over steps whose bytes are unpacked four values of K at a time, and then made floats.

    The numbers are byte × scale − minimum, rounded once, as `Decoder` stores them.
    """
    build = code.build
    step_bytes = DEPTH * PANEL * (2 if vectors.in_pairs else 4)

    def decode_step(step: ir.Value) -> None:
        numbers = build.gep(target, [build.mul(build.and_(step, steps.place_mask), I64(step_bytes))])
        for index, run in enumerate(source.runs(step)):
            for quad, columns in enumerate(run.quads, index * source.run_len // VALUES_PER_QUAD):
                floats = [_floats_of_quad(code, *each) for each in zip(columns, *run.terms, strict=True)]
                if vectors.in_pairs:
                    chunks = [_paired(code, half[k : k + 2]) for k in (0, 2) for half in floats]
                else:
                    chunks = [list(of_k) for of_k in zip(*floats, strict=True)]
                for number, chunk in enumerate(chunks, quad * VALUES_PER_QUAD):
                    store_numbers(code, vectors, numbers, I64(number * PANEL), chunk)

    code.loop(steps.begin, steps.end, decode_step)


def _floats_of_quad(code: Code, quad: ir.Value, scale: ir.Value, minimum: ir.Value) -> list[ir.Value]:
    """Return the numbers of 16 columns for each of four values of K."""
    build = code.build
    words, added = build.bitcast(quad, _vector(I32)), build.fneg(minimum)
    shifted = (build.lshr(words, constant(words.type, 8 * k)) for k in range(VALUES_PER_QUAD))
    values = (build.sitofp(build.and_(each, constant(words.type, 255)), _vector(F32)) for each in shifted)
    return [code.add_product(each, scale, added) for each in values]


def _paired(code: Code, numbers: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the numbers of 16 columns for two values of K, those of a column beside each other, as two vectors."""
    lanes = [
        ir.Constant(_vector(I32), [first + i // 2 + i % 2 * VECTOR_COLUMNS for i in range(VECTOR_COLUMNS)])
        for first in (0, VECTOR_COLUMNS // 2)
    ]
    return [code.build.shuffle_vector(*numbers, which) for which in lanes]


def store_numbers(code: Code, vectors: Vectors, values: ir.Value, offset: ir.Value, numbers: list[ir.Value]) -> None:
    """Emit the store of 32 numbers, two vectors of float32, from an element on, as what they are decoded to."""
    if vectors.in_pairs and vectors.has_avx512_bf16:
        code.store_vector(code.build.bitcast(_rounded(code, numbers), ir.VectorType(I16, PANEL)), values, offset)
        return
    for half, each in enumerate(numbers):
        half_offset = code.build.add(offset, I64(half * VECTOR_COLUMNS))
        if vectors.in_pairs:
            code.store_rounded(each, values, half_offset, has_avx512_bf16=False)
        else:
            code.store_vector(each, values, half_offset)


def _rounded(code: Code, numbers: list[ir.Value]) -> ir.Value:
    """Return 32 numbers as bfloat16, by AVX512-BF16."""
    both = ir.VectorType(BFLOAT16, PANEL)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = declare(code.build.module, name, both, *(each.type for each in numbers))
    return code.build.call(function, numbers[::-1])  # The second operand fills the lower half.


_vector = partial(ir.VectorType, count=VECTOR_COLUMNS)
