"""Draws tokens of rows of logits in native code: weighs them, cuts them by truncation, and draws down a tree.

XLA:CPU computes these on one core, batch of rows after batch. Here a row is one unit of work, which any thread takes.
A row's results depend on that row alone. What the limits of truncation mean is written in `sampling.truncation`, and
what the tree is in `sampling.drawing`.

Letters: R rows, b blocks of B tokens, L levels of trees.
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

from .draw_trees import DrawTree
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
    """A number that is not above 0, NaN too, keeps all."""
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    """A NaN keeps all."""


class DrawnRows(NamedTuple):
    """A token of each of R rows, and what is kept of the row. Of rows that are not drawn all this means nothing.

    A weight is exp((logit − row maximum) ÷ temperature), and 0 below e⁻⁸⁷.
    """

    token_ids: Int[Array, " R"]
    """0 if all weights are 0."""
    threshold: Float[Array, " R"]
    """Weights that reach it are kept."""
    totals: Float[Array, " R"]
    """The sum of all weights."""
    block_sums: Float[Array, "R b"]
    """The sum of the kept weights of each block."""


def drawn_rows(
    blocks: Float[Array, "R b B"],
    row_max: Float[Array, " R"],
    is_drawn: Bool[Array, " R"],
    temperature: Float[Array, " R"],
    limits: RowLimits,
    uniforms_RL: Float[Array, "R L"],
    *,
    num_branches: int,
) -> DrawnRows:
    """Return a token of each row with `is_drawn`, by its weight, among those that min-p, top-k and top-p leave.

    `blocks` are logits, of which −inf fills up the last block of a row. `uniforms_RL` are the random numbers of each
    row for the L levels of two trees with `num_branches`: first for its blocks, then for the tokens of one.
    """
    num_rows, num_blocks, block = blocks.shape
    types = [
        jax.ShapeDtypeStruct((num_rows, *shape), dtype)
        for shape, dtype in (
            ((), jnp.int32),
            ((), jnp.float32),
            ((), jnp.float32),
            ((num_blocks,), jnp.float32),
            ((_room_size(num_blocks * block),), jnp.float32),
        )
    ]
    call = ffi_call(_handler(num_blocks, block, num_branches), types)
    rows = blocks.reshape(num_rows, -1)
    *drawn, _ = call(rows, row_max, is_drawn, 1.0 / temperature, *limits, uniforms_RL)
    return DrawnRows(*drawn)


@cache
def _handler(num_blocks: int, block: int, num_branches: int) -> str:
    """Compile the custom call of `drawn_rows` for rows of these blocks, and return its name."""
    size, lanes = num_blocks * block, lanes_for(block)

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        with code.build.if_then(is_set(code, arguments[2], row)):
            draw(code, arguments, row)

    def draw(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        logits, row_max, _, scale, min_p, top_k, top_p, uniforms, *results = arguments
        token_ids, threshold, totals, block_sums, room = results
        build = code.build
        logits, block_sums = row_of(code, logits, row, size), row_of(code, block_sums, row, num_blocks)
        room = row_of(code, room, row, _room_size(size))
        weigh = weigher(code, code.load(row_max, row, F32), code.load(scale, row, F32), lanes)
        # Searches need a threshold whose bits are in the order of numbers: one from 0 on.
        least = code.maximum(code.load(min_p, row, F32), constant(F32, 0.0))
        limits = least, code.load(top_k, row, I32), code.load(top_p, row, F32)

        def weights_at(token: ir.Value) -> ir.Value:
            return weigh(code.load_vector(logits, token, F32, lanes))

        def stored_weights_at(token: ir.Value) -> ir.Value:
            """Return weights that are written to the room, too, where thresholds are searched."""
            weights = weights_at(token)
            code.store_vector(weights, room, token)
            return weights

        code.store(limits[0], threshold, row)
        has_top_k, has_top_p = _has_limits(code, size, *limits[1:])
        with build.if_else(build.or_(has_top_k, has_top_p)) as (then, otherwise):
            with then:
                code.store(_emit_sums(code, stored_weights_at, limits[0], block_sums, num_blocks, block), totals, row)
                kept = _KeptWeights(code, room, code.build.gep(room, [I64(size * SIZES[F32])]), size, lanes)
                least = _emit_truncation(code, kept, size, *limits)
                code.store(least, threshold, row)
                _emit_sums(
                    code, lambda token: code.load_vector(room, token, F32, lanes), least, block_sums, num_blocks, block
                )
            with otherwise:
                code.store(_emit_sums(code, weights_at, limits[0], block_sums, num_blocks, block), totals, row)
        trees = DrawTree(code, num_blocks, num_branches), DrawTree(code, block, num_branches)
        numbers = row_of(code, uniforms, row, sum(tree.num_levels for tree in trees))
        token = _emit_draw(code, trees, numbers, block_sums, weights_at, code.load(threshold, row, F32), lanes)
        code.store(build.trunc(token, I32), token_ids, row)

    name = f"jpaged_drawn_rows_{num_blocks}_{block}_{num_branches}_{lanes}"
    return register(name, lambda: handler(name, 8, 5, prepare_rows, body))


def _emit_draw(
    code: Code,
    trees: tuple[DrawTree, DrawTree],
    uniforms: ir.Value,
    block_sums: ir.Value,
    weights_at: Callable[[ir.Value], ir.Value],
    threshold: ir.Value,
    lanes: int,
) -> ir.Value:
    """Emit the draw of a block by its sum, then of a token in it that reaches the threshold; return the token."""
    build, (block_tree, token_tree) = code.build, trees
    code.loop(
        0, block_tree.num_leaves, lambda leaf: code.store(code.load(block_sums, leaf, F32), block_tree.leaves, leaf)
    )
    first = build.mul(block_tree.draw(uniforms, 0), I64(token_tree.num_leaves))
    for offset in range(0, token_tree.num_leaves, lanes):
        weights = _kept(code, weights_at(build.add(first, I64(offset))), threshold)
        code.store_vector(weights, token_tree.leaves, I64(offset))
    return build.add(first, token_tree.draw(uniforms, block_tree.num_levels))


def _emit_sums(
    code: Code,
    weights_at: Callable[[ir.Value], ir.Value],
    threshold: ir.Value,
    block_sums: ir.Value,
    num_blocks: int,
    block: int,
) -> ir.Value:
    """Emit the sum of those weights of each block of a row that reach the threshold; return that of all weights.

    `weights_at` gives a vector of weights from a token on.
    """
    build, lanes = code.build, lanes_for(block)
    zeros = constant(ir.VectorType(F32, lanes), 0.0)
    total_type = ir.VectorType(ir.DoubleType(), lanes)  # A float32 sum over a vocabulary would be off by 1e-6.

    def add_block(index: ir.Value, total: ir.Value) -> list[ir.Value]:
        first, block_total, kept_total = build.mul(index, I64(block)), zeros, zeros
        for offset in range(0, block, lanes):
            weights = weights_at(build.add(first, I64(offset)))
            block_total = build.fadd(block_total, weights)
            kept_total = build.fadd(kept_total, _kept(code, weights, threshold))
        code.store(code.reduce(kept_total, build.fadd), block_sums, index)
        return [build.fadd(total, build.fpext(block_total, total_type))]

    (total,) = code.loop(0, num_blocks, add_block, carried=[constant(total_type, 0.0)])
    return build.fptrunc(code.reduce(total, build.fadd), F32)


def _kept(code: Code, weights: ir.Value, threshold: ir.Value) -> ir.Value:
    """Return the weights of a vector that reach the threshold, and 0 for the others."""
    build, least = code.build, code.broadcast(threshold, weights.type.count)
    return build.select(build.fcmp_ordered(">=", weights, least), weights, constant(weights.type, 0.0))


def _has_limits(code: Code, size: int, top_k: ir.Value, top_p: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return whether top-k and top-p may leave out tokens of a row of `size` weights."""
    build = code.build
    has_top_k = build.and_(build.icmp_signed(">", top_k, I32(0)), build.icmp_signed("<", top_k, I32(size)))
    return has_top_k, build.fcmp_ordered("<", top_p, constant(F32, 1.0))


