"""Writes native code for the CPU of this machine: loops, vectors, exponentials, in LLVM's intermediate language.

A loop over pages that keeps its sums in registers cannot be written in XLA:CPU: plain XLA copies pages together,
multiplies the copies, and writes every intermediate to memory. Such a loop is written here. LLVM compiles it at start
in a tenth of a second, for the vectors of this machine, and `xla_call` makes it a custom call of XLA.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from llvmlite import ir

from .processor import host_has_avx512

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER = I8.as_pointer()
SIZES = {I8: 1, I16: 2, I32: 4, I64: 8, F32: 4, POINTER: 8}
CACHE_LINE = 64
LONG_LANES = 16
"""Lanes of float32 in an AVX-512 vector."""
LN2_HIGH, LN2_LOW, LOG2_E = 0.693359375, -2.12194440e-4, 1.4426950408889634
ROUNDER = 1.5 * 2**23
EXP2_LEAST = -125.0
EXP2_TERMS = 1.5353362e-4, 1.3398875e-3, 9.6184369e-3, 5.5503324e-2, 0.24022648, 0.69314718, 1.0
"""Coefficients of 2ʳ for |r| ≤ ½, the highest power first: with the last one 1, the largest relative error is least."""
EXP2_TERMS_FOR_BF16 = 0.05517166954, 0.24261112544, 0.69326098565, 0.99992807335
"""Fewer coefficients of 2ʳ, whose largest relative error is 8e-5: for results that become bfloat16."""
FLUSH_DENORMALS = 0x8040
"""Bits of the control register MXCSR: results that are not normal become 0, and so do such operands."""
EXP_LEAST = -87.0
"""Smallest argument of `Code.exp`: its result is about the smallest normal float32."""
EXP_TERMS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
"""Coefficients of (eʳ − 1 − r) ÷ r² for |r| ≤ ln 2 ÷ 2, the highest power first. Source: Cephes, expf."""


class Code:
    """Emits instructions at the end of a function's last block. Addresses are byte pointers, offsets count elements."""

    def __init__(self, function: ir.Function) -> None:
        self.build = ir.IRBuilder(function.append_basic_block("entry"))

    def allocate(self, element_type: ir.Type, count: int) -> ir.Value:
        """Allocate `count` elements on the stack, once per call of the function, aligned to a cache line."""
        with self.build.goto_entry_block():
            address = self.build.alloca(element_type, size=count)
            address.align = CACHE_LINE
            return self.build.bitcast(address, POINTER)

    @contextlib.contextmanager
    def borrowed(self, element_type: ir.Type, count: int) -> Iterator[ir.Value]:
        """Give the code emitted within `count` elements on the heap, aligned to a cache line: for more than a stack
        holds.
        """
        build, module = self.build, self.build.module
        num_bytes = I64(count * SIZES[element_type] + CACHE_LINE - 1)
        memory = build.call(declare(module, "malloc", POINTER, I64), [num_bytes])
        end_of_line = build.add(build.ptrtoint(memory, I64), I64(CACHE_LINE - 1))
        yield build.inttoptr(build.and_(end_of_line, I64(-CACHE_LINE)), POINTER)
        build.call(declare(module, "free", ir.VoidType(), POINTER), [memory])

    def at(self, base: ir.Value, offset: ir.Value | int, element_type: ir.Type) -> ir.Value:
        """Return the address of the element at `offset`, as a pointer to its type."""
        offset = I64(offset) if isinstance(offset, int) else offset
        address = self.build.gep(base, [self.build.mul(offset, I64(SIZES[element_type]))])
        return self.build.bitcast(address, element_type.as_pointer())

    def load(self, base: ir.Value, offset: ir.Value | int, element_type: ir.Type) -> ir.Value:
        """Load the element at `offset`."""
        return self.build.load(self.at(base, offset, element_type))

    def load_index(self, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        """Load an int32 and sign-extend it to int64."""
        return self.build.sext(self.load(base, offset, I32), I64)

    def store(self, value: ir.Value, base: ir.Value, offset: ir.Value | int) -> None:
        """Store the element at `offset`."""
        self.build.store(value, self.at(base, offset, value.type))

    def load_vector(self, base: ir.Value, offset: ir.Value, element_type: ir.Type, lanes: int) -> ir.Value:
        """Load a vector of `lanes` elements from `offset` on, aligned to one element."""
        vector_pointer = ir.VectorType(element_type, lanes).as_pointer()
        address = self.build.bitcast(self.at(base, offset, element_type), vector_pointer)
        return self.build.load(address, align=SIZES[element_type])

    def load_vectors(
        self, base: ir.Value, offsets: Iterable[ir.Value], element_type: ir.Type, lanes: int
    ) -> list[ir.Value]:
        """Load a vector from each offset on. A generator may emit each offset, just before its vector is loaded."""
        return [self.load_vector(base, offset, element_type, lanes) for offset in offsets]

    def table(self, values: Sequence[int], element_type: ir.Type) -> ir.Value:
        """Return the address of constants, which lie in the module once, aligned to a cache line."""
        module, type_ = self.build.module, ir.ArrayType(element_type, len(values))
        name = f"table_{hashlib.sha256(repr(values).encode()).hexdigest()[:16]}"
        if (variable := module.globals.get(name)) is None:
            variable = ir.GlobalVariable(module, type_, name)
            variable.initializer, variable.global_constant = ir.Constant(type_, list(values)), True
            variable.linkage, variable.align = "internal", CACHE_LINE
        return self.build.bitcast(variable, POINTER)

    def gather(self, base: ir.Value, offsets: ir.Value, element_type: ir.Type, *, has_avx512: bool) -> ir.Value:
        """Load the elements at 16 offsets, or at 8 if they are int64, by one instruction (AVX-512) or one by one.

        Offsets are a vector of int32.
        """
        lanes = offsets.type.count
        loaded_type = ir.VectorType(element_type, lanes)
        if has_avx512:
            mask, kind = ir.VectorType(ir.IntType(1), lanes), "dpi" if element_type is I32 else "dpq"
            arguments = [loaded_type, POINTER, offsets.type, mask, I32]
            function = declare(self.build.module, f"llvm.x86.avx512.mask.gather.{kind}.512", loaded_type, *arguments)
            scale = I32(SIZES[element_type])
            return self.build.call(function, [constant(loaded_type, 0), base, offsets, constant(mask, 1), scale])
        loaded: ir.Value = ir.Constant(loaded_type, ir.Undefined)
        for lane in range(lanes):
            offset = self.build.zext(self.build.extract_element(offsets, I32(lane)), I64)
            loaded = self.build.insert_element(loaded, self.load(base, offset, element_type), I32(lane))
        return loaded

    def store_vector(self, vector: ir.Value, base: ir.Value, offset: ir.Value) -> None:
        """Store a vector from the element at `offset` on, aligned to one element."""
        address = self.build.bitcast(self.at(base, offset, vector.type.element), vector.type.as_pointer())
        self.build.store(vector, address, align=SIZES[vector.type.element])

    def store_rounded(self, vector: ir.Value, base: ir.Value, offset: ir.Value, *, has_avx512_bf16: bool) -> None:
        """Store a vector of float32 as bfloat16, rounded to nearest even, from the element of 2 bytes at `offset` on.

        With `has_avx512_bf16` one instruction (AVX512-BF16) converts the vector, which must have 16 lanes then. Without
        it, integer arithmetic on the bits does: 0x3F808000, halfway between two bfloat16, becomes 0x3F80, and
        0x3F818000 becomes 0x3F82. It does not know NaN, so a NaN may become another NaN, an infinity or a zero.
        """
        build, lanes = self.build, vector.type.count
        bits16_type = ir.VectorType(I16, lanes)
        if has_avx512_bf16:
            name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}"
            function = declare(build.module, name, ir.VectorType(BFLOAT16, lanes), vector.type)
            rounded = build.bitcast(build.call(function, [vector]), bits16_type)
        else:
            # Add just under half of the last kept bit, or exactly half if that bit is 1; then drop the lower 16 bits.
            bits_type = ir.VectorType(I32, lanes)
            bits, sixteen = build.bitcast(vector, bits_type), constant(bits_type, 16)
            is_odd = build.and_(build.lshr(bits, sixteen), constant(bits_type, 1))
            rounded_bits = build.add(build.add(bits, constant(bits_type, 0x7FFF)), is_odd)
            rounded = build.trunc(build.lshr(rounded_bits, sixteen), bits16_type)
        self.store_vector(rounded, base, offset)

    def store_rounded_pair(self, first: ir.Value, second: ir.Value, base: ir.Value, offset: ir.Value) -> None:
        """Store two vectors of 16 float32 one after the other, as `store_rounded` does, by one instruction."""
        name, halves = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(I16, 2 * LONG_LANES)
        function = declare(self.build.module, name, ir.VectorType(BFLOAT16, 2 * LONG_LANES), first.type, first.type)
        self.store_vector(self.build.bitcast(self.build.call(function, [second, first]), halves), base, offset)

    def prefetch(
        self, base: ir.Value, offset: ir.Value, element_type: ir.Type, count: int, *, for_writing: bool = False
    ) -> None:
        """Emit prefetches of `count` elements from element `offset` of `base` on into the processor's level-2 cache.

        It is not the level-1 cache, because the data in use fills that. One instruction is emitted per cache line of 64
        bytes: 32 elements of float32 take 2. Prefetching an unmapped address does not fault, so a caller may prefetch
        beyond the end of an array. `for_writing` asks for lines that no other core holds.
        """
        start = self.build.bitcast(self.at(base, offset, element_type), POINTER)
        function = declare(self.build.module, "llvm.prefetch.p0", ir.VoidType(), POINTER, I32, I32, I32)
        # Arguments of the intrinsic: read or write; locality 2 of 0 … 3, which is the level-2 cache; data.
        into_level_2 = I32(int(for_writing)), I32(2), I32(1)
        for num_bytes in range(0, count * SIZES[element_type], CACHE_LINE):
            self.build.call(function, [self.build.gep(start, [I64(num_bytes)]), *into_level_2])

    def broadcast(self, value: ir.Value, lanes: int) -> ir.Value:
        """Return a vector that holds `value` in all lanes."""
        undefined = _undefined(value.type, lanes)
        in_first_lane = self.build.insert_element(undefined, value, I32(0))
        return self.build.shuffle_vector(in_first_lane, undefined, constant(ir.VectorType(I32, lanes), 0))

    def loop(
        self,
        start: ir.Value | int,
        stop: ir.Value | int,
        body: Callable[..., Sequence[ir.Value] | None],
        *,
        step: int = 1,
        carried: Sequence[ir.Value] = (),
    ) -> list[ir.Value]:
        """Emit `for i in range(start, stop, step): carried = body(i, *carried)` and return the last carried values.

        `body` is called once, while the code is written, to emit an iteration; i is an int64. It returns the next
        carried values, or None if nothing is carried. If the range is empty, the loop returns the initial values. Each
        carried value is a phi node (SSA): coming from the block before the loop it is the initial value, and coming
        from the loop's end it is the value that `body` returned. The stop test is emitted twice: before the loop and at
        its end. New code goes after the loop.
        """
        build, entry_block = self.build, self.build.block
        start, stop = (I64(x) if isinstance(x, int) else x for x in (start, stop))
        loop_block, end_block = build.append_basic_block("loop"), build.append_basic_block("end")
        build.cbranch(build.icmp_signed("<", start, stop), loop_block, end_block)
        build.position_at_end(loop_block)
        index, *values = (build.phi(value.type) for value in (start, *carried))
        next_values = body(index, *values) or ()
        next_index = build.add(index, I64(step))
        for phi, initial, next_value in zip(
            (index, *values), (start, *carried), (next_index, *next_values), strict=True
        ):
            phi.add_incoming(initial, entry_block)
            phi.add_incoming(next_value, build.block)
        last_block = build.block  # Not `loop_block` if `body` has emitted branches of its own.
        build.cbranch(build.icmp_signed("<", next_index, stop), loop_block, end_block)
        build.position_at_end(end_block)
        results = []
        for initial, next_value in zip(carried, next_values, strict=True):
            results.append(build.phi(initial.type))
            results[-1].add_incoming(initial, entry_block)
            results[-1].add_incoming(next_value, last_block)
        return results

    def min(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the smaller of two int64."""
        return self.build.select(self.build.icmp_signed("<", a, b), a, b)

    def max(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the larger of two int64."""
        return self.build.select(self.build.icmp_signed(">", a, b), a, b)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the larger of two floats, lane by lane; b where a is NaN."""
        return self.build.select(self.build.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the smaller of two floats, lane by lane; b where a is NaN."""
        return self.build.select(self.build.fcmp_ordered("<", a, b), a, b)

    def add_product(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a × b + c, rounded once where the processor has a fused multiply-add."""
        function = declare(self.build.module, f"llvm.fmuladd.v{a.type.count}f32", a.type, *[a.type] * 3)
        return self.build.call(function, [a, b, c])

    def add_words(self, factor: ir.Value, words: ir.Value, total: ir.Value, *, has_avx512_bf16: bool) -> ir.Value:
        """Return the float32 vector total + factor × words, lane by lane.

        The three vectors have the same number of lanes. A lane of `factor` and of `words` is a float32, or an int32
        that holds a pair of bfloat16. For pairs, both products are added to the lane's total: total + f₀ · w₀ + f₁ · w₁
        with the lower halves f₀ and w₀. With `has_avx512_bf16`, which needs 16 lanes, one instruction (AVX512-BF16)
        does so; else two fused multiply-adds in float32 do, the lower halves first.
        """
        build = self.build
        if words.type.element is F32:
            return self.add_product(factor, words, total)
        if has_avx512_bf16:
            pairs = ir.VectorType(BFLOAT16, 2 * total.type.count)
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * total.type.count}"
            function = declare(build.module, name, total.type, total.type, pairs, pairs)
            return build.call(function, [total, build.bitcast(factor, pairs), build.bitcast(words, pairs)])
        for half in range(2):
            factor_half, words_half = (self.half(pair, half) for pair in (factor, words))
            total = self.add_product(factor_half, words_half, total)
        return total

    def add_outer(
        self,
        factors: Iterable[ir.Value],
        words: Sequence[ir.Value],
        totals: Sequence[ir.Value],
        *,
        has_avx512_bf16: bool,
    ) -> list[ir.Value]:
        """Return the totals plus the outer product of `factors` and `words`: totals[i, j] + factors[i] × words[j].

        A word is 32 bits: one float32, or a pair of bfloat16 whose two products are both added. A factor is a single
        word, and each of `words` is a vector of them. `totals` and the result are flat lists of float32 vectors, row
        after row: with 3 factors and 2 vectors of words, totals[1, 0] is item 2 of the 6, counted from 0.
        `has_avx512_bf16`: one instruction multiplies pairs, see `add_words`. Each factor is taken from the iterable
        just before it is multiplied: a generator may emit its load there, so that few factors wait in registers.
        """
        sums: list[ir.Value] = []
        for factor in factors:
            factor_in_lanes = self.broadcast(factor, words[0].type.count)
            row_totals = totals[len(sums) : len(sums) + len(words)]
            for vector, total in zip(words, row_totals, strict=True):
                sums.append(self.add_words(factor_in_lanes, vector, total, has_avx512_bf16=has_avx512_bf16))
        return sums

    def half(self, pairs: ir.Value, half: int) -> ir.Value:
        """Return the lower (0) or upper (1) bfloat16 of each pair as float32: its bits followed by 16 zeros."""
        word_type, build = pairs.type, self.build
        bits = build.and_(pairs, constant(word_type, -1 << 16)) if half else build.shl(pairs, constant(word_type, 16))
        return build.bitcast(bits, ir.VectorType(F32, word_type.count))

    @contextlib.contextmanager
    def flushed_denormals(self) -> Iterator[None]:
        """Have the code emitted within take and give 0 for numbers below the smallest normal float32 (x86 only)."""
        control = self.allocate(I32, 2)
        read, write = (
            declare(self.build.module, f"llvm.x86.sse.{name}mxcsr", ir.VoidType(), POINTER) for name in ("st", "ld")
        )
        self.build.call(read, [control])
        self.store(self.build.or_(self.load(control, 0, I32), I32(FLUSH_DENORMALS)), control, 1)
        self.build.call(write, [self.build.gep(control, [I64(4)])])
        yield
        self.build.call(write, [control])

    def exp(self, x: ir.Value) -> ir.Value:
        """Return eˣ for each lane of x, float32 and at most 0, within 2 units in the last place.

        An x below −87 counts as −87, so that the result is a normal number and never 0. With n = round(x × log₂ e) and
        r = x − n × ln 2, eˣ is 2ⁿ × eʳ: for x = −1, n is −1 and r about −0.307. A polynomial gives eʳ, and n is written
        into the exponent bits for 2ⁿ. n × ln 2 is subtracted in two parts (Cody-Waite), so that r keeps its low bits.
        """
        build, vector_type = self.build, x.type
        min_argument = constant(vector_type, EXP_LEAST)
        x = build.select(build.fcmp_ordered("<", x, min_argument), min_argument, x)
        # Adding 1.5 × 2²³ rounds to an integer, which is left in the low bits of the mantissa.
        rounder = constant(vector_type, ROUNDER)
        shifted = self.add_product(x, constant(vector_type, LOG2_E), rounder)
        exponent_float = build.fsub(shifted, rounder)
        remainder = self.add_product(exponent_float, constant(vector_type, -LN2_HIGH), x)
        remainder = self.add_product(exponent_float, constant(vector_type, -LN2_LOW), remainder)
        series = constant(vector_type, EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            series = self.add_product(series, remainder, constant(vector_type, term))
        # eʳ ≈ series × r² + (r + 1).
        square, linear = build.fmul(remainder, remainder), build.fadd(remainder, constant(vector_type, 1.0))
        series = self.add_product(series, square, linear)
        bits_type = ir.VectorType(I32, vector_type.count)
        # Float32 has its exponent from bit 23 on, with a bias of 127.
        exponent = build.shl(build.bitcast(shifted, bits_type), constant(bits_type, 23))
        return build.fmul(series, build.bitcast(build.add(exponent, constant(bits_type, 127 << 23)), vector_type))

    def exp2(self, x: ir.Value, terms: Sequence[float] = EXP2_TERMS) -> ir.Value:
        """Return 2ˣ for each lane of x, float32 and at most 0, within 1 unit in the last place; 1 for 0.

        An x below −125 counts as −125, so that the result is a normal number. See `exp` for the method. `terms` are the
        coefficients of 2ʳ.
        """
        build, vector_type = self.build, x.type
        x = self.maximum(constant(vector_type, EXP2_LEAST), x)  # A NaN stays.
        rounder = constant(vector_type, ROUNDER)
        shifted = build.fadd(x, rounder)
        remainder = build.fsub(x, build.fsub(shifted, rounder))
        series = constant(vector_type, terms[0])
        for term in terms[1:]:
            series = self.add_product(series, remainder, constant(vector_type, term))
        bits_type = ir.VectorType(I32, vector_type.count)
        exponent = build.shl(build.bitcast(shifted, bits_type), constant(bits_type, 23))
        return build.bitcast(build.add(build.bitcast(series, bits_type), exponent), vector_type)

    def soft_capped(self, x: ir.Value, cap: float) -> ir.Value:
        """Return cap × tanh(x ÷ cap) for each lane of x, float32: within ± `cap`, and about x where x is near 0.

        With y = exp(−2 |x| ÷ cap), which cannot overflow, tanh(|x| ÷ cap) is (1 − y) ÷ (1 + y). The sign comes last.
        """
        build, vector_type = self.build, x.type
        is_negative = build.fcmp_ordered("<", x, constant(vector_type, 0.0))
        magnitude = build.select(is_negative, build.fneg(x), x)
        exponential = self.exp(build.fmul(magnitude, constant(vector_type, -2.0 / cap)))
        one = constant(vector_type, 1.0)
        tanh = build.fdiv(build.fsub(one, exponential), build.fadd(one, exponential))
        capped = build.fmul(constant(vector_type, cap), tanh)
        return build.select(is_negative, build.fneg(capped), capped)

    def reduce(self, vector: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Return the reduction of a vector's lanes to one value by `join`, such as the sum if `join` adds two vectors.

        `join(lower half, upper half)` is applied to halves of the vector until one lane is left, so the number of lanes
        must be a power of two. With 4 lanes and addition, the result is (lane 0 + lane 2) + (lane 1 + lane 3).
        """
        while (num_lanes := vector.type.count // 2) > 0:
            halves = (
                ir.Constant(ir.VectorType(I32, num_lanes), list(range(first_lane, first_lane + num_lanes)))
                for first_lane in (0, num_lanes)
            )
            vector = join(*(self.build.shuffle_vector(vector, vector, lanes) for lanes in halves))
        return self.build.extract_element(vector, I32(0))


class _Bfloat16(ir.Type):
    """LLVM's type `bfloat`, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


BFLOAT16 = _Bfloat16()


def constant(type_: ir.Type, value: float) -> ir.Constant:
    """Return a constant of a type; a vector has `value` in all lanes."""
    return _constant(type_, value, math.copysign(1.0, value))


@cache
def _constant(type_: ir.Type, value: float, sign: float) -> ir.Constant:
    """Return a constant, the same object for equal arguments, whose text is written once.

    Writing modules as text takes most of the time of compiling them. `sign` tells minus zero from zero.
    """
    return ir.Constant(type_, value)


@cache
def _undefined(element_type: ir.Type, lanes: int) -> ir.Constant:
    """Return a vector whose lanes may hold anything."""
    return ir.Constant(ir.VectorType(element_type, lanes), ir.Undefined)


def declare(module: ir.Module, name: str, result: ir.Type, *args: ir.Type) -> ir.Function:
    """Return the declaration of a function that is defined outside of the module."""
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, args), name)


def lanes_for(size: int) -> int:
    """Return the lanes of float32 in the longest vector that divides `size`: 16, 8, 4, 2 or 1; 16 needs AVX-512."""
    lanes = 16 if host_has_avx512() else 8
    while size % lanes:
        lanes //= 2
    return lanes
