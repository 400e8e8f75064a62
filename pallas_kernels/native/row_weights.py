"""Weighs rows of logits in native code: thresholds of truncation, and the sums that draws begin with.

XLA:CPU computes these on one core, batch of rows after batch. Here a row is one unit of work, which any thread takes.
A row's results depend on that row alone. What the limits of truncation mean is written in `sampling.truncation`.

Letters: R rows, b blocks of B tokens, V tokens of all blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from .llvm import EXP_LEAST, F32, I8, I32, I64, LONG_LANES, POINTER, SIZES, Code, constant, declare, lanes_for
from .registry import register
from .xla_call import Call, Work, handler

MIN_PARALLEL_NUMBERS = 1 << 16
"""Rows of fewer numbers together run on one thread: waking a second would take longer."""
BITS_OF_ONE = int.from_bytes(struct.pack("<f", 1.0), "little")
MAX_HALVINGS = 31
"""Float32 numbers in [0, 1] are fewer than 2³⁰."""
COMPACTION = 4
"""Weights that reach a threshold are copied together once they are at most one in 4 of those searched so far."""
NUM_ACCUMULATORS = 4
"""Independent sums of a row: additions to a single one would wait for each other. They divide a block's vectors."""
I1 = ir.IntType(1)


class RowLimits(NamedTuple):
    """The limits of truncation of R rows, in the order in which they apply; see `truncation.TruncationLimits`."""

    min_p: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]


class WeighedRows(NamedTuple):
    """The weights of R rows and those that truncation keeps. Rows that are not drawn have block sums of 0 alone."""

    weights: Float[Array, "R b B"]
    """exp((logit − row maximum) ÷ temperature), and 0 below e⁻⁸⁷."""
    threshold: Float[Array, " R"]
    """Weights that reach it are kept."""
    block_sums: Float[Array, "R b"]
    """The sum of the kept weights of each block."""


def weighed_rows(
    blocks: Float[Array, "R b B"],
    row_max: Float[Array, " R"],
    is_drawn: Bool[Array, " R"],
    temperature: Float[Array, " R"],
    limits: RowLimits,
) -> WeighedRows:
    """Return the weights of rows with `is_drawn`, and which of them are left by min-p, top-k and top-p.

    `blocks` are logits, of which −inf fills up the last block of a row.
    """
    num_rows, num_blocks, block = blocks.shape
    row_type, threshold_type, sums_type = (
        jax.ShapeDtypeStruct((num_rows, *shape), jnp.float32) for shape in ((num_blocks * block,), (), (num_blocks,))
    )
    room_type = jax.ShapeDtypeStruct((num_rows, _room_size(num_blocks * block)), jnp.float32)
    call = ffi_call(_weigh_handler(num_blocks, block), (row_type, threshold_type, sums_type, room_type))
    rows = blocks.reshape(num_rows, -1)
    weights, threshold, block_sums, _ = call(rows, row_max, is_drawn, 1.0 / temperature, *limits)
    return WeighedRows(weights.reshape(blocks.shape), threshold, block_sums)


@cache
def _weigh_handler(num_blocks: int, block: int) -> str:
    """Compile the custom call of `weighed_rows` for rows of these blocks, and return its name."""

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        logits, row_max, is_drawn, scale, min_p, top_k, top_p, weights, threshold, block_sums, room = arguments
        build, size, lanes = code.build, num_blocks * block, lanes_for(block)
        logits, weights = (row_of(code, array, row, size) for array in (logits, weights))
        room = row_of(code, room, row, _room_size(size))
        block_sums = row_of(code, block_sums, row, num_blocks)
        with build.if_else(is_set(code, is_drawn, row)) as (then, otherwise):
            with then:
                weigh = weigher(code, code.load(row_max, row, F32), code.load(scale, row, F32), lanes)

                def weigh_vector(token: ir.Value) -> None:
                    code.store_vector(weigh(code.load_vector(logits, token, F32, lanes)), weights, token)

                code.loop(0, size, weigh_vector, step=lanes)
                kept = _KeptWeights(code, weights, room, size, lanes)
                limits = code.load(min_p, row, F32), code.load(top_k, row, I32), code.load(top_p, row, F32)
                least = _emit_truncation(code, kept, size, *limits)
                code.store(least, threshold, row)
                _emit_block_sums(code, weights, least, block_sums, num_blocks, block)
            with otherwise:
                code.store(constant(F32, 0.0), threshold, row)
                code.loop(0, num_blocks, lambda index: code.store(constant(F32, 0.0), block_sums, index))

    name = f"jpaged_weighed_rows_{num_blocks}_{block}_{lanes_for(block)}"
    return register(name, lambda: handler(name, 7, 4, prepare_rows, body))