def _emit_truncation(
    code: Code, kept: _KeptWeights, size: int, min_p: ir.Value, top_k: ir.Value, top_p: ir.Value
) -> ir.Value:
    """Emit the limits of a row of `size` weights one after another; return its threshold."""
    build = code.build
    kept.raise_to(build.bitcast(min_p, I32))
    has_top_k, has_top_p = _has_limits(code, size, top_k, top_p)
    with build.if_then(has_top_k):
        kept.search(top_k, constant(F32, 0.0))
    with build.if_then(has_top_p):
        _, mass = kept.count_and_mass(kept.threshold_bits)
        kept.search(I32(0), build.fmul(top_p, mass))
    return build.bitcast(kept.threshold_bits, F32)


def prepare_rows(code: Code, call: Call) -> Work:
    """Emit code that hands all addresses on, a unit for each row, and decides whether they are worth several threads.

    The first argument holds the rows.
    """
    num_rows, row_size = (call.arguments[0].size(dimension) for dimension in range(2))
    num_numbers = code.build.mul(num_rows, row_size)
    is_large = code.build.icmp_signed(">=", num_numbers, I64(MIN_PARALLEL_NUMBERS))
    return Work([buffer.data for buffer in (*call.arguments, *call.results)], [num_rows], is_large)


def _room_size(size: int) -> int:
    """Return the length of the room for a row of `size` weights, and for a copy of few of them with zeros behind."""
    return size + size // COMPACTION + NUM_ACCUMULATORS * LONG_LANES


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
        """`weights` is the address of `size` numbers, whole blocks, and `room` that of a copy of few, to be written."""
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
