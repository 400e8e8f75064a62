"""Scores rows of logits in native code: totals of softmaxes, ranks of tokens, and the most likely tokens.

XLA:CPU computes these on one core, batch of rows after batch. Here a row is one unit of work, which any thread takes.
A row's results depend on that row alone.

Letters: R rows, b blocks of B tokens, k most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from .llvm import F32, I32, I64, Code, constant
from .registry import register
from .row_calls import RowShape, is_set, prepare_rows, row_address
from .row_weights import weigher
from .xla_call import handler

MAX_TOPS = 64
"""Most likely tokens that are found natively: each one found is put in its place among the others step by step."""
NO_KEY = -(1 << 31)
"""Below the key of every logit."""
I1 = ir.IntType(1)


class ScoredRows(NamedTuple):
    """All weights of each of R rows together, how many logits are larger than that of its token, and the largest."""

    totals: Float[Array, " R"]
    num_larger: Int[Array, " R"]
    top_logits: Float[Array, "R k"] | None = None
    """The largest first; None if they were not wanted."""
    top_ids: Int[Array, "R k"] | None = None
    """Their tokens. Of equal logits the one with the lower id comes first, where +0.0 is larger than −0.0."""


def scored_rows(
    blocks: Float[Array, "R b B"],
    maxima: Float[Array, "R b"],
    is_scored: Bool[Array, " R"],
    wants_tops: Bool[Array, " R"],
    temperature: Float[Array, " R"],
    token_logits: Float[Array, " R"],
    *,
    num_tops: int,
) -> ScoredRows:
    """Return Σ exp((logit − row maximum) ÷ temperature) of rows with `is_scored`, the number of logits above
    `token_logits`, and of rows with `wants_tops` the `num_tops` largest logits, at most MAX_TOPS.

    −inf, which fills up the last block of a row, adds nothing. `maxima` are those of the blocks, NaNs aside. What a row
    is not asked for means nothing; without `num_tops`, None stands for the largest.
    """
    assert num_tops <= MAX_TOPS, "found one by one"
    num_rows, shape = len(blocks), RowShape(*blocks.shape[1:])
    types = [jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in (jnp.float32, jnp.int32)]
    if num_tops:
        types += [jax.ShapeDtypeStruct((num_rows, num_tops), dtype) for dtype in (jnp.float32, jnp.int32)]
    call = ffi_call(_handler(shape, num_tops), types)
    row_max, scale = jnp.max(maxima, axis=1), 1.0 / temperature
    return ScoredRows(*call(blocks.reshape(num_rows, -1), maxima, row_max, is_scored, wants_tops, scale, token_logits))


@cache
def _handler(shape: RowShape, num_tops: int) -> str:
    """Compile the custom call of `scored_rows` for rows of this shape, and return its name."""

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        logits, maxima, row_max, is_scored, wants_tops, scale, token_logits, totals, num_larger, *tops = arguments
        logits = row_address(code, logits, row, shape.size, F32)
        with code.build.if_then(is_set(code, is_scored, row)):
            largest, factor, token_logit = (code.load(array, row, F32) for array in (row_max, scale, token_logits))
            weigh = weigher(code, largest, factor, shape.lanes)
            total, count = _emit_totals(code, shape, logits, weigh, token_logit)
            code.store(total, totals, row)
            code.store(count, num_larger, row)
        if tops:
            with code.build.if_then(is_set(code, wants_tops, row)):
                maxima = row_address(code, maxima, row, shape.num_blocks, F32)
                likeliest = _Likeliest(code, num_tops)
                likeliest.search(shape, logits=logits, maxima=maxima)
                top_logits, top_ids = tops
                likeliest.write(
                    logits=row_address(code, top_logits, row, num_tops, F32),
                    ids=row_address(code, top_ids, row, num_tops, I32),
                )

    name = f"jpaged_scored_rows_{shape.num_blocks}_{shape.block}_{num_tops}_{shape.lanes}"
    return register(name, lambda: handler(name, 7, 4 if num_tops else 2, prepare_rows, body))


def _emit_totals(
    code: Code, shape: RowShape, logits: ir.Value, weigh: Callable[[ir.Value], ir.Value], token_logit: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Emit the sum of a row's weights, which `weigh` gives, and the number of its logits above `token_logit`."""
    build, lanes = code.build, shape.lanes
    sum_type, count_type = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    total_type = ir.VectorType(ir.DoubleType(), lanes)  # A float32 sum over a vocabulary would be off by 1e-6.
    token_logit = code.broadcast(token_logit, lanes)

    def add_block(index: ir.Value, total: ir.Value, count: ir.Value) -> tuple[ir.Value, ir.Value]:
        first, block_total = build.mul(index, I64(shape.block)), constant(sum_type, 0.0)
        for offset in range(0, shape.block, lanes):
            values = code.load_vector(logits, build.add(first, I64(offset)), F32, lanes)
            block_total = build.fadd(block_total, weigh(values))
            is_larger = build.fcmp_ordered(">", values, token_logit)
            count = build.add(count, build.zext(is_larger, count_type))
        return build.fadd(total, build.fpext(block_total, total_type)), count

    total, count = code.loop(
        0, shape.num_blocks, add_block, carried=[constant(total_type, 0.0), constant(count_type, 0)]
    )
    return build.fptrunc(code.reduce(total, build.fadd), F32), code.reduce(count, build.add)


