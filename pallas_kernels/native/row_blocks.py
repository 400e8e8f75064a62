"""A row of logits in memory, in blocks, with what is told of each block: native code reads, writes and copies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llvmlite import ir

from .llvm import F32, I8, I64, Code, constant
from .row_calls import RowShape, is_set, row_address

INFINITY = float("inf")
I1 = ir.IntType(1)


class RowBlocks:
    """A row's logits in memory, with what is told of each of its blocks: its maximum, NaNs aside, and a flag."""

    def __init__(
        self, code: Code, shape: RowShape, row: ir.Value, *, logits: ir.Value, maxima: ir.Value, flags: ir.Value
    ) -> None:
        """`logits`, `maxima` and `flags` are the addresses of all rows' logits, and of what is told of their blocks."""
        self._code, self._block, self.lanes = code, shape.block, shape.lanes
        self._logits = row_address(code, logits, row, shape.size, F32)
        self._maxima = row_address(code, maxima, row, shape.num_blocks, F32)
        self._flags = row_address(code, flags, row, shape.num_blocks, I8)

    def load(self, token: ir.Value, lanes: int) -> ir.Value:
        """Load a vector of logits from `token` on."""
        return self._code.load_vector(self._logits, token, F32, lanes)

    def store(self, values: ir.Value, token: ir.Value) -> None:
        """Store a vector of logits from `token` on."""
        self._code.store_vector(values, self._logits, token)

    def write(self, index: ir.Value, vector_from: Callable[[ir.Value], ir.Value]) -> None:
        """Emit a block whose vectors `vector_from(first token)` computes, and what is told of it."""

        def write_vector(token: ir.Value) -> ir.Value:
            values = vector_from(token)
            self.store(values, token)
            return values

        self._summarize(index, write_vector)

    def summarize(self, index: ir.Value) -> None:
        """Emit what is told of a block that was written."""
        self._summarize(index, lambda token: self.load(token, self.lanes))

    def copy_logits(self, source: RowBlocks, index: ir.Value) -> None:
        """Emit a copy of a block's logits."""
        for token in self._vectors_of(index):
            self.store(source.load(token, self.lanes), token)

    def copy_summary(self, source: RowBlocks, index: ir.Value) -> None:
        """Emit a copy of what is told of a block."""
        self._code.store(self._code.load(source._maxima, index, F32), self._maxima, index)
        self._code.store(self._code.load(source._flags, index, I8), self._flags, index)

    def set_flag(self, flag: ir.Value, index: ir.Value) -> None:
        """Emit a block's flag; see `has_flag`."""
        self._code.store(self._code.build.zext(flag, I8), self._flags, index)

    def has_flag(self, index: ir.Value) -> ir.Value:
        """Return a block's flag: whether it holds a NaN, or in saved blocks whether it was changed."""
        return is_set(self._code, self._flags, index)

    def _vectors_of(self, index: ir.Value) -> Iterator[ir.Value]:
        """Yield the first token of each vector of a block."""
        first_token = self._code.build.mul(index, I64(self._block))
        for offset in range(0, self._block, self.lanes):
            yield self._code.build.add(first_token, I64(offset))

    def _summarize(self, index: ir.Value, vector_from: Callable[[ir.Value], ir.Value]) -> None:
        """Emit the maximum of a block's vectors, NaNs aside, and whether they hold a NaN."""
        code, build = self._code, self._code.build
        maximum, is_nan = (
            constant(ir.VectorType(F32, self.lanes), -INFINITY),
            constant(ir.VectorType(I1, self.lanes), 0),
        )
        for token in self._vectors_of(index):
            values = vector_from(token)
            maximum = code.maximum(values, maximum)
            is_nan = build.or_(is_nan, build.fcmp_unordered("uno", values, values))
        code.store(code.reduce(maximum, code.maximum), self._maxima, index)
        code.store(build.zext(code.reduce(is_nan, build.or_), I8), self._flags, index)
