"""Weighs the logits of rows in native code: a token's weight is exp((logit − row maximum) ÷ temperature).

XLA:CPU computes this on one core, batch of rows after batch. Here a row is one unit of work, which any thread takes.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from .llvm import EXP_LEAST, F32, I64, Code, constant
from .row_calls import RowShape

WeightsAt = Callable[[ir.Value], ir.Value]
"""Emits a vector of a row's weights, those of the tokens from one on, and returns it."""


def weigher(code: Code, row_max: ir.Value, scale: ir.Value, lanes: int) -> Callable[[ir.Value], ir.Value]:
    """Return a function that emits exp((logit − row_max) × scale) of a vector of logits, 0 below e⁻⁸⁷ and for a NaN."""
    build = code.build
    maxima, scales = code.broadcast(row_max, lanes), code.broadcast(scale, lanes)
    least, zeros = (constant(maxima.type, value) for value in (EXP_LEAST, 0.0))

    def weigh(logits: ir.Value) -> ir.Value:
        exponent = build.fmul(build.fsub(logits, maxima), scales)
        return build.select(build.fcmp_ordered(">=", exponent, least), code.exp(exponent), zeros)

    return weigh


def kept_weights(code: Code, weights: ir.Value, threshold: ir.Value) -> ir.Value:
    """Return the weights of a vector that reach the threshold, and 0 for the others."""
    build, least = code.build, code.broadcast(threshold, weights.type.count)
    return build.select(build.fcmp_ordered(">=", weights, least), weights, constant(weights.type, 0.0))


def sum_blocks(
    code: Code, shape: RowShape, weights_at: WeightsAt, *, threshold: ir.Value, block_sums: ir.Value
) -> ir.Value:
    """Emit the sums of those weights of each block of a row that reach the threshold; return that of all weights.

    `block_sums` is the address of the row's sums.
    """
    build, lanes = code.build, shape.lanes
    zeros = constant(ir.VectorType(F32, lanes), 0.0)
    total_type = ir.VectorType(ir.DoubleType(), lanes)  # A float32 sum over a vocabulary would be off by 1e-6.

    def add_block(index: ir.Value, total: ir.Value) -> list[ir.Value]:
        first, block_total, kept_total = build.mul(index, I64(shape.block)), zeros, zeros
        for offset in range(0, shape.block, lanes):
            weights = weights_at(build.add(first, I64(offset)))
            block_total = build.fadd(block_total, weights)
            kept_total = build.fadd(kept_total, kept_weights(code, weights, threshold))
        code.store(code.reduce(kept_total, build.fadd), block_sums, index)
        return [build.fadd(total, build.fpext(block_total, total_type))]

    (total,) = code.loop(0, shape.num_blocks, add_block, carried=[constant(total_type, 0.0)])
    return build.fptrunc(code.reduce(total, build.fadd), F32)
