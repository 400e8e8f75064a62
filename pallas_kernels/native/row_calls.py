"""What custom calls share whose unit of work is a row: its shape, its addresses, and when more threads are woken."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from .llvm import I8, I64, SIZES, Code, lanes_for
from .xla_call import Call, Work

MIN_PARALLEL_NUMBERS = 1 << 16
"""Rows of fewer numbers together run on one thread: waking a second would take longer."""


class RowShape(NamedTuple):
    """The numbers of a row: blocks of equal size, one behind the other."""

    num_blocks: int
    block: int
    """Numbers of a block."""

    @property
    def size(self) -> int:
        """The numbers of a row."""
        return self.num_blocks * self.block

    @property
    def lanes(self) -> int:
        """Numbers of a vector, which divide a block."""
        return lanes_for(self.block)


def prepare_rows(code: Code, call: Call) -> Work:
    """Emit code that hands all addresses on, a unit for each row, and decides whether they are worth several threads.

    The first argument holds the rows.
    """
    num_rows, row_size = (call.arguments[0].size(dimension) for dimension in range(2))
    num_numbers = code.build.mul(num_rows, row_size)
    is_large = code.build.icmp_signed(">=", num_numbers, I64(MIN_PARALLEL_NUMBERS))
    return Work([buffer.data for buffer in (*call.arguments, *call.results)], [num_rows], is_large)


def row_address(code: Code, array: ir.Value, row: ir.Value, row_size: int, element_type: ir.Type) -> ir.Value:
    """Return the address of row number `row` of an array whose rows have `row_size` elements."""
    return code.build.gep(array, [code.build.mul(row, I64(row_size * SIZES[element_type]))])


def is_set(code: Code, flags: ir.Value, index: ir.Value) -> ir.Value:
    """Return a flag as an i1."""
    return code.build.icmp_signed("!=", code.load(flags, index, I8), I8(0))
