"""Products with quantized matrices by integers: codes are not decoded, and rows are rounded to 16 bits.

A result differs from that of float32 by about 2e-5 of its row's norm: 32 values of a row share a scale, so that the
outliers of a row do not coarsen it. Its bits are the same for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from ....code_formats import CodeFormat, CodeParts
from ...llvm import F32, I8, I64, POINTER, Code, host_has, host_has_avx512
from ..batches import EvenBatches, max_rows_together
from ..multiplier import Batch, DepthBlock, Panel
from ..panels import DEPTH
from .integer_kernel import ProductArguments, emit_product, emit_unpacked_product, emit_unpacking
from .integer_rows import RECORD_WORDS, emit_record
from .integer_steps import run_kind
from .stored_parts import StoredParts

MAX_STEPS_PER_BLOCK = 48
"""Steps of a block of K at most: this part of a panel, unpacked, stays in the level-2 cache while all rows use it."""
MAX_PACKED_ROWS = 4
"""Rows of an only batch that are multiplied by codes as they are stored, where any number of rows is compiled for."""


def has_integer_products(parts: CodeParts) -> bool:
    """Return whether a processor without a matrix unit multiplies a matrix of these formats by integers.

    It needs products of 16 bits in its vectors, and codes that are integers, or that are if they are doubled: floats of
    8 bits would have 18.
    """
    has_products = host_has("avx512bw" if host_has_avx512() else "avx2")
    return has_products and all(_are_integers(code_format) for code_format, _ in parts)


def _are_integers(code_format: CodeFormat) -> bool:
    return code_format.mantissa_bits is None or code_format.bits == 4


@dataclass(frozen=True)
class IntegerMultiplier(EvenBatches):
    """Multiplies codes as integers. See `Multiplier` for the methods."""

    stored: StoredParts
    has_avx512: bool
    rows_per_batch: int | None
    is_only_batch: bool
    """Whether a block of rows is one batch, of `rows_per_batch` rows."""

    @classmethod
    def of_rows(cls, stored: StoredParts, num_rows: int | None, has_avx512: bool) -> IntegerMultiplier:
        """Return the multiplier of `num_rows` rows; None for any number, which differs from block to block."""
        if num_rows is None:
            return cls(stored, has_avx512, None, is_only_batch=False)
        num_batches = -(-num_rows // max_rows_together(has_avx512))
        return cls(stored, has_avx512, num_rows // num_batches, is_only_batch=num_batches == 1)

    @property
    def name(self) -> str:
        rows = "any" if self.rows_per_batch is None else f"{self.rows_per_batch}{'only' * self.is_only_batch}"
        return f"integers{'512' if self.has_avx512 else '256'}x{rows}_{self.stored.name}"

    @property
    def num_steps(self) -> int:
        """Return how many steps go over K, 32 values each."""
        return self.stored.depth // DEPTH

    @property
    def num_depth_blocks(self) -> int:
        return -(-self.num_steps // MAX_STEPS_PER_BLOCK)

    @property
    def _steps_per_block(self) -> int:
        return -(-self.num_steps // self.num_depth_blocks)

    def depth_block(self, code: Code, block: ir.Value) -> DepthBlock:
        return DepthBlock(*(code.build.mul(step, I64(DEPTH)) for step in self._steps_of_block(code, block)))

    def _steps_of_block(self, code: Code, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the first step of a block of K, and the one behind its last."""
        first_step = code.build.mul(block, I64(self._steps_per_block))
        return first_step, code.min(code.build.add(first_step, I64(self._steps_per_block)), I64(self.num_steps))

    def takes_steps(self, code: Code, batch: Batch) -> ir.Value | None:
        """See `Multiplier.takes_steps`: panels are not decoded."""
        return None

    @property
    def takes_words(self) -> bool:
        return False

    @property
    def pads_depth(self) -> bool:
        return False

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        return (num_rows, self._row_words), jnp.float32

    @property
    def _row_words(self) -> int:
        """Return the words of a row, an odd number of records: rows side by side do not share sets of a cache."""
        return (self.num_steps | 1) * RECORD_WORDS

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        """See `Multiplier.pack`. Values stay float32 until all 32 of a record are there."""
        code.store_vector(values, rows, code.build.add(code.build.mul(row, I64(self._row_words)), column))

    def end_pack(self, code: Code, rows: ir.Value, row: ir.Value, begin: ir.Value, num_values: int) -> None:
        build = code.build
        first = code.at(rows, build.add(build.mul(row, I64(self._row_words)), begin), F32)

        def round_values(offset: ir.Value) -> None:
            emit_record(code, build.gep(build.bitcast(first, POINTER), [build.mul(offset, I64(4))]))

        code.loop(0, num_values, round_values, step=DEPTH)

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return self.stored.panel(code, panels, index)

    def begin(self, code: Code) -> ir.Value | None:
        """Return the address of the steps of a block that are unpacked."""
        if self.is_only_batch:
            return None
        step_bytes = max(run_kind(code_format).step_bytes for code_format, _ in self.stored.parts)
        return code.allocate(I8, self._steps_per_block * step_bytes)

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """See `Multiplier.multiply`. Several batches share what the first of them unpacks."""
        build, (begin, end) = code.build, self._steps_of_block(code, block)
        assert panel.ahead is not None
        row_words = I64(self._row_words)
        first_row = build.gep(rows, [build.mul(batch.first_row, I64(4 * self._row_words))])
        arguments = ProductArguments(first_row, row_words, panel.begin, panel.ahead, sums, begin, end)

        def multiply_packed(code_format: CodeFormat) -> None:
            def multiply_rows(num_rows: int) -> None:
                emit_product(code, code_format, num_rows, self.has_avx512, arguments)

            if self.rows_per_batch is not None:
                multiply_rows(self.rows_per_batch)
            else:
                self.by_rows(code, batch, MAX_PACKED_ROWS, multiply_rows)

        def multiply_unpacked(code_format: CodeFormat) -> None:
            with build.if_then(build.icmp_signed("==", batch.number, I64(0))):
                emit_unpacking(code, code_format, self.has_avx512, panel.begin, panel.tools, (begin, end), panel.ahead)
            unpacked, kind = arguments._replace(panel=panel.tools), run_kind(code_format)
            self.by_rows(
                code,
                batch,
                self.max_batch_rows,
                lambda num_rows: emit_unpacked_product(code, kind, num_rows, self.has_avx512, unpacked),
            )

        if self.is_only_batch:
            self.stored.by_format(code, panel.index, multiply_packed)
        elif self.rows_per_batch is not None:
            self.stored.by_format(code, panel.index, multiply_unpacked)
        else:
            is_only = build.icmp_signed("==", batch.num_batches, I64(1))
            has_few = build.and_(is_only, build.icmp_signed("<=", batch.num_rows, I64(MAX_PACKED_ROWS)))
            with build.if_else(has_few) as (few, many):
                with few:
                    self.stored.by_format(code, panel.index, multiply_packed)
                with many:
                    self.stored.by_format(code, panel.index, multiply_unpacked)

    def end(self, code: Code) -> None:
        """See `Multiplier.end`: integers need nothing."""
