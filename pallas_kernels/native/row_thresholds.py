"""Finds the threshold that min-p, top-k and top-p set to the weights of a row, in native code.

What the limits mean is written in `sampling.truncation`.
"""

from __future__ import annotations

import struct
from functools import reduce
from typing import NamedTuple

from llvmlite import ir

from .llvm import F32, I32, I64, LONG_LANES, POINTER, SIZES, Code, constant, declare
from .row_calls import RowShape

BITS_OF_ONE = int.from_bytes(struct.pack("<f", 1.0), "little")
MAX_HALVINGS = 31
"""Float32 numbers in [0, 1] are fewer than 2³⁰."""
COMPACTION = 4
"""Weights that reach a threshold are copied together once they are at most one in 4 of those searched so far."""
NUM_ACCUMULATORS = 4
"""Independent sums of a row: additions to a single one would wait for each other. They divide a block's vectors."""
I1 = ir.IntType(1)


class Limits(NamedTuple):
    """The limits of truncation of one row, in registers."""

    min_p: ir.Value
    """float32, from 0 on: searches need a threshold whose bits are in the order of numbers."""
    top_k: ir.Value
    top_p: ir.Value

    def is_top_k_set(self, code: Code, shape: RowShape) -> ir.Value:
        """Return whether top-k may leave out tokens of a row."""
        is_below_size = code.build.icmp_signed("<", self.top_k, I32(shape.size))
        return code.build.and_(code.build.icmp_signed(">", self.top_k, I32(0)), is_below_size)

    def is_top_p_set(self, code: Code) -> ir.Value:
        """Return whether top-p may leave out tokens."""
        return code.build.fcmp_ordered("<", self.top_p, constant(F32, 1.0))


def room_size(shape: RowShape) -> int:
    """Return the length of the room for a row's weights, and for a copy of few of them with zeros behind."""
    return shape.size + shape.size // COMPACTION + NUM_ACCUMULATORS * LONG_LANES


def truncation_threshold(code: Code, shape: RowShape, room: ir.Value, limits: Limits) -> ir.Value:
    """Emit the limits of a row one after another; return the threshold that weights reach which are kept.

    `room` is the address of `room_size` numbers, of which the first are the row's weights.
    """
    build, kept = code.build, _KeptWeights(code, room, shape)
    kept.raise_to(build.bitcast(limits.min_p, I32))
    with build.if_then(limits.is_top_k_set(code, shape)):
        kept.search(min_count=limits.top_k, min_mass=constant(F32, 0.0))
    with build.if_then(limits.is_top_p_set(code)):
        _, mass = kept.count_and_mass(kept.threshold_bits)
        kept.search(min_count=I32(0), min_mass=build.fmul(limits.top_p, mass))
    return build.bitcast(kept.threshold_bits, F32)


