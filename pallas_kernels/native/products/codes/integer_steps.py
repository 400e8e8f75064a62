"""The words of codes that are multiplied as integers: step by step as a panel is stored, or once they are unpacked.

A step is 32 values of K, and a run a part of it in one group. A pair is two values of K of each of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple, Protocol

from llvmlite import ir

from ....code_formats import CodeFormat
from ...llvm import F32, I8, I16, I32, I64, LONG_LANES, Code, constant, declare
from ..panels import DEPTH, PANEL
from .panels import BlockLayout
from .scales import GroupScales

WORDS = PANEL
"""Words of a vector: those of 16 columns."""
VECTOR_BYTES = 2 * WORDS
PAIRS_TOGETHER = 4
"""Pairs whose products are written one behind the other."""
HALVES = 0, 1
"""The two vectors of a panel's columns."""
WORD_VECTOR = ir.VectorType(I16, WORDS)
FLOAT_VECTOR = ir.VectorType(F32, LONG_LANES)
INTEGER_VECTOR = ir.VectorType(I32, LONG_LANES)


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


class Run(NamedTuple):
    """The codes of a run, and the numbers of its group."""

    numbers: list[list[ir.Value]]
    """The scales, then the minima or the zeros: two vectors of 16 columns of each, float32."""
    each_pair: Callable[[Callable[..., list[ir.Value]], list[ir.Value]], list[ir.Value]]
    """(body, carried values): emits `body(pair, vectors of words, *carried)` for each pair of the run."""


class Steps(Protocol):
    """Where the words of steps come from."""

    kind: RunKind

    def runs(self, step: ir.Value) -> Iterator[Run]:
        """Emit what the runs of a step have, one after the other."""


class _Plane(NamedTuple):
    """Some bits of all codes of a step: words of 16 bits, in vectors of 16 columns."""

    begin: ir.Value
    """Address of its first vector; those of both halves of the columns take turns."""
    num_bits: int
    place: int
    """The bit of a code that its lowest bit is."""


