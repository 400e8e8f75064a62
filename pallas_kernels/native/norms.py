"""Norms of rows on a CPU, in native code: a row's bits do not depend on how many rows there are.

XLA:CPU sums a row in a different order if there are few rows, so a request alone would not get the same logprobs as
beside other requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float
from llvmlite import ir

from .llvm import F32, I64, Code, constant, declare, lanes_for
from .registry import register
from .xla_call import Call, Work, handler

NUM_ACCUMULATORS = 4
"""Independent partial sums per row at most, a vector each; a single one would stall on FMA latency."""
ROWS_OF_UNIT = 16
MIN_PARALLEL_ELEMENTS = 1 << 17
"""A norm of fewer elements runs on one thread: waking a second would take longer."""

LoadVector = Callable[[ir.Value, int], ir.Value]
"""(first element of the row, lanes) → a float32 vector of the row."""
StoreVector = Callable[[ir.Value, ir.Value], None]
"""(first element of the row, float32 vector): stores a vector of the row."""


class NormKind(NamedTuple):
    """Which norm code is compiled for."""

    eps: float
    is_centered: bool
    """Whether it is the layer norm, which subtracts the row's mean and adds a bias, and not the RMS norm."""

    @property
    def num_vectors(self) -> int:
        """Return how many vectors [D] the norm takes: a weight, and for the layer norm also a bias."""
        return 2 if self.is_centered else 1

    @property
    def name(self) -> str:
        """Return the name of the norm, without its eps."""
        return "layer_norm" if self.is_centered else "rms_norm"


def rms_norm(x_TD: Float[Array, "T D"], weight_D: Float[Array, " D"], eps: float) -> Float[Array, "T D"]:
    """Return x ÷ √(mean(x²) + eps) × weight, all in float32."""
    return _norm("rms_norm", x_TD, weight_D, eps=eps)


def layer_norm(
    x_TD: Float[Array, "T D"], weight_D: Float[Array, " D"], bias_D: Float[Array, " D"], eps: float
) -> Float[Array, "T D"]:
    """Return (x − mean(x)) ÷ √(mean((x − mean(x))²) + eps) × weight + bias, all in float32."""
    return _norm("layer_norm", x_TD, weight_D, bias_D, eps=eps)


def _norm(name: str, x_TD: Array, *vectors: Array, eps: float) -> Array:
    """Return the RMS norm of each row of x [T, D] if `vectors` is one weight [D], else the layer norm.

    For the layer norm, `vectors` are a weight [D] and a bias [D]. `eps` is added to the mean square before the root.
    Native code checks no arguments, so this raises ValueError unless all dtypes are float32 and each vector is as long
    as a row. `name` is the norm's name in the message.
    """
    for vector in vectors:
        if x_TD.dtype != jnp.float32 or vector.dtype != jnp.float32:
            raise ValueError(f"{name}: got rows of {x_TD.dtype} and a weight of {vector.dtype}, wanted float32")
        if x_TD.shape[1:] != vector.shape:
            raise ValueError(f"{name}: got rows of {x_TD.shape[1:]} and a weight of {vector.shape}, wanted the same")
    call = _handler(x_TD.shape[1], NormKind(float(eps), is_centered=len(vectors) == 2))
    return ffi_call(call, jax.ShapeDtypeStruct(x_TD.shape, jnp.float32))(x_TD, *vectors)