def _keys(code: Code, numbers: ir.Value) -> ir.Value:
    """Return int32 in the order of float32 numbers: those below 0 have all bits but the sign inverted."""
    is_vector = isinstance(numbers.type, ir.VectorType)
    int_type = ir.VectorType(I32, numbers.type.count) if is_vector else I32
    return _with_order(code, code.build.bitcast(numbers, int_type))


def _with_order(code: Code, bits: ir.Value) -> ir.Value:
    """Return the keys of float32 bits, or the bits of keys."""
    build = code.build
    signs = build.ashr(bits, constant(bits.type, 31))
    return build.xor(bits, build.and_(signs, constant(bits.type, 0x7FFFFFFF)))


class _Likeliest:
    """The k largest of the logits that were added, in memory: their keys in descending order, and their tokens."""

    def __init__(self, code: Code, num_tops: int) -> None:
        self._code, self._num_tops = code, num_tops
        self._keys, self._ids = code.allocate(I32, num_tops), code.allocate(I32, num_tops)

    @property
    def least(self) -> ir.Value:
        """The smallest key; NO_KEY while fewer than k logits were added."""
        return self._code.load(self._keys, self._num_tops - 1, I32)

    def clear(self) -> None:
        """Emit that no logit was added."""

        def clear_one(index: ir.Value) -> None:
            self._code.store(I32(NO_KEY), self._keys, index)
            self._code.store(I32(0), self._ids, index)

        self._code.loop(0, self._num_tops, clear_one)

    def add(self, key: ir.Value, token: ir.Value) -> None:
        """Emit that a logit with this key is put behind all that are at least as large, and the smallest falls out.

        All k places are walked for each logit that is larger than the smallest.
        """
        code, build = self._code, self._code.build

        def place(index: ir.Value, key: ir.Value, token: ir.Value, is_placed: ir.Value) -> list[ir.Value]:
            old_key, old_token = (code.load(array, index, I32) for array in (self._keys, self._ids))
            is_placed = build.or_(is_placed, build.icmp_signed(">", key, old_key))
            code.store(build.select(is_placed, key, old_key), self._keys, index)
            code.store(build.select(is_placed, token, old_token), self._ids, index)
            return [build.select(is_placed, old_key, key), build.select(is_placed, old_token, token), is_placed]

        with build.if_then(build.icmp_signed(">", key, self.least)):
            code.loop(0, self._num_tops, place, carried=[key, build.trunc(token, I32), ir.Constant(I1, 0)])

    def search(self, shape: RowShape, *, logits: ir.Value, maxima: ir.Value) -> None:
        """Emit a search for a row's largest logits; `maxima` are those of its blocks.

        The k-th largest maximum of blocks comes first: k logits reach it, so that no smaller logit is among the k
        largest. At most k blocks and those that tie hold larger ones, whatever the order of a row's logits: few blocks
        are read.
        """
        code, build, lanes = self._code, self._code.build, shape.lanes

        def add_maximum(index: ir.Value) -> None:
            self.add(_keys(code, code.load(maxima, index, F32)), index)

        self.clear()
        code.loop(0, shape.num_blocks, add_maximum)
        threshold_key = self.least
        self.clear()

        def read_vector(token: ir.Value) -> None:
            keys = _keys(code, code.load_vector(logits, token, F32, lanes))
            is_candidate = build.icmp_signed(">=", keys, code.broadcast(threshold_key, lanes))
            is_candidate = build.and_(is_candidate, build.icmp_signed(">", keys, code.broadcast(self.least, lanes)))
            bits_type = ir.IntType(lanes)
            with build.if_then(build.icmp_unsigned("!=", build.bitcast(is_candidate, bits_type), bits_type(0))):
                end = build.add(token, I64(lanes))
                code.loop(token, end, lambda one: self.add(_keys(code, code.load(logits, one, F32)), one))

        def read_block(index: ir.Value) -> None:
            key = _keys(code, code.load(maxima, index, F32))
            is_likely = build.icmp_signed(">=", key, threshold_key)
            with build.if_then(build.and_(is_likely, build.icmp_signed(">", key, self.least))):
                first = build.mul(index, I64(shape.block))
                code.loop(first, build.add(first, I64(shape.block)), read_vector, step=lanes)

        code.loop(0, shape.num_blocks, read_block)

    def write(self, *, logits: ir.Value, ids: ir.Value) -> None:
        """Emit that all are written to rows of results."""
        code = self._code

        def write_one(index: ir.Value) -> None:
            bits = _with_order(code, code.load(self._keys, index, I32))
            code.store(code.build.bitcast(bits, F32), logits, index)
            code.store(code.load(self._ids, index, I32), ids, index)

        code.loop(0, self._num_tops, write_one)
