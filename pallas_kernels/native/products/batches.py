"""Rows cut into batches of nearly one size, for multipliers whose sums stay in registers."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ..llvm import I64, Code
from .multiplier import Batch, Batches

MAX_BLOCK_ROWS = 252
"""Rows that a unit of work multiplies at most: 21 batches of 12, or 42 of 6."""
MAX_SPECIALIZED_ROWS = 4
"""Where code is compiled for any number of rows: if all rows are one batch, and at most this many, code that is made
for exactly that number runs."""


def max_rows_together(has_avx512: bool) -> int:
    """Return how many rows are multiplied together at most: all their sums must stay in registers."""
    return 12 if has_avx512 else 6


def rows_per_batch(num_rows: int, has_avx512: bool) -> int:
    """Return how many rows each batch has, of the fewest that hold `num_rows` ≥ 1 rows; some have one more."""
    return num_rows // -(-num_rows // max_rows_together(has_avx512))


class EvenBatches:
    """Base of multipliers that cut rows into the fewest batches, whose sizes differ by one at most.

    See `Multiplier` for the methods. The larger batches, of `rows_per_batch` + 1 rows, come first. With AVX-512 (at
    most 12 rows together), 25 rows are 3 batches with `rows_per_batch` 8: one of 9 rows and two of 8.
    """

    has_avx512: bool
    rows_per_batch: int | None
    """None for a number that is known as the code runs, as for groups of rows that choose their matrix."""

    @property
    def num_task_steps(self) -> int:
        return 0

    @property
    def max_batch_rows(self) -> int:
        return max_rows_together(self.has_avx512)

    @property
    def row_alignment(self) -> int:
        return 1

    @property
    def batches_per_block(self) -> int:
        return MAX_BLOCK_ROWS // self.max_batch_rows

    def num_batches(self, code: Code, num_rows: ir.Value) -> ir.Value:
        return code.build.sdiv(code.build.add(num_rows, I64(self.max_batch_rows - 1)), I64(self.max_batch_rows))

    def batch(self, code: Code, batches: Batches, index: ir.Value, num_rows: ir.Value) -> Batch:
        """See `Multiplier.batch`. 25 rows with `rows_per_batch` 8 are 3 batches, of which 25 − 3 × 8 = 1 is larger."""
        build, num_batches = code.build, self.num_batches(code, num_rows)
        smaller_rows = build.sdiv(num_rows, num_batches) if self.rows_per_batch is None else I64(self.rows_per_batch)
        num_larger = build.sub(num_rows, build.mul(num_batches, smaller_rows))
        first_row = build.add(build.mul(index, smaller_rows), code.min(index, num_larger))
        is_larger = build.icmp_signed("<", index, num_larger)
        batch_rows = build.add(smaller_rows, build.zext(is_larger, I64))
        return batches.batch(code, index, first_row, batch_rows)

    def by_rows(self, code: Code, batch: Batch, max_rows: int, body: Callable[[int], None]) -> None:
        """Emit a branch with `body`(number of rows) for each size that a batch may have; that of its own size runs.

        There are two sizes, or all up to `max_rows` if the number of rows is known only as the code runs.
        """
        if self.rows_per_batch is None:
            _by_any_rows(code, batch, max_rows, body)
            return
        # If `rows_per_batch` is the most that fits, no batch is larger, and code for one would spill registers.
        if self.rows_per_batch == self.max_batch_rows:
            body(self.rows_per_batch)
            return
        is_larger = code.build.icmp_signed(">", batch.num_rows, I64(self.rows_per_batch))
        with code.build.if_else(is_larger) as (larger, smaller):
            with larger:
                body(self.rows_per_batch + 1)
            with smaller:
                body(self.rows_per_batch)


def _by_any_rows(code: Code, batch: Batch, max_rows: int, body: Callable[[int], None]) -> None:
    """Emit a branch with `body`(number of rows) for each number up to `max_rows`; that of the batch's rows runs."""
    build = code.build
    end = build.append_basic_block("end")
    switch = build.switch(batch.num_rows, end)
    for num_rows in range(1, max_rows + 1):
        block = build.append_basic_block(f"rows_{num_rows}")
        switch.add_case(I64(num_rows), block)
        build.position_at_end(block)
        body(num_rows)
        build.branch(end)
    build.position_at_end(end)