def emit_row_norm(
    code: Code, kind: NormKind, size: int, load: LoadVector, vectors: Sequence[ir.Value], store: StoreVector
) -> None:
    """Emit the norm of one row of `size` elements: (x − center) ÷ √(mean((x − center)²) + eps) × weight + bias.

    `center` is the row's mean for the layer norm; the RMS norm subtracts nothing, and adds no bias. `vectors` are the
    addresses of the weight and of the bias. `load` reads the row, once for each mean and once to be scaled, and `store`
    gets the result; both take vectors of as many lanes as divide the row. A row is summed in up to `NUM_ACCUMULATORS`
    vectors, which are then added to each other and across their lanes: the order depends on `size` alone.
    """
    build, lanes = code.build, lanes_for(size)
    num_accumulators = next(count for count in range(NUM_ACCUMULATORS, 0, -1) if size % (count * lanes) == 0)
    weight, *bias = vectors

    def mean(add_vector: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Return the mean of the row's elements, or of their squares, as `add_vector` adds one or the other.

        `add_vector(vector, sum)` returns `sum` plus a vector of the row, or plus its square. The row is summed in
        independent vectors, since additions to a single one would wait for each other.
        """

        def add_vectors(element: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            offsets = [build.add(element, I64(index * lanes)) for index in range(num_accumulators)]
            return [add_vector(load(offset, lanes), total) for offset, total in zip(offsets, sums, strict=True)]

        zeros = [constant(ir.VectorType(F32, lanes), 0.0)] * num_accumulators
        partial_sums = code.loop(0, size, add_vectors, step=num_accumulators * lanes, carried=zeros)
        sum_of_vectors = functools.reduce(build.fadd, partial_sums)
        return build.fdiv(code.reduce(sum_of_vectors, build.fadd), constant(F32, float(size)))

    center = code.broadcast(mean(lambda values, total: build.fadd(total, values)), lanes) if kind.is_centered else None

    def centered(values: ir.Value) -> ir.Value:
        return values if center is None else build.fsub(values, center)

    mean_square = mean(lambda values, total: code.add_product(centered(values), centered(values), total))
    square_root = declare(build.module, "llvm.sqrt.f32", F32, F32)
    root = build.call(square_root, [build.fadd(mean_square, constant(F32, kind.eps))])
    factor = code.broadcast(build.fdiv(constant(F32, 1.0), root), lanes)

    def scale(element: ir.Value) -> None:
        normed = build.fmul(centered(load(element, lanes)), factor)
        normed = build.fmul(normed, code.load_vector(weight, element, F32, lanes))
        if bias:
            normed = build.fadd(normed, code.load_vector(bias[0], element, F32, lanes))
        store(element, normed)

    code.loop(0, size, scale, step=lanes)


@cache
def _handler(size: int, kind: NormKind) -> str:
    """Compile the custom call that normalises rows of `size` elements, and return its name.

    A unit of work is `ROWS_OF_UNIT` rows.
    """

    def prepare(code: Code, call: Call) -> Work:
        """Emit code that counts the units of rows, and decides whether they are worth several threads.

        The arguments are x and the weight, and for the layer norm also the bias. 40 rows in units of 16 are 3 units.
        """
        build, (x, *vectors) = code.build, call.arguments
        num_rows = x.size(0)
        num_units = build.sdiv(build.add(num_rows, I64(ROWS_OF_UNIT - 1)), I64(ROWS_OF_UNIT))
        is_large = build.icmp_signed(">=", build.mul(num_rows, I64(size)), I64(MIN_PARALLEL_ELEMENTS))
        return Work(
            [x.data, call.results[0].data, num_rows, *(vector.data for vector in vectors)], [num_units], is_large
        )

    def body(code: Code, arguments: list[ir.Value], unit: ir.Value) -> None:
        """Emit the norms of the `ROWS_OF_UNIT` rows of unit `unit`; the last unit may have fewer rows."""
        x, out, num_rows, *vectors = arguments
        build = code.build

        def normalize_row(row: ir.Value) -> None:
            start = build.mul(row, I64(size))
            emit_row_norm(
                code,
                kind,
                size,
                lambda element, lanes: code.load_vector(x, build.add(start, element), F32, lanes),
                vectors,
                lambda element, normed: code.store_vector(normed, out, build.add(start, element)),
            )

        first_row = build.mul(unit, I64(ROWS_OF_UNIT))
        code.loop(first_row, code.min(build.add(first_row, I64(ROWS_OF_UNIT)), num_rows), normalize_row)

    name = f"jpaged_{kind.name}_{size}_{lanes_for(size)}_{kind.eps.hex()}"
    return register(name, lambda: handler(name, 1 + kind.num_vectors, 1, prepare, body))