class _KeptWeights:
    """The weights of a row that reach a threshold, which searches raise, by bisection over the bits of float32 numbers.

    As integers, the bits of numbers ≥ 0 are in the order of the numbers. Weights below the threshold are not needed
    again, so those that reach it are copied together once they are few: most halvings then read little.
    """

    def __init__(self, code: Code, room: ir.Value, shape: RowShape) -> None:
        """`room` begins with the weights; the copy of few is written behind them."""
        self._code, self._lanes = code, shape.lanes
        self._copies = code.build.gep(room, [I64(shape.size * SIZES[F32])])
        self._threshold, self._high, self._num_low, self._num_high = (code.allocate(I32, 1) for _ in range(4))
        self._searched, self._num_searched = code.allocate(POINTER, 1), code.allocate(I64, 1)
        code.store(room, self._searched, 0)
        code.store(I64(shape.size), self._num_searched, 0)

    @property
    def threshold_bits(self) -> ir.Value:
        """The bits of the threshold, an int32."""
        return self._code.load(self._threshold, 0, I32)

    def raise_to(self, bits: ir.Value) -> None:
        """Set the threshold, which only rises."""
        self._code.store(bits, self._threshold, 0)

    def search(self, min_count: ir.Value, min_mass: ir.Value) -> None:
        """Raise the threshold as far as the weights that reach it are still `min_count` and sum up to `min_mass`.

        It stays if they are too few already. Halving ends when at most one weight lies between the bounds: it is kept,
        as in `thresholds.bisect_thresholds`.
        """
        code, build = self._code, self._code.build
        code.store(I32(BITS_OF_ONE + 1), self._high, 0)  # No weight is above 1.
        code.store(build.trunc(code.load(self._num_searched, 0, I64), I32), self._num_low, 0)
        code.store(I32(0), self._num_high, 0)

        def halve(_: ir.Value) -> None:
            low, high, num_low, num_high = (
                code.load(cell, 0, I32) for cell in (self._threshold, self._high, self._num_low, self._num_high)
            )
            has_numbers = build.icmp_signed(">", build.sub(high, low), I32(1))
            has_weights = build.icmp_signed(">", build.sub(num_low, num_high), I32(1))
            with build.if_then(build.and_(has_numbers, has_weights)):
                middle = build.add(low, build.ashr(build.sub(high, low), I32(1)))
                count, mass = self.count_and_mass(middle)
                has_count = build.icmp_signed(">=", count, min_count)
                is_enough = build.and_(has_count, build.fcmp_ordered(">=", mass, min_mass))
                with build.if_else(is_enough) as (then, otherwise):
                    with then:
                        code.store(middle, self._threshold, 0)
                        code.store(count, self._num_low, 0)
                        few = build.mul(build.sext(count, I64), I64(COMPACTION))
                        with build.if_then(build.icmp_signed("<=", few, code.load(self._num_searched, 0, I64))):
                            self._compact()
                    with otherwise:
                        code.store(middle, self._high, 0)
                        code.store(count, self._num_high, 0)

        code.loop(0, MAX_HALVINGS, halve)

    def count_and_mass(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return how many weights reach the threshold with these bits, at least the present one, and their sum."""
        code, build = self._code, self._code.build
        least, searched = code.broadcast(build.bitcast(bits, F32), self._lanes), code.load(self._searched, 0, POINTER)
        mass_type, count_type = ir.VectorType(F32, self._lanes), ir.VectorType(I32, self._lanes)
        zeros = constant(mass_type, 0.0)

        def add(token: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            new_sums = []
            for index in range(NUM_ACCUMULATORS):
                weights = code.load_vector(searched, build.add(token, I64(index * self._lanes)), F32, self._lanes)
                is_kept = build.fcmp_ordered(">=", weights, least)
                new_sums.append(build.add(sums[2 * index], build.zext(is_kept, count_type)))
                new_sums.append(build.fadd(sums[2 * index + 1], build.select(is_kept, weights, zeros)))
            return new_sums

        num_searched = code.load(self._num_searched, 0, I64)
        carried = [constant(count_type, 0), zeros] * NUM_ACCUMULATORS
        sums = code.loop(0, num_searched, add, step=NUM_ACCUMULATORS * self._lanes, carried=carried)
        count, mass = reduce(build.add, sums[::2]), reduce(build.fadd, sums[1::2])
        return code.reduce(count, build.add), code.reduce(mass, build.fadd)

    def _compact(self) -> None:
        """Copy the weights that reach the threshold together, also those that lie among the copies already.

        No weight is overwritten before it is read, since each moves towards the front. Zeros fill up the last
        vectors: any threshold that is tried later is above 0.
        """
        code, build, lanes = self._code, self._code.build, self._lanes
        vector_type, mask_type = ir.VectorType(F32, lanes), ir.VectorType(I1, lanes)
        least = code.broadcast(build.bitcast(self.threshold_bits, F32), lanes)
        searched, bits_type = code.load(self._searched, 0, POINTER), ir.IntType(lanes)
        store = declare(
            build.module, f"llvm.masked.compressstore.v{lanes}f32", ir.VoidType(), vector_type, POINTER, mask_type
        )
        count_bits = declare(build.module, f"llvm.ctpop.i{lanes}", bits_type, bits_type)

        def copy(token: ir.Value, end: ir.Value) -> list[ir.Value]:
            weights = code.load_vector(searched, token, F32, lanes)
            is_kept = build.fcmp_ordered(">=", weights, least)
            bits = build.bitcast(is_kept, bits_type)
            with build.if_then(build.icmp_unsigned("!=", bits, bits_type(0))):
                build.call(store, [weights, build.bitcast(code.at(self._copies, end, F32), POINTER), is_kept])
            return [build.add(end, build.zext(build.call(count_bits, [bits]), I64))]

        num_searched = code.load(self._num_searched, 0, I64)
        (end,) = code.loop(0, num_searched, copy, step=lanes, carried=[I64(0)])
        for index in range(NUM_ACCUMULATORS):
            code.store_vector(constant(vector_type, 0.0), self._copies, build.add(end, I64(index * lanes)))
        part = NUM_ACCUMULATORS * lanes
        whole = build.and_(build.add(end, I64(part - 1)), I64(-part))
        code.store(self._copies, self._searched, 0)
        code.store(whole, self._num_searched, 0)