def _emit_truncation(
    code: Code, kept: _KeptWeights, size: int, min_p: ir.Value, top_k: ir.Value, top_p: ir.Value
) -> ir.Value:
    """Emit the limits of a row of `size` weights one after another; return its threshold."""
    build = code.build
    kept.raise_to(build.bitcast(min_p, I32))
    has_top_k = build.and_(build.icmp_signed(">", top_k, I32(0)), build.icmp_signed("<", top_k, I32(size)))
    with build.if_then(has_top_k):
        kept.search(top_k, constant(F32, 0.0))
    with build.if_then(build.fcmp_ordered("<", top_p, constant(F32, 1.0))):
        _, mass = kept.count_and_mass(kept.threshold_bits)
        kept.search(I32(0), build.fmul(top_p, mass))
    return build.bitcast(kept.threshold_bits, F32)


def _emit_block_sums(
    code: Code, weights: ir.Value, threshold: ir.Value, block_sums: ir.Value, num_blocks: int, block: int
) -> None:
    """Emit the sum of those weights of each block of a row that reach the threshold."""
    build, lanes = code.build, lanes_for(block)
    sum_type = ir.VectorType(F32, lanes)
    least, zeros = code.broadcast(threshold, lanes), constant(sum_type, 0.0)

    def add_block(index: ir.Value) -> None:
        first, total = build.mul(index, I64(block)), zeros
        for offset in range(0, block, lanes):
            values = code.load_vector(weights, build.add(first, I64(offset)), F32, lanes)
            total = build.fadd(total, build.select(build.fcmp_ordered(">=", values, least), values, zeros))
        code.store(code.reduce(total, build.fadd), block_sums, index)

    code.loop(0, num_blocks, add_block)


def prepare_rows(code: Code, call: Call) -> Work:
    """Emit code that hands all addresses on, a unit for each row, and decides whether they are worth several threads.

    The first argument holds the rows.
    """
    num_rows, row_size = (call.arguments[0].size(dimension) for dimension in range(2))
    num_numbers = code.build.mul(num_rows, row_size)
    is_large = code.build.icmp_signed(">=", num_numbers, I64(MIN_PARALLEL_NUMBERS))
    return Work([buffer.data for buffer in (*call.arguments, *call.results)], [num_rows], is_large)


def _room_size(size: int) -> int:
    """Return the length of the room in which a row of `size` weights is copied together, with zeros behind."""
    return size // COMPACTION + NUM_ACCUMULATORS * LONG_LANES


def row_of(code: Code, rows: ir.Value, row: ir.Value, size: int) -> ir.Value:
    """Return the address of a row of `size` float32 numbers."""
    return code.build.gep(rows, [code.build.mul(row, I64(size * SIZES[F32]))])


def is_set(code: Code, flags: ir.Value, index: ir.Value) -> ir.Value:
    """Return a flag as an i1."""
    return code.build.icmp_signed("!=", code.load(flags, index, I8), I8(0))


def weigher(code: Code, row_max: ir.Value, scale: ir.Value, lanes: int) -> Callable[[ir.Value], ir.Value]:
    """Return a function that emits exp((logit − row_max) × scale) of a vector of logits, 0 below e⁻⁸⁷ and for a NaN."""
    build = code.build
    maxima, scales = code.broadcast(row_max, lanes), code.broadcast(scale, lanes)
    least, zeros = (constant(maxima.type, value) for value in (EXP_LEAST, 0.0))

    def weigh(logits: ir.Value) -> ir.Value:
        exponent = build.fmul(build.fsub(logits, maxima), scales)
        return build.select(build.fcmp_ordered(">=", exponent, least), code.exp(exponent), zeros)

    return weigh


class _KeptWeights:
    """The weights of a row that reach a threshold, which searches raise, by bisection over the bits of float32 numbers.

    As integers, the bits of numbers ≥ 0 are in the order of the numbers. Weights below the threshold are not needed
    again, so those that reach it are copied together once they are few: most halvings then read little.
    """

    def __init__(self, code: Code, weights: ir.Value, room: ir.Value, size: int, lanes: int) -> None:
        """`weights` is the address of `size` numbers, whole blocks, and `room` that of `_room_size`, to be written."""
        self._code, self._room, self._lanes = code, room, lanes
        self._threshold, self._high, self._num_low, self._num_high = (code.allocate(I32, 1) for _ in range(4))
        self._searched, self._num_searched = code.allocate(POINTER, 1), code.allocate(I64, 1)
        code.store(weights, self._searched, 0)
        code.store(I64(size), self._num_searched, 0)

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
        """Copy the weights that reach the threshold together into `room`, from there too once they lie in it.

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
                build.call(store, [weights, build.bitcast(code.at(self._room, end, F32), POINTER), is_kept])
            return [build.add(end, build.zext(build.call(count_bits, [bits]), I64))]

        num_searched = code.load(self._num_searched, 0, I64)
        (end,) = code.loop(0, num_searched, copy, step=lanes, carried=[I64(0)])
        for index in range(NUM_ACCUMULATORS):
            code.store_vector(constant(vector_type, 0.0), self._room, build.add(end, I64(index * lanes)))
        part = NUM_ACCUMULATORS * lanes
        whole = build.and_(build.add(end, I64(part - 1)), I64(-part))
        code.store(self._room, self._searched, 0)
        code.store(whole, self._num_searched, 0)
