"""Finds the block of a panel of codes, and loads what its groups share: scales, minima, zeros, of 32 columns each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from ...llvm import F32, I8, I16, I32, I64, Code, constant
from ..panels import PANEL
from .panels import VECTOR_COLUMNS, BlockLayout

_vector = partial(ir.VectorType, count=VECTOR_COLUMNS)


def emit_block(
    code: Code, layout: BlockLayout, panel: ir.Value, ahead: ir.Value, number: ir.Value, num_values: int
) -> tuple[ir.Value, ir.Value]:
    """Return the address of the block of a panel that has section `number` of K, and the section's number in it.

    A section is `num_values` values of K; a block has one or several. The share of the bytes of the same block of panel
    `ahead` that a section has is prefetched.
    """
    build, sections_per_block = code.build, layout.code_format.block // num_values
    section_bytes = -(-layout.num_bytes // sections_per_block)
    offset = build.mul(build.udiv(number, I64(sections_per_block)), I64(layout.num_bytes))
    number_in_block = build.urem(number, I64(sections_per_block))
    block, block_ahead = (build.gep(address, [offset]) for address in (panel, ahead))
    code.prefetch(block_ahead, build.mul(number_in_block, I64(section_bytes)), I8, section_bytes)
    return block, number_in_block


@dataclass(frozen=True)
class GroupScales:
    """Emits the loads, of two vectors of 16 columns each."""

    code: Code
    layout: BlockLayout

    def of_super_groups(self, block: ir.Value) -> list[list[ir.Value]] | None:
        """Return the super-scales of a block, two vectors of 16 columns of each; None if the format has none."""
        if self.layout.code_format.super_group is None:
            return None
        return [self._load_float16(block, I64(PANEL * index)) for index in range(self.layout.code_format.num_scales)]

    def of_group(
        self, block: ir.Value, group: ir.Value, super_scales: list[list[ir.Value]] | None
    ) -> list[list[ir.Value]]:
        """Return the scales of a group, and if the format has minima those too: two vectors of 16 columns of each.

        `super_scales` are those of the block: scales that are bytes are multiplied by the first of them, and minima
        that are bytes by the second.
        """
        build, num_groups = self.code.build, self.layout.code_format.block // self.layout.code_format.group
        group_scales = []
        begin = build.gep(block, [I64(self.layout.scales)])
        for index in range(self.layout.code_format.num_scales):
            number = build.add(group, I64(index * num_groups))
            if super_scales is None:
                group_scales.append(self._load_floats(begin, build.mul(number, I64(PANEL))))
                continue
            factors = self._load_factors(begin, number, is_scale=index == 0)
            group_scales.append([build.fmul(*pair) for pair in zip(super_scales[index], factors, strict=True)])
        return group_scales

    def _load_factors(self, begin: ir.Value, number: ir.Value, *, is_scale: bool) -> list[ir.Value]:
        """Return what 32 scales or minima under super-scales stand for, by their number: minima follow all scales."""
        build, format_ = self.code.build, self.layout.code_format
        if format_.scale_bits == 8:
            convert = build.sext if format_.is_signed else build.zext
            loaded = self.load_columns(begin, build.mul(number, I64(PANEL)), I8)
            integers = [convert(each, _vector(I32)) for each in loaded]
        else:
            # Those of the second half are upper halves of the bytes.
            num_bytes = I64(format_.num_scales * format_.block // format_.group // 2)
            loaded = self.load_columns(begin, build.mul(build.urem(number, num_bytes), I64(PANEL)), I8)
            shift = build.trunc(build.mul(build.udiv(number, num_bytes), I64(4)), I32)
            shifts = self.code.broadcast(shift, VECTOR_COLUMNS)
            shifted = (build.lshr(build.zext(each, _vector(I32)), shifts) for each in loaded)
            integers = [build.and_(each, constant(_vector(I32), 15)) for each in shifted]
        floats = [build.sitofp(each, _vector(F32)) for each in integers]
        if not is_scale or (format_.scale_step, format_.first_scale) == (1.0, 0.0):
            return floats
        step, first = (constant(_vector(F32), each) for each in (format_.scale_step, format_.first_scale))
        return [self.code.add_product(each, step, first) for each in floats]

    def zeros(self, block: ir.Value, group: ir.Value) -> list[ir.Value]:
        """Return the zeros of a group as float32: two vectors of 16 columns."""
        build = self.code.build
        begin = build.gep(block, [I64(self.layout.zeros)])
        loaded = self.load_columns(begin, build.mul(group, I64(PANEL)), I8)
        return [build.uitofp(each, _vector(F32)) for each in loaded]

    def _load_floats(self, begin: ir.Value, offset: ir.Value) -> list[ir.Value]:
        """Return 32 scales of the format's kind, from an element on, as two vectors of float32."""
        build, kind = self.code.build, self.layout.code_format.scale
        if kind == "float16":
            return self._load_float16(begin, offset)
        if kind == "float32":
            return self.load_columns(begin, offset, F32)
        # The bits of a bfloat16 are the upper half of those of a float32; a power of two has exponent bits alone.
        element_type, shift = (I16, 16) if kind == "bfloat16" else (I8, 23)
        words = (build.zext(each, _vector(I32)) for each in self.load_columns(begin, offset, element_type))
        return [build.bitcast(build.shl(each, constant(_vector(I32), shift)), _vector(F32)) for each in words]

    def _load_float16(self, begin: ir.Value, offset: ir.Value) -> list[ir.Value]:
        """Return 32 float16, from an element on, as two vectors of float32."""
        build = self.code.build
        halves = (build.bitcast(each, _vector(ir.HalfType())) for each in self.load_columns(begin, offset, I16))
        return [build.fpext(each, _vector(F32)) for each in halves]

    def load_columns(self, begin: ir.Value, offset: ir.Value, element_type: ir.Type) -> list[ir.Value]:
        """Return a number of each of 32 columns, from an element on, as two vectors."""
        offsets = (self.code.build.add(offset, I64(half * VECTOR_COLUMNS)) for half in range(2))
        return self.code.load_vectors(begin, offsets, element_type, VECTOR_COLUMNS)
