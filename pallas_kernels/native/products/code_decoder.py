"""Decodes panels of codes: to float32, or rounded to bfloat16 in pairs, as products read them (see `code_panels`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from ...code_formats import CodeFormat
from ..llvm import BFLOAT16, F32, I8, I16, I32, I64, Code, constant, declare
from ..registry import link
from .code_panels import HALF, BlockLayout, block_layout
from .panels import DEPTH, PANEL

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
    arguments = [panel, target, *steps, ahead]
    name = "_".join(["jpaged_decode", code_format.name, *(name for name, has in vectors._asdict().items() if has)])

    def build() -> ir.Module:
        module = ir.Module(name)
        module.triple = llvm.get_default_triple()
        types = [value.type for value in arguments]
        new_code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), types), name))
        new_panel, new_target, begin, end, place_mask, new_ahead = new_code.build.function.args
        decoder = _Decoder(new_code, block_layout(code_format), vectors)
        decoder.emit(new_panel, new_target, Steps(begin, end, place_mask), new_ahead)
        new_code.build.ret_void()
        return module

    types = [value.type for value in arguments]
    function = declare(code.build.module, link(name, build), ir.VoidType(), *types)
    code.build.call(function, arguments)


@dataclass(frozen=True)
class _Decoder:
    """Emits the code that decodes one panel."""

    code: Code
    layout: BlockLayout
    vectors: Vectors

    @property
    def format(self) -> CodeFormat:
        return self.layout.code_format

    def emit(self, panel: ir.Value, target: ir.Value, steps: Steps, ahead: ir.Value) -> None:
        """Emit a loop over steps: each is a part of a block, and one or several groups."""
        code, build, format_ = self.code, self.code.build, self.format
        steps_per_block, groups_per_step = format_.block // DEPTH, DEPTH // format_.group
        step_bytes = -(-self.layout.num_bytes // steps_per_block)
        value_bytes = 2 if self.vectors.in_pairs else 4

        def decode_step(step: ir.Value) -> None:
            block_offset = build.mul(build.udiv(step, I64(steps_per_block)), I64(self.layout.num_bytes))
            step_in_block = build.urem(step, I64(steps_per_block))
            block, block_ahead = (build.gep(address, [block_offset]) for address in (panel, ahead))
            code.prefetch(block_ahead, build.mul(step_in_block, I64(step_bytes)), I8, step_bytes)
            place = build.and_(step, steps.place_mask)
            values = build.gep(target, [build.mul(place, I64(DEPTH * PANEL * value_bytes))])
            super_scales = None
            if format_.super_group is not None:
                super_scales = [self._halves(block, I64(PANEL * kind)) for kind in range(format_.num_scales)]
            for number in range(groups_per_step):
                group = build.add(build.mul(step_in_block, I64(groups_per_step)), I64(number))
                group_values = build.gep(values, [I64(number * format_.group * PANEL * value_bytes)])
                self._decode_group(block, group_values, group, super_scales)

        code.loop(steps.begin, steps.end, decode_step)

    def _decode_group(
        self, block: ir.Value, values: ir.Value, group: ir.Value, super_scales: list[list[ir.Value]] | None
    ) -> None:
        """Emit the decoding of a group of a block; `values` is where its numbers go."""
        code, build, group_size = self.code, self.code.build, self.format.group
        scales = self._scales(block, group, super_scales)
        factors = scales[0]
        if self.format.has_minima:
            minima = scales[1]
        else:
            minima = [build.fmul(each, constant(each.type, float(self.format.zero))) for each in factors]
        negated = [build.fneg(each) for each in minima]
        if self.vectors.in_pairs:  # A chunk of 32 codes has two of each of 16 columns.
            factors, negated = self._doubled(factors), self._doubled(negated)
        first_chunk = build.mul(group, I64(group_size))

        def decode_chunks(index: ir.Value) -> None:
            for number in range(CHUNKS_TOGETHER):
                index_here = build.add(index, I64(number))
                chunk = build.add(first_chunk, index_here)
                first_column = 2 * number if self.vectors.in_pairs else 0
                numbers = [
                    code.add_product(floats, factors[first_column + half], negated[first_column + half])
                    for half, floats in enumerate(self._codes(block, chunk))
                ]
                self._store(values, build.mul(index_here, I64(PANEL)), numbers)

        code.loop(0, group_size, decode_chunks, step=CHUNKS_TOGETHER)

    def _store(self, values: ir.Value, offset: ir.Value, numbers: list[ir.Value]) -> None:
        """Emit the store of 32 numbers from an element on."""
        code = self.code
        if self.vectors.in_pairs and self.vectors.has_avx512_bf16:
            both = ir.VectorType(BFLOAT16, PANEL)
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            function = declare(code.build.module, name, both, *(each.type for each in numbers))
            rounded = code.build.call(function, numbers[::-1])  # The second operand fills the lower half.
            code.store_vector(code.build.bitcast(rounded, ir.VectorType(I16, PANEL)), values, offset)
            return
        for half, each in enumerate(numbers):
            half_offset = code.build.add(offset, I64(half * HALF))
            if self.vectors.in_pairs:
                code.store_rounded(each, values, half_offset, has_avx512_bf16=False)
            else:
                code.store_vector(each, values, half_offset)

    def _scales(
        self, block: ir.Value, group: ir.Value, super_scales: list[list[ir.Value]] | None
    ) -> list[list[ir.Value]]:
        """Return scales, and minima, of a group: of each two vectors of 16 columns."""
        code, build, num_groups = self.code, self.code.build, self.format.block // self.format.group
        found = []
        begin = build.gep(block, [I64(self.layout.scales)])
        for kind in range(self.format.num_scales):
            offset = build.mul(build.add(group, I64(kind * num_groups)), I64(PANEL))
            if super_scales is None:
                found.append(self._halves(begin, offset))
                continue
            convert = build.sext if self.format.is_signed else build.zext
            loaded = code.load_vectors(begin, (build.add(offset, I64(half * HALF)) for half in range(2)), I8, HALF)
            numbers = [build.sitofp(convert(each, _vector(I32)), _vector(F32)) for each in loaded]
            found.append([build.fmul(*pair) for pair in zip(super_scales[kind], numbers, strict=True)])
        return found

    def _halves(self, begin: ir.Value, offset: ir.Value) -> list[ir.Value]:
        """Return 32 float16, from an element on, as two vectors of float32."""
        code, build = self.code, self.code.build
        loaded = code.load_vectors(begin, (build.add(offset, I64(half * HALF)) for half in range(2)), I16, HALF)
        return [build.fpext(build.bitcast(each, _vector(ir.HalfType())), _vector(F32)) for each in loaded]

    def _doubled(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """Return two vectors of 16 columns as four, in which each column comes twice."""
        lanes = [ir.Constant(_vector(I32), [first + i // 2 for i in range(HALF)]) for first in (0, HALF // 2)]
        return [self.code.build.shuffle_vector(each, each, which) for each in vectors for which in lanes]

    def _codes(self, block: ir.Value, chunk: ir.Value) -> list[ir.Value]:
        """Return the 32 codes of a chunk as two vectors of float32."""
        code, build, bits = self.code, self.code.build, self.format.bits
        low_bits = build.gep(block, [I64(self.layout.low_bits)])
        if bits == 8:
            first = build.mul(chunk, I64(PANEL))
            loaded = code.load_vectors(low_bits, (build.add(first, I64(half * HALF)) for half in range(2)), I8, HALF)
            return [build.uitofp(each, _vector(F32)) for each in loaded]
        packed = code.load_vector(low_bits, build.mul(chunk, I64(HALF)), I8, HALF)
        words = build.zext(packed, _vector(I32))
        upper = build.lshr(words, constant(_vector(I32), 4))
        if bits == 4 and self.vectors.has_avx512:
            return [self._looked_up(words), self._looked_up(upper)]
        low = [build.and_(words, constant(_vector(I32), 15)), upper]
        high_bits = build.gep(block, [I64(self.layout.high_bits)])
        if bits == 5:
            mask = build.bitcast(code.load(high_bits, chunk, I32), ir.VectorType(ir.IntType(1), PANEL))
            fifth, none = constant(_vector(I32), 16), constant(_vector(I32), 0)
            for half in range(2):
                lanes = ir.Constant(_vector(I32), list(range(half * HALF, (half + 1) * HALF)))
                is_set = build.shuffle_vector(mask, mask, lanes)
                low[half] = build.or_(low[half], build.select(is_set, fifth, none))
        if bits == 6:
            shifts = ir.Constant(_vector(I32), [2 * i for i in range(HALF)])
            for half in range(2):
                word = code.load(high_bits, build.add(build.mul(chunk, I64(2)), I64(half)), I32)
                pairs = build.and_(build.lshr(code.broadcast(word, HALF), shifts), constant(_vector(I32), 3))
                low[half] = build.or_(low[half], build.shl(pairs, constant(_vector(I32), 4)))
        return [build.sitofp(each, _vector(F32)) for each in low]

    def _looked_up(self, words: ir.Value) -> ir.Value:
        """Return the lowest 4 bits of each word as float32: one instruction (AVX-512) that reads no other bits."""
        name, type_ = "llvm.x86.avx512.permvar.sf.512", _vector(F32)
        function = declare(self.code.build.module, name, type_, type_, _vector(I32))
        return self.code.build.call(function, [ir.Constant(type_, [float(i) for i in range(HALF)]), words])


_vector = partial(ir.VectorType, count=HALF)
