"""RMS norm on a CPU, in native code: a row's bits do not depend on how many rows there are.

XLA:CPU adds the squares of a row up in another order where there are few rows: a request that is alone would not get
the logprobs that it gets beside other rows.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float
from llvmlite import ir

from .llvm import F32, I64, Code, constant, declare, lanes_for, register
from .xla_call import Buffer, handler

NUM_ACCUMULATORS = 4
"""Independent partial sums per row at most, a vector each; a single one would stall on FMA latency."""
ROWS_OF_UNIT = 16
MIN_PARALLEL_ELEMENTS = 1 << 17
"""A norm of fewer elements runs on one thread: waking another would take longer."""


def rms_norm(x_TD: Float[Array, "T D"], weight_D: Float[Array, " D"], eps: float) -> Float[Array, "T D"]:
    """Return x ÷ √(mean(x²) + eps) × weight, all in float32."""
    # Native code reads what it is given as what it was made for.
    if x_TD.dtype != jnp.float32 or weight_D.dtype != jnp.float32:
        raise ValueError(f"rms_norm: got rows of {x_TD.dtype} and a weight of {weight_D.dtype}, wanted float32")
    if x_TD.shape[1:] != weight_D.shape:
        raise ValueError(f"rms_norm: got rows of {x_TD.shape[1:]} and a weight of {weight_D.shape}, wanted the same")
    name = _handler(x_TD.shape[1], float(eps))
    return ffi_call(name, jax.ShapeDtypeStruct(x_TD.shape, jnp.float32))(x_TD, weight_D)


@cache
def _handler(size: int, eps: float) -> str:
    """Return the name of the custom call for rows of `size` elements."""
    lanes = lanes_for(size)
    vectors = next(count for count in range(NUM_ACCUMULATORS, 0, -1) if size % (count * lanes) == 0)
    kind = ir.VectorType(F32, lanes)

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        build, (x, weight) = code.build, args
        num_rows = x.size(0)
        num_units = build.sdiv(build.add(num_rows, I64(ROWS_OF_UNIT - 1)), I64(ROWS_OF_UNIT))
        is_large = build.icmp_signed(">=", build.mul(num_rows, I64(size)), I64(MIN_PARALLEL_ELEMENTS))
        return [x.data, weight.data, rets[0].data, num_rows], num_units, is_large

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        x, weight, out, num_rows = given
        build = code.build
        square_root = declare(build.module, "llvm.sqrt.f32", F32, F32)

        def of_row(row: ir.Value) -> None:
            start = build.mul(row, I64(size))

            def add_squares(place: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                at = build.add(start, place)
                found = []
                for vector, total in enumerate(sums):
                    values = code.load_vector(x, build.add(at, I64(vector * lanes)), F32, lanes)
                    found.append(code.add_product(values, values, total))
                return found

            none = [constant(kind, 0.0)] * vectors
            total, *others = code.loop(0, size, add_squares, step=vectors * lanes, carried=none)
            for other in others:
                total = build.fadd(total, other)
            mean = build.fdiv(code.reduce(total, build.fadd), constant(F32, float(size)))
            root = build.call(square_root, [build.fadd(mean, constant(F32, eps))])
            factor = code.broadcast(build.fdiv(constant(F32, 1.0), root), lanes)

            def scale(place: ir.Value) -> None:
                values = code.load_vector(x, build.add(start, place), F32, lanes)
                weights = code.load_vector(weight, place, F32, lanes)
                normed = build.fmul(build.fmul(values, factor), weights)
                code.store_vector(normed, out, build.add(start, place))

            code.loop(0, size, scale, step=lanes)

        first = build.mul(unit, I64(ROWS_OF_UNIT))
        code.loop(first, code.min(build.add(first, I64(ROWS_OF_UNIT)), num_rows), of_row)

    return register(handler(f"jpaged_rms_norm_{size}_{lanes}_{eps.hex()}", 2, 1, prepare, body))