@dataclass(frozen=True)
class PackedSteps:
    """Steps of a panel as it is stored, `Order.WORDS`. Those of panel `ahead` are prefetched."""

    code: Code
    layout: BlockLayout
    has_avx512: bool
    panel: ir.Value
    ahead: ir.Value

    @property
    def kind(self) -> RunKind:
        return run_kind(self.layout.code_format)

    def runs(self, step: ir.Value) -> Iterator[Run]:
        code, build, layout, format_ = self.code, self.code.build, self.layout, self.layout.code_format
        steps_per_block = format_.block // DEPTH
        step_bytes = -(-layout.num_bytes // steps_per_block)
        block_offset = build.mul(build.udiv(step, I64(steps_per_block)), I64(layout.num_bytes))
        step_in_block = build.urem(step, I64(steps_per_block))
        block, block_ahead = (build.gep(address, [block_offset]) for address in (self.panel, self.ahead))
        code.prefetch(block_ahead, build.mul(step_in_block, I64(step_bytes)), I8, step_bytes)
        scales, planes = GroupScales(code, layout), self._planes(block, step_in_block)
        super_scales = scales.of_super_groups(block)
        for index in range(self.kind.num_per_step):
            run = build.add(build.mul(step_in_block, I64(self.kind.num_per_step)), I64(index))
            group = build.udiv(run, I64(format_.group // format_.run_len))
            numbers = scales.of_group(block, group, super_scales)
            if format_.has_zeros:
                numbers.append(scales.zeros(block, group))
            if format_.mantissa_bits is not None:  # See `_doubled_floats`.
                numbers = [[build.fmul(each, constant(FLOAT_VECTOR, 0.5)) for each in vectors] for vectors in numbers]
            yield Run(numbers, partial(self._each_pair, planes, index * self.kind.length // 2))

    def _planes(self, block: ir.Value, step: ir.Value) -> list[_Plane]:
        """Return the planes of a step's codes: whole codes of 4 or 8 bits, or the lower 4 bits and those above them."""
        build, layout, bits = self.code.build, self.layout, self.layout.code_format.bits
        planes = [(layout.low_bits, bits, 0)]
        if bits not in (4, 8):
            planes = [(layout.low_bits, 4, 0), (layout.high_bits, bits - 4, 4)]
        addresses = (
            build.gep(block, [build.add(build.mul(step, I64(DEPTH * PANEL * num_bits // 8)), I64(first_byte))])
            for first_byte, num_bits, _ in planes
        )
        return [_Plane(address, *plane[1:]) for address, plane in zip(addresses, planes, strict=True)]

    def _each_pair(
        self,
        planes: Sequence[_Plane],
        first_pair: int,
        body: Callable[..., list[ir.Value]],
        carried: list[ir.Value],
    ) -> list[ir.Value]:
        build = self.code.build
        for pair in range(self.kind.length // 2):
            vectors = []
            for half in HALVES:
                codes = [self._bits(plane, first_pair + pair, half) for plane in planes]
                values = reduce(build.or_, codes)
                is_float = self.layout.code_format.mantissa_bits is not None
                vectors.append(self._doubled_floats(values) if is_float else values)
            carried = body(pair, vectors, *carried)
        return carried

    def _bits(self, plane: _Plane, pair: int, half: int) -> ir.Value:
        """Return the bits of a plane of pair `pair` of a step, at their place in words, of a half of the columns.

        Example for 4 bits: a word has the codes of 4 pairs, and pair 6 is bits 8 to 11 of the second words.
        """
        build, pairs_of_word = self.code.build, 16 // plane.num_bits
        vector = pair // pairs_of_word * len(HALVES) + half
        words = self.code.load_vector(plane.begin, I64(vector * WORDS), I16, WORDS)
        shift = pair % pairs_of_word * plane.num_bits - plane.place
        if shift > 0:
            words = build.lshr(words, constant(WORD_VECTOR, shift))
        elif shift < 0:
            words = build.shl(words, constant(WORD_VECTOR, -shift))
        if shift + plane.num_bits == 16:  # No other bits are left.
            return words
        return build.and_(words, constant(WORD_VECTOR, ((1 << plane.num_bits) - 1) << plane.place))

    def _doubled_floats(self, codes: ir.Value) -> ir.Value:
        """Return twice the small floats that codes of 4 bits stand for, which are integers."""
        code, build = self.code, self.code.build
        table = [int(value) for value in 2 * self.layout.code_format.code_values]
        if self.has_avx512:
            look_up = declare(build.module, "llvm.x86.avx512.permvar.hi.512", WORD_VECTOR, WORD_VECTOR, WORD_VECTOR)
            return build.call(look_up, [ir.Constant(WORD_VECTOR, table * 2), codes])
        # By bytes: the upper one of each word is 0, and so is what is found for it, and then it becomes the sign.
        as_bytes = ir.VectorType(I8, WORDS)
        look_up = declare(build.module, "llvm.x86.avx2.pshuf.b", as_bytes, as_bytes, as_bytes)
        found = [
            build.call(look_up, [ir.Constant(as_bytes, table * 2), build.bitcast(each, as_bytes)])
            for each in cut_in_two(code, codes)
        ]
        words = joined(code, [build.bitcast(each, ir.VectorType(I16, WORDS // 2)) for each in found])
        return build.ashr(build.shl(words, constant(WORD_VECTOR, 8)), constant(WORD_VECTOR, 8))


@dataclass(frozen=True)
class UnpackedSteps:
    """Steps that `emit_unpacking` has stored, from `first_step` on."""

    code: Code
    kind: RunKind
    steps: ir.Value
    first_step: ir.Value

    def runs(self, step: ir.Value) -> Iterator[Run]:
        code, build, kind = self.code, self.code.build, self.kind
        words = build.gep(self.steps, [build.mul(build.sub(step, self.first_step), I64(kind.step_bytes))])
        begin = build.gep(words, [I64(2 * DEPTH * PANEL)])
        for index in range(kind.num_per_step):
            places = range(index * kind.num_vectors, (index + 1) * kind.num_vectors)
            numbers = [
                code.load_vectors(begin, (I64((2 * place + half) * LONG_LANES) for half in HALVES), F32, LONG_LANES)
                for place in places
            ]
            yield Run(numbers, partial(self._each_pair, build.gep(words, [I64(index * kind.length * VECTOR_BYTES)])))

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


def cut_in_two(code: Code, vector: ir.Value) -> list[ir.Value]:
    """Return the lower and the upper half of a vector: two vectors of AVX2."""
    size = vector.type.count // 2
    lanes = (ir.Constant(ir.VectorType(I32, size), list(range(first, first + size))) for first in (0, size))
    return [code.build.shuffle_vector(vector, vector, each) for each in lanes]


def joined(code: Code, halves: Sequence[ir.Value]) -> ir.Value:
    """Return two vectors as one."""
    size = 2 * halves[0].type.count
    return code.build.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, size), list(range(size))))
