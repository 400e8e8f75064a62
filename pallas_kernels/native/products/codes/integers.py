"""Products with quantized matrices by integers: codes are not decoded, and rows are rounded to 24 or 16 bits.

Each block of 32 values of a row becomes integers with a scale of their own. In float32 they have 24 bits: an error of
up to about 2⁻²⁴ of the block's largest magnitude. In bfloat16 they have 16 bits, 2⁻¹⁶, where rounding to bfloat16 is
an error of up to 2⁻⁹ of each value. Weights are not rounded. A result has the same bits for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from ....code_formats import CodeFormat, CodeParts
from ...llvm import F32, I8, I64, POINTER, Code
from ...processor import host_has, host_has_avx512
from ..batches import MAX_SPECIALIZED_ROWS, EvenBatches, rows_per_batch
from ..depth_blocks import DepthBlocks
from ..multiplier import Batch, Panel
from ..panels import DEPTH
from .integer_kernel import IntegerCalls, ProductArguments
from .integer_rows import emit_record, row_slots
from .integer_steps import unpacked_bytes
from .stored_parts import StoredParts

MAX_STEPS_PER_BLOCK = 48
"""Steps of a block of K at most: this part of a panel, unpacked, stays in the level-2 cache while all rows use it."""


def has_integer_products(parts: CodeParts) -> bool:
    """Return whether a processor without a matrix unit multiplies a matrix of these formats by integers.

    It needs instructions for products of bytes (VNNI). Floats of 4 bits are integers from −12 to 12 once they are
    doubled, but float8_e4m3fn would need 18 bits.
    """
    has_products = host_has("avx512vnni" if host_has_avx512() else "avxvnni")
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
    num_planes: int
    """Bytes of an integer of the rows: 3 for runs in float32, 2 for runs in bfloat16."""

    @classmethod
    def for_rows(cls, stored: StoredParts, num_rows: int | None, dtype: str, *, has_avx512: bool) -> IntegerMultiplier:
        """Return the multiplier of `num_rows` rows of a run in `dtype`.

        `num_rows` is None for any number, which differs from block to block.
        """
        num_planes = 2 if dtype == "bfloat16" else 3
        if num_rows is None:
            return cls(stored, has_avx512, None, is_only_batch=False, num_planes=num_planes)
        batch_rows = rows_per_batch(num_rows, has_avx512)
        return cls(stored, has_avx512, batch_rows, batch_rows == num_rows, num_planes)

    @property
    def name(self) -> str:
        rows = "any" if self.rows_per_batch is None else f"{self.rows_per_batch}{'only' * self.is_only_batch}"
        return f"integers{8 * self.num_planes}x{16 if self.has_avx512 else 8}x{rows}_{self.stored.name}"

    @property
    def _blocks(self) -> DepthBlocks:
        return DepthBlocks(self.stored.depth // DEPTH, MAX_STEPS_PER_BLOCK)

    @property
    def num_depth_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def pads_depth(self) -> bool:
        return False

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        return (num_rows, self._row_slots), jnp.float32

    @property
    def _row_slots(self) -> int:
        return row_slots(self.stored.depth)

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        """See `Multiplier.pack`. Values stay float32 until all 32 of a record are there."""
        code.store_vector(values, rows, code.build.add(code.build.mul(row, I64(self._row_slots)), column))

    def end_pack(self, code: Code, rows: ir.Value, row: ir.Value, begin: ir.Value, num_values: int) -> None:
        build = code.build
        first = code.at(rows, build.add(build.mul(row, I64(self._row_slots)), begin), F32)

        def round_values(offset: ir.Value) -> None:
            emit_record(code, build.gep(build.bitcast(first, POINTER), [build.mul(offset, I64(4))]), self.num_planes)

        code.loop(0, num_values, round_values, step=DEPTH)

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return self.stored.panel(code, panels, index)

    def begin(self, code: Code) -> ir.Value | None:
        """Return the address of the steps of a block that are unpacked."""
        if self.is_only_batch:
            return None
        step_bytes = max(unpacked_bytes(code_format.run_len) for code_format, _ in self.stored.parts)
        return code.allocate(I8, self._blocks.steps_per_block * step_bytes)

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """See `Multiplier.multiply`. A block of rows that is one batch multiplies codes as they are stored.

        Of several batches the first one unpacks the codes of the block of K, and all multiply what it has stored. If
        the number of rows is known only as the code runs, it takes one of these two ways then.
        """
        build, (begin, end) = code.build, self._blocks.steps(code, block)
        assert panel.ahead is not None
        first_row = build.gep(rows, [build.mul(batch.first_row, I64(4 * self._row_slots))])
        given = ProductArguments(first_row, I64(self._row_slots), panel.begin, panel.ahead, sums, begin, end)
        calls = IntegerCalls(code, self.has_avx512, self.num_planes)

        def multiply_packed(code_format: CodeFormat) -> None:
            if self.rows_per_batch is not None:
                calls.multiply(code_format, self.rows_per_batch, given)
            else:
                self.by_rows(
                    code, batch, MAX_SPECIALIZED_ROWS, lambda num_rows: calls.multiply(code_format, num_rows, given)
                )

        def multiply_unpacked(code_format: CodeFormat) -> None:
            """The first of several batches unpacks the block for all."""
            unpacked_steps, run_len, max_rows = panel.tools, code_format.run_len, self.max_batch_rows
            with build.if_then(build.icmp_signed("==", batch.number, I64(0))):
                calls.unpack(code_format, given, unpacked_steps)
            unpacked = given._replace(panel=unpacked_steps)
            self.by_rows(code, batch, max_rows, lambda num_rows: calls.multiply_unpacked(run_len, num_rows, unpacked))

        if self.is_only_batch:
            self.stored.by_format(code, panel.index, multiply_packed)
        elif self.rows_per_batch is not None:
            self.stored.by_format(code, panel.index, multiply_unpacked)
        else:
            is_only = build.icmp_signed("==", batch.num_batches, I64(1))
            has_few = build.and_(is_only, build.icmp_signed("<=", batch.num_rows, I64(MAX_SPECIALIZED_ROWS)))
            with build.if_else(has_few) as (few, many):
                with few:
                    self.stored.by_format(code, panel.index, multiply_packed)
                with many:
                    self.stored.by_format(code, panel.index, multiply_unpacked)

    def end(self, code: Code) -> None:
        """See `Multiplier.end`: integers need nothing."""
